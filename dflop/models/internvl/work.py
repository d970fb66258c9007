"""The work of InternVL's modules in one forward pass: InternViT with pixel shuffle and projector, and the LLM."""

from dflop.models.llm_work import llm_work
from dflop.models.spec import ModelSpec
from dflop.models.vit_work import VitWidths, vit_layer, vit_work
from dflop.models.work import ModuleWork, size_of

__all__ = ["count_work"]


def count_work(spec: ModelSpec, module: str, tp: int) -> ModuleWork:
    """Counts of one module on each of `tp` ranks.

    Raises:
        UserError: when the config lacks a size, or has an LLM that cannot be counted.
    """
    if module == "llm":  # transformers ties head and embedding if the config does not say
        return llm_work(spec, tp, is_tied=spec.hf_config.get("tie_word_embeddings", True))
    return vit_work(_internvit(spec), tp)


def _internvit(spec: ModelSpec) -> VitWidths:
    vision, rules, sizes = spec.hf_config.get("vision_config", {}), spec.rules, spec.module("vision")
    hidden, positions = sizes.hidden_size, (rules.image_size // rules.patch_size) ** 2 + 1
    wide = hidden * int(1 / rules.downsample_ratio) ** 2
    has_norm = not vision.get("use_mean_pooling", True)
    places = positions if vision.get("use_absolute_position_embeddings", True) else 0
    return VitWidths(
        layer=vit_layer(
            hidden=hidden,
            inner=size_of(spec, "vision_config", "intermediate_size"),
            num_heads=sizes.num_heads,
            qkv_bias=bool(vision.get("attention_bias", False)),
            head_norm=hidden if vision.get("use_qk_norm", False) else 0,
            rms_norm=vision.get("norm_type") == "rms_norm",
            scaled=True,
        ),
        image_size=rules.image_size,
        patch_size=rules.patch_size,
        positions=positions,
        projected=rules.tokens_per_tile,
        projector_width=wide,
        out=spec.module("llm").hidden_size,
        # Before the layers, the patch embedding's bias, the class token, positions and mask token; after them, the
        # projector's norm.
        in_vectors=hidden * (2 + places + bool(vision.get("use_mask_token", False))),
        out_vectors=2 * wide,
        # Pixel shuffle copies twice, and a norm follows.
        shuffle_bytes=12.0 * wide,
        shuffle_saved_bytes=2.0 * wide + 8.0,
        has_norm=has_norm,
        norm_runs=has_norm,
    )
