"""The parameters of a stage's parts, as the table that goes beside measurements."""

import math
from functools import partial

import polars as pl

from dflop.models.stages import LlmStage, Stage
from dflop.plan.trained import TrainedSet

__all__ = ["parameter_sizes"]

_COLUMNS = ("passing_backward", "passing_kept", "attention_bytes")


def parameter_sizes(
    stage: Stage,
    module: str,
    tp: int,
    trained: TrainedSet,
    passing: tuple[float | None, float | None],
    attention_bytes: float | None,
) -> pl.DataFrame:
    """fp32 bytes of the parameters of a layer, the first and the last part on one of `tp` ranks, one row each.

    `adapter_bytes` are those that are trained among them, if the part is trained in part: those of adapters, or those
    that a pattern names. `targets_at_once` is the number of targets for which the head holds logits at a time (infinite
    for other parts). `passing` are the shares of a trained layer's backward, and of what it keeps, that a frozen layer
    takes which passes gradients on. `attention_bytes` are those a token of what a layer's attention reads and makes.
    """
    sizes = dict.fromkeys(("layer", "first", "last"), 0.0)
    in_part = dict(sizes)
    depth, partly = len(stage.layer_names), stage.those(partial(trained.is_trained_in_part, module))
    for name, parameter in stage.named_hf_parameters().items():
        part = stage.part_of(name)
        own_bytes = 4.0 * parameter.numel() / (depth if part == "layer" else 1)
        sizes[part] += own_bytes
        in_part[part] += own_bytes * (parameter in partly)
    at_once = dict.fromkeys(sizes, math.inf)
    if isinstance(stage, LlmStage):
        at_once["last"] = float(stage.hf.lm_head.num_at_once)
    about = {"module": module, "tp": tp}
    return pl.DataFrame(
        [
            about
            | {"part": part, "parameter_bytes": size, "adapter_bytes": in_part[part], "targets_at_once": at_once[part]}
            | dict(zip(_COLUMNS, (*passing, attention_bytes), strict=True))
            for part, size in sizes.items()
        ],
        schema_overrides=dict.fromkeys(_COLUMNS, pl.Float64),
    )
