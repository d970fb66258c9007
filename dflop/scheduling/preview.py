"""The preview tables: schedules as the rows of `schedule.parquet` and `schedule_stages.parquet`."""

from collections.abc import Sequence

import polars as pl

from dflop.pipeline import Node
from dflop.scheduling.scheduler import StepSchedule

__all__ = ["preview_frames"]


def preview_frames(schedules: Sequence[StepSchedule], nodes: Sequence[Node]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """One row a sample, and one row a (node, microbatch) with its predicted forward and backward seconds
    and whether they are of a load outside of what was measured."""
    samples = pl.concat(
        pl.DataFrame(
            {
                "step": [schedule.step] * len(schedule.sample_id),
                "sample_id": schedule.sample_id.tolist(),
                "llm_dp_rank": schedule.llm_dp_rank,
                "microbatch": schedule.microbatch,
                "position": schedule.position,
                "num_items": schedule.num_items,
                "llm_tokens": schedule.llm_tokens,
                "encoder_rank": schedule.encoder_rank,
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
    return samples, stages
