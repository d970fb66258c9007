"""A plan's stages and transformers' own model in one process, to be compared.

Both take the inputs that training's loaders make of samples. The stages run one after the other, without other ranks,
on any number of packed samples. Transformers' model runs one sample at a time through its own `forward`, which makes
masks and positions itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from inspect import signature
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy, linear
from transformers import PretrainedConfig, PreTrainedModel

from dflop.base import UserError
from dflop.config import Config
from dflop.loading.dataset import MicrobatchJob, SampleRef, TrainingRecords, microbatch_loader
from dflop.models import ModelSpec, load_runtime
from dflop.models.microbatch import EncoderBatch, TextBatch
from dflop.models.stages import EncoderStage, LlmStage
from dflop.models.weights import norms_in_float64
from dflop.plan import Plan
from dflop.shapes import ChatTokenizer, SampleShapes, list_sources, tokenizer_folder
from dflop.shapes.reader import MediumSize

__all__ = [
    "Inputs",
    "PackedSamples",
    "Pass",
    "build_plain",
    "build_stages",
    "each_stage",
    "job_of",
    "pass_plain",
    "pass_stages",
]


class PackedSamples(NamedTuple):
    """Inputs of one sample, or of several that are packed: a batch for each encoder with media, and the text."""

    media: dict[str, EncoderBatch]
    text: TextBatch


class Pass(NamedTuple):
    """The result of a microbatch: `logits` [num_targets, vocab_size], `target_ids` [num_targets] and `positions`
    [(num_axes,) num_tokens]. `embedded` and `items` are its inputs, by encoder, so that the loss can be differentiated
    with respect to them."""

    logits: torch.Tensor
    target_ids: torch.Tensor
    positions: torch.Tensor
    embedded: torch.Tensor | None = None
    items: Mapping[str, torch.Tensor] = MappingProxyType({})

    @property
    def loss(self) -> torch.Tensor:
        """The summed loss of all targets."""
        return cross_entropy(self.logits, self.target_ids, reduction="sum")

    def detached(self) -> "Pass":
        return Pass(self.logits.detach(), self.target_ids, self.positions)

    def split(self, text: TextBatch) -> list["Pass"]:
        """The parts of the packed samples; `text` is their microbatch."""
        segment = torch.bucketize(text.target_positions, torch.tensor(text.segment_ends.ends), right=True)
        num_targets = torch.bincount(segment, minlength=len(text.segment_ends.ends)).tolist()
        lengths = text.segment_ends.bounds.diff().tolist()
        parts = (
            self.logits.split(num_targets),
            self.target_ids.split(num_targets),
            self.positions.split(lengths, dim=-1),
        )
        return [Pass(*tensors) for tensors in zip(*parts, strict=True)]


class Inputs:
    """Loads samples as training does, with one replica of each module."""

    def __init__(self, config: Config, spec: ModelSpec, dtype: torch.dtype) -> None:
        runtime, checkpoint = load_runtime(spec.family), Path(config.model.path) if config.model.path else None
        self._dtype, self._encoders = dtype, [encoder.name for encoder in spec.encoders]
        tokenizer = ChatTokenizer(tokenizer_folder(config.model), spec.rules)
        self.hf_config = runtime.make_config(
            spec, tokenizer.placeholder_ids | tokenizer.special_ids, tokenizer.vocab_size(spec.media)
        )
        records = TrainingRecords(list_sources(config.data), config.seed)
        self._loaders = {
            module.name: microbatch_loader(
                config.data,
                spec,
                records,
                tokenizer_folder=tokenizer.folder,
                module=module.name,
                num_replicas=[1] * len(spec.encoders),
                processor=None if module.name == "llm" else runtime.processors[module.name](spec, checkpoint),
            )
            for module in spec.modules
        }

    def sample(self, shapes: SampleShapes) -> PackedSamples:
        """These samples, packed.

        Raises:
            UserError: when a record has changed since it was profiled, or a medium cannot be decoded.
        """
        media = {}
        for encoder in self._encoders:
            has_media = shapes.items_of(encoder) > 0
            if has_media.any():
                loaded = self._loaders[encoder][job_of(shapes.take(has_media))]
                if loaded.undecodable:
                    raise UserError(f"samples cannot be compared: {'; '.join(loaded.unreadable)}")
                media[encoder] = loaded.batch.to(torch.device("cpu"), self._dtype)
        return PackedSamples(media, self._loaders["llm"][job_of(shapes)])


def build_stages(
    config: Config, plan: Plan, spec: ModelSpec, hf_config: PretrainedConfig, dtype: torch.dtype
) -> dict[str, list[EncoderStage | LlmStage]]:
    """The stages of each module, whole on this process, as the plan cuts the layers."""
    checkpoint = Path(config.model.path) if config.model.path else None
    return {
        module.name: [
            load_runtime(spec.family)
            .build_stage(hf_config, module.name, layers=layers, seed=config.seed, checkpoint=checkpoint, dtype=dtype)
            .eval()
            for layers in plan.layers_of(module.name, module.num_layers)
        ]
        for module in spec.modules
    }


def build_plain(
    spec: ModelSpec, hf_config: PretrainedConfig, stages: Mapping[str, list], dtype: torch.dtype
) -> PreTrainedModel:
    """The whole model, whose weights are the stages' own tensors."""
    config = deepcopy(hf_config)
    for name in config.sub_configs:
        getattr(config, name)._attn_implementation = "sdpa"
    model = load_runtime(spec.family).architecture(config)
    weights = {}
    for stage in each_stage(stages):
        weights |= stage.hf_state_dict()
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    if dtype == torch.float64:
        norms_in_float64(model)
    return model.to(dtype).eval()


def pass_stages(stages: Mapping[str, list], sample: PackedSamples) -> Pass:
    """Run a microbatch through the stages, encoders first."""
    feature_size = stages["llm"][0].hidden_shape(1, 0)[-1]
    items, features = {}, []
    for encoder, encoder_stages in stages.items():
        if encoder == "llm":
            continue
        if encoder not in sample.media:
            features.append(torch.zeros(0, feature_size))
            continue
        items[encoder] = sample.media[encoder].items.detach().clone().requires_grad_()
        batch, made = replace(sample.media[encoder], items=items[encoder]), None
        for stage in encoder_stages:
            made = stage(batch, made)
        features.append(torch.cat(made))
    text, llm, logits = sample.text, stages["llm"], []

    head = llm[-1].hf.lm_head
    hook = head.register_forward_pre_hook(lambda _, given: logits.append(linear(given[0], head.weight)))
    hidden = embedded = llm[0].embed(text, features)
    with _positions_of(llm[-1].hf) as positions:
        for stage in llm:
            hidden = stage(hidden, text)
    hook.remove()
    return Pass(logits[0], text.target_ids, positions[-1], embedded, items)


def pass_plain(
    model: PreTrainedModel, spec: ModelSpec, samples: Sequence[PackedSamples]
) -> tuple[list[Pass], dict[str, torch.Tensor]]:
    """Run each sample through transformers' model. Also returns the gradients of the summed losses, by parameter name.

    Raises:
        UserError: when transformers' model cannot take a sample.
    """
    passes, keeps = [], "logits_to_keep" in signature(model.forward).parameters
    for sample in samples:
        text = sample.text
        try:
            given = load_runtime(spec.family).plain_inputs(sample.media, text)
        except ValueError as error:
            raise UserError(f"a drawn sample cannot be compared: {error}; draw others with another `seed`") from None
        if keeps:
            given["logits_to_keep"] = text.target_positions
        with _positions_of(model) as positions:
            logits = model(input_ids=text.token_ids[None], use_cache=False, **given).logits[0]
        at_targets = logits if keeps else logits[text.target_positions]
        made = Pass(at_targets, text.target_ids, positions[0])
        made.loss.backward()
        passes.append(made.detached())
    return passes, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def each_stage(stages: Mapping[str, list]) -> Iterator[EncoderStage | LlmStage]:
    """All stages of all modules, one after the other."""
    return chain.from_iterable(stages.values())


@contextmanager
def _positions_of(hf: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Collect the position ids that the LLM's rotary embedding gets in the context, [(num_axes,) num_tokens]."""
    found: list[torch.Tensor] = []

    def keep(_: torch.nn.Module, given: tuple, named: dict) -> None:
        positions = named["position_ids"] if "position_ids" in named else given[1]
        found.append(positions.squeeze(-2))

    hook = hf.model.language_model.rotary_emb.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield found
    finally:
        hook.remove()


def job_of(shapes: SampleShapes) -> MicrobatchJob:
    """The job that loads these samples as one microbatch, with one replica of each encoder."""
    return MicrobatchJob(
        samples=tuple(SampleRef(str(name), int(row)) for name, row in zip(shapes.source, shapes.row, strict=True)),
        media=tuple(tuple(MediumSize(*size) for size in sizes.tolist()) for sizes in shapes.media.of_each()),
        kept_tokens=tuple(map(tuple, shapes.kept_tokens.tolist())),
        llm_tokens=tuple(shapes.llm_tokens.tolist()),
        encoder_rank=tuple((0,) * len(shapes.encoders) for _ in range(len(shapes))),
    )
