"""Whether all messages of a plan's step end on GPUs, and over how many communicators a rank sends them."""

from dflop.base.devices import MESSAGE_CTAS
from dflop.checks.of_plan import PlanToCheck
from dflop.models import load_model_spec
from dflop.step import check_program, communicator_bytes, make_program, num_communicators
from dflop.step.check import FEWEST_SMS

__all__ = ["check"]

# Messages that are followed one by one, in some ten seconds.
_MOST_MESSAGES = 100_000


def check(asked: PlanToCheck) -> str:
    """A line on the plan's messages, which are followed in a model of NCCL (`step.streams`).

    Raises:
        ValueError: where a rank would wait for ever.
    """
    plan, trained, bytes_of_group = asked.plan, asked.config.model.trained, asked.costs.communicator_bytes
    program = make_program(plan, trained, rank=0)
    is_tied = load_model_spec(asked.config.model).has_tied_head
    count = num_communicators(plan, is_tied=is_tied)
    had = f"{count} communicators a rank"
    if bytes_of_group:  # costs of GPUs
        had += f" with {communicator_bytes(plan, bytes_of_group, is_tied=is_tied) / 2**30:.3g} GiB"
    num_messages = len(program.edges) * plan.num_microbatches
    if num_messages > _MOST_MESSAGES:
        return f"{had}; {num_messages:,} messages a step, too many to follow here"
    check_program(plan, make_program(plan, trained), trained)
    return (
        f"{had}; all {num_messages:,} messages of a step end, even if all streams of a GPU shared one queue; on "
        f"{FEWEST_SMS} SMs computing fits beside those that wait, with {MESSAGE_CTAS} SMs for each channel"
    )
