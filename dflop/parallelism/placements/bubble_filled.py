"""Bubble-filled: encoders where colocated ones are, on all of the LLM's ranks, computing while a rank would wait.

A rank computes encoder forwards before the LLM's where it would wait for hidden states or for gradients, in the order
in which the LLM's first stage takes the features, and encoder backwards behind the LLM's as gradients come (Feng et
al., Optimus, ATC 2025, has the idea for microbatches of equal shapes; here their times differ, so the order is made
anew for each batch, from predicted times: `pipeline.filling`).

Such an order is said in whole numbers, the *slots*: how many of a rank's LLM computations stand before its encoders'
forward of a microbatch, and before their backward. The process that schedules finds them and the schedule carries
them, so every rank has the same ones, whatever its own arithmetic would make of the times. All workers of a pipeline
stage share their slots: the order of a batch is as small as the pipeline, however many replicas there are. So each
replica of an encoder lies on the ranks of one stage, and none gathers parameters from those of another. All do every
microbatch, those that have no media of it in no time.

Encoders have the LLM's microbatches, and on each rank they do them in their order, forwards and backwards; of one slot
forwards come first, since others wait for them. So messages between two ranks come in the order in which they are
asked for, and nothing can wait in a circle if the merge of all stages' orders ends (`compile_plan`). Without slots the
order is the colocated one, and it is taken for a batch, too, wherever it is the faster one: a plan of this placement is
never slower than the colocated one for the same assignment.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dflop.parallelism.placements.colocated import Colocated
from dflop.parallelism.shardings import PLAIN_SHARDING
from dflop.runtime import UserError

if TYPE_CHECKING:
    from dflop.parallelism.plan import Plan

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
                    f"{encoder.module}: sharding: {encoder.sharding} lets replicas meet in every pass, but those of "
                    f"different stages have orders of their own in a {self.name} plan; use sharding: {PLAIN_SHARDING}, "
                    "or placement: colocated"
                )
            if (llm.dp * llm.tp) % encoder.tp:
                raise UserError(
                    f"{encoder.module}: replicas of tp={encoder.tp} would lie on several of the LLM's stages of "
                    f"{llm.dp * llm.tp} ranks, which have orders of their own in a {self.name} plan; use a tp that "
                    "divides that, or placement: colocated"
                )

    def encoder_layouts(
        self, num_ranks: int, llm: tuple[int, int, int], tp_sizes: Sequence[int], pp_sizes: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """None beside an LLM of one stage, which has no bubbles: that is a colocated plan."""
        llm_tp, llm_pp, llm_dp = llm
        if llm_pp == 1:
            return []
        tp_sizes = [tp for tp in tp_sizes if llm_tp * llm_dp % tp == 0]
        return super().encoder_layouts(num_ranks, llm, tp_sizes, pp_sizes)

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
    """One rank's LLM computations with encoders' before those whose numbers their slots are."""
    slots = np.concatenate([forward_slots[forwards[:, 2]], backward_slots[backwards[:, 2]], np.arange(len(order))])
    return np.concatenate([forwards, backwards, order])[np.argsort(slots, kind="stable")]


PLACEMENT = BubbleFilled()
