"""The parameters of a stage's parts, as the table that goes beside measurements."""

import math

import polars as pl

from dflop.models.stages import LlmStage, Stage

__all__ = ["parameter_sizes"]


def parameter_sizes(stage: Stage, module: str, tp: int) -> pl.DataFrame:
    """fp32 bytes of the parameters of a layer, the first and the last part on one of `tp` ranks, one row each.

    `targets_at_once` is the number of targets for which the head holds logits at a time (infinite for other parts).
    """
    sizes = dict.fromkeys(("layer", "first", "last"), 0.0)
    depth = len(stage.layer_names)
    for name, parameter in stage.named_hf_parameters().items():
        part = stage.part_of(name)
        sizes[part] += 4.0 * parameter.numel() / (depth if part == "layer" else 1)
    at_once = dict.fromkeys(sizes, math.inf)
    if isinstance(stage, LlmStage):
        at_once["last"] = float(stage.hf.lm_head.num_at_once)
    about = {"module": module, "tp": tp}
    return pl.DataFrame(
        [
            about | {"part": part, "parameter_bytes": size, "targets_at_once": at_once[part]}
            for part, size in sizes.items()
        ]
    )
