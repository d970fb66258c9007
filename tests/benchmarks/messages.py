"""How many communicators a rank has, and whether all messages end in the model of NCCL (`dflop/step/streams.py`).

    python tests/benchmarks/messages.py [--plans 2000] [--seed 0]

The first table is by cluster: communicators of a rank if there were one for each pair of ranks and channel, those that
there are, and the calls that make them. Then plans of 2 to 1,024 ranks are drawn: any placement, schedule and sharding,
any tp, frozen modules, microbatches of text alone and random bridges. Each is followed once with all streams of a GPU
in one hardware queue, and once with a queue a stream and the SMs of an A100.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "unit/step"))

from drawn_plans import orders
from test_streams import assert_ends

from dflop.base.devices import COMMUNICATOR_BYTES
from dflop.plan import Grid, Plan
from dflop.step import communicator_bytes, make_program, num_communicators
from dflop.step.check import FEWEST_SMS
from dflop.step.routes import channels_of, lanes_of, make_routes
from dflop.train.groups import rank_groups

# Ranks, ranks of encoders alone (0 where modules share ranks), and stages of the LLM.
CLUSTERS = (
    (8, 2, 1), (8, 0, 2), (16, 0, 4), (64, 16, 1), (64, 0, 4), (256, 64, 1), (256, 0, 4), (1024, 256, 1), (1024, 0, 4)
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="draws other plans")
    arguments = parser.parse_args()
    print(f"python {' '.join(sys.argv)}\n\n{'':28}{'one a pair':>12}{'now':>6}{'calls':>7}{'GB':>7}")
    for num_ranks, num_encoding, pp in CLUSTERS:
        print_cluster(num_ranks, num_encoding, pp)
    follow(arguments.plans, arguments.seed)


def print_cluster(num_ranks: int, num_encoding: int, pp: int) -> None:
    vision = Grid(module="vision", num_ranks=num_encoding or num_ranks)
    llm = Grid(module="llm", num_ranks=num_ranks - num_encoding, pp=pp, rank_offset=num_encoding)
    plan = Plan(placement="disjoint" if num_encoding else "colocated", grids=(vision, llm), num_microbatches=2 * pp)
    program = make_program(plan, rank=0)
    routes, pairs = make_routes(program.workers, program.edges), set()
    for number, edge in enumerate(program.edges):
        for is_forward in (True, False):
            for route in routes.of(number, is_forward):
                sender, receiver = program.workers[route.sender], program.workers[route.receiver]
                for here, there in lanes_of(sender.num_ranks, receiver.num_ranks):
                    way = edge.is_bridge, is_forward
                    pairs.add((sender.first_rank + here, receiver.first_rank + there, way))
    of_rank = Counter(rank for *ends, _ in pairs for rank in ends)
    groups = rank_groups(program, is_tied=False)
    of_groups = Counter(rank for own in {*groups.values()} for ranks in own if len(ranks) > 1 for rank in ranks)
    before = 1 + max(of_rank[rank] + of_groups[rank] for rank in range(num_ranks))  # with that of the world
    calls = len(channels_of(program.edges, routes)) + len({*groups.values()})
    name = f"{num_ranks:,} ranks, {plan.placement}, {pp} stages"
    held = f"{communicator_bytes(plan, COMMUNICATOR_BYTES, is_tied=False) / 1e9:.2f}"
    print(f"{name:<28}{before:>12,}{num_communicators(plan, is_tied=False):>6}{calls:>7}{held:>7}", flush=True)


def follow(num_plans: int, drawn_from: int) -> None:
    """Follow drawn plans; one that does not end is an error, which shows the plan."""
    placements, sizes, started = Counter(), Counter(), time.process_time()

    @seed(drawn_from)
    @settings(max_examples=num_plans, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        order=orders(most_ranks=1024),
        share=st.sampled_from([0.0, 0.3, 1.0]),
        number=st.integers(0, 10**6),
        is_tied=st.booleans(),
    )
    def ends(order, share, number, is_tied):
        for num_queues, num_sms in ((1, None), (None, FEWEST_SMS)):
            assert_ends(order, num_queues, num_sms, number, share, is_tied)
        plan = order[0]
        placements[plan.placement] += 1
        sizes[next(size for size in (8, 64, 256, 1024) if plan.world_size <= size)] += 1
        if (count := sum(sizes.values())) % 100 == 0:
            print(f"  {count} plans in {time.process_time() - started:.0f} s of a core", flush=True)

    ends()
    print(f"\n{sum(sizes.values()):,} plans, all end, in {time.process_time() - started:.0f} s of a core")
    print(f"  by placement: {dict(placements)}\n  by ranks, up to: {dict(sorted(sizes.items()))}")


if __name__ == "__main__":
    main()
