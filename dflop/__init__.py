"""Plan and run multimodal-LLM training around the data."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflop.balance.collators import pads_batches
    from dflop.balance.sampler import BalancedBatchSampler
    from dflop.balance.trainers import balance_trainer, sample_costs

__all__ = ["BalancedBatchSampler", "balance_trainer", "pads_batches", "sample_costs"]

_MODULES = {
    "BalancedBatchSampler": "dflop.balance.sampler",
    "balance_trainer": "dflop.balance.trainers",
    "pads_batches": "dflop.balance.collators",
    "sample_costs": "dflop.balance.trainers",
}


def __getattr__(name: str) -> Any:
    # Torch is imported when one of these names is first used, not whenever a command of the workflow starts.
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
