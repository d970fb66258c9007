"""Stages of the families' tiny models, and drawn inputs for them, on any device. No test framework is needed."""

import zlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from dflop.models import ModelSpec, family_of, load_runtime
from dflop.models.microbatch import EncoderBatch, MediumLayout, SegmentEnds, TextBatch
from dflop.models.precision import COMPUTES_IN, compute_in, held_in
from dflop.models.presets import TINY_LLM
from dflop.models.stages import Stage
from dflop.models.tensor_group import ALONE, Shard, TensorGroup

__all__ = ["DEPTH", "Case", "build", "forward", "part_of"]

DEPTH = TINY_LLM["num_hidden_layers"]  # as many as of the encoders'
_PLACEHOLDERS = {"image": 1001, "video": 1002, "audio": 1003}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A stage of a family's tiny model, of which `text` and `vision` are other fields. Noise of the standard deviation
    `noise` is added to all drawn weights, so that no bias is zero. An LLM has `num_tokens` tokens."""

    family: str = "llava_onevision"
    module: str = "llm"
    layers: range = range(DEPTH)
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    checkpointing: bool = False
    precision: str = "fp64"
    noise: float = 0.1
    num_tokens: int = 40

    @property
    def hf_fields(self) -> dict[str, Any]:
        fields = deepcopy(family_of(self.family).presets["tiny"])
        fields["text_config"] |= self.text
        fields["vision_config"] |= self.vision
        return fields | {"tie_word_embeddings": self.tied}

    @property
    def spec(self) -> ModelSpec:
        return family_of(self.family).make_spec("the model", self.hf_fields, {})


def build(case: Case, ranks: TensorGroup = ALONE) -> Stage:
    """The stage, or these ranks' part of it, on the CPU."""
    runtime = load_runtime(case.family)
    config = runtime.make_config(case.spec, _PLACEHOLDERS, 1024)
    dtype = COMPUTES_IN[case.precision]
    stage = runtime.build_stage(
        config,
        case.module,
        layers=case.layers,
        seed=1,
        dtype=held_in(dtype),
        num_recomputed=len(case.layers) if case.checkpointing else 0,
        ranks=ranks,
    )
    with torch.no_grad():
        for name, parameter in stage.named_hf_parameters().items():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            shard = stage.shards.get(name)
            noise = torch.randn(shard.whole if shard else parameter.shape, generator=generator)
            parameter += case.noise * part_of(noise, shard, parameter.shape)
    compute_in(stage, dtype)
    return stage


def forward(case: Case, stage: Stage, draw: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Drawn inputs, and what the stage makes of them. `draw(*shape)` draws where the stage is."""

    def batch_of(items: torch.Tensor, media: tuple, kept_tokens: tuple[int, ...]) -> EncoderBatch:
        made = load_runtime(case.family).encoder_batch(
            case.spec, case.module, items=items, media=media, kept_tokens=kept_tokens
        )
        return made.to(items.device, items.dtype)

    if case.module == "audio":
        num_mels, chunk = load_runtime(case.family).make_up_media(case.spec, "audio", 1).item_shape
        items = draw(4, num_mels, chunk).requires_grad_()
        sounds = tuple(
            MediumLayout("audio", -(-frames // chunk), 0, 0, (frames, 1, 1)) for frames in (2 * chunk + 37, chunk - 90)
        )
        return items, stage(batch_of(items, (sounds[:1], sounds[1:]), (80, 1000)))
    if case.family.startswith("qwen") and case.module == "vision":
        made_up = load_runtime(case.family).make_up_media(case.spec, "vision", 30)
        items = draw(30, *made_up.item_shape).requires_grad_()
        media = tuple((medium,) for medium in made_up.media)
        return items, stage(batch_of(items, media, (20, *([1000] * (len(media) - 1)))))
    if case.module == "vision":
        side = case.spec.rules.image_size
        items = draw(5, 3, side, side).requires_grad_()
        media = ((MediumLayout("image", 3, side, 2 * side),), (MediumLayout("video", 2, side, side),))
        return items, stage(batch_of(items, media, (60, 1000)))
    vocab_size = stage.hf.config.text_config.vocab_size
    num_tokens = case.num_tokens
    ids = draw(num_tokens).double().abs().mul(1e6).long() % vocab_size  # the same in each precision
    # The ends of both ranks' shares, the padding's id in one case, and the id in that place of the other share.
    ids[:6] = torch.tensor([0, vocab_size - 1, vocab_size // 2, vocab_size // 2 - 1, 700, 188])
    batch = TextBatch(
        token_ids=ids,
        position_ids=torch.cat([torch.arange(25), torch.arange(num_tokens - 25)]),
        segment_ends=SegmentEnds([25, num_tokens]),
        feature_positions=(torch.arange(6, 13),),
        target_positions=torch.arange(12, num_tokens - 1),
        target_ids=torch.cat([ids[:6], ids[19:]]),
    ).to(ids.device)
    if stage.is_first:
        features = draw(7, case.spec.feature_size).requires_grad_()
        return features, [stage(stage.embed(batch, [features]), batch)]
    hidden = draw(*stage.hidden_shape(num_tokens, stage.layers.start)).requires_grad_()
    return hidden, [stage(hidden, batch)]


def part_of(whole: torch.Tensor, shard: Shard | None, shape: torch.Size) -> torch.Tensor:
    """What a rank holds of a parameter."""
    if shard is None:
        return whole
    stacked = whole.unflatten(shard.dim, (shard.num_stacked, -1))
    own = stacked.narrow(shard.dim + 1, shard.start, shape[shard.dim] // shard.num_stacked)
    return own.flatten(shard.dim, shard.dim + 1)
