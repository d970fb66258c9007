"""The pins of `plan.fixed` or `plan.today` as text, for messages."""

from dataclasses import replace

from dflop.config import FixedPlan

__all__ = ["without_each"]


def without_each(fixed: FixedPlan) -> dict[str, FixedPlan]:
    """For each pin as text, such as `llm tp=2`, the pins without it."""
    without = {}
    for module, grid in fixed.modules.items():
        for size in ("tp", "pp", "dp", "sharding", "cp"):
            if value := getattr(grid, size):
                modules = fixed.modules | {module: replace(grid, **{size: None})}
                without[f"{module} {size}={value}"] = replace(fixed, modules=modules)
    for key in ("placement", "num_microbatches", "checkpointing", "schedule"):
        if (value := getattr(fixed, key)) is not None:
            without[f"{key}={value}"] = replace(fixed, **{key: None})
    return without
