"""The learning rate over a run: a warm-up, then constant or down a line or a cosine."""

import math

from dflop.config import TrainConfig

__all__ = ["lr_factor"]


def lr_factor(config: TrainConfig, step: int) -> float:
    """What `train.lr`, and each module's own, is multiplied by in a step.

    It rises over `warmup_steps` to 1, which the first step behind them has. From there on `linear` and `cosine` go down
    to `min_lr_ratio`, which the step behind the last would have.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    shape = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape[config.lr_schedule]
