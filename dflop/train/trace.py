"""The timeline of training in Chrome's trace format, for Perfetto or chrome://tracing."""

from typing import Any

import polars as pl

__all__ = ["chrome_trace"]

_LAST_STEPS = 5


def chrome_trace(
    observations: pl.DataFrame, step_seconds: pl.DataFrame, num_steps: int = _LAST_STEPS
) -> dict[str, Any]:
    """The last `num_steps` steps, one after the other, with a row for each rank and a box for each computation; times
    are in microseconds. A counter for each rank shows where the time of each step went, in milliseconds."""
    steps = observations["step"].unique().sort()[-num_steps:]
    events: list[dict[str, Any]] = []
    parts = observations.select("rank", "module", "pp_stage", "dp_rank").unique(maintain_order=True).sort("rank")
    for (rank,), frame in parts.group_by("rank", maintain_order=True):
        # A rank may carry several stages: an encoder's beside the LLM's, or several chunks of the LLM.
        name = " + ".join(f"{module} stage {stage} replica {replica}" for _, module, stage, replica in frame.rows())
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": name}})
    offset_s = 0.0
    for step in steps:
        rows = observations.filter(pl.col("step") == step)
        for row in rows.iter_rows(named=True):
            label = row["pass"] if row["pass"] == "sync" else f"{row['pass']} {row['microbatch']}"
            events.append(
                {
                    "name": label,
                    "cat": row["pass"],
                    "ph": "X",
                    "pid": 0,
                    "tid": row["rank"],
                    "ts": (offset_s + row["start_s"]) * 1e6,
                    "dur": row["seconds"] * 1e6,
                    "args": {"step": step, "predicted_s": row["predicted_s"]},
                }
            )
        for row in step_seconds.filter(pl.col("step") == step).iter_rows(named=True):
            parts = {name.removesuffix("_s"): row[name] * 1e3 for name in row if name.endswith("_s")}
            parts.pop("step")
            name = f"rank {row['rank']}: milliseconds of the step"
            events.append({"name": name, "ph": "C", "pid": 0, "ts": offset_s * 1e6, "args": parts})
        offset_s += (rows["start_s"] + rows["seconds"]).max()
    return {"traceEvents": events, "displayTimeUnit": "ms"}
