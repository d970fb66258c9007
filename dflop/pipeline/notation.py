"""torch's notation of pipeline schedules: one row a pipeline rank, `0F3` for the forward of microbatch 3 on stage 0.

This is the CSV of torch.distributed.pipelining.schedules with computations only: F is forward, B backward, I and W are
the input and weight parts of backward. Stages are numbered as in `stages_of`, so an LLM without encoders reads as in
torch.
"""

import csv
import io
import re
from collections.abc import Sequence
from typing import NamedTuple

from dflop.parallelism.passes import BACKWARD, FORWARD
from dflop.parallelism.plan import Plan
from dflop.pipeline.instructions import Op
from dflop.pipeline.layout import stages_of
from dflop.pipeline.orders import group_orders, splits_backward
from dflop.runtime import UserError

__all__ = ["Action", "actions_of", "format_actions", "parse_actions"]

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """A computation of every replica of a stage."""

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


def actions_of(plan: Plan, frozen: Sequence[str] = ()) -> list[list[Action]]:
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
        for order in group_orders(plan, frozen)
    ]


def format_actions(rows: Sequence[Sequence[Action]]) -> str:
    """The computations as CSV, a row a group of workers."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def parse_actions(text: str) -> list[list[Action]]:
    """The rows of CSV that `format_actions` or torch wrote. Empty cells, which are torch's bubbles, are skipped.

    Raises:
        UserError: naming the row and the cell that is not a computation.
    """
    rows: list[list[Action]] = []
    for number, cells in enumerate(csv.reader(io.StringIO(text))):
        row = []
        for cell in filter(None, (cell.strip() for cell in cells)):
            found = _ACTION.fullmatch(cell)
            if not found:
                raise UserError(
                    f"row {number} of the schedule holds {cell!r}; a computation is a stage, one of F, B, I, W, and a "
                    "microbatch, like 0F3"
                )
            row.append(Action(int(found[1]), Op(found[2]), int(found[3])))
        rows.append(row)
    return rows
