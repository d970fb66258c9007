"""The preview tables: schedules as the rows of `schedule.parquet`, `schedule_stages.parquet` and
`schedule_steps.parquet`."""

from collections.abc import Sequence

import numpy as np
import polars as pl

from dflop.schedule.step_schedule import StepSchedule
from dflop.step import Node

__all__ = ["preview_frames", "rank_columns"]


def rank_columns(encoders: Sequence[str]) -> list[str]:
    """The columns of `schedule.parquet` that say which replica of each encoder computes a sample's media.

    That of the first encoder is `encoder_rank` without the encoder's name, as in older files, which have one encoder.
    """
    return ["encoder_rank" if number == 0 else f"{encoder}_rank" for number, encoder in enumerate(encoders)]


def preview_frames(
    schedules: Sequence[StepSchedule], nodes: Sequence[Node]
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """The three tables: samples, stages and steps.

    They have one row a sample, or share of one; one row a (node, microbatch), with predicted forward and backward
    seconds and whether the load lies outside the measured range; and one row a step, whose `gap` is its time over the
    lower bound.
    """
    samples = pl.concat(
        pl.DataFrame(
            {
                "step": [schedule.step] * len(schedule.sample_id),
                "sample_id": schedule.sample_id.tolist(),
                "llm_dp_rank": schedule.llm_dp_rank,
                "microbatch": schedule.microbatch,
                "position": schedule.position,
                "num_items": schedule.num_items.sum(axis=1),
                "llm_tokens": schedule.llm_tokens,
                "degree": np.ones_like(schedule.row) if schedule.degree is None else schedule.degree,
                "share": np.zeros_like(schedule.row) if schedule.share is None else schedule.share,
                **dict(zip(rank_columns(schedule.encoders), schedule.encoder_rank.T, strict=True)),
            }
        )
        for schedule in schedules
    )
    stages = pl.DataFrame(
        [
            {
                "step": schedule.step,
                "module": node.module,
                "dp_rank": node.dp_rank,
                "pp_stage": node.pp_stage,
                "microbatch": microbatch,
                "forward_s": float(schedule.forward_s[index, microbatch]),
                "backward_s": float(schedule.backward_s[index, microbatch]),
                "extrapolated": bool(schedule.extrapolated[index, microbatch]),
            }
            for schedule in schedules
            for index, node in enumerate(nodes)
            for microbatch in range(schedule.forward_s.shape[1])
        ]
    )
    steps = pl.DataFrame(
        [
            {
                "step": schedule.step,
                "policy": schedule.policy,
                "status": schedule.status,
                "step_s": schedule.step_s,
                "lower_bound_s": schedule.lower_bound_s,
                "gap": schedule.step_s / schedule.lower_bound_s,
                "idle": schedule.idle,
                "deciding_s": schedule.deciding_s,
                "num_beyond_memory": schedule.num_beyond_memory,
            }
            for schedule in schedules
        ]
    )
    return samples, stages, steps
