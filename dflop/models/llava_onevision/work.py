"""The work of LLaVA-OneVision's modules in one forward pass: SigLIP with its projector, and the LLM."""

from dflop.base import UserError
from dflop.models.llm_work import llm_work
from dflop.models.spec import ModelSpec
from dflop.models.vit_work import VitWidths, vit_layer, vit_work
from dflop.models.work import ModuleWork, size_of

__all__ = ["count_work"]


def count_work(spec: ModelSpec, module: str, tp: int) -> ModuleWork:
    """Counts of one module on each of `tp` ranks.

    Raises:
        UserError: when the config lacks a size, or has a part that cannot be counted.
    """
    if module == "llm":
        config = spec.hf_config
        is_tied = config.get("tie_word_embeddings", False) or config["text_config"].get("tie_word_embeddings", False)
        return llm_work(spec, tp, is_tied=is_tied)
    return vit_work(_siglip(spec), tp)


def _siglip(spec: ModelSpec) -> VitWidths:
    config, vision = spec.hf_config, spec.hf_config.get("vision_config", {})
    if vision.get("vision_use_head", True):
        raise UserError(
            f"the encoder of {spec.name} has SigLIP's pooling head, of which no analytic costs are known; set "
            "`vision_config.vision_use_head` to false (the model does not use the head) or `costs.source: measured`"
        )
    sizes, patches = spec.module("vision"), spec.rules.tokens_per_item
    layers = config.get("vision_feature_layer", -1)
    return VitWidths(
        layer=vit_layer(
            hidden=sizes.hidden_size,
            inner=size_of(spec, "vision_config", "intermediate_size"),
            num_heads=sizes.num_heads,
        ),
        image_size=spec.rules.image_size,
        patch_size=spec.rules.patch_size,
        positions=patches,
        projected=patches - (config.get("vision_feature_select_strategy", "full") == "default"),
        projector_width=sizes.hidden_size * (1 if isinstance(layers, int) else len(layers)),
        out=spec.module("llm").hidden_size,
        # Before the layers, the patch embedding's bias and the positions; after them, the newline's embedding.
        in_vectors=sizes.hidden_size + sizes.hidden_size * patches,
        out_vectors=spec.module("llm").hidden_size,
        # Each picture's gradient is as large as that of all pictures: two of them and their sum, beside the sample's.
        num_cuts=4,
        # The features are taken before SigLIP's last norm.
        has_norm=True,
        norm_runs=False,
        has_projector_biases=bool(config.get("multimodal_projector_bias", True)),
    )
