"""A pass of every stage before the first step, without any message.

At its first use a kernel is loaded and a layer compiled, which may wait for all that runs on the GPU, and takes minutes
on some ranks while others wait. Here each rank runs its stages on made-up microbatches instead, while nobody sends
anything. What training reads stays as it is: parameters, random numbers, buffers, and gradients of zero.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from dflop.costs.design import Point
from dflop.costs.made_up import MadeUpRuns
from dflop.train.rank_model import NodeModel, RankModel

__all__ = ["warm_up"]

# Several of everything: compilers take sizes of one for a case of its own.
_NUM_ITEMS, _SEGMENTS, _NUM_TARGETS = 8, (40, 24), 16


def warm_up(model: RankModel, *, evaluates: bool) -> None:
    """Run a forward and a backward of each of the rank's stages, and where the run `evaluates` a forward alone. Every
    rank must call this, since ranks that divide a stage or share its parameters compute together."""
    for node in model.nodes:
        with _left_as_it_was(node.stage):
            _train(model, node)
            if evaluates:
                with torch.no_grad():
                    node.stage.eval()
                    _forward(model, node)
        node.zero_grad()


def _train(model: RankModel, node: NodeModel) -> None:
    outputs = [output for output in _forward(model, node) if output.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def _forward(model: RankModel, node: NodeModel) -> list[torch.Tensor]:
    load = (0, _SEGMENTS, _NUM_TARGETS) if node.node.module == "llm" else (_NUM_ITEMS,)
    runs = MadeUpRuns(model.spec, node.node.module, node.stage, node.dtype)
    run = runs.make(Point("stage", len(node.stage.layers), False, *load))
    has_gradient = model.trained.gives_gradients_to(node.node.module, node.stage.layers.start)
    for leaf in run.inputs:
        leaf.requires_grad_(torch.is_grad_enabled() and has_gradient)
    return list(node.run(lambda: dict(enumerate(run.forward()))).values())


@contextmanager
def _left_as_it_was(stage: nn.Module) -> Iterator[None]:
    """Put back the random numbers, the buffers and the mode of a stage at the end."""
    is_training, buffers = stage.training, [(buffer, buffer.clone()) for buffer in stage.buffers()]
    device = next(stage.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    for buffer, before in buffers:
        buffer.copy_(before)
    stage.train(is_training)
