"""Plan and run multimodal-LLM training around the data."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflop.balancing.sampler import BalancedBatchSampler

__all__ = ["BalancedBatchSampler"]


def __getattr__(name: str) -> Any:
    # Torch is loaded when the sampler is asked for, not whenever a command of the workflow starts.
    if name == "BalancedBatchSampler":
        from dflop.balancing.sampler import BalancedBatchSampler

        return BalancedBatchSampler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
