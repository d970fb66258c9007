"""Plan and run multimodal-LLM training around the data."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflop.balance.collators import pads_batches
    from dflop.balance.sampler import BalancedBatchSampler

__all__ = ["BalancedBatchSampler", "pads_batches"]


def __getattr__(name: str) -> Any:
    # Torch is imported when one of these names is first used, not whenever a command of the workflow starts.
    modules = {"BalancedBatchSampler": "dflop.balance.sampler", "pads_batches": "dflop.balance.collators"}
    if name in modules:
        return getattr(import_module(modules[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
