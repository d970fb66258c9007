"""Simulating again what changed is simulating all of it anew, to the bit, whatever was changed, kept or taken back."""

import numpy as np
from drawn_plans import frozen_sets, plans
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.pipeline import (
    Bridges,
    CellTimes,
    StageTimes,
    compile_plan,
    fresh_clocks,
    mark,
    network_of,
    resimulate,
    simulate,
    stages_of,
    take_back,
)

properties = settings(max_examples=120)


def drawn_times(rng, compiled, num_encoders, num_replicas) -> CellTimes:
    """Of a step in which some cells are empty and some pairs of replicas send nothing."""
    shape = (compiled.num_nodes, compiled.num_microbatches)
    forward_s, backward_s, chain_s = (rng.choice([0.0, *rng.random(5)], size=shape) for _ in range(3))
    message_s = rng.random((compiled.num_microbatches, num_encoders, num_replicas))
    message_s[rng.random(message_s.shape) < 0.5] = -1.0
    weight_s = backward_s * rng.random(shape)
    return CellTimes(forward_s, backward_s, weight_s, chain_s, message_s)


def whole_step_s(plan, compiled, times: CellTimes, sync_s) -> float:
    """The oracle: all of it, by the simulator."""
    stages = stages_of(plan)
    llm = next(stage for stage in stages if stage.module == "llm")
    encoder = stages[stages.index(llm) - 1]
    microbatch, source, target = np.nonzero(times.message_s >= 0)
    bridges = Bridges(
        source=encoder.first_node + source,
        target=llm.first_node + target,
        microbatch=microbatch,
        seconds=times.message_s[microbatch, source, target],
    )
    if plan.placement == "monolithic":
        bridges = Bridges.none()
    return simulate(
        compiled,
        StageTimes(
            forward_s=times.forward_s,
            backward_s=times.backward_s,
            chain_s=times.chain_s,
            bridges=bridges,
            sync_s=sync_s,
            weight_s=times.weight_s,
        ),
    ).step_s


def change(rng, times: CellTimes, network, clocks, first_nodes, num_cells: int) -> tuple[int, CellTimes]:
    """New times for a few cells, their columns marked; the first item that may see it, and the times as they were."""
    before = CellTimes(*(array.copy() for array in times))
    first_item = len(network.items)
    num_nodes, num_microbatches = times.forward_s.shape
    for _ in range(num_cells):
        microbatch = rng.integers(num_microbatches)
        nodes = [rng.integers(num_nodes)]
        if rng.random() < 0.5:
            for array in (times.forward_s, times.backward_s, times.chain_s):
                array[nodes[0], microbatch] = rng.random()
            times.weight_s[nodes[0], microbatch] = times.backward_s[nodes[0], microbatch] * rng.random()
        else:
            encoder, replica = (rng.integers(size) for size in times.message_s.shape[1:])
            times.message_s[microbatch, encoder, replica] = rng.choice([-1.0, rng.random()])
            nodes = [first_nodes[0] + encoder, first_nodes[1] + replica]
        for node in nodes:
            mark(network, clocks, network.column[node])
        first_item = min(first_item, network.first_item[microbatch])
    return first_item, before


def is_of_one_encoder(plan) -> bool:
    return len(plan.grids) == 2


@properties
@given(
    plan=plans().filter(is_of_one_encoder),
    frozen=frozen_sets,
    seed=st.integers(0, 2**31),
    num_changes=st.integers(1, 8),
)
def test_what_changed_is_simulated_as_all_of_it_would_be(plan, frozen, seed, num_changes):
    rng = np.random.default_rng(seed)
    compiled = compile_plan(plan, frozen)
    stages = stages_of(plan)
    llm = next(stage for stage in stages if stage.module == "llm")
    encoder = stages[stages.index(llm) - 1]
    sync_s = rng.random(compiled.num_nodes)
    network = network_of(compiled, sync_s)
    clocks = fresh_clocks(network)
    times = drawn_times(rng, compiled, encoder.dp, llm.dp)
    for column in range(len(clocks.column_end_s)):
        mark(network, clocks, column)
    assert resimulate(network, clocks, times, 0) == whole_step_s(plan, compiled, times, sync_s)
    for _ in range(num_changes):
        ends_s = clocks.end_s.copy()
        first_nodes = (encoder.first_node, llm.first_node)
        first_item, before = change(rng, times, network, clocks, first_nodes, int(rng.integers(1, 4)))
        step_s = resimulate(network, clocks, times, first_item)
        assert step_s == whole_step_s(plan, compiled, times, sync_s)
        assert step_s == clocks.column_end_s.max()
        if rng.random() < 0.5:
            take_back(clocks)
            np.testing.assert_array_equal(clocks.end_s, ends_s)
            for array, old in zip(times, before, strict=True):
                array[:] = old
