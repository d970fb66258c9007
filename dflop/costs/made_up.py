"""Random microbatches for measuring: packed and laid out as in training, and run on one piece of a stage."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from dflop.costs.design import Point
from dflop.models import ModelSpec, load_runtime
from dflop.models.microbatch import SegmentEnds, TextBatch
from dflop.models.stages import EncoderStage, LlmStage

__all__ = ["MadeUpRuns", "Run"]

_ALL_TOKENS = 1 << 30


class Run(NamedTuple):
    """One microbatch on one piece: `forward` returns the outputs to call backward on, `inputs` are leaves that get a
    gradient."""

    forward: Callable[[], list[torch.Tensor]]
    inputs: list[torch.Tensor]


class MadeUpRuns:
    """Random microbatches for a stage of a module: that of `make(point)` has the loads of the point."""

    def __init__(self, spec: ModelSpec, module: str, stage: EncoderStage | LlmStage, dtype: torch.dtype) -> None:
        self._spec, self._module, self._stage, self._dtype = spec, module, stage, dtype
        self._device = next(stage.parameters()).device
        self._runtime = load_runtime(spec.family)
        # What a piece makes of its leaves before it reads them.
        self.receive: Callable[[torch.Tensor], torch.Tensor] = lambda leaf: leaf
        self._generator = torch.Generator(device=self._device).manual_seed(0)

    def make(self, point: Point) -> Run:
        if isinstance(self._stage, LlmStage):
            return self._of_llm(self._stage, point)
        return self._of_encoder(self._stage, point)

    def loads(self, point: Point) -> dict[str, object]:
        """The point's columns in `measurements`, with an encoder's `sum_sq_tokens` as the model's family gives it."""
        if not point.num_items:
            return point.keys()
        made_up = self._runtime.make_up_media(self._spec, self._module, point.num_items)
        return point.keys() | {"sum_sq_tokens": round(made_up.sum_sq_items)}

    def _of_encoder(self, encoder: EncoderStage, point: Point) -> Run:
        made_up = self._runtime.make_up_media(self._spec, self._module, point.num_items)
        media = tuple((medium,) for medium in made_up.media)
        batch = self._runtime.encoder_batch(
            self._spec,
            self._module,
            items=self._random(point.num_items, *made_up.item_shape),
            media=media,
            kept_tokens=(_ALL_TOKENS,) * len(media),
        ).to(self._device, self._dtype)
        if point.piece == "stage":
            shape = encoder.hidden_shape(point.num_items, encoder.layers.start)
            leaves = [] if encoder.is_first else [self._random(*shape).requires_grad_()]
            return Run(lambda: [made] if isinstance(made := encoder(batch, *leaves), torch.Tensor) else made, leaves)
        if point.piece == "first":
            return Run(lambda: [encoder.embed(replace(batch, items=self.receive(batch.items)))], [])
        if point.piece == "whole":
            return Run(lambda: [torch.cat(encoder(replace(batch, items=self.receive(batch.items))))], [])
        shape = encoder.hidden_shape(point.num_items, 0)
        if point.piece == "layers":
            leaf = self._random(*shape).requires_grad_()
            return Run(lambda: [own for own in encoder.encode(self.receive(leaf), batch) if own is not None], [leaf])
        # One leaf for the last layer's output, and one for each earlier output that is a feature.
        depth = self._spec.module(self._module).num_layers
        num_read = encoder.hidden_shape(point.num_items, depth)[-1] // shape[-1]
        leaves = [self._random(*shape).requires_grad_() for _ in range(num_read)]
        # Earlier outputs are also the inputs of layers, which keep them.
        return Run(lambda: [torch.cat(encoder.finish([*leaves[:-1], self.receive(leaves[-1])], batch))], leaves)

    def _of_llm(self, llm: LlmStage, point: Point) -> Run:
        """Tokens of which the first half are features of an encoder."""
        config = llm.hf.config.get_text_config()
        num_tokens, device = point.num_tokens, self._device
        ids = torch.randint(config.vocab_size, (num_tokens,), device=device, generator=self._generator)
        targets = torch.arange(num_tokens - point.num_targets, num_tokens, device=device)
        batch = TextBatch(
            token_ids=ids,
            position_ids=torch.cat([torch.arange(length, device=device) for length in point.segments]),
            segment_ends=SegmentEnds(list(itertools.accumulate(point.segments))).to(device),
            feature_positions=(torch.arange(num_tokens // 2, device=device),),
            target_positions=targets,
            target_ids=ids[targets],
        )
        features = self._random(num_tokens // 2, self._spec.feature_size).requires_grad_()
        if point.piece == "stage":
            shape = llm.hidden_shape(num_tokens, llm.layers.start)
            leaf = features if llm.is_first else self._random(*shape).requires_grad_()
            return Run(lambda: [llm(llm.embed(batch, [leaf]) if llm.is_first else leaf, batch)], [leaf])
        if point.piece == "first":
            return Run(lambda: [llm.embed(batch, [features])], [features])
        if point.piece == "whole":
            return Run(lambda: [llm.finish(llm.encode(llm.embed(batch, [features]), batch), batch)], [features])
        if point.piece == "layers":
            leaf = self._random(*llm.hidden_shape(num_tokens, llm.layers.start)).requires_grad_()
            return Run(lambda: [llm.encode(self.receive(leaf), batch)], [leaf])
        leaf = self._random(1, num_tokens, config.hidden_size).requires_grad_()
        return Run(lambda: [llm.finish(self.receive(leaf), batch)], [leaf])

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self._device, dtype=self._dtype, generator=self._generator)
