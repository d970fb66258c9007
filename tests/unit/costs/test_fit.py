"""The fit finds the costs that made the measurements, and says how wrong it is on stages that it has not seen."""

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.base import UserError
from dflop.cli import cli
from dflop.config import ModelConfig, load_config
from dflop.costs import CostModel, Loads, StageKind, fit_costs
from dflop.costs.fit import fit_model, fit_piece, median_points
from dflop.costs.fitted import column_of
from dflop.costs.measured import read_measured
from dflop.models import digest_of_spec, load_model_spec
from dflop.models.loads import FEATURES, Coefficients, Hinge
from dflop.plan.layout_key import LayoutKey
from dflop.store import LINKS_SCHEMA

LOADS = {
    "vision": Loads(*(np.array(load, dtype=float) for load in ([1, 7, 30], [0] * 3, [0] * 3, [0] * 3))),
    "llm": Loads(
        *(np.array(load, dtype=float) for load in ([0] * 3, [40, 700, 1900], [1600, 90_000, 1e6], [4, 90, 800]))
    ),
}


def fit(frames, source="measured"):
    return fit_costs(frames.measurements, frames.parameters, source)


def seconds_errors(frames) -> pl.DataFrame:
    return fit(frames)["fit_error"].filter(quantity="seconds")


def fitted(frames) -> CostModel:
    return fit_model(median_points(frames.measurements), frames.parameters)


@pytest.mark.parametrize("module", ["vision", "llm"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("is_first", "is_last"), [(True, True), (True, False), (False, True), (False, False)])
def test_the_costs_that_made_the_measurements_are_found(costs, measure_as, module, checkpointing, is_first, is_last):
    found = fitted(measure_as(costs))
    ask = {"is_first": is_first, "is_last": is_last}
    for depth in (1, 7, 28):
        num_recomputed = (depth + 1) // 2 if checkpointing else 0
        kind = StageKind(module=module, layout=LayoutKey(), num_layers=depth, num_recomputed=num_recomputed, **ask)
        expected, predicted = (
            (*model.stage_time(kind, LOADS[module]), *model.stage_memory(kind, LOADS[module]))
            for model in (costs, found)
        )
        for right, own in zip(expected, predicted, strict=True):
            np.testing.assert_allclose(own, right, rtol=1e-3)


def test_load_beyond_a_cache_may_cost_more_a_unit(costs, measure_as):
    bent = Coefficients(2e-4, (0, 5e-6, 0, 0), (Hinge(1, 500.0, 5e-6),))
    times = costs.times | {
        ("llm", LayoutKey(), "layer", checkpointing, direction): bent
        for checkpointing in (False, True)
        for direction in ("forward", "backward")
    }
    model = dataclasses.replace(costs, times=times)
    found = fitted(measure_as(model))
    for tokens in (50.0, 400.0, 1500.0):
        loads = Loads(*(np.array(load) for load in (0.0, tokens, 0.0, 0.0)))
        assert found.times["llm", LayoutKey(), "layer", False, "forward"](loads) == pytest.approx(bent(loads), rel=0.05)
    straight = fitted(measure_as(costs)).times["llm", LayoutKey(), "layer", False, "forward"]
    assert sum(hinge.slope for hinge in straight.hinges) < 0.02 * straight.per_load[1]


@pytest.mark.parametrize(
    ("sizes", "is_bent"), [((1, 11, 64), False), ((1, 4, 11, 64), True), ((1, 4, 11, 23, 64), True)]
)
def test_from_four_sizes_on_what_waits_for_launches_is_told_from_what_grows(sizes, is_bent):
    """Up to ten items a layer takes 1 ms, whatever there is to do, and beyond 0.1 ms an item."""
    points = [(depth, size) for depth in (1, 4) for size in sizes]
    frame = pl.DataFrame(
        {
            "num_layers": [depth for depth, _ in points],
            "seconds": [depth * max(1e-3, 1e-4 * size) for depth, size in points],
        }
        | {load: [float(size) * (load == "num_items") for _, size in points] for load in FEATURES}
    )
    _, layer = fit_piece(frame, "vision", "layers", "seconds")
    beyond = layer(Loads(*(np.array(load) for load in (256.0, 0.0, 0.0, 0.0))))
    assert (beyond == pytest.approx(25.6e-3, rel=0.06)) == is_bent


@settings(max_examples=15)
@given(noise=st.floats(0.0, 1.0), seed=st.integers(0, 1000))
def test_no_coefficient_is_ever_negative(costs, measure_as, noise, seed):
    tables = fit(measure_as(costs, modules=("llm",), noise=noise, repeats=1, seed=seed))
    for table, unit in (("time_model", "s"), ("memory_model", "bytes")):
        for column in (f"const_{unit}", *(column_of(feature, unit) for feature in FEATURES)):
            assert (tables[table][column] >= 0).all()
    times = tables["time_model"]
    assert (times["hinge_s"].list.min().fill_null(0) >= 0).all()
    assert (times.filter(pl.col("part") != "last")["per_target_s"] == 0).all()  # the head alone sees targets
    assert (times.filter(pl.col("part") != "layer")["per_sum_sq_token_s"] == 0).all()  # and layers alone attend


@settings(max_examples=20)
@given(noise=st.floats(0.0, 1.0), seed=st.integers(0, 1000), num_tokens=st.integers(1, 5000))
def test_each_recomputed_layer_adds_the_same_and_at_most_its_forward_however_noisy_the_device_is(
    costs, measure_as, noise, seed, num_tokens
):
    frames = measure_as(costs, modules=("llm",), noise=noise, repeats=1, seed=seed)
    model = fit_model(median_points(frames.measurements), frames.parameters)
    loads = Loads(*(np.array([float(load)]) for load in (0, num_tokens, num_tokens**2, num_tokens // 3)))
    layer_s = model.times["llm", LayoutKey(), "layer", False, "forward"](loads)[0]
    forward_s, backward_s = model.stage_time(StageKind.whole("llm", LayoutKey(), 4), loads)
    with_one = model.stage_time(StageKind.whole("llm", LayoutKey(), 4, num_recomputed=1), loads)
    added_s = with_one[1] - backward_s
    assert -1e-12 <= added_s <= layer_s * (1 + 1e-9)
    for count in range(1, 5):
        with_some = model.stage_time(StageKind.whole("llm", LayoutKey(), 4, num_recomputed=count), loads)
        assert with_some[0] == pytest.approx(forward_s)
        assert with_some[1] == pytest.approx(backward_s + count * added_s)


@pytest.mark.parametrize("repeated", [1.0, 0.7, 0.0])
def test_a_recomputed_layer_repeats_attention_and_the_measured_share_of_the_rest(costs, measure_as, repeated):
    """As compiled layers do, which leave out their last product."""
    forward, backward = (costs.times["llm", LayoutKey(), "layer", False, way] for way in ("forward", "backward"))
    attention = Coefficients(
        0.0, tuple(own * (name == "sum_sq_tokens") for name, own in zip(FEATURES, forward.per_load, strict=True))
    )
    again = backward + attention + repeated * (forward + -1.0 * attention)
    layer = ("llm", LayoutKey(), "layer", True, "backward")
    found = fitted(measure_as(dataclasses.replace(costs, times=costs.times | {layer: again})))
    for tokens in (200.0, 2000.0):
        loads = Loads(*(np.array(load) for load in (0.0, tokens, tokens**2, 0.0)))
        assert found.times[layer](loads) == pytest.approx(again(loads), rel=0.02)


def clocked(frames, attention: Coefficients):
    """The measurements, with the seconds of attention in the forward of the LLM's layers."""
    loads = frames.measurements.select(*FEATURES).to_numpy().astype(float).T
    seconds = pl.Series(attention(Loads(*loads))) * frames.measurements["num_layers"]
    has_any = (pl.col("module") == "llm") & (pl.col("piece") == "layers") & (pl.col("pass") == "forward")
    column = pl.when(has_any & ~pl.col("checkpointing")).then(seconds)
    return frames._replace(measurements=frames.measurements.with_columns(attention_s=column))


@pytest.mark.parametrize("repeated", [1.0, 0.7])
def test_clocked_attention_is_spared_whole_where_it_takes_more_than_its_squares(costs, measure_as, repeated):
    """A part of them grows with tokens, however long their segments are."""
    keys = {way: ("llm", LayoutKey(), "layer", False, way) for way in ("forward", "backward")}
    attention = Coefficients(2e-5, (0, 3e-6, 1e-9, 0))
    others, backward = Coefficients(5e-5, (0, 4e-6, 0, 0), (Hinge(1, 600.0, 4e-6),)), costs.times[keys["backward"]]
    again = ("llm", LayoutKey(), "layer", True, "backward")
    made = {keys["forward"]: others + attention, again: backward + attention + repeated * others}
    found = fitted(clocked(measure_as(dataclasses.replace(costs, times=costs.times | made)), attention))
    for tokens, length in ((200.0, 200.0), (2000.0, 2000.0), (2000.0, 50.0)):
        at = Loads(*(np.array(load) for load in (0.0, tokens, tokens * length, 0.0)))
        forward_s, backward_s = found.part_times("llm", LayoutKey(), at)
        assert forward_s["layer"] == pytest.approx((others + attention)(at), rel=0.03)
        assert backward_s["recomputed_layer"] == pytest.approx(made[again](at), rel=0.03)
        assert backward_s["attention_kept_layer"] == pytest.approx((backward + repeated * others)(at), rel=0.03)


def test_exact_measurements_leave_no_error_and_noisy_ones_about_their_noise(costs, measure_as):
    exact = fit(measure_as(costs))["fit_error"]
    assert (exact["p95_error"] < 2e-3).all()
    assert exact.select("module", "tp", "quantity", "pass").rows() == [
        *((module, 1, "seconds", direction) for module in ("vision", "llm") for direction in ("forward", "backward")),
        *((module, 1, "peak_bytes", None) for module in ("vision", "llm")),
    ]
    assert exact["num_held_out"].to_list() == [16, 16, 60, 60, 16, 60]
    noisy = seconds_errors(measure_as(costs, noise=0.1, repeats=1))
    assert noisy["median_error"].is_between(0.01, 0.3).all()
    assert (noisy["p95_error"] >= noisy["median_error"]).all()


def test_whole_stages_are_kept_out_of_the_fit_and_a_stage_that_is_more_than_its_parts_shows(costs, measure_as):
    frames = measure_as(costs)
    slower = pl.when(pl.col("piece") == "whole").then(1.5).otherwise(1.0)
    disturbed = frames._replace(measurements=frames.measurements.with_columns(seconds=pl.col("seconds") * slower))
    before, after = fit(frames), fit(disturbed)
    assert after["time_model"].equals(before["time_model"])
    errors = seconds_errors(disturbed)
    assert errors["median_error"].to_list() == pytest.approx([1 / 3] * 4, abs=1e-3)
    assert errors["bias"].to_list() == pytest.approx([-1 / 3] * 4, abs=1e-3)


def test_stages_that_hold_more_than_their_parts_show_in_the_error_of_memory(costs, measure_as):
    frames = measure_as(costs)
    fuller = pl.when(pl.col("piece") == "whole").then(pl.col("peak_bytes") * 5 // 4).otherwise(pl.col("peak_bytes"))
    errors = fit(frames._replace(measurements=frames.measurements.with_columns(peak_bytes=fuller)))["fit_error"]
    assert errors.filter(quantity="peak_bytes")["bias"].to_list() == pytest.approx([-0.2] * 2, abs=2e-3)


def test_a_single_slow_repeat_changes_nothing(costs, measure_as):
    frames = measure_as(costs, repeats=3)
    slow = pl.when(pl.col("repeat") == 1).then(pl.col("seconds") * 50).otherwise(pl.col("seconds"))
    disturbed = frames._replace(measurements=frames.measurements.with_columns(seconds=slow))
    assert fit(disturbed)["time_model"].equals(fit(frames)["time_model"])


def test_a_slow_point_in_twenty_changes_little(costs, measure_as):
    frames = measure_as(costs)
    slow = pl.when(pl.int_range(pl.len()) % 20 == 7).then(pl.col("seconds") * 2).otherwise(pl.col("seconds"))
    disturbed = frames._replace(
        measurements=frames.measurements.sort("piece", "pass", "num_layers", maintain_order=True).with_columns(
            seconds=slow
        )
    )
    assert (seconds_errors(disturbed)["median_error"] < 0.05).all()


def test_modules_are_fitted_apart(costs, measure_as):
    both = fit(measure_as(costs))["time_model"]
    alone = fit(measure_as(costs, modules=("llm",)))["time_model"]
    assert both.filter(pl.col("module") == "llm").equals(alone)
    assert set(both["module"]) == {"vision", "llm"}


@pytest.mark.parametrize(
    "kept",
    [
        pl.col("num_layers") != 4,
        (pl.col("num_items") <= 1) | (pl.col("piece") != "layers"),
        (pl.col("num_items") <= 1) | (pl.col("piece") != "last"),
    ],
)
def test_too_few_points_say_how_many_there_are_and_what_to_run(costs, measure_as, kept):
    frames = measure_as(costs, modules=("vision",))
    with pytest.raises(
        UserError, match=r"vision tp=1: \d+ forward points of \w+ at \d depth.* `dflop profile-costs` again"
    ):
        fit(frames._replace(measurements=frames.measurements.filter(kept)))


def test_points_that_ran_out_of_memory_are_kept_and_not_fitted(costs, measure_as):
    frames = measure_as(costs)
    lost = frames.measurements.filter(pl.col("num_tokens") == 2048).with_columns(
        num_tokens=4096, seconds=pl.lit(None, pl.Float64), peak_bytes=pl.lit(None, pl.Int64)
    )
    tables = fit(frames._replace(measurements=pl.concat([frames.measurements, lost], how="vertical_relaxed")))
    assert tables["time_model"].equals(fit(frames)["time_model"])
    assert set(tables["load_range"].filter(pl.col("module") == "llm")["most_num_tokens"]) == {2048}


def test_the_range_ends_where_a_depth_was_not_measured(costs, measure_as):
    frames = measure_as(costs, modules=("llm",))
    too_long = (pl.col("num_layers") == 4) & ~pl.col("checkpointing") & (pl.col("num_tokens") > 512)
    found = fitted(frames._replace(measurements=frames.measurements.filter(~too_long)))
    assert found.ranges["llm", LayoutKey(), False].most[1] == 512
    assert found.ranges["llm", LayoutKey(), True].most[1] == 2048


def test_analytic_costs_claim_no_error(costs, measure_as):
    assert fit(measure_as(costs), "analytic")["fit_error"].is_empty()


@pytest.mark.parametrize("is_clocked", [False, True])
def test_what_is_fitted_is_what_the_cost_model_loads_and_predicts(costs, measure_as, tmp_path, is_clocked):
    frames = measure_as(costs)
    if is_clocked:
        frames = clocked(frames, Coefficients(1e-5, (0, 1e-6, 1e-9, 0)))
    frames.write(tmp_path / "costs.duckdb", fit(frames))
    loaded = CostModel.load(tmp_path / "costs.duckdb")
    assert loaded == fitted(frames)


@pytest.mark.parametrize(("rates", "expected"), [([2e12, 1e12], 1e12), ([None, 2e12], 2e12), ([None, None], math.inf)])
def test_an_optimisers_step_is_as_slow_as_where_it_was_measured_slowest(costs, measure_as, tmp_path, rates, expected):
    frames = measure_as(costs)
    device = pl.DataFrame(
        {
            "overhead_bytes": [0, 0],
            "allocator_share": [0.0, 0.0],
            "update_bytes_per_s": pl.Series(rates, dtype=pl.Float64),
        }
    )
    frames._replace(device=device).write(tmp_path / "costs.duckdb", fit(frames))
    assert CostModel.load(tmp_path / "costs.duckdb").update_bytes_per_s == expected


def write_measured(folder, frames, name, **device) -> Path:
    """What `dflop profile-costs` writes of one module."""
    path, module = folder / f"{name}.parquet", name.split("-")[0]
    about = {"module": module, "tp": 1, "model": "m", "device": "a card", "device_model": "card", "source": "measured"}
    about |= {"precision": "fp32", "torch": "2", "num_ranks": 1, "threads": 1, "is_frozen": False, "overhead_bytes": 0}
    about |= {"communicator_bytes": 7}
    about |= {"allocator_share": 0.0, "seconds": 1.0, "config_digest": ""} | device
    frames.measurements.filter(pl.col("module") == module).write_parquet(path)
    frames.parameters.filter(pl.col("module") == module).write_parquet(path.with_suffix(".parameters.parquet"))
    pl.DataFrame([about]).write_parquet(path.with_suffix(".device.parquet"))
    return path


def test_files_of_all_modules_are_read_together(costs, measure_as, tmp_path):
    frames = measure_as(costs)
    measured = read_measured([write_measured(tmp_path, frames, module) for module in ("vision", "llm")])
    assert len(measured.measurements) == len(frames.measurements)
    assert measured.device["module"].to_list() == ["vision", "llm"]
    assert measured.device["attention"].to_list() == [None, None]  # earlier versions did not write it
    new = write_measured(tmp_path, frames, "llm-new", attention="flash-attn 3")
    measured = read_measured([write_measured(tmp_path, frames, "vision"), new])
    assert measured.device["attention"].to_list() == [None, "flash-attn 3"]


def test_files_that_do_not_belong_together_are_refused_in_one_line(costs, measure_as, tmp_path):
    frames = measure_as(costs)
    vision, llm = (write_measured(tmp_path, frames, module) for module in ("vision", "llm"))
    other = write_measured(tmp_path, frames, "llm-other", device="another card")
    of_flash = write_measured(tmp_path, frames, "vision-flash", attention="flash-attn 2")
    of_torch = write_measured(tmp_path, frames, "llm-torch", attention="torch varlen")
    lost = frames.measurements.with_columns(seconds=pl.lit(None, pl.Float64))
    empty = write_measured(tmp_path, frames._replace(measurements=lost), "llm-lost")
    old = write_measured(tmp_path, frames._replace(measurements=frames.measurements.drop("piece")), "llm-old")
    junk = tmp_path / "junk.parquet"
    junk.write_text("hello")
    for paths, said in (
        ([vision, llm, llm], "llm tp=1 was given twice"),
        ([vision, other], "`device` is 'a card' in one, 'another card' in another"),
        ([of_flash, of_torch], "`attention` is 'flash-attn 2' in one, 'torch varlen' in another"),
        ([empty], "no point was measured without running out of memory"),
        ([old], "llm-old.parquet has no column 'piece': another version of dflop"),
        ([llm.with_suffix(".device.parquet")], "has no column 'piece': another version of dflop, or another command"),
        ([tmp_path / "costs.duckdb"], "costs.duckdb: the name of measurements must end in .parquet"),
        ([junk], "junk.parquet is not a Parquet file"),
        ([tmp_path / "none.parquet"], "none.parquet does not exist; make it with `dflop profile-costs`"),
    ):
        with pytest.raises(UserError) as caught:
            read_measured(paths)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_name_under_which_measurements_cannot_be_written_is_refused_before_measuring(tmp_path):
    done = CliRunner().invoke(cli, ["profile-costs", "--module", "llm", "--out", str(tmp_path / "costs")])
    assert isinstance(done.exception, UserError)
    assert "costs: the name of measurements must end in .parquet" in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_costs_of_another_model_precision_or_device_are_refused(costs):
    spec = load_model_spec(ModelConfig(preset="tiny"))
    right = {"train": {"precision": "bf16"}, "cluster": {"device_model": "h100-80g"}}
    made_for = {"model": digest_of_spec(spec), "precision": "bf16", "device_model": "h100-80g", "llm": "trained"}
    made = dataclasses.replace(costs, made_for=made_for)
    made.require_made_for(spec, load_config(right))
    costs.require_made_for(spec, load_config({"model": {"freeze": ["llm"]}}))  # a file that does not say
    made.require_made_for(spec, load_config(right | {"model": {"freeze": ["vision"]}}))
    with pytest.raises(UserError, match="the costs are of another model; run `dflop profile-costs`"):
        made.require_made_for(load_model_spec(ModelConfig(preset="llava_ov_7b")), load_config(right))
    for wrong, said in (
        ({"train": {"precision": "fp32"}}, "the costs are of `precision` 'bf16', and the config has 'fp32'"),
        ({"cluster": {"device_model": "cpu"}}, "the costs are of `device_model` 'h100-80g', and the config has 'cpu'"),
        (
            {"model": {"freeze": ["llm"]}},
            "costs are of llm as trained, and by `model.train`, `model.freeze` and `model.lora` it",
        ),
        (
            {"model": {"lora": {"rank": 4}}},
            "as trained, and by `model.train`, `model.freeze` and `model.lora` it is adapted",
        ),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            made.require_made_for(spec, load_config(right | wrong))


def test_a_communicator_has_the_measured_bytes_where_some_were_measured_else_the_assumed_ones(
    costs, measure_as, tmp_path
):
    frames, out = measure_as(costs), tmp_path / "costs.duckdb"
    measured = [str(write_measured(tmp_path, frames, module)) for module in ("vision", "llm")]
    links = tmp_path / "links.parquet"
    rows = [("p2p", "intra", 2, size, size * 1e-9, 0) for size in (1024, 4096, 16384)]
    row = ("communicator", "intra", 2, 3 * 2**26, 0.2, 0)
    pl.DataFrame([*rows, row], schema=LINKS_SCHEMA, orient="row").write_parquet(links)
    for more, num_bytes in (([], 7), (["--links", str(links)], 3 * 2**26)):
        done = CliRunner().invoke(cli, ["fit-costs", *measured, *more, "--out", str(out)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert CostModel.load(out).communicator_bytes == num_bytes
