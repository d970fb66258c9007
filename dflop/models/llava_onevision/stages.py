"""LLaVA-OneVision cut into stages: the Hugging Face model with what other ranks own left out.

A stage keeps the parameter names of the whole model, so that checkpoints of any layout are unions of the
stages' state dicts and the final weights are an ordinary Hugging Face checkpoint.
"""

import re
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, PreTrainedModel
from transformers.modeling_utils import load_state_dict

from dflop.models.attention import PACKED
from dflop.models.microbatch import TextBatch, VisualBatch
from dflop.runtime import UserError

__all__ = ["LlmStage", "Stage", "VisionStage", "build_stage", "make_hf_config", "norms_in_float64"]

_FIRST_NAMES = (
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^language_model\.(model\.)?", "model.language_model."),
    (r"^(vision_tower|multi_modal_projector|image_newline)\b", r"model.\1"),
    (r"^model\.vision_tower\.vision_model\.", "model.vision_tower."),
)


def make_hf_config(fields: dict[str, Any], placeholder_ids: dict[str, int], vocab_size: int) -> LlavaOnevisionConfig:
    """The Hugging Face config for a tokenizer: its placeholder ids, and a vocabulary that holds all its tokens."""
    text = dict(fields["text_config"])
    text["vocab_size"] = max(text.get("vocab_size", 0), vocab_size)
    config = LlavaOnevisionConfig(
        **{key: value for key, value in fields.items() if key not in ("model_type", "text_config")},
        text_config=text,
    )
    config.image_token_id = placeholder_ids["image"]
    config.video_token_id = placeholder_ids["video"]
    return config


class Stage(nn.Module):
    """Common to all stages: the partial Hugging Face model, under its own parameter names."""

    def __init__(
        self, hf: LlavaOnevisionForConditionalGeneration, layers: range, *, is_first: bool, is_last: bool
    ) -> None:
        super().__init__()
        self.hf, self.layers, self.is_first, self.is_last = hf, layers, is_first, is_last

    def set_checkpointing(self, on: bool) -> None:
        """Whether layers keep their inputs only and compute the rest again in backward."""
        # transformers 5.23 renamed both; the old names are to go in version 6.
        if on:
            enable = getattr(self.hf, "activation_checkpointing_enable", None) or self.hf.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        else:
            (getattr(self.hf, "activation_checkpointing_disable", None) or self.hf.gradient_checkpointing_disable)()

    def hf_state_dict(self) -> dict[str, torch.Tensor]:
        return self.hf.state_dict()

    def named_hf_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.hf.named_parameters())


class VisionStage(Stage):
    """A run of the encoder's layers, with the patches' embedding if it is the first and the projector if the last."""

    def embed(self, batch: VisualBatch) -> torch.Tensor:
        """Embedded patches [num_items, num_patches, hidden_size]."""
        return self.hf.model.vision_tower.embeddings(batch.items)

    def encode(self, hidden: torch.Tensor, batch: VisualBatch | None = None) -> list[torch.Tensor]:
        """What comes in, and the output of each layer, as `vision_feature_layer` counts them."""
        outputs = [hidden]
        for index in self.layers:
            outputs.append(self.hf.model.vision_tower.encoder.layers[index](outputs[-1], None))
        return outputs

    def finish(self, outputs: list[torch.Tensor], batch: VisualBatch) -> list[torch.Tensor]:
        """Features of each sample, [kept_tokens, hidden_size of the LLM]."""
        model, config = self.hf.model, self.hf.config
        chosen = config.vision_feature_layer
        hidden = torch.cat([outputs[layer] for layer in ([chosen] if isinstance(chosen, int) else chosen)], dim=-1)
        if config.vision_feature_select_strategy == "default":
            hidden = hidden[:, 1:]
        per_item = model.multi_modal_projector(hidden)
        features, start = [], 0
        for media, kept in zip(batch.media, batch.kept_tokens, strict=True):
            parts = []
            for medium in media:
                part = per_item[start : start + medium.num_items]
                start += medium.num_items
                if medium.kind == "video":
                    parts += [model.apply_pooling(part).flatten(0, 1), model.image_newline[None].to(part.dtype)]
                else:
                    packed, _ = model.pack_image_features(
                        [part],
                        [(medium.height, medium.width)],
                        image_newline=model.image_newline,
                        vision_aspect_ratio=config.vision_aspect_ratio,
                    )
                    parts.append(packed[0])
            features.append(torch.cat(parts)[:kept])
        return features

    def forward(self, batch: VisualBatch) -> list[torch.Tensor]:
        """Items in, each sample's features out."""
        return self.finish(self.encode(self.embed(batch)), batch)


class LlmStage(Stage):
    """A run of the LLM's layers, with the embedding if it is the first and the head and loss if it is the last."""

    def __init__(
        self, hf: LlavaOnevisionForConditionalGeneration, layers: range, *, is_first: bool, is_last: bool
    ) -> None:
        super().__init__(hf, layers, is_first=is_first, is_last=is_last)
        # Of logits [num_targets, vocab_size] and ids; where ranks share the vocabulary, their shards' own.
        self.summed_loss: Callable[..., torch.Tensor] = partial(cross_entropy, reduction="sum")

    def embed(self, batch: TextBatch, features: list[torch.Tensor]) -> torch.Tensor:
        """Token embeddings [1, num_tokens, hidden_size] with the visual features put in their places."""
        hidden = self.hf.model.language_model.embed_tokens(batch.token_ids)
        for positions, values in zip(batch.visual_positions, features, strict=True):
            if len(positions):
                hidden = hidden.index_copy(0, positions, values.to(hidden.dtype))
        return hidden.unsqueeze(0)

    def encode(self, hidden: torch.Tensor, batch: TextBatch) -> torch.Tensor:
        """Hidden states [1, num_tokens, hidden_size] behind this stage's layers."""
        language_model = self.hf.model.language_model
        rotary = language_model.rotary_emb(hidden, batch.position_ids[None])
        for index in self.layers:
            hidden = language_model.layers[index](
                hidden, attention_mask=None, position_embeddings=rotary, segment_ends=batch.segment_ends
            )
        return hidden

    def finish(self, hidden: torch.Tensor, batch: TextBatch) -> torch.Tensor:
        """The summed loss over all target tokens."""
        at_targets = self.hf.model.language_model.norm(hidden[0, batch.target_positions])
        logits = self.hf.lm_head(at_targets)
        return self.summed_loss(logits if logits.dtype == torch.float64 else logits.float(), batch.target_ids)

    def forward(self, hidden: torch.Tensor, batch: TextBatch) -> torch.Tensor:
        """Hidden states in and out; on the last stage the loss comes out."""
        hidden = self.encode(hidden, batch)
        return self.finish(hidden, batch) if self.is_last else hidden


def build_stage(
    config: LlavaOnevisionConfig,
    module: str,
    *,
    layers: range,
    seed: int,
    checkpoint: Path | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    checkpointing: bool = False,
    draw_on: torch.device | str = "cpu",
) -> VisionStage | LlmStage:
    """One stage of a module, on `device`, with weights from `checkpoint` or drawn from `seed`.

    Random weights depend on the seed and the parameter's name only: every layout starts from the same model. They are
    drawn on the CPU, so that every device has the same; `draw_on` the device itself is quicker.
    """
    config.text_config._attn_implementation = PACKED
    config.vision_config._attn_implementation = "sdpa"
    num_layers = (config.text_config if module == "llm" else config.vision_config).num_hidden_layers
    is_first, is_last = layers.start == 0, layers.stop == num_layers
    with torch.device("meta"):
        hf = LlavaOnevisionForConditionalGeneration(config)
    if module == "vision":
        assert layers == range(num_layers), "encoders run in one stage"
        hf.model.language_model, hf.lm_head = None, None
        stage: VisionStage | LlmStage = VisionStage(hf, layers, is_first=is_first, is_last=is_last)
    else:
        if config.tie_word_embeddings and not (is_first and is_last):
            raise UserError(
                "this model ties its embedding to its head, which pipeline stages of the LLM cannot share yet; "
                "use `plan.fixed.llm.pp: 1`"
            )
        language_model = hf.model.language_model
        hf.model.vision_tower, hf.model.multi_modal_projector, hf.model.image_newline = None, None, None
        for index in range(num_layers):
            if index not in layers:
                language_model.layers[index] = nn.Identity()
        if not is_first:
            language_model.embed_tokens = None
        if not is_last:
            language_model.norm, hf.lm_head = None, None
        stage = LlmStage(hf, layers, is_first=is_first, is_last=is_last)
    hf.to_empty(device=draw_on)
    _draw_weights(hf, hf, "", seed)
    if is_first and is_last and config.tie_word_embeddings and module == "llm":
        hf.lm_head.weight = hf.model.language_model.embed_tokens.weight
    if checkpoint is not None:
        _load_weights(hf, checkpoint)
    if checkpointing:
        stage.set_checkpointing(True)
    if dtype == torch.float64:
        norms_in_float64(hf)
    return stage.to(device=device, dtype=dtype).train()


def norms_in_float64(model: nn.Module) -> None:
    """Exchange transformers' RMSNorms, which compute in float32 whatever they get, for torch's own, in place."""
    for owner in list(model.modules()):
        for name, norm in list(owner.named_children()):
            if type(norm).__name__.endswith("RMSNorm") and not isinstance(norm, nn.RMSNorm):
                exact = nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon)
                exact.weight = norm.weight
                setattr(owner, name, exact)


@torch.no_grad()
def _draw_weights(module: nn.Module, owner: PreTrainedModel, name: str, seed: int) -> None:
    """transformers' own initialisation of each submodule, seeded by the submodule's name."""
    for child_name, child in module.named_children():
        child_owner = child if isinstance(child, PreTrainedModel) else owner
        _draw_weights(child, child_owner, f"{name}.{child_name}" if name else child_name, seed)
    torch.manual_seed(zlib.crc32(name.encode()) ^ (seed * 0x9E3779B1 & 0xFFFFFFFF))
    if name == "model" and getattr(module, "image_newline", None) is None:
        return
    owner._init_weights(module)


def _load_weights(hf: nn.Module, checkpoint: Path) -> None:
    """Load this stage's tensors from the checkpoint's safetensors files.

    Raises:
        UserError: naming the first tensor that the checkpoint lacks.
    """
    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        raise UserError(f"`model.path` {checkpoint} holds no *.safetensors file; save the model with `save_pretrained`")
    wanted = set(hf.state_dict())
    if hf.config.tie_word_embeddings:
        wanted.discard("lm_head.weight")  # it is the embedding, which checkpoints hold once
    found: set[str] = set()
    for file in files:
        named = {_model_name(name): tensor for name, tensor in load_state_dict(str(file)).items()}
        weights = {name: tensor for name, tensor in named.items() if name in wanted}
        hf.load_state_dict(weights, strict=False)
        found |= set(weights)
    if missing := sorted(wanted - found):
        raise UserError(f"`model.path` {checkpoint} lacks {len(missing)} tensors of this model, e.g. {missing[0]}")


def _model_name(name: str) -> str:
    """The model's name for a tensor of a checkpoint: the hub and `save_pretrained` keep the family's first names."""
    for pattern, replacement in _FIRST_NAMES:
        name = re.sub(pattern, replacement, name)
    return name
