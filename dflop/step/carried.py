"""When everything in a step ends if messages are carried as on a GPU: in the total order, one operation at a time.

`walk` lets a message begin as soon as it is made. On a GPU it begins when both its ends are through with what stands
before it on its channel, and when all is made that they send together with it: messages of one place in the total order
and of one channel are one operation. Receives begin ahead of need (`receiving`), so they wait for nothing else. Before
a worker uses the memory of what it sent again, it waits until that has arrived (`instructions.kept_until`).

This takes several times as long as `walk`. So searches compare steps without these waits, and whatever is shown,
trained or chosen at the end has them.
"""

import numpy as np

from dflop.base.kernels import kernel
from dflop.plan.passes import BACKWARD, FORWARD
from dflop.step.compiled import AHEAD
from dflop.step.simulation_kernel import (
    BRIDGE_IN,
    BRIDGE_OUT,
    DP,
    FIRST_NODE,
    FIRST_WORKER,
    HAS_BACKWARD,
    PARTS,
    SHARED,
    SPAN,
    STAGE_BEFORE,
    STAGE_BEHIND,
    TRACK,
)

__all__ = ["carry"]

# A message between two workers: they, its channel, and the cell that takes it; then the pass, cell and lane behind
# which its sender keeps it no longer. No cell is -1.
_SENDER, _RECEIVER, _CHANNEL, _TAKER, _KEEPER, _KEPT_PASS, _LANE = range(7)
_NUM_CHANNELS = 8


@kernel
def carry(order, stages, seconds, chain_s, messages, syncs, clocks, end_s, start_s):
    """As `walk`, with messages as a GPU carries them.

    `order` and `stages` are those of the compiled plan. `start_s` has the shape of `end_s`; both are written.
    """
    num_encoders = stages[:, BRIDGE_OUT].max() + 1
    num_microbatches = seconds.shape[1] // stages[:, DP].sum()
    of_plan = stages, num_microbatches, messages
    span = stages[:, SPAN].max()
    free_s = np.zeros((len(clocks), _NUM_CHANNELS))  # when a channel's last operation has ended, by worker
    state = free_s, np.zeros_like(free_s), np.zeros_like(free_s)  # and when the next one's messages are made, and end
    kept_s = np.zeros((2, seconds.shape[1], span))  # when what is kept until a computation has arrived
    let_go_s = np.zeros_like(clocks)  # what a worker's next computation waits for because of that
    arrived_s = np.zeros_like(end_s)
    most = span * (stages[:, DP].max() + len(messages.seconds))
    sent, times_s = np.empty((most, 7), dtype=np.int64), np.empty((2, most))
    is_taken = np.zeros(num_microbatches + AHEAD, dtype=np.bool_)
    is_taken[:AHEAD] = True  # features may be sent behind the forward of the microbatch `AHEAD` before that takes them
    is_held = np.zeros((num_microbatches + AHEAD, len(stages), stages[:, PARTS].max()), dtype=np.bool_)
    clocks[:] = 0.0
    for place in range(len(order)):
        which, stage, microbatch, part = order[place]
        _compute(of_plan, order[place], seconds, syncs, (arrived_s, kept_s, let_go_s), clocks, end_s, start_s)
        count = _in_module(of_plan, order[place], chain_s, end_s, sent, times_s)
        if which == FORWARD and stages[stage, BRIDGE_OUT] >= 0:
            if is_taken[microbatch]:
                count = _over_bridge(of_plan, FORWARD, stage, microbatch, part, end_s, sent, times_s, count)
            else:
                is_held[microbatch, stage, part] = True
        if stages[stage, BRIDGE_IN] > 0:
            of_microbatch = microbatch
            if which == FORWARD:
                is_taken[microbatch + AHEAD], of_microbatch = True, microbatch + AHEAD
            for encoder in range(len(stages) if num_encoders else 0):
                if stages[encoder, BRIDGE_OUT] < 0 or (which == BACKWARD and not stages[encoder, HAS_BACKWARD]):
                    continue
                for its_part in range(stages[encoder, PARTS]):
                    if which == BACKWARD or is_held[of_microbatch, encoder, its_part]:
                        count = _over_bridge(
                            of_plan, which, encoder, of_microbatch, its_part, end_s, sent, times_s, count
                        )
        if count:
            _issue(sent[:count], times_s[:, :count], which, state, kept_s, arrived_s)


@kernel
def _compute(of_plan, computation, seconds, syncs, waits, clocks, end_s, start_s):
    """Write when a computation begins and ends on its replicas, and what their workers wait for behind it."""
    stages, num_microbatches, _ = of_plan
    arrived_s, kept_s, let_go_s = waits
    which, stage, microbatch, part = computation
    own = stages[stage]
    span, shared, num_replicas = own[SPAN], own[SHARED], own[DP] // own[PARTS]
    first_cell = own[FIRST_NODE] * num_microbatches + microbatch * own[DP]
    first = part * num_replicas
    for replica in range(first, first + num_replicas):
        begin_s = arrived_s[which, first_cell + replica]
        for worker in range(own[FIRST_WORKER] + replica * span, own[FIRST_WORKER] + (replica + 1) * span):
            begin_s = max(begin_s, clocks[worker], let_go_s[worker])
        if which == FORWARD and microbatch == 0 and syncs.gathered_s.size > 0:
            gathered_s = syncs.gathered_s[own[FIRST_NODE] + replica]
            begin_s = max(begin_s, gathered_s - seconds[which, first_cell + replica])
        start_s[which, first_cell + replica] = begin_s
    for group in range(num_replicas // shared):
        cells = slice(first_cell + first + group * shared, first_cell + first + (group + 1) * shared)
        ended_s = start_s[which, cells].max() + seconds[which, cells].max()
        end_s[which, cells] = ended_s
        start_s[which, cells] = ended_s - seconds[which, cells]
    for replica in range(first, first + num_replicas):
        for lane in range(span):
            worker = own[FIRST_WORKER] + replica * span + lane
            clocks[worker] = end_s[which, first_cell + replica]
            let_go_s[worker] = kept_s[which, first_cell + replica, lane]


@kernel
def _in_module(of_plan, computation, chain_s, end_s, sent, times_s):
    """Write the messages to the next stage of the module, or back from it, to `sent` and `times_s`; how many."""
    stages, num_microbatches, _ = of_plan
    which, stage, microbatch, part = computation
    taker = stages[stage, STAGE_BEHIND] if which == FORWARD else stages[stage, STAGE_BEFORE]
    if taker < 0 or (which == BACKWARD and not stages[taker, HAS_BACKWARD]):
        return 0
    count, num_replicas = 0, stages[stage, DP] // stages[stage, PARTS]
    for replica in range(part * num_replicas, (part + 1) * num_replicas):
        first = stage if which == FORWARD else taker
        cell = stages[first, FIRST_NODE] * num_microbatches + microbatch * stages[first, DP] + replica
        ends = (stage, replica), (taker, replica)
        channel = 2 * stages[first, TRACK] + which
        count = _add(of_plan, which, microbatch, ends, (channel, chain_s[cell]), end_s, sent, times_s, count)
    return count


@kernel
def _over_bridge(of_plan, which, encoder, microbatch, part, end_s, sent, times_s, count):
    """Write the messages of a part of an encoder's last stage over its bridge, as `_in_module`."""
    stages, num_microbatches, messages = of_plan
    num_encoders, num_parts = stages[:, BRIDGE_OUT].max() + 1, stages[:, PARTS].max()
    number = (microbatch * num_encoders + stages[encoder, BRIDGE_OUT]) * num_parts + part
    llm = np.argmax(stages[:, BRIDGE_IN])
    first = np.int64(messages.first[number])
    for entry in range(first, first + np.int64(messages.count[number])):
        source = np.int64(messages.source[entry]) - stages[encoder, FIRST_NODE] * num_microbatches
        target = np.int64(messages.target[entry]) - stages[llm, FIRST_NODE] * num_microbatches
        here = encoder, source - microbatch * stages[encoder, DP]
        there = llm, target - microbatch * stages[llm, DP]
        ends = (here, there) if which == FORWARD else (there, here)
        how = which, messages.seconds[entry]
        count = _add(of_plan, which, microbatch, ends, how, end_s, sent, times_s, count)
    return count


@kernel
def _add(of_plan, which, microbatch, ends, how, end_s, sent, times_s, count):
    """Write the messages between the workers of two replicas (`routes.make_routes`), as `_in_module`."""
    stages, num_microbatches, _ = of_plan
    (maker, from_replica), (taker, to_replica) = ends
    channel, seconds = how
    sending, receiving = stages[maker, SPAN], stages[taker, SPAN]
    first_sender = stages[maker, FIRST_WORKER] + from_replica * sending
    first_receiver = stages[taker, FIRST_WORKER] + to_replica * receiving
    made = stages[maker, FIRST_NODE] * num_microbatches + microbatch * stages[maker, DP] + from_replica
    taken = stages[taker, FIRST_NODE] * num_microbatches + microbatch * stages[taker, DP] + to_replica
    learns = stages[maker, HAS_BACKWARD] > 0
    later = 0
    if which == BACKWARD or not learns:
        later = AHEAD if which == FORWARD or channel == which else 1
    keeper = made + later * stages[maker, DP] if microbatch + later < num_microbatches else -1
    kept_pass = BACKWARD if which == BACKWARD or learns else FORWARD
    for lane in range(receiving):
        receiver = first_receiver + lane
        if first_sender <= receiver < first_sender + sending:
            continue  # it has made the data itself
        its_lane = lane * sending // receiving
        sent[count] = first_sender + its_lane, receiver, channel, taken, keeper, kept_pass, its_lane
        times_s[:, count] = seconds, end_s[which, made]
        count += 1
    return count


@kernel
def _issue(sent, times_s, which, state, kept_s, arrived_s):
    """Carry out the operations of one place in the total order: write when their messages have arrived."""
    free_s, ready_s, ended_s = state
    for number in range(len(sent)):
        sender, channel = sent[number, _SENDER], sent[number, _CHANNEL]
        ready_s[sender, channel] = max(ready_s[sender, channel], times_s[1, number])
    for number in range(len(sent)):
        begin_s, channel = 0.0, sent[number, _CHANNEL]
        for worker in sent[number, :2]:
            begin_s = max(begin_s, ready_s[worker, channel], free_s[worker, channel])
        for worker in sent[number, :2]:
            ended_s[worker, channel] = max(ended_s[worker, channel], begin_s + times_s[0, number])
    for number in range(len(sent)):
        sender, receiver, channel, taker, keeper, kept_pass, lane = sent[number]
        arrived_s[which, taker] = max(arrived_s[which, taker], ended_s[receiver, channel])
        if keeper >= 0:
            kept_s[kept_pass, keeper, lane] = max(kept_s[kept_pass, keeper, lane], ended_s[sender, channel])
    for number in range(len(sent)):
        channel = sent[number, _CHANNEL]
        for worker in sent[number, :2]:
            free_s[worker, channel] = max(free_s[worker, channel], ended_s[worker, channel])
            ready_s[worker, channel] = 0.0
