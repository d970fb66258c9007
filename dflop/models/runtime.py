"""The half of a family that builds and feeds its models: `RUNTIME` in the family's `runtime.py`.

Measuring and training get it from `load_runtime`. It gives a Hugging Face config, stages with their weights, and the
processors that turn decoded media into the encoders' items. Everything here needs torch and transformers.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from dflop.models.adapter_files import check_tensors, is_adapter
from dflop.models.attention import PACKED
from dflop.models.lora import adapt_layer, check_targets
from dflop.models.microbatch import EncoderBatch, MediaProcessor, MediumLayout, Movable, TextBatch
from dflop.models.named_parts import check_names
from dflop.models.precision import held_in, set_values
from dflop.models.spec import ModelSpec
from dflop.models.stages import EncoderStage, LlmStage, Stage
from dflop.models.tensor_group import ALONE, TensorGroup
from dflop.models.tensor_parallel import Divider
from dflop.models.weights import draw_weights, load_adapter, load_weights, norms_in_float64
from dflop.plan.trained import EVERYTHING, TrainedSet

__all__ = ["FamilyRuntime", "MadeUpMedia"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeUpMedia:
    """Media for measuring an encoder: the shape of an item, the media that the items belong to, and the sum of squares
    of these media (`models.ItemCount.sum_sq_items`)."""

    item_shape: tuple[int, ...]
    media: tuple[MediumLayout, ...]
    sum_sq_items: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyRuntime:
    """The functions by which a family runs its models.

    - `architecture`: the Hugging Face class of the whole model.
    - `token_fields`: the fields of its config that hold ids of a tokenizer, each with the kind of media whose
      placeholder it is, or with one of `special_tokens`.
    - `cut(model, module, layers)`: removes from a model without weights everything but these layers of the module, and
      returns the stage.
    - `weight_renamings`: (pattern, replacement) pairs, applied in order, from names in checkpoints to the model's. A
      tensor whose name becomes empty belongs to a part that is not trained, and is not read.
    - `packs_media`: whether the layers of encoders take the ends of segments, as the LLM's do (`attention.py`).
    - `processors`: for each encoder, by name, a function `(spec, checkpoint)` that makes its media processor, with the
      checkpoint's settings if there is one.
    - `layouts`: for encoders whose layers must know how media lie in their items, by name, a function `(spec, media)`
      that computes it: the `EncoderBatch.layout` of a microbatch with these media, of which there is at least one.
      Loader processes call it, so it stands in a file that does not import the model's classes.
    - `with_depth(spec, module, num_layers)`: the same model with `num_layers` layers in one module, for measuring.
    - `make_up_media(spec, module, num_items)`: media with that many items, to measure an encoder.
    - `plain_inputs(media, text)`: the arguments, by name, that `architecture.forward` takes for one sample's media
      beside its token ids. They serve to compare stages with the unpacked model.
    """

    architecture: type[PreTrainedModel]
    token_fields: Mapping[str, str]
    cut: Callable[[PreTrainedModel, str, range], Stage]
    weight_renamings: tuple[tuple[str, str], ...] = ()
    packs_media: bool = False
    processors: Mapping[str, Callable[[ModelSpec, Path | None], MediaProcessor]]
    layouts: Mapping[str, Callable[[ModelSpec, Sequence[MediumLayout]], Movable]] = field(default_factory=dict)
    with_depth: Callable[[ModelSpec, str, int], ModelSpec]
    make_up_media: Callable[[ModelSpec, str, int], MadeUpMedia]
    plain_inputs: Callable[[Mapping[str, EncoderBatch], TextBatch], dict[str, torch.Tensor]]

    def make_config(self, spec: ModelSpec, token_ids: Mapping[str, int], vocab_size: int) -> PretrainedConfig:
        """The Hugging Face config for a tokenizer, with a vocabulary of at least `vocab_size` ids.

        `token_ids` has the ids of the media's placeholders, by kind, and of `special_tokens`, by token. The fields of
        other tokens keep their defaults.
        """
        text = spec.hf_config["text_config"]
        text = text | {"vocab_size": max(text.get("vocab_size", 0), vocab_size)}
        fields = {key: value for key, value in spec.hf_config.items() if key != "model_type"} | {"text_config": text}
        config = self.architecture.config_class(**deepcopy(fields))
        for field_name, token in self.token_fields.items():
            if token in token_ids:
                setattr(config, field_name, token_ids[token])
        return config

    def check_trained(
        self, spec: ModelSpec, config: PretrainedConfig, trained: TrainedSet, further: Mapping[str, str] | None = None
    ) -> None:
        """Check that each name of `model.train` and `model.freeze`, and each in `further`, by its key, is that of a
        parameter; that there is something to train; and that each pattern of `model.lora.targets` matches a linear
        layer.

        Raises:
            UserError: naming the first of these that is not so.
        """
        given = {f"model.train[{number}]": name for number, name in enumerate(trained.named)}
        given |= {f"model.freeze[{number}]": name for number, name in enumerate(trained.frozen)} | dict(further or {})
        known = {"encoder", "projector", *spec.part_names}
        given = {key: name for key, name in given.items() if name not in known}
        if not given and not trained.lora:
            return
        stages = self._whole_modules(spec, config)
        check_names(given, trained, stages)
        if trained.lora:
            check_targets(trained.lora, {name: stage for name, stage in stages.items() if trained.adapts(name)})

    def check_adapter(self, spec: ModelSpec, config: PretrainedConfig, trained: TrainedSet, folder: Path) -> None:
        """Check that the adapters in `folder` are those of this model's layers that `trained` adapts.

        Raises:
            UserError: naming the first tensor of which this is not so.
        """
        stages = self._whole_modules(spec, config)
        for module, stage in stages.items():
            for layer in stage.layer_names if trained.adapts(module) else ():
                adapt_layer(stage, layer, trained.lora, ALONE, 0, is_empty=True)
        shapes = {name: own.shape for stage in stages.values() for name, own in stage.hf.state_dict().items()}
        check_tensors(folder, self.weight_renamings, shapes)

    def _whole_modules(self, spec: ModelSpec, config: PretrainedConfig) -> dict[str, Stage]:
        """Each module as one stage, without values."""
        stages = {}
        for own in spec.modules:
            with torch.device("meta"):
                stages[own.name] = self.cut(self.architecture(config), own.name, range(own.num_layers))
                if own.name == "llm" and config.tie_word_embeddings:
                    stages[own.name].hf.lm_head.weight = stages[own.name].hf.model.language_model.embed_tokens.weight
        return stages

    def encoder_batch(
        self,
        spec: ModelSpec,
        module: str,
        *,
        items: torch.Tensor | None,
        media: tuple[tuple[MediumLayout, ...], ...],
        kept_tokens: tuple[int, ...],
    ) -> EncoderBatch:
        """A microbatch of made-up media, with the layout that a loader would compute."""
        flat, layout = [medium for own in media for medium in own], None
        if flat and module in self.layouts:
            with unset_fake_temporarily():  # its sizes depend on values, which fake tensors do not have
                layout = self.layouts[module](spec, flat)
        return EncoderBatch(items=items, media=media, kept_tokens=kept_tokens, layout=layout)

    def build_stage(
        self,
        config: PretrainedConfig,
        module: str,
        *,
        layers: range,
        seed: int,
        checkpoint: Path | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        num_recomputed: int = 0,
        num_attention_kept: int = 0,
        num_offloaded: int = 0,
        num_still: int = 0,
        draw_on: torch.device | str = "cpu",
        ranks: TensorGroup = ALONE,
        share: Callable[[nn.Module, set[nn.Parameter]], None] | None = None,
        is_empty: bool = False,
        trained: TrainedSet = EVERYTHING,
        adapter: Path | None = None,
    ) -> EncoderStage | LlmStage:
        """One stage of a module, on `device`, with weights from `checkpoint` or drawn from `seed`, and above them those
        of the directory `adapter` (`adapter_files`).

        Weights of a checkpoint are read into place, on `device` and in `dtype`, and nothing is drawn. Others are drawn
        on the CPU, so that they are the same on every device; drawing them on the device itself (`draw_on`) is quicker.
        With several tensor-parallel `ranks`, each keeps its part of a block as soon as the block is made, and reads
        only that part from the checkpoint. If replicas shard parameters, `share` turns each unit (`Stage.units`), as
        soon as it is made, into this replica's rows of it, as DTensors on the device; only these rows are read. It
        also gets the unit's trained parameters. If `is_empty`, the values of the weights do not matter, and the stage
        may be made of fake tensors. The first `num_offloaded` layers behind `num_still` keep their saved tensors in
        host memory; the next `num_recomputed` are recomputed in backward, the last `num_attention_kept` of these but
        for attention (`Stage.set_recomputed`). If `trained` says so, linear layers have adapters.

        Raises:
            UserError: for a checkpoint without this stage's weights, or a model that cannot be cut or divided this way.
        """
        for name in config.sub_configs:
            part = getattr(config, name)
            is_packed = self.packs_media or part is config.get_text_config()
            part._attn_implementation = PACKED if is_packed else "sdpa"
        config.architectures = [self.architecture.__name__]  # as transformers writes it beside the weights
        with torch.device("meta"):
            hf = self.architecture(config)
        names = set(hf.state_dict())
        stage = self.cut(hf, module, layers)
        divide = Divider(stage, ranks).divide if ranks.group is not None else None
        units = stage.units if share else ()
        adapted = stage.layer_names if trained.adapts(module) else ()

        def complete(name: str, drawn: nn.Module) -> None:
            if divide:
                divide(name, drawn)
            if name in adapted:
                adapt_layer(stage, name, trained.lora, ranks, seed, is_empty=is_empty)
            if name in units:
                unit = hf.get_submodule(name)  # dividing may have replaced it
                share(unit if is_empty else _as_dtype(unit, dtype), stage.those(trained.includes, name))

        reads = checkpoint is not None and not is_empty
        draw_weights(hf, seed, draw_on, complete, is_empty=is_empty, are_read=(device, dtype) if reads else None)
        if stage.is_last and module == "llm" and config.tie_word_embeddings:
            hf.lm_head.weight = hf.model.language_model.embed_tokens.weight
        if reads:
            load_weights(hf, checkpoint, self.weight_renamings, stage.shards, names)
        stage.set_recomputed(num_recomputed, num_still + num_offloaded, num_attention_kept)
        stage.set_offloaded(num_offloaded, num_still)
        if is_empty:
            return stage.train()
        _as_dtype(stage, dtype)  # adapters are now as wide as they are held
        if adapter:
            load_adapter(hf, adapter, self.weight_renamings, stage.shards)
        return stage.to(device).train()


def _as_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with parameters in this dtype; adapters, which are trained, as masters are held. Buffers, such as
    rotary frequencies, become no narrower. Replicas' shards have the dtype in which they were shared."""
    if dtype == torch.float64:
        norms_in_float64(module)
    for name, parameter in module.named_parameters():
        if is_adapter(name) and not isinstance(parameter, DTensor):
            set_values(parameter, parameter.detach().to(held_in(dtype)))
        elif not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(dtype)
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(torch.promote_types(buffer.dtype, dtype))
    return module
