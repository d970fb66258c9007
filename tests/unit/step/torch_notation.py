"""The computations of a plan as torch writes them: `0F3` is the forward of microbatch 3 on stage 0.

F is forward, B backward, I and W are the input and weight parts of backward. Stages are numbered as in `stages_of`, so
an LLM without encoders reads as in torch.
"""

from typing import NamedTuple

from dflop.plan import Plan
from dflop.plan.passes import BACKWARD, FORWARD
from dflop.step import Op, stages_of
from dflop.step.orders import group_orders, splits_backward


class Action(NamedTuple):
    """A computation of every replica of a stage."""

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


def actions_of(plan: Plan) -> list[list[Action]]:
    """The computations of each group of workers, that is of each pipeline rank of a module, encoders first."""
    stages = stages_of(plan)

    def op_of(which: int, stage: int) -> Op:
        if which == FORWARD:
            return Op.FORWARD
        if which == BACKWARD:
            return Op.BACKWARD_INPUT if splits_backward(plan, stages[stage].module) else Op.BACKWARD
        return Op.BACKWARD_WEIGHT

    return [
        [Action(stage, op_of(which, stage), microbatch) for which, stage, microbatch in order.tolist()]
        for order in group_orders(plan)
    ]
