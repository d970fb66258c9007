"""Slots are priced as the executor takes them, whatever the order of computations."""

from collections import Counter, defaultdict

from drawn_plans import orders
from hypothesis import given, settings

from dflop.plan.trained import TrainedSet
from dflop.step import Program, SlotCounts, compile_plan, make_program
from dflop.step.instructions import instructions_together
from dflop.step.nodes import stages_of

FEATURES, FEATURE_GRADIENTS = 0, 1  # channels


def slots_taken(program: Program, worker: int) -> Counter[int]:
    """By channel, the slots of `receiving.Slots` on a worker's ranks."""
    taken, free, open_messages, operation_of = Counter(), Counter(), {}, {}
    for is_message, items in instructions_together(program.instructions[worker]):
        if is_message:
            by_channel = defaultdict(list)
            for item in items:
                if item.op.is_receive:
                    by_channel[program.edges[item.edge].channel(item.op.is_forward)].append(item)
            for channel, received in by_channel.items():
                if free[channel] and taken[channel] > 1:
                    free[channel] -= 1
                else:
                    taken[channel] += 1
                operation = channel, received[0].place
                open_messages[operation] = len(received)
                operation_of |= {(item.op.is_forward, item.edge, item.microbatch): operation for item in received}
            continue
        for item in items:
            if item.op.is_wait:
                operation = operation_of[item.op.is_forward, item.edge, item.microbatch]
                open_messages[operation] -= 1
                free[operation[0]] += not open_messages[operation]
    return taken


@settings(max_examples=150)
@given(order=orders())
def test_ranks_have_the_counted_slots(order):
    """A rank that makes some of its features itself may need fewer for them."""
    plan, frozen, slots = order
    program, trained = make_program(plan, TrainedSet(frozen), slots), TrainedSet(frozen)
    counts = compile_plan(plan, trained, slots).slot_counts
    found: dict[str, Counter[int]] = {kind: Counter() for kind in SlotCounts._fields}
    for stage in stages_of(plan):
        if stage.num_groups > 1:  # counted with the stages of the LLM that have these ranks
            continue
        for worker in (worker for replica in range(stage.dp) for worker in stage.workers(replica)):
            for channel, count in slots_taken(program, worker).items():
                kind = {FEATURES: "features", FEATURE_GRADIENTS: "feature_gradients"}.get(channel)
                kind = kind or ("state_gradients" if channel % 2 else "states")
                found[kind][stage.group] = max(found[kind][stage.group], count)
    for kind, of_groups in found.items():
        for group, count in of_groups.items():
            counted = getattr(counts, kind)[group]
            assert counted >= count if kind == "features" else counted == count, (kind, group)
