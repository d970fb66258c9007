"""Whether all messages of a plan's step end on GPUs, and over how many communicators a rank sends them."""

from dflop.plan import Plan
from dflop.plan.trained import TrainedSet
from dflop.step import Program, check_program, make_program
from dflop.step.routes import channels_of, make_routes
from dflop.train.groups import rank_groups

__all__ = ["messages_of", "num_communicators"]

# Messages that are followed one by one, in some ten seconds.
_MOST_MESSAGES = 100_000


def messages_of(plan: Plan, trained: TrainedSet) -> str:
    """A line on the plan's messages, which are followed in a model of NCCL (`step.streams`).

    Raises:
        ValueError: where a rank would wait for ever.
    """
    program = make_program(plan, trained, rank=0)
    had = f"{num_communicators(program)} communicators a rank"
    num_messages = len(program.edges) * plan.num_microbatches
    if num_messages > _MOST_MESSAGES:
        return f"{had}; {num_messages:,} messages a step, too many to follow here"
    check_program(plan, make_program(plan, trained), trained)
    return f"{had}; all {num_messages:,} messages of a step end, even if all streams of a GPU shared one queue"


def num_communicators(program: Program) -> int:
    """Communicators of a rank at most: the world's, those of messages, and those of the modules' groups."""
    channels = channels_of(program.edges, make_routes(program.workers, program.edges))
    return 1 + len(channels) + len(set(rank_groups(program).values()))
