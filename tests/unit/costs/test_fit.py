"""The fit finds the coefficients that made the measurements, and says how wrong it is on what it has not seen."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.costs import CostModel, Loads, fit_costs
from dflop.costs.model import FEATURES, column_of
from dflop.errors import UserError
from dflop.store import write_costs

DEPTHS = (1, 4)
# A made-up LLM: (part, load) -> seconds; `const` is the load of 1 that every microbatch has.
LLM_FORWARD = {
    ("rest", "const"): 4e-4,
    ("rest", "num_tokens"): 3e-7,
    ("rest", "num_targets"): 5e-6,
    ("layer", "const"): 2e-4,
    ("layer", "num_tokens"): 1e-6,
    ("layer", "sum_sq_tokens"): 8e-10,
}
VISION_FORWARD = {
    ("rest", "const"): 1e-3,
    ("rest", "num_items"): 2e-4,
    ("layer", "const"): 3e-4,
    ("layer", "num_items"): 6e-4,
}
LLM_BYTES = {("rest", "num_targets"): 9_000.0, ("rest", "num_tokens"): 500.0, ("layer", "num_tokens"): 3_000.0}
VISION_BYTES = {("rest", "num_items"): 700.0, ("layer", "num_items"): 40_000.0}


def evaluate(coefficients: dict, loads: dict, num_layers: int) -> float:
    """The formula of the cost model, term by term."""
    return sum(
        value * (1 if load == "const" else loads[load]) * (num_layers if part == "layer" else 1)
        for (part, load), value in coefficients.items()
    )


def measure(module: str, noise: float = 0.0, repeats: int = 3, seed: int = 0) -> pl.DataFrame:
    """What a device with exactly these costs would show; backward takes twice as long as forward."""
    rng = np.random.default_rng(seed)
    forward, sizes = (LLM_FORWARD, LLM_BYTES) if module == "llm" else (VISION_FORWARD, VISION_BYTES)
    rows = []
    for depth in DEPTHS:
        for size in (1, 2, 3, 5, 8, 13, 21, 34, 55):
            for segments, share in ((1, 0.5), (4, 0.05), (8, 0.25)) if module == "llm" else ((1, 0.0),):
                loads = dict.fromkeys(FEATURES, 0)
                if module == "llm":
                    tokens = 64 * size
                    loads |= {"num_tokens": tokens, "sum_sq_tokens": tokens**2 // segments}
                    loads["num_targets"] = int(tokens * share)
                else:
                    loads["num_items"] = size
                for direction, factor in (("forward", 1), ("backward", 2)):
                    seconds = factor * evaluate(forward, loads, depth)
                    rows += [
                        {
                            "module": module,
                            "tp": 1,
                            "num_layers": depth,
                            **loads,
                            "pass": direction,
                            "seconds": seconds * float(np.exp(noise * rng.normal())),
                            "peak_bytes": int(evaluate(sizes, loads, depth)),
                            "repeat": repeat,
                        }
                        for repeat in range(repeats)
                    ]
    return pl.DataFrame(rows)


def make_parameters(*modules: str) -> pl.DataFrame:
    nothing = {"const_bytes": 0.0} | {column_of(feature, "bytes"): 0.0 for feature in FEATURES}
    rows = []
    for module in modules:
        rows += [
            {"module": module, "tp": 1, "part": "layer", "parameter_bytes": 4e5} | nothing,
            {"module": module, "tp": 1, "part": "rest", "parameter_bytes": 2e5} | nothing,
            {"module": module, "tp": 1, "part": "layer_input", "parameter_bytes": 0.0} | nothing
            | {"per_token_bytes": 512.0},
        ]  # fmt: skip
    return pl.DataFrame(rows)


def fit(measurements: pl.DataFrame, *modules: str) -> dict[str, pl.DataFrame]:
    return fit_costs(measurements, make_parameters(*modules))


def coefficient(table: pl.DataFrame, part: str, load: str, unit: str, direction: str | None = None) -> float:
    rows = table.filter(pl.col("part") == part)
    if direction:
        rows = rows.filter(pl.col("pass") == direction)
    column = f"const_{unit}" if load == "const" else column_of(load, unit)
    return rows[column].item()


@pytest.mark.parametrize(("module", "truth"), [("llm", LLM_FORWARD), ("vision", VISION_FORWARD)])
@pytest.mark.parametrize(("direction", "factor"), [("forward", 1), ("backward", 2)])
def test_the_coefficients_that_made_the_measurements_are_found(module, truth, direction, factor):
    table = fit(measure(module), module)["time_model"]
    for part in ("rest", "layer"):
        for load in ("const", *FEATURES):
            expected = factor * truth.get((part, load), 0.0)
            found = coefficient(table, part, load, "s", direction)
            assert found == pytest.approx(expected, rel=1e-6, abs=1e-15), (part, load)


def test_bytes_are_found_as_seconds_are():
    table = fit(measure("llm"), "llm")["memory_model"]
    for part in ("rest", "layer"):
        for load in ("num_tokens", "num_targets"):
            assert coefficient(table, part, load, "bytes") == pytest.approx(LLM_BYTES.get((part, load), 0.0), rel=1e-3)


@settings(deadline=None, max_examples=15)
@given(noise=st.floats(0.0, 1.0), seed=st.integers(0, 1000))
def test_no_coefficient_is_ever_negative(noise, seed):
    tables = fit(measure("llm", noise=noise, repeats=1, seed=seed), "llm")
    for table, unit in (("time_model", "s"), ("memory_model", "bytes")):
        for column in (f"const_{unit}", *(column_of(feature, unit) for feature in FEATURES)):
            assert (tables[table][column] >= 0).all()
    times = tables["time_model"]
    assert (times.filter(pl.col("part") == "layer")["per_target_s"] == 0).all()  # the head alone sees targets
    assert (times.filter(pl.col("part") == "rest")["per_sum_sq_token_s"] == 0).all()  # and layers alone attend


def test_exact_measurements_leave_no_error_and_noisy_ones_about_their_noise():
    exact = fit(measure("llm"), "llm")["fit_error"]
    assert (exact["p95_error"] < 1e-6).all()
    noisy = fit(measure("llm", noise=0.1, repeats=1), "llm")["fit_error"]
    assert noisy["median_error"].is_between(0.01, 0.3).all()
    assert (noisy["p95_error"] >= noisy["median_error"]).all()


def test_a_third_of_the_points_is_held_out_of_the_fit_that_is_judged():
    errors = fit(measure("llm"), "llm")["fit_error"]
    assert errors["num_points"].to_list() == [54, 54]
    assert errors["num_held_out"].to_list() == [18, 18]
    assert errors.select("module", "tp", "pass").rows() == [("llm", 1, "forward"), ("llm", 1, "backward")]


def test_a_law_that_the_model_cannot_follow_shows_as_a_held_out_error():
    frame = measure("vision").with_columns(seconds=1e-3 * 1.2 ** pl.col("num_items"))
    assert (fit(frame, "vision")["fit_error"]["median_error"] > 0.3).all()


def test_a_single_slow_repeat_changes_nothing():
    clean = measure("llm")
    disturbed = clean.with_columns(
        seconds=pl.when(pl.col("repeat") == 1).then(pl.col("seconds") * 50).otherwise(pl.col("seconds"))
    )
    assert fit(disturbed, "llm")["time_model"].equals(fit(clean, "llm")["time_model"])


def test_modules_are_fitted_apart():
    both = fit(pl.concat([measure("vision"), measure("llm")]), "vision", "llm")["time_model"]
    alone = fit(measure("llm"), "llm")["time_model"]
    assert both.filter(pl.col("module") == "llm").equals(alone)
    assert set(both["module"]) == {"vision", "llm"}


@pytest.mark.parametrize(
    "thin_out",
    [
        lambda frame: frame.filter(pl.col("num_layers") == 1),
        lambda frame: frame.filter(pl.col("num_items") <= 3),
    ],
)
def test_too_few_points_say_how_many_there_are_and_what_to_run(thin_out):
    with pytest.raises(
        UserError, match=r"vision tp=1: \d+ forward points at \d depth.* run `dflop profile-costs` again"
    ):
        fit(thin_out(measure("vision")), "vision")


def test_what_is_fitted_is_what_the_cost_model_loads_and_predicts(tmp_path):
    measurements = pl.concat([measure("vision"), measure("llm")])
    tables = fit(measurements, "vision", "llm")
    path = tmp_path / "costs.duckdb"
    write_costs(path, {"measurements": measurements, "device": pl.DataFrame({"device": ["made up"]}), **tables}, {})
    costs = CostModel.load(path)
    loads = {"num_items": 0, "num_tokens": 3000, "sum_sq_tokens": 10**6, "num_targets": 400}
    forward, backward = costs.stage_time("llm", 1, 7, Loads(*map(np.array, loads.values())), with_rest=True)
    assert float(forward) == pytest.approx(evaluate(LLM_FORWARD, loads, 7))
    assert float(backward) == pytest.approx(2 * evaluate(LLM_FORWARD, loads, 7))
    memory = costs.stage_memory("llm", 1, 7, Loads(*map(np.array, loads.values())), with_rest=True)
    assert float(memory.activation_bytes) == pytest.approx(evaluate(LLM_BYTES, loads, 7), rel=1e-3)
    assert memory.resident_bytes == 4 * (7 * 4e5 + 2e5)
