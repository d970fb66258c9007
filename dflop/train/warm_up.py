"""A pass of every stage before the first step, without any message.

At its first use a kernel is loaded and a layer compiled, which may wait for all that runs on the GPU, and takes minutes
on some ranks while others wait. Here each rank runs its stages on made-up microbatches instead, while nobody sends
anything: one for each kind of microbatch that layers are compiled for on their own. What training reads stays as it is:
parameters, random numbers, buffers, and gradients of zero.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from dflop.costs.design import Point
from dflop.costs.made_up import MadeUpRuns
from dflop.train.rank_model import NodeModel, RankModel

__all__ = ["warm_up"]

# Several of everything, and one item: compilers take a size of one for a case of its own.
_NUMS_OF_ITEMS, _SEGMENTS, _NUM_TARGETS = (8, 1), (40, 24), 16


def warm_up(model: RankModel, *, evaluates: bool) -> None:
    """Run forwards and backwards of each of the rank's stages, and where the run `evaluates` forwards alone. Every
    rank must call this, since ranks that divide a stage or share its parameters compute together."""
    for node in model.nodes:
        with _left_as_it_was(node.stage):
            for load in _loads(node):
                for has_gradient in _ways(model, node):
                    _train(model, node, load, has_gradient)
            if evaluates:
                node.stage.eval()
                with torch.no_grad():
                    for load in _loads(node):
                        _forward(model, node, load, has_gradient=False)
        node.zero_grad()


def _loads(node: NodeModel) -> list[tuple]:
    """The loads of the microbatches, as `Point` has them. Tensor-parallel ranks fill up the tokens that they cannot
    divide evenly, which is compiled anew: they get such a number, too."""
    if node.node.module != "llm":
        return [(number,) for number in _NUMS_OF_ITEMS]
    uneven: Sequence[int] = (_SEGMENTS[0], _SEGMENTS[1] + 1)
    return [(0, segments, _NUM_TARGETS) for segments in (_SEGMENTS, uneven)[: 1 + (node.ranks.size > 1)]]


def _ways(model: RankModel, node: NodeModel) -> list[bool]:
    """Whether what a stage reads has a gradient: behind a frozen embedding, a text does not, and one with media may."""
    stage = node.stage
    has_gradient = model.trained.gives_gradients_to(node.node.module, stage.layers.start)
    reads_media = has_gradient and node.node.module == "llm" and stage.is_first
    if reads_media and not stage.hf.get_input_embeddings().weight.requires_grad:
        return [True, False]
    return [has_gradient]


def _train(model: RankModel, node: NodeModel, load: tuple, has_gradient: bool) -> None:
    outputs = [output for output in _forward(model, node, load, has_gradient) if output.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def _forward(model: RankModel, node: NodeModel, load: tuple, has_gradient: bool) -> list[torch.Tensor]:
    runs = MadeUpRuns(model.spec, node.node.module, node.stage, node.dtype)
    run = runs.make(Point("stage", len(node.stage.layers), False, *load))
    for leaf in run.inputs:
        leaf.requires_grad_(has_gradient)
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
