"""Predictions follow the load, layer by layer, whatever the shape of the arrays that ask."""

import dataclasses

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.costs import CostModel, Loads
from dflop.costs.model import FEATURES, Coefficients, column_of
from dflop.errors import UserError
from dflop.store import write_costs

counts = st.integers(0, 10_000)
depths = st.integers(1, 48)


def make_loads(num_items=0, num_tokens=0, sum_sq_tokens=0, num_targets=0) -> Loads:
    return Loads(*(np.asarray(value, dtype=float) for value in (num_items, num_tokens, sum_sq_tokens, num_targets)))


def llm_loads(*lengths: int) -> Loads:
    """One microbatch of segments of these lengths, a quarter of its tokens learned."""
    return make_loads(0, sum(lengths), sum(length**2 for length in lengths), sum(lengths) // 4)


@pytest.mark.parametrize("module", ["vision", "llm"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_many_microbatches_at_once_are_those_one_by_one(costs, module, checkpointing):
    rng = np.random.default_rng(0)
    loads = make_loads(*rng.integers(0, 500, (4, 3, 5)))
    loads.num_items[1, 2] = loads.num_tokens[1, 2] = 0

    def ask(chosen):
        times = costs.stage_time(module, 1, 6, chosen, with_rest=True, checkpointing=checkpointing)
        memory = costs.stage_memory(module, 1, 6, chosen, with_rest=True, checkpointing=checkpointing)
        return np.array([*times, memory.activation_bytes])

    together = ask(loads)
    assert together.shape == (3, 3, 5)
    for index in np.ndindex(3, 5):
        np.testing.assert_allclose(together[:, *index], ask(Loads(*(load[index] for load in loads))))


def test_a_stage_costs_what_its_layers_and_its_end_cost(costs):
    loads = llm_loads(300, 20)
    forward_s, backward_s = costs.stage_time("llm", 1, 3, loads, with_rest=True)
    layer_s = 1e-4 + 5e-6 * 320 + 1e-9 * (300**2 + 20**2)
    rest_s = 2e-4 + 1e-6 * 320 + 4e-6 * 80
    assert float(forward_s) == pytest.approx(3 * layer_s + rest_s)
    assert float(backward_s) == pytest.approx(2 * (3 * layer_s + rest_s))
    assert float(costs.stage_time("llm", 1, 3, loads, with_rest=False)[0]) == pytest.approx(3 * layer_s)


@pytest.mark.parametrize("module", ["vision", "llm"])
def test_nothing_to_do_takes_no_time_at_all(costs, module):
    for times in costs.stage_time(module, 1, 4, make_loads(np.zeros(3), np.zeros(3), np.zeros(3), np.zeros(3)),
                                  with_rest=True, checkpointing=True):  # fmt: skip
        assert (times == 0).all()


@given(lengths=st.lists(st.integers(1, 2000), min_size=1, max_size=5), more=st.integers(1, 500), depth=depths)
def test_more_load_never_takes_less_time_or_memory(costs, lengths, more, depth):
    small, large = llm_loads(*lengths), llm_loads(*lengths, more)
    for ask in (costs.stage_time, lambda *a, **k: [costs.stage_memory(*a, **k).activation_bytes]):
        for less, greater in zip(
            ask("llm", 1, depth, small, with_rest=True), ask("llm", 1, depth, large, with_rest=True), strict=True
        ):
            assert float(greater) > float(less)


@given(num_items=st.integers(1, 500), num_tokens=st.integers(1, 10_000), depth=st.integers(2, 48))
@pytest.mark.parametrize("module", ["vision", "llm"])
def test_checkpointing_costs_a_second_forward_of_the_layers_and_saves_memory(
    costs, module, num_items, num_tokens, depth
):
    loads = make_loads(num_items) if module == "vision" else llm_loads(num_tokens)
    plain = costs.stage_time(module, 1, depth, loads, with_rest=True)
    checkpointed = costs.stage_time(module, 1, depth, loads, with_rest=True, checkpointing=True)
    layers_s = costs.stage_time(module, 1, depth, loads, with_rest=False)[0]
    assert float(checkpointed[0]) == float(plain[0])
    assert float(checkpointed[1]) == pytest.approx(float(plain[1] + layers_s))
    fat, thin = (
        costs.stage_memory(module, 1, depth, loads, with_rest=True, checkpointing=checkpointing)
        for checkpointing in (False, True)
    )
    assert fat.resident_bytes == thin.resident_bytes
    assert float(thin.activation_bytes) < float(fat.activation_bytes)


def test_resident_memory_is_parameters_gradients_and_two_moments(costs):
    nothing = make_loads()
    assert costs.stage_memory("llm", 1, 4, nothing, with_rest=False).resident_bytes == 4 * 4 * 5e5
    assert costs.stage_memory("llm", 1, 4, nothing, with_rest=True).resident_bytes == 4 * (4 * 5e5 + 3e5)


@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=6), depths)
def test_what_samples_add_is_what_their_microbatch_takes_beyond_its_constants(costs, samples, depth):
    """Segments add their own squares, so that the load of a packed microbatch is the sum of its samples'."""
    tokens, targets = (np.array(column, dtype=float) for column in zip(*samples, strict=True))
    each = make_loads(np.zeros(len(samples)), tokens, tokens**2, targets)
    added_s = costs.additive_loads_s("llm", 1, depth, each, with_rest=True).sum()
    together = Loads(*(np.asarray(load.sum()) for load in each))
    if together.num_tokens:
        times = costs.stage_time("llm", 1, depth, together, with_rest=True)
        constant_s = 3 * (depth * 1e-4 + 2e-4)
        assert added_s == pytest.approx(float(sum(times)) - constant_s)


@pytest.mark.parametrize("ask", ["stage_time", "stage_memory", "additive_loads_s"])
def test_a_tp_size_that_was_not_measured_says_what_was_and_how_to_get_it(costs, ask):
    with pytest.raises(UserError) as caught:
        getattr(costs, ask)("llm", 2, 4, make_loads(), with_rest=True)
    message = str(caught.value)
    assert "no measured costs for llm tp=2 (there are: llm tp=1, vision tp=1)" in message
    assert "add 2 to `costs.tp_sizes`" in message


def test_a_module_that_was_not_measured_is_named(costs):
    with pytest.raises(UserError, match="no measured costs for audio tp=1"):
        costs.stage_time("audio", 1, 4, make_loads(), with_rest=True)


def test_a_cost_model_comes_back_from_its_tables_as_it_was(costs, tmp_path):
    def row(unit: str, fit: Coefficients, **keys) -> dict:
        named = dict(zip((column_of(feature, unit) for feature in FEATURES), map(float, fit.per_load), strict=True))
        return keys | {f"const_{unit}": float(fit.const)} | named

    times = [
        row("s", fit, module=module, tp=tp, part=part, **{"pass": direction})
        for (module, tp, part, direction), fit in costs.times.items()
    ]
    parts = costs.activations | {(*key, "layer_input"): fit for key, fit in costs.layer_input.items()}
    memory = [
        row("bytes", fit, module=key[0], tp=key[1], part=key[2], parameter_bytes=costs.parameter_bytes.get(key, 0.0))
        for key, fit in parts.items()
    ]
    nothing = pl.DataFrame({"nothing": [0]})
    frames = dict.fromkeys(("measurements", "fit_error", "device"), nothing)
    frames |= {"time_model": pl.DataFrame(times), "memory_model": pl.DataFrame(memory)}
    write_costs(tmp_path / "costs.duckdb", frames, {})
    loaded = CostModel.load(tmp_path / "costs.duckdb")
    extra = {key: 0.0 for key in parts if key[2] == "layer_input"}
    assert loaded == dataclasses.replace(costs, parameter_bytes=costs.parameter_bytes | extra)


def test_tables_without_a_fit_are_refused(tmp_path):
    columns = {"module": pl.String, "tp": pl.Int64, "part": pl.String, "parameter_bytes": pl.Float64}
    empty = pl.DataFrame(schema=columns)
    names = ("measurements", "time_model", "memory_model", "fit_error", "device")
    write_costs(tmp_path / "costs.duckdb", dict.fromkeys(names, empty), {})
    with pytest.raises(UserError, match="holds no time model; make it again with `dflop fit-costs`"):
        CostModel.load(tmp_path / "costs.duckdb")
    with pytest.raises(UserError, match="does not exist; make it with `dflop fit-costs`"):
        CostModel.load(tmp_path / "none.duckdb")
