"""Layers that are recomputed but for attention: its inputs and results are kept from forward to backward.

For a sample of 64k tokens, attention is nearly two thirds of the forward of a layer of Qwen2-7B, and takes 16 of the
111 KB a token that the layer keeps. `keeping_attention` is a `context_fn` of torch's activation checkpointing, and
`made_once` wraps a function of attention. In such a layer's forward, the kernel's saved tensors stay out of
checkpointing, and its result is noted; when the layer is recomputed, the noted result is returned, and no kernel runs.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from functools import wraps
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["keeping_attention", "made_once"]

_Attention = Callable[..., tuple[torch.Tensor, None]]


class _Layer(AbstractContextManager):
    """One pass of a layer: its forward, which fills `results`, or the forward that is computed again."""

    def __init__(self, results: list[torch.Tensor], *, is_again: bool) -> None:
        self._results, self._is_again = results, is_again

    def __enter__(self) -> None:
        self._num_made = 0
        self._before: Token = _LAYER.set(self)

    def __exit__(self, *raised: object) -> None:
        _LAYER.reset(self._before)

    def attended(self, compute: Callable[[], tuple[torch.Tensor, None]]) -> tuple[torch.Tensor, None]:
        if self._is_again:
            result = self._results[self._num_made]
            self._num_made += 1
            return result.detach().requires_grad_(result.requires_grad), None
        with saved_tensors_hooks(_as_it_is, _as_it_is):  # the innermost hooks count, not those of checkpointing
            made, _ = compute()
        # Without its graph, which holds the layer's saved tensors, and through them this list.
        self._results.append(made.detach().requires_grad_(made.requires_grad))
        return made, None


_LAYER: ContextVar[_Layer | None] = ContextVar("layer", default=None)


def keeping_attention() -> tuple[AbstractContextManager, AbstractContextManager]:
    """The contexts of a layer's forward and of its recomputation."""
    results: list[torch.Tensor] = []
    return _Layer(results, is_again=False), _Layer(results, is_again=True)


def made_once(attention: _Attention) -> _Attention:
    """The attention function, which returns its result and None; its result is noted or taken as the layer says."""

    @wraps(attention)
    def attended(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        layer = _LAYER.get()
        if layer is None:
            return attention(*args, **kwargs)
        return layer.attended(lambda: attention(*args, **kwargs))

    return attended


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
