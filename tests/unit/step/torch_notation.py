"""The computations of a plan as torch writes them: `0F3` is the forward of microbatch 3 on stage 0.

F is forward, B backward. Stages are numbered as in `stages_of`, so an LLM without encoders reads as in torch.
"""

from typing import NamedTuple

from dflop.plan import Plan
from dflop.plan.passes import BACKWARD, FORWARD
from dflop.step import Op
from dflop.step.orders import group_orders

_OPS = {FORWARD: Op.FORWARD, BACKWARD: Op.BACKWARD}


class Action(NamedTuple):
    """A computation of every replica of a stage."""

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


def actions_of(plan: Plan) -> list[list[Action]]:
    """The computations of each group of workers, that is of each pipeline rank of a module, encoders first."""
    return [
        [Action(stage, _OPS[which], microbatch) for which, stage, microbatch in order.tolist()]
        for order in group_orders(plan)
    ]
