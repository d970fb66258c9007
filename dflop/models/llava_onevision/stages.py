"""LLaVA-OneVision's encoder as a stage, and how the whole model is cut into stages."""

import torch
from transformers import LlavaOnevisionForConditionalGeneration

from dflop.models.division import Division, check_kind
from dflop.models.microbatch import VisualBatch
from dflop.models.stages import EncoderStage, LlmStage, cut_llm

__all__ = ["VisionStage", "cut"]


def cut(hf: LlavaOnevisionForConditionalGeneration, module: str, layers: range) -> EncoderStage | LlmStage:
    """The stage of these layers of a module, in place, from the whole model."""
    if module == "llm":
        return cut_llm(hf, layers, of_encoders=("vision_tower", "multi_modal_projector", "image_newline"))
    assert layers == range(len(hf.model.vision_tower.encoder.layers)), "encoders run in one stage"
    hf.model.language_model, hf.lm_head = None, None
    return VisionStage(hf, layers, is_first=True, is_last=True)


class VisionStage(EncoderStage):
    """SigLIP's layers, the projector, and the layout of its features as the LLM reads them."""

    def division(self) -> Division:
        check_kind(self.hf.config.vision_config.model_type, ("siglip_vision_model",))
        return Division(
            blocks=(
                "model.vision_tower.encoder.layers.*.self_attn",
                "model.vision_tower.encoder.layers.*.mlp",
                "model.multi_modal_projector",
            ),
            columns=("q_proj", "k_proj", "v_proj", "fc1", "linear_1"),
            rows=("out_proj", "fc2", "linear_2"),
        )

    def embed(self, batch: VisualBatch) -> torch.Tensor:
        """Embedded patches [num_items, num_patches, hidden_size]."""
        return self.hf.model.vision_tower.embeddings(batch.items)

    def encode(self, hidden: torch.Tensor) -> list[torch.Tensor]:
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
