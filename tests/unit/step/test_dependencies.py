"""Who waits for whom, said computation by computation, makes the same steps as the simulator."""

import numpy as np
from drawn_plans import orders
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.plan.passes import FORWARD
from dflop.plan.trained import TrainedSet
from dflop.step import Bridges, StageTimes, compile_plan, computations_of, nodes_of, simulate, stages_of


def all_bridges(plan) -> Bridges:
    """A message of no length between every pair of replicas in every microbatch."""
    stages = stages_of(plan)
    llm = next(stage for stage in stages if stage.module == "llm")
    last = {stage.module: stage for stage in stages if stage.module != "llm"}
    rows = [
        (encoder.first_node + source, llm.first_node + target, microbatch)
        for encoder in last.values()
        for source in range(encoder.dp)
        for target in range(llm.dp)
        for microbatch in range(plan.num_microbatches)
    ]
    source, target, microbatch = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return Bridges(source=source, target=target, microbatch=microbatch, seconds=np.zeros(len(rows)))


@settings(deadline=None, max_examples=60)
@given(order=orders(shares=False), seed=st.integers(0, 99))
def test_each_computation_begins_when_what_it_waits_for_has_ended(order, seed):
    plan, frozen, slots = order
    compiled = compile_plan(plan, TrainedSet(frozen), slots)
    shape = (len(nodes_of(plan)), plan.num_microbatches)
    rng = np.random.default_rng(seed)
    forward_s, chain_s = rng.random(shape), rng.random(shape)
    times = StageTimes(
        forward_s=forward_s,
        backward_s=2 * forward_s,
        chain_s=chain_s,
        bridges=all_bridges(plan) if compiled.stages[:, 7].max() >= 0 else Bridges.none(),
        sync_s=np.zeros(shape[0]),
    )
    timeline, stages = simulate(compiled, times), stages_of(plan)
    computations, last = computations_of(compiled)
    ends_s = np.zeros(len(computations))
    for number, own in enumerate(computations):
        node = stages[own.stage].first_node + own.replica
        ready_s = ends_s[[*own.on_workers, *own.bridged]].max(initial=0.0)
        if own.neighbour >= 0:
            other = computations[own.neighbour]
            sender = stages[other.stage].first_node + other.replica if own.which == FORWARD else node
            ready_s = max(ready_s, ends_s[own.neighbour] + chain_s[sender, own.microbatch])
        assert ready_s == timeline.start_s[own.which, node, own.microbatch]
        ends_s[number] = timeline.end_s[own.which, node, own.microbatch]
    assert max(ends_s[last]) == timeline.step_s
