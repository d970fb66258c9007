"""The half of a family that builds and feeds its models: `RUNTIME` in the family's `runtime.py`.

Who measures or trains gets it from `load_runtime`, and asks it for a config, a stage with its weights, and what turns
decoded media into the encoders' items. Everything here needs torch and transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from dflop.models.attention import PACKED
from dflop.models.microbatch import EncoderBatch, MediaProcessor, MediumLayout, TextBatch
from dflop.models.spec import ModelSpec
from dflop.models.stages import EncoderStage, LlmStage, Stage
from dflop.models.tensor_group import ALONE, TensorGroup
from dflop.models.tensor_parallel import Divider
from dflop.models.weights import draw_weights, load_weights, norms_in_float64

__all__ = ["FamilyRuntime", "MadeUpMedia", "config_fields"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeUpMedia:
    """Media for measuring an encoder: one item's shape, and the media that a number of items belong to, with the
    squares of their runs (`models.ItemCount`)."""

    item_shape: tuple[int, ...]
    media: tuple[MediumLayout, ...]
    sum_sq_items: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyRuntime:
    """What a family gives to run its models.

    `architecture` is the Hugging Face class of the whole model. `make_config(spec, token_ids, vocab_size)` gives its
    config for a tokenizer: the ids of the media's placeholders by kind and of `special_tokens` by themselves, and a
    vocabulary that holds all tokens.
    `cut(model, module, layers)` takes a model without weights, removes what is not of these layers of the module, and
    gives the stage. `weight_renamings` lead from the names in checkpoints to the model's (pattern, replacement; in
    order). `processors` give, for each encoder by name, `(spec, checkpoint)`, the media processor of a checkpoint or,
    without one, the usual one. With `packs_media` the layers of encoders take the ends of segments, as the LLM's do
    (`attention.py`). `with_depth(spec, module, num_layers)` is the same model with so many layers in one module, and
    `make_up_media(spec, module, num_items)` gives an encoder something to do: both serve measuring.
    `plain_inputs(media, text)` is what `architecture.forward` takes of one sample's media beside its token ids, by the
    names of its parameters: it serves comparing stages with the unpacked model.
    """

    architecture: type[PreTrainedModel]
    make_config: Callable[[ModelSpec, dict[str, int], int], PretrainedConfig]
    cut: Callable[[PreTrainedModel, str, range], Stage]
    weight_renamings: tuple[tuple[str, str], ...] = ()
    packs_media: bool = False
    processors: Mapping[str, Callable[[ModelSpec, Path | None], MediaProcessor]]
    with_depth: Callable[[ModelSpec, str, int], ModelSpec]
    make_up_media: Callable[[ModelSpec, str, int], MadeUpMedia]
    plain_inputs: Callable[[Mapping[str, EncoderBatch], TextBatch], dict[str, torch.Tensor]]

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
        checkpointing: bool = False,
        draw_on: torch.device | str = "cpu",
        ranks: TensorGroup = ALONE,
        share: Callable[[nn.Module], None] | None = None,
        is_empty: bool = False,
    ) -> EncoderStage | LlmStage:
        """One stage of a module, on `device`, with weights from `checkpoint` or drawn from `seed`.

        Weights are drawn on the CPU, so that every device has the same; `draw_on` the device itself is quicker. Of
        several `ranks` each keeps its part of a block as soon as this is drawn, and reads that part alone. Where
        replicas share parameters, `share` leaves of each unit (`Stage.units`) their rows, as DTensors on the device, as
        soon as the unit is drawn, and these are read alone. Nobody reads the weights of a stage that `is_empty`: it may
        be made of fake tensors.

        Raises:
            UserError: for a checkpoint without this stage's weights, or a model that cannot be cut or divided so.
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

        def complete(name: str, drawn: nn.Module) -> None:
            if divide:
                divide(name, drawn)
            if name in units:
                unit = hf.get_submodule(name)  # a divided one may be another
                share(unit if is_empty else _as_dtype(unit, dtype))

        draw_weights(hf, seed, draw_on, complete, is_empty=is_empty)
        if stage.is_last and module == "llm" and config.tie_word_embeddings:
            hf.lm_head.weight = hf.model.language_model.embed_tokens.weight
        if checkpoint is not None and not is_empty:
            load_weights(hf, checkpoint, self.weight_renamings, stage.shards, names)
        if checkpointing:
            stage.set_checkpointing(True)
        return (stage if is_empty else _as_dtype(stage, dtype).to(device)).train()


def _as_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    if dtype == torch.float64:
        norms_in_float64(module)
    return module.to(dtype)


def config_fields(spec: ModelSpec, vocab_size: int) -> dict[str, Any]:
    """The fields of a model's Hugging Face config, with a vocabulary that holds at least so many tokens."""
    text = spec.hf_config["text_config"]
    text = text | {"vocab_size": max(text.get("vocab_size", 0), vocab_size)}
    return {key: value for key, value in spec.hf_config.items() if key != "model_type"} | {"text_config": text}
