"""Bubble-filled: encoders on all of the LLM's ranks, as if colocated, computing while a rank would otherwise wait.

A rank computes encoder forwards when it would wait for hidden states or gradients of the LLM, in the order in which the
LLM's first stage takes the features. It computes encoder backwards among the LLM's later computations, as gradients
arrive. The idea is that of Feng et al. (Optimus, ATC 2025) for microbatches of equal shapes. Here their times differ,
so the order is made anew for each batch from predicted times (`step.filling`).

Such an order is given by whole numbers, the *slots*: how many of a rank's LLM computations come before its encoders'
forward of a microbatch, and before their backward. The scheduling process computes the slots and the schedule contains
them, so that all ranks use the same ones. All workers of a pipeline stage share their slots, so the size of an order
depends on the number of stages and not of replicas. Therefore each encoder replica must lie on the ranks of one stage,
and must not gather parameters from ranks of another. Every replica has all microbatches; one without media of a
microbatch computes it in no time.

Encoders have the same microbatches as the LLM, and each rank computes them in order, forwards as well as backwards. In
one slot forwards come first, because other ranks wait for them. So messages between two ranks are sent in the order in
which they are received, and there is no deadlock if all stages' orders can be merged (`compile_plan`). Without slots
the order is the colocated one. It is also used for a batch if it is faster, so that a plan of this placement is never
predicted to be slower than the colocated one for the same assignment.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dflop.base import UserError
from dflop.plan.layout_key import LayoutKey, ModuleLayout
from dflop.plan.placements.colocated import Colocated
from dflop.plan.shardings import PLAIN_SHARDING

if TYPE_CHECKING:
    from dflop.plan.plan import Plan

__all__ = ["PLACEMENT"]


class BubbleFilled(Colocated):
    name = "bubble_filled"
    encodes_all_first = False
    fills_bubbles = True

    def check(self, plan: "Plan") -> None:
        super().check(plan)
        llm = plan.grid("llm")
        for encoder in plan.grids[:-1]:
            if encoder.gathers:
                raise UserError(
                    f"{encoder.module}: with sharding: {encoder.sharding} replicas communicate in every pass, but "
                    f"those of different stages have orders of their own in a {self.name} plan; use sharding: "
                    f"{PLAIN_SHARDING}, or placement: colocated"
                )
            if (llm.dp * llm.tp) % encoder.tp:
                raise UserError(
                    f"{encoder.module}: replicas of tp={encoder.tp} would lie on several of the LLM's stages of "
                    f"{llm.dp * llm.tp} ranks, which have orders of their own in a {self.name} plan; use a tp that "
                    "divides that, or placement: colocated"
                )

    def encoder_layouts(
        self, num_ranks: int, llm: ModuleLayout, layouts: Sequence[LayoutKey], pp_sizes: Sequence[int]
    ) -> list[ModuleLayout]:
        """As for `colocated`, but none if the LLM has one stage, as there are then no bubbles to fill."""
        if llm.pp == 1:
            return []
        layouts = [layout for layout in layouts if llm.layout.num_ranks * llm.dp % layout.num_ranks == 0]
        return super().encoder_layouts(num_ranks, llm, layouts, pp_sizes)

    def with_encoders_at(
        self, slots: np.ndarray, pipeline: list[np.ndarray], forwards: np.ndarray, backwards: np.ndarray
    ) -> list[np.ndarray]:
        return [
            _woven(order, forwards, slots[0, stage], backwards, slots[1, stage]) for stage, order in enumerate(pipeline)
        ]


def _woven(
    order: np.ndarray,
    forwards: np.ndarray,
    forward_slots: np.ndarray,
    backwards: np.ndarray,
    backward_slots: np.ndarray,
) -> np.ndarray:
    """One rank's LLM computations, with each encoder computation inserted before the LLM computation number `slot`."""
    slots = np.concatenate([forward_slots[forwards[:, 2]], backward_slots[backwards[:, 2]], np.arange(len(order))])
    return np.concatenate([forwards, backwards, order])[np.argsort(slots, kind="stable")]


PLACEMENT = BubbleFilled()
