"""Qwen2.5-VL's encoder as a stage, and how the whole model is cut into stages."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

from dflop.models.attention import OneSegment
from dflop.models.division import Division, check_kind
from dflop.models.microbatch import EncoderBatch
from dflop.models.stages import EncoderStage, LlmStage, cut_llm, keep_layers

__all__ = ["VisionStage", "cut", "cut_vision", "exact_in_float64"]


def cut(hf: Qwen2_5_VLForConditionalGeneration, module: str, layers: range) -> EncoderStage | LlmStage:
    """The stage of these layers of a module, cut in place from the whole model."""
    if module == "llm":
        return cut_llm(hf, layers, of_encoders=("visual",), kind="qwen2")
    return VisionStage(hf, layers, **cut_vision(hf, layers))


def cut_vision(hf: PreTrainedModel, layers: range) -> dict[str, bool]:
    """Reduce a whole model, in place, to these layers of its `visual` encoder, with the patch embedding before the
    first and the merger after the last. Returns `is_first` and `is_last`: whether it has the first and the last layer.
    """
    hf.model.language_model, hf.lm_head = None, None
    tower = hf.model.visual
    is_first, is_last = keep_layers(tower.blocks, layers)
    if is_first:
        tower.patch_embed.proj.__class__ = _PatchProjection
    else:
        tower.patch_embed = None
    if not is_last:
        tower.merger = None
    return {"is_first": is_first, "is_last": is_last}


class _PatchProjection(nn.Conv3d):
    """A convolution over patches as large as its kernel, computed as a matrix product. On a CPU that takes a third to a
    sixth of the convolution's time."""

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """From patches [num_patches, channels, frames, height, width] to their embeddings [num_patches, embed_dim]."""
        return nn.functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)


Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def exact_in_float64(rotate: Rotation) -> Rotation:
    """Make an encoder's rotary positions exact in float64. transformers' `rotate` always computes in float32.

    Families replace transformers' function by the result, as `weights.norms_in_float64` replaces norms. Values that are
    rounded to float32 sometimes differ between layouts by far more than float64 values do.
    """

    def rotated(
        query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if query.dtype != torch.float64:
            return rotate(query, key, cosines, sines)
        cosines, sines = cosines.unsqueeze(-2).double(), sines.unsqueeze(-2).double()
        return tuple(own * cosines + modeling.rotate_half(own) * sines for own in (query, key))

    return rotated


modeling.apply_rotary_pos_emb_vision = exact_in_float64(modeling.apply_rotary_pos_emb_vision)


class VisionStage(EncoderStage):
    """The vision transformer's layers and the merger. Between stages the patches are ordered by windows."""

    layer_name = r"\bblocks\.\d+"

    @property
    def reads_records(self) -> bool:
        """Every layer needs to know where pictures and windows end."""
        return True

    def division(self) -> Division:
        check_kind(self.hf.config.vision_config.model_type, ("qwen2_5_vl_vision",))
        return Division(
            blocks=("model.visual.blocks.*.attn", "model.visual.blocks.*.mlp", "model.visual.merger.mlp"),
            columns=("qkv", "gate_proj", "up_proj", "0"),
            rows=("proj", "down_proj", "2"),
            stacked={"qkv": 3},
            sizes=("num_heads",),
        )

    def hidden_shape(self, num_items: int, layer: int) -> tuple[int, ...]:
        """[num_patches, hidden_size]."""
        config = self.hf.config.vision_config
        return (num_items * config.spatial_merge_size**2, config.hidden_size)

    def embed(self, batch: EncoderBatch) -> torch.Tensor:
        """Embedded patches [num_patches, hidden_size], ordered by windows."""
        patches = self.hf.model.visual.patch_embed(batch.items)
        return patches.unflatten(0, (len(batch.items), -1))[batch.layout.order].flatten(0, 1)

    def encode(self, hidden: torch.Tensor, batch: EncoderBatch) -> list[torch.Tensor]:
        """The output of this stage's last layer. Backward does not need the others: the norms keep copies in fp32."""
        layout, tower = batch.layout, self.hf.model.visual
        whole, rotary = OneSegment(hidden), tower.rotary_pos_emb(hidden, layout.positions)
        for index in self.layers:
            is_full = index in tower.fullatt_block_indexes
            hidden = tower.blocks[index](
                hidden,
                cu_seqlens=whole,
                position_embeddings=rotary,
                segment_ends=layout.pictures if is_full else layout.windows,
            )
        return [hidden]

    def finish(self, outputs: list[torch.Tensor], batch: EncoderBatch) -> list[torch.Tensor]:
        """Features of each sample, [kept_tokens, hidden_size of the LLM]."""
        features = self.hf.model.visual.merger(outputs[-1])[batch.layout.places]
        of_samples = features.split([sum(medium.num_items for medium in media) for media in batch.media])
        return [own[:kept] for own, kept in zip(of_samples, batch.kept_tokens, strict=True)]
