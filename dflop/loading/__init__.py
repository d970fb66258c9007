"""Loading: what a rank computes from, media decoded to an encoder's items and texts packed to a microbatch.

`dataset` and `measure` need torch, so this package does not import them; their callers do.
"""

from dflop.loading.times import LoadingTimes, read_loading_times

__all__ = ["LoadingTimes", "read_loading_times"]
