"""What operations compute, move and hold, counted as they are dispatched, on fake tensors as on real ones.

Every operation is one kernel, as in eager PyTorch: it reads its inputs and writes its outputs. Views are none. A chain
of operations that a compiler fuses can be counted as one kernel (`Meter.one_kernel`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from dflop.costs.live_bytes import LiveBytes, storage_key, tensors_in

__all__ = ["Meter", "Work"]

# Operations that read as many values of their first input as they return, and operations that change as many values
# as they are given. All others read and write whole tensors.
_GATHERS = {"embedding", "index", "index_select", "gather"}
_SCATTERS = {"index_add_", "index_copy_", "index_put_", "_index_put_impl_", "scatter_add_"}
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "wait_tensor"}
# How often collectives pass all values around a ring of ranks.
_ROUNDS = {"allreduce_": 2, "all_reduce": 2, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}


@dataclass(slots=True)
class Work:
    """The work of one pass.

    - `product_flops`: FLOPs of matrix products and convolutions, `product_bytes`: what these and attention read and
      write. `product_rows`: their rows, in the mean over FLOPs; of a forward pass only.
    - `attention_flops`: FLOPs of attention, of the half below the diagonal where it is causal, all positions being in
      one segment. Its backward is taken to do twice the FLOPs of forward.
    - `pointwise_bytes`: what all other kernels read and write.
    - `round_bytes`: bytes that collectives pass around the ring of tensor-parallel ranks, in `num_rounds` rounds: an
      all-reduce makes two, a gather or a scattered sum one. `num_collectives` counts these.
    - `matrices`: the size of each matrix that products read, by its storage.
    """

    product_flops: float = 0.0
    product_bytes: float = 0.0
    attention_flops: float = 0.0
    pointwise_bytes: float = 0.0
    round_bytes: float = 0.0
    num_rounds: float = 0.0
    num_collectives: float = 0.0
    num_kernels: float = 0.0
    matrices: dict[int, int] = field(default_factory=dict)

    @property
    def product_rows(self) -> float:
        return self.product_flops / (2 * sum(self.matrices.values()) or 1)


class Meter(LiveBytes):
    """Counts the operations inside this context in `work`, which may be replaced between two passes.

    `peak` is that of the last operation alone; `peaks` has those of all. `products` are the places of matrix products
    among these.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()
        self._is_inside = False
        self.peaks: list[int] = []
        self.products: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self._is_inside:
            return function(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        inputs, outputs = tensors_in((args, kwargs)), tensors_in((result,))
        self._note_made(inputs, outputs)
        self._count(function, args, kwargs, result, inputs, outputs)
        self.peaks.append(self.peak)
        self.peak = self.now
        return result

    def one_kernel(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of `function(*args)`, whose operations count as one kernel."""
        self._is_inside = True
        try:
            result = function(*args)
        finally:
            self._is_inside = False
        inputs = tensors_in(args)
        given = set(map(storage_key, inputs))
        if made := [tensor for tensor in tensors_in((result,)) if storage_key(tensor) not in given]:
            self._note_made(inputs, made)
            self._count_moved(inputs, made)
        return result

    def _count(
        self,
        function: Any,
        args: tuple,
        kwargs: dict,
        result: Any,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        name, work = function.overloadpacket.__name__, self.work
        is_view = not function._schema.is_mutable and set(map(storage_key, outputs)) <= set(map(storage_key, inputs))
        if num_rounds := _ROUNDS.get(name):
            whole = max(sum(map(_nbytes, tensors_in(args[:1]))), sum(map(_nbytes, outputs)))
            work.round_bytes += num_rounds * whole
            work.num_rounds += num_rounds
            work.num_collectives += 1
            work.num_kernels += 1
        elif "attention" in name or "attn" in name:
            names = (argument.name for argument in function._schema.arguments)
            work.attention_flops += _attention_flops(name, dict(zip(names, args, strict=False)) | kwargs)
            self._count_moved(inputs, outputs, product=True)
        elif function.overloadpacket in flop_registry:
            work.product_flops += flop_registry[function.overloadpacket](*args, **kwargs, out_val=result)
            matrix = args[2] if name == "addmm" else args[1]
            work.matrices[storage_key(matrix)] = matrix.numel() if name != "bmm" else 0
            self.products.append(len(self.peaks))
            self._count_moved(inputs, outputs, product=True)
        elif name in _FREE or not outputs or is_view:
            return
        elif name in _GATHERS:
            moved = 2 * sum(map(_nbytes, outputs)) + sum(map(_nbytes, inputs[1:]))
            self._add(moved)
        elif name in _SCATTERS:
            self._add(3 * max(map(_nbytes, inputs[1:])))
        else:
            self._count_moved(inputs, outputs)

    def _count_moved(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *, product: bool = False
    ) -> None:
        moved = 0
        for tensors in (inputs, outputs):  # two views of the same values count once
            moved += sum(
                {(storage_key(tensor), tensor.storage_offset()): _nbytes(tensor) for tensor in tensors}.values()
            )
        if product:
            self.work.product_bytes += moved
            self.work.num_kernels += 1
        else:
            self._add(moved)

    def _add(self, moved: float) -> None:
        self.work.pointwise_bytes += moved
        self.work.num_kernels += 1


def _attention_flops(name: str, named: dict[str, Any]) -> float:
    """Of queries and keys [num_positions, num_heads, head_dim], or [batch, num_heads, num_positions, head_dim]."""
    query, key = named["query"], named["key"]
    num_keys = len(key) if key.dim() == 3 else key.shape[2]
    is_causal = named.get("is_causal") or (named.get("window_size") or (-1, -1))[1] == 0
    return 4.0 * query.numel() * num_keys * (0.5 if is_causal else 1.0) * (2 if "backward" in name else 1)


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; those of an expanded one count once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
