"""Compiled layers on fake tensors: what torch.compile would keep and fuse, without a compiler or a GPU.

AOTAutograd traces a layer's forward and backward and cuts them apart as torch.compile does, which decides what is kept
(`min_cut_rematerialization_partition`). In both graphs, the operations between matrix products, attention and
collectives become one kernel wherever they depend on each other. Training compiles a layer in pieces, before and behind
its attention, so that what the attention's projections read is kept in any case. Of a recomputed layer it leaves the
last product out, which is not repeated: what only a layer's output needs is not counted in backward.
"""

import inspect
import operator
from collections.abc import Callable, Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import get_default_op_list
from torch._inductor.decomposition import select_decomp_table
from torch.func import functional_call
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from dflop.base import UserError
from dflop.costs.meter import Meter

__all__ = ["Fuser", "check_torch_fuses"]

_DEFAULT = MappingProxyType({})


def check_torch_fuses() -> None:
    """Raise a UserError where torch is too old: its partitioner would join kernels that share nothing but an input."""
    if "skip_horizontal_fusion" not in inspect.signature(CapabilityBasedPartitioner).parameters:
        raise UserError(
            f"analytic costs of compiled layers need torch 2.13 or newer, and this is {torch.__version__}: upgrade it, "
            "set `train.compile: off`, or measure the costs on a device (`costs.source: measured`)"
        )


class Fuser:
    """A compiler for `replace_forwards`, whose kernels `meter` counts. Layers of one shape are traced once.

    `config` is what of functorch's config differs from the default (`models.compilation`).
    """

    def __init__(self) -> None:
        self.meter: Meter | None = None
        self._traced: dict[Any, Callable[..., Any]] = {}
        self._num_outputs = 0

    @property
    def num_traced(self) -> int:
        return len(self._traced)

    def __call__(self, forward: Callable[..., Any], config: Mapping[str, bool] = _DEFAULT) -> Callable[..., Any]:
        layer = forward.__self__

        def run(*args: Any, **kwargs: Any) -> Any:
            values, form = tree_flatten((args, kwargs))
            tensors = {place: value for place, value in enumerate(values) if isinstance(value, torch.Tensor)}
            weights = dict(layer.named_parameters())
            both = [*weights.values(), *tensors.values()]
            key = (type(layer), *config, form, *((tensor.shape, tensor.requires_grad) for tensor in both))
            if key not in self._traced:

                def called(*flat: torch.Tensor) -> Any:
                    filled = list(values)
                    for place, value in zip(tensors, flat[len(weights) :], strict=True):
                        filled[place] = value
                    args, kwargs = tree_unflatten(filled, form)
                    return functional_call(layer, dict(zip(weights, flat, strict=False)), args, kwargs)

                self._traced[key] = aot_function(
                    called,
                    self._compile_forward,
                    self._compile,
                    partition_fn=self._partition,
                    decompositions=select_decomp_table(),
                )
            with _Forward(layer, forward), functorch_config.patch(dict(config)):
                return self._traced[key](*both)

        return run

    def _partition(self, joint: fx.GraphModule, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._num_outputs = kwargs["num_fwd_outputs"]
        return _partition(joint, *args, **kwargs)

    def _compile_forward(self, graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        """The forward, and what is left of it where backward computes it again."""
        whole = self._compile(deepcopy(graph), inputs)
        again = self._compile(_without_outputs(graph, self._num_outputs), inputs)

        def run(args: list[Any]) -> Any:
            is_in_backward = torch._C._current_graph_task_id() >= 0
            return (again if is_in_backward else whole)(args)

        run._boxed_call = True
        return run

    def _compile(self, graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        fused = CapabilityBasedPartitioner(graph, _Fusible(), skip_horizontal_fusion=True).partition_and_fuse()
        for name, piece in list(fused.named_children()):
            setattr(fused, name, _Kernel(piece, self))
        fused.graph.set_codegen(fx.graph._BoxedCodeGen())  # inputs are freed once they are read
        fused.recompile()

        def run(args: list[Any]) -> Any:
            return fused.forward(args)

        run._boxed_call = True
        return run


def _partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a layer. What lies between its compiled pieces is kept: attention's results, and what the
    projections ahead of attention read (views are never kept, but the tensors that they are views of)."""
    attention = next((node for node in joint.graph.nodes if "attn" in str(node.target)), None)
    if attention is not None:
        kept = [attention, *attention.users]
        for node in _ahead_of(attention):
            if getattr(node.target, "overloadpacket", None) in flop_registry:
                kept += node.all_input_nodes
        for node in kept:
            while get_default_op_list().is_view(node):
                node = node.all_input_nodes[0]
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return min_cut_rematerialization_partition(joint, *args, **kwargs)


def _without_outputs(forward: fx.GraphModule, num_outputs: int) -> fx.GraphModule:
    """The forward graph without the nodes that only its first `num_outputs` results need, e.g. the last matrix product.
    The results behind these are what backward reads."""
    (output,) = forward.graph.find_nodes(op="output")
    results = list(output.args[0])
    with forward.graph.inserting_before(output):
        nothing = forward.graph.call_function(torch.ops.aten.empty.memory_format, ([0],))
    output.args = ([nothing] * num_outputs + results[num_outputs:],)
    for node in reversed(forward.graph.nodes):  # also reductions over ranks, which torch takes to have side effects
        if node.op == "call_function" and not node.users:
            forward.graph.erase_node(node)
    forward.recompile()
    return forward


def _ahead_of(node: fx.Node) -> set[fx.Node]:
    """The nodes that a node depends on."""
    found, waiting = set(), [node]
    while waiting:
        given = set(waiting.pop().all_input_nodes) - found
        found |= given
        waiting += given
    return found


class _Fusible(OperatorSupportBase):
    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: fx.Node) -> bool:
        if node.target is operator.getitem:  # of what an operation with several results gave
            node = node.args[0]
        packet = getattr(node.target, "overloadpacket", None)
        if node.op != "call_function" or packet is None:
            return False
        namespace = node.target.namespace
        return namespace in ("aten", "prims") and packet not in flop_registry and "attention" not in str(packet)


class _Kernel(nn.Module):
    def __init__(self, piece: fx.GraphModule, fuser: Fuser) -> None:
        super().__init__()
        self.piece, self._fuser = piece, fuser

    def forward(self, *args: Any) -> Any:
        return self._fuser.meter.one_kernel(self.piece, *args)


class _Forward:
    """A layer with its forward of before, and with all-reduces that can be traced."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        self._layer, self._forward = layer, forward

    def __enter__(self) -> None:
        self._replaced, self._layer.forward = self._layer.forward, self._forward
        self._all_reduce, torch.distributed.all_reduce = torch.distributed.all_reduce, _all_reduce

    def __exit__(self, *_: Any) -> None:
        self._layer.forward, torch.distributed.all_reduce = self._replaced, self._all_reduce


def _all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None) -> None:
    functional = torch.ops._c10d_functional
    tensor.copy_(functional.wait_tensor(functional.all_reduce(tensor, "sum", group.group_name)))
