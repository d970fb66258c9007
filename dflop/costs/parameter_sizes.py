"""The parameters of a stage's parts, as the table that goes beside measurements."""

import math

import polars as pl

from dflop.models.stages import LlmStage, Stage, is_adapter

__all__ = ["parameter_sizes"]


def parameter_sizes(stage: Stage, module: str, tp: int) -> pl.DataFrame:
    """fp32 bytes of the parameters of a layer, the first and the last part on one of `tp` ranks, one row each.

    `adapter_bytes` are those of adapters among them. `targets_at_once` is the number of targets for which the head
    holds logits at a time (infinite for other parts).
    """
    sizes = dict.fromkeys(("layer", "first", "last"), 0.0)
    adapters = dict(sizes)
    depth = len(stage.layer_names)
    for name, parameter in stage.named_hf_parameters().items():
        part = stage.part_of(name)
        own_bytes = 4.0 * parameter.numel() / (depth if part == "layer" else 1)
        sizes[part] += own_bytes
        adapters[part] += own_bytes * is_adapter(name)
    at_once = dict.fromkeys(sizes, math.inf)
    if isinstance(stage, LlmStage):
        at_once["last"] = float(stage.hf.lm_head.num_at_once)
    about = {"module": module, "tp": tp}
    return pl.DataFrame(
        [
            about
            | {"part": part, "parameter_bytes": size, "adapter_bytes": adapters[part], "targets_at_once": at_once[part]}
            for part, size in sizes.items()
        ]
    )
