"""The learning rate over a run: a warm-up, and then constant, linear or cosine decay."""

import math

from dflop.config import TrainConfig

__all__ = ["lr_factor"]


def lr_factor(config: TrainConfig, step: int) -> float:
    """The factor of `train.lr`, and of each module's own learning rate, in a step (from 0).

    It rises linearly over the first `warmup_steps` steps, of which the last has 1. From there on `linear` and `cosine`
    decay towards `min_lr_ratio`, which a step after the last one would have.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    shape = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape[config.lr_schedule]
