"""Predictions follow the load, layer by layer, whatever the shape of the arrays that ask."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.base import UserError
from dflop.costs import CostModel, Loads, StageKind, launch_bound_load, resident_parts, stage_kinds, sync_bytes
from dflop.costs.fitted import LoadRange
from dflop.models.loads import Coefficients, Hinge
from dflop.plan.layout_key import LayoutKey
from dflop.plan.trained import TrainedSet
from dflop.store import write_costs

counts = st.integers(0, 10_000)
depths = st.integers(1, 48)
whole = StageKind.whole


def inner(module: str, num_layers: int, **other: bool) -> StageKind:
    """A stage between others, but for what `other` says."""
    return StageKind(
        **{"module": module, "layout": LayoutKey(), "num_layers": num_layers, "is_first": False, "is_last": False}
        | other
    )


def make_loads(num_items=0, num_tokens=0, sum_sq_tokens=0, num_targets=0) -> Loads:
    return Loads(*(np.asarray(value, dtype=float) for value in (num_items, num_tokens, sum_sq_tokens, num_targets)))


def llm_loads(*lengths: int) -> Loads:
    """One microbatch of segments of these lengths, a quarter of its tokens learned."""
    return make_loads(0, sum(lengths), sum(length**2 for length in lengths), sum(lengths) // 4)


@pytest.mark.parametrize("module", ["vision", "llm"])
@pytest.mark.parametrize("num_recomputed", [0, 2, 6])
def test_many_microbatches_at_once_are_those_one_by_one(costs, module, num_recomputed):
    rng = np.random.default_rng(0)
    loads = make_loads(*rng.integers(0, 500, (4, 3, 5)))
    loads.num_items[1, 2] = loads.num_tokens[1, 2] = 0

    def ask(chosen):
        times = costs.stage_time(whole(module, LayoutKey(), 6, num_recomputed=num_recomputed), chosen)
        memory = costs.stage_memory(whole(module, LayoutKey(), 6, num_recomputed=num_recomputed), chosen)
        return np.array([*times, memory.activation_bytes, memory.transient_bytes])

    together = ask(loads)
    assert together.shape == (4, 3, 5)
    for index in np.ndindex(3, 5):
        np.testing.assert_allclose(together[:, *index], ask(Loads(*(load[index] for load in loads))))


def test_the_load_below_which_a_layer_takes_the_same_time_is_where_its_constant_no_longer_hides_the_slope(costs):
    def with_layers(const):
        forms = {"forward": Coefficients(const, (0, 1e-6, 0, 0)), "backward": Coefficients(2 * const, (0, 2e-6, 0, 0))}
        times = costs.times | {("llm", LayoutKey(), "layer", False, name): form for name, form in forms.items()}
        ranges = {("llm", LayoutKey(), False): LoadRange((0, 64, 4096, 4), (0, 65536, 1e9, 9e4))}
        return dataclasses.replace(costs, times=times, ranges=ranges)

    # 1.25 times the time of 64 tokens: 1 ms + 330 µs.
    assert launch_bound_load(with_layers(1e-3), "llm", LayoutKey()) == pytest.approx(330, rel=0.05)
    assert launch_bound_load(with_layers(1e-5), "llm", LayoutKey()) is None  # time falls with the tokens to the last
    assert launch_bound_load(costs, "llm", LayoutKey()) is None  # nothing says what was measured


@pytest.mark.parametrize("module", ["vision", "llm"])
def test_stages_of_several_kinds_cost_what_their_functions_of_the_loads_say(costs, module):
    loads = make_loads(*np.random.default_rng(0).integers(1, 5000, (4, 2, 7)))
    kept = (0, 1, 6, 0, 2) if module == "llm" else ()
    kinds = stage_kinds(module, LayoutKey(), (7, 5, 6, 6, 4), (0, 2, 6, 0, 3), attention_kept=kept)
    kinds = list(dict.fromkeys(kinds))
    working_bytes = {"stage": 3.0, "layer": 1e6, "first": 2e6, "last": 0.0}
    times, memories = costs.stage_times(kinds, loads), costs.stage_memories(kinds, loads, working_bytes)
    for kind, seconds, memory in zip(kinds, times, memories, strict=True):
        own, on_top = costs.stage_memory_forms(kind, working_bytes)
        np.testing.assert_allclose(seconds, [form(loads) for form in costs.time_forms(kind)], rtol=1e-12)
        np.testing.assert_allclose(memory.activation_bytes, own(loads), rtol=1e-12)
        np.testing.assert_allclose(memory.transient_bytes, np.max([form(loads) for form in on_top], axis=0), rtol=1e-12)


def test_a_stage_costs_what_its_layers_and_its_ends_cost(costs):
    loads = llm_loads(300, 20)
    forward_s, backward_s = costs.stage_time(whole("llm", LayoutKey(), 3), loads)
    layer_s = 1e-4 + 5e-6 * 320 + 1e-9 * (300**2 + 20**2)
    ends_s = {"is_first": 5e-5 + 1e-6 * 320, "is_last": 1.5e-4 + 4e-6 * 80}
    assert float(forward_s) == pytest.approx(2e-5 + 3 * layer_s + sum(ends_s.values()))
    assert float(backward_s) == pytest.approx(2 * (2e-5 + 3 * layer_s + sum(ends_s.values())))
    assert float(costs.stage_time(inner("llm", 3), loads)[0]) == pytest.approx(2e-5 + 3 * layer_s)
    for end, seconds in ends_s.items():
        with_end = inner("llm", 3, **{end: True})
        assert float(costs.stage_time(with_end, loads)[0]) == pytest.approx(2e-5 + 3 * layer_s + seconds)


@pytest.mark.parametrize("module", ["vision", "llm"])
def test_nothing_to_do_takes_no_time_at_all(costs, module):
    for times in costs.stage_time(whole(module, LayoutKey(), 4, num_recomputed=4), make_loads(*np.zeros((4, 3)))):
        assert (times == 0).all()


@given(lengths=st.lists(st.integers(1, 2000), min_size=1, max_size=5), more=st.integers(1, 500), depth=depths)
def test_more_load_never_takes_less_time_or_memory(costs, lengths, more, depth):
    small, large = llm_loads(*lengths), llm_loads(*lengths, more)
    kind = whole("llm", LayoutKey(), depth)
    for ask in (costs.stage_time, lambda *asked: [costs.stage_memory(*asked).activation_bytes]):
        for less, greater in zip(ask(kind, small), ask(kind, large), strict=True):
            assert float(greater) > float(less)


@given(num_items=st.integers(1, 500), num_tokens=st.integers(1, 10_000), depth=st.integers(2, 48), data=st.data())
@pytest.mark.parametrize("module", ["vision", "llm"])
def test_each_recomputed_layer_costs_its_forward_once_more_and_keeps_less(
    costs, module, num_items, num_tokens, depth, data
):
    num_recomputed = data.draw(st.integers(1, depth))
    loads = make_loads(num_items) if module == "vision" else llm_loads(num_tokens)
    plain = costs.stage_time(whole(module, LayoutKey(), depth), loads)
    checkpointed = costs.stage_time(whole(module, LayoutKey(), depth, num_recomputed=num_recomputed), loads)
    layers_s = costs.stage_time(inner(module, num_recomputed), loads)[0] - 2e-5
    assert float(checkpointed[0]) == pytest.approx(float(plain[0]))
    assert float(checkpointed[1]) == pytest.approx(float(plain[1] + layers_s))
    fat, thin = (
        costs.stage_memory(whole(module, LayoutKey(), depth, num_recomputed=count), loads)
        for count in (0, num_recomputed)
    )
    kept, input_alone = (
        float(costs.activations[module, LayoutKey(), "layer", again](loads)) for again in (False, True)
    )
    saved = num_recomputed * (kept - input_alone)
    assert float(fat.activation_bytes - thin.activation_bytes) == pytest.approx(saved, rel=1e-6)
    assert saved > 0


def test_a_stage_has_the_parameters_of_its_parts(costs):
    for kind, rest in (
        (inner("llm", 4), 0),
        (whole("llm", LayoutKey(), 4), 3e5),
        (inner("llm", 4, is_first=True), 1e5),
    ):
        assert costs.stage_parameter_bytes(kind) == 4 * 5e5 + rest


def test_stages_of_a_module_differ_by_their_layers_and_their_ends_alone():
    kinds = stage_kinds("llm", LayoutKey(2), (3, 4, 4, 4), (3, 4, 4, 4))
    assert [(kind.num_layers, kind.is_first, kind.is_last) for kind in kinds] == [
        (3, True, False), (4, False, False), (4, False, False), (4, False, True)
    ]  # fmt: skip
    assert len(set(kinds)) == 3
    assert [kind.num_recomputed for kind in kinds] == [3, 4, 4, 4]
    assert len(set(stage_kinds("llm", LayoutKey(2), (4, 4, 4, 4), (4, 4, 2, 0)))) == 4
    assert stage_kinds("llm", LayoutKey(), (4,)) == [whole("llm", LayoutKey(), 4)]


def test_of_layers_with_a_backward_the_first_are_offloaded_and_the_next_recomputed():
    last_three = TrainedSet((), named=("llm.layers.[1-3]",), modules=(("llm", 4),))
    (kind,) = stage_kinds("llm", LayoutKey(), (4,), (4,), last_three, offloaded=(1,))
    assert (kind.num_offloaded, kind.num_recomputed) == (1, 2)
    assert kind.layers_with_backward == ["offloaded_layer", "recomputed_layer", "recomputed_layer"]


def test_replicas_hold_parameters_and_gradients_whole_and_two_moments_together():
    assert sum(resident_parts(100.0, 0.0, 1, value_bytes=4)) == 400
    assert sum(resident_parts(100.0, 0.0, 4, value_bytes=4)) == 250
    assert sum(resident_parts(0.0, 100.0, 4, value_bytes=4)) == 100
    assert sum(resident_parts(100.0, 0.0, 4, value_bytes=8)) == 500


def test_in_half_precision_masters_are_divided_as_moments_are():
    of_one = 25.0  # parameters: 2 bytes, a gradient of 4, and masters and moments of 12
    assert sum(resident_parts(100.0, 0.0, 1, value_bytes=2)) == of_one * 18
    assert sum(resident_parts(100.0, 0.0, 4, value_bytes=2)) == of_one * (6 + 12 / 4)
    assert sum(resident_parts(0.0, 100.0, 4, value_bytes=2)) == of_one * 2
    assert sum(resident_parts(100.0, 0.0, 8, value_bytes=2, num_shards=4)) == of_one * 16 / 4


def test_a_gradient_sync_sums_fp32_and_gives_back_what_is_computed_in():
    assert sync_bytes(100.0, value_bytes=4) == 100
    assert sync_bytes(100.0, value_bytes=2) == 75
    assert sync_bytes(100.0, value_bytes=8) == 200
    assert sync_bytes(100.0, value_bytes=2, num_shards=4) == 100  # between nodes that each have a copy


def test_what_a_microbatch_needs_on_top_is_that_of_the_part_that_needs_most(costs):
    loads = make_loads(30)
    parts = [float(costs.transients["vision", LayoutKey(), part, False](loads)) for part in ("layer", "first", "last")]
    without_backward = costs.stage_memory(whole("vision", LayoutKey(), 9, trained=TrainedSet(("vision",))), loads)
    assert float(without_backward.transient_bytes) == max(parts)
    loads = llm_loads(100)
    again = costs.stage_memory(inner("llm", 9, num_recomputed=9), loads)
    assert float(again.transient_bytes) == float(costs.activations["llm", LayoutKey(), "layer", False](loads))


def test_layers_are_recomputed_where_those_behind_them_have_given_up_what_they_kept(costs):
    loads = llm_loads(100)
    kept = float(costs.activations["llm", LayoutKey(), "layer", False](loads))
    of_one, again = (
        float(costs.transients["llm", LayoutKey(), "layer", recomputed](loads)) for recomputed in (False, True)
    )
    for num_recomputed in range(1, 9):
        some = costs.stage_memory(inner("llm", 9, num_recomputed=num_recomputed), loads)
        assert float(some.transient_bytes) == max(of_one, again - (9 - num_recomputed) * kept, 0.0)


def test_a_layer_that_is_recomputed_but_for_attention_keeps_that_and_does_not_compute_it_again(costs):
    loads, a_token = llm_loads(300, 100), costs.attention_bytes["llm", LayoutKey()]
    some, whole_ones = inner("llm", 9, num_recomputed=5, num_attention_kept=3), inner("llm", 9, num_recomputed=5)
    (forward_s, backward_s), others_s = costs.stage_time(some, loads), costs.stage_time(whole_ones, loads)
    assert float(forward_s) == float(others_s[0])
    assert float(backward_s) == pytest.approx(float(others_s[1]) - 3 * 1e-9 * (300**2 + 100**2))
    memory, others = costs.stage_memory(some, loads), costs.stage_memory(whole_ones, loads)
    assert float(memory.activation_bytes) == float(others.activation_bytes) + 3 * 400 * a_token
    nothing = costs.stage_memory(inner("llm", 9), loads)
    layer, again = (
        float(costs.activations["llm", LayoutKey(), "layer", recomputed](loads)) for recomputed in (False, True)
    )
    # At the peak the last layer's backward runs, or that of the last layer that is recomputed, as either kind.
    at_peaks = [
        nothing.transient_bytes,
        layer - 400 * a_token - 4 * layer,
        layer - 4 * layer - 3 * (again + 400 * a_token),
    ]
    assert float(memory.transient_bytes) == max(map(float, at_peaks))
    all_again = costs.stage_memory(inner("llm", 9, num_recomputed=9, num_attention_kept=9), loads)
    assert float(all_again.transient_bytes) == layer - 400 * a_token


def test_a_layer_that_keeps_its_attention_does_not_ask_others_for_keys_and_values_again(costs):
    loads = make_loads(1000, 300, 300 * 1300, 10)
    exchanging = costs.exchanging(64.0, 1e-6, 2.0)
    for num_kept, times in ((0, 2), (1, 1)):
        kind = inner("llm", 1, num_recomputed=1, num_attention_kept=num_kept)
        less_s, more_s = (own.stage_time(kind, loads)[1] for own in (costs, exchanging))
        assert float(more_s - less_s) == pytest.approx(times * 1000 * 64 * 1e-6)
        less, more = (own.stage_memory(kind, loads).activation_bytes for own in (costs, exchanging))
        assert float(more - less) == num_kept * 1000 * 64


@pytest.mark.parametrize(("module", "loads"), [("llm", llm_loads(100)), ("vision", make_loads(30))])
def test_layers_use_again_what_the_last_part_has_given_up(costs, module, loads):
    layer, first, last = (
        float(costs.transients[module, LayoutKey(), part, False](loads)) for part in ("layer", "first", "last")
    )
    given_up = float(costs.activations[module, LayoutKey(), "last", False](loads))
    assert layer > last > layer - given_up  # or the test shows nothing
    with_last = costs.stage_memory(whole(module, LayoutKey(), 9), loads)
    assert float(with_last.transient_bytes) == max(layer - given_up, first - given_up, last)
    without = costs.stage_memory(inner(module, 9), loads)
    assert float(without.transient_bytes) == layer


def test_loads_outside_of_what_was_measured_are_flagged(costs):
    bounds = LoadRange((0, 32, 1024, 4), (0, 2048, 2048**2, 1024))
    ranged = dataclasses.replace(costs, ranges={("llm", LayoutKey(), False): bounds})
    loads = make_loads([0] * 5, [100, 4096, 0, 10, 2048], [1e4, 1e6, 0, 100, 2048**2], [5, 5, 0, 5, 2000])
    assert ranged.is_extrapolated("llm", LayoutKey(), loads).tolist() == [False, True, False, True, True]
    assert not ranged.is_extrapolated("vision", LayoutKey(), loads).any()
    assert not ranged.is_extrapolated("llm", LayoutKey(), loads, checkpointing=True).any()


def test_what_a_unit_of_load_adds_lies_between_its_least_and_its_most():
    bent = Coefficients(1.0, (0, 2.0, 0, 0), (Hinge(1, 100.0, 1.0), Hinge(1, 300.0, 1.0)))
    loads = make_loads(num_tokens=10)
    assert float(bent.without_const(least=True)(loads)) == 20
    assert 20 < float(bent.without_const(least=False)(loads)) < 40


@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=6), depths)
def test_what_samples_add_is_what_their_microbatch_takes_beyond_its_constants(costs, samples, depth):
    """Segments add their own squares, so that the load of a packed microbatch is the sum of its samples'."""
    tokens, targets = (np.array(column, dtype=float) for column in zip(*samples, strict=True))
    each = make_loads(np.zeros(len(samples)), tokens, tokens**2, targets)
    added_s = costs.additive_loads_s(whole("llm", LayoutKey(), depth), each).sum()
    together = Loads(*(np.asarray(load.sum()) for load in each))
    if together.num_tokens:
        times = costs.stage_time(whole("llm", LayoutKey(), depth), together)
        constant_s = 3 * (depth * 1e-4 + 2e-4 + 2e-5)
        assert added_s == pytest.approx(float(sum(times)) - constant_s)


@pytest.mark.parametrize("ask", ["stage_time", "stage_memory", "additive_loads_s"])
def test_a_tp_size_that_was_not_measured_says_what_was_and_how_to_get_it(costs, ask):
    with pytest.raises(UserError) as caught:
        getattr(costs, ask)(whole("llm", LayoutKey(2), 4), make_loads())
    message = str(caught.value)
    assert "no measured costs for llm tp=2 (there are: llm tp=1, vision tp=1)" in message
    assert "add 2 to `costs.tp_sizes`" in message


def test_a_module_that_was_not_measured_is_named(costs):
    with pytest.raises(UserError, match=r"no measured costs for audio \(there are: llm tp=1, vision tp=1\)"):
        costs.stage_time(whole("audio", 1, 4), make_loads())


def test_tables_without_a_fit_are_refused(tmp_path):
    empty = pl.DataFrame(schema={"module": pl.String, "tp": pl.Int64, "part": pl.String})
    names = ("measurements", "time_model", "memory_model", "load_range", "fit_error", "device")
    write_costs(tmp_path / "costs.duckdb", dict.fromkeys(names, empty), {})
    with pytest.raises(UserError, match="holds no time model; make it again with `dflop fit-costs`"):
        CostModel.load(tmp_path / "costs.duckdb")
    with pytest.raises(UserError, match="does not exist; make it with `dflop fit-costs`"):
        CostModel.load(tmp_path / "none.duckdb")


def test_a_stage_is_charged_for_its_trained_layers_those_that_pass_gradients_on_and_those_without_a_backward(costs):
    """Recomputing adds 0.7 of a forward, whether the layer is trained or passes gradients on."""
    key = ("llm", LayoutKey(), "layer")
    again = costs.times[*key, False, "backward"] + 0.7 * costs.times[*key, False, "forward"]
    costs = dataclasses.replace(
        costs,
        times=costs.times | {(*key, True, "backward"): again},
        passing={("llm", LayoutKey()): (0.5, 0.25)},
        partial_bytes={("llm", LayoutKey(), "layer"): 7.0},
    )
    forward, backward = (
        {part: form(llm_loads(300, 40)) for part, form in forms.items()}
        for forms in costs.part_forms("llm", LayoutKey())
    )
    kept = costs.activations["llm", LayoutKey(), "layer", False](llm_loads(300, 40))
    named = ("llm.layers.3", "llm.layers.4", "llm.layers.5.*norm*", "llm.layers.7")
    modules = [SimpleNamespace(name="vision", num_layers=2), SimpleNamespace(name="llm", num_layers=8)]
    first, second = stage_kinds("llm", LayoutKey(), (4, 4), (0, 2), TrainedSet(named=named).among(modules))
    assert (first.num_whole, second.num_whole) == (1, 2)
    for kind, layers_s in ((first, backward["layer"]), (second, 3.5 * backward["layer"] + 1.4 * forward["layer"])):
        own = {part: count for part, count in kind.parts if "layer" not in part}
        in_forward, in_backward = costs.stage_time(kind, llm_loads(300, 40))
        assert in_forward == pytest.approx(4 * forward["layer"] + sum(forward[part] for part in own))
        others_s = sum(backward[part] for part in own if part != "first")
        assert in_backward == pytest.approx(layers_s + others_s)
    again = dataclasses.replace(second, num_attention_kept=1)
    less_s = costs.stage_time(second, llm_loads(300, 40))[1] - costs.stage_time(again, llm_loads(300, 40))[1]
    assert less_s == pytest.approx(1e-9 * (300**2 + 40**2))
    stage_kept = costs.activations["llm", LayoutKey(), "stage", False](llm_loads(300, 40))
    assert costs.stage_memory(first, llm_loads(300, 40)).activation_bytes == pytest.approx(kept + stage_kept)
    layer = costs.parameter_bytes["llm", LayoutKey(), "layer"]
    assert costs.trained_and_frozen_bytes(second)[0] == 2 * layer + 7.0
