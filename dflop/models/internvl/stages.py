"""InternVL's encoder as a stage, and how the whole model is cut into stages."""

import torch
from transformers import InternVLForConditionalGeneration

from dflop.models.division import Division, check_kind
from dflop.models.microbatch import EncoderBatch
from dflop.models.stages import EncoderStage, LlmStage, cut_llm, keep_layers

__all__ = ["VisionStage", "cut"]


def cut(hf: InternVLForConditionalGeneration, module: str, layers: range) -> EncoderStage | LlmStage:
    """The stage of these layers of a module, cut in place from the whole model."""
    if module == "llm":
        return cut_llm(hf, layers, of_encoders=("vision_tower", "multi_modal_projector"))
    hf.model.language_model, hf.lm_head = None, None
    tower = hf.model.vision_tower
    is_first, is_last = keep_layers(tower.encoder.layer, layers)
    if not is_first:
        tower.embeddings = None
    if not is_last:
        hf.model.multi_modal_projector = tower.layernorm = None
    return VisionStage(hf, layers, is_first=is_first, is_last=is_last)


class VisionStage(EncoderStage):
    """InternViT's layers, pixel shuffle and the projector. The LLM gets the features of a sample's tiles in order."""

    def division(self) -> Division:
        check_kind(self.hf.config.vision_config.model_type, ("internvl_vision",))
        return Division(
            blocks=(
                "model.vision_tower.encoder.layer.*.attention",
                "model.vision_tower.encoder.layer.*.mlp",
                "model.multi_modal_projector",
            ),
            columns=("q_proj", "k_proj", "v_proj", "fc1", "linear_1"),
            rows=("projection_layer", "fc2", "linear_2"),
            norms=("q_norm", "k_norm"),
            sizes=("num_heads", "embed_dim"),
        )

    def hidden_shape(self, num_items: int, layer: int) -> tuple[int, ...]:
        """[num_items, 1 + num_patches, hidden_size]: the class token comes first."""
        config = self.hf.config.vision_config
        (height, width), (patch_height, patch_width) = config.image_size, config.patch_size
        return (num_items, 1 + (height // patch_height) * (width // patch_width), config.hidden_size)

    def embed(self, batch: EncoderBatch) -> torch.Tensor:
        """Class token and embedded patches [num_items, 1 + num_patches, hidden_size]."""
        return self.hf.model.vision_tower.embeddings(batch.items)

    def encode(self, hidden: torch.Tensor, batch: EncoderBatch) -> list[torch.Tensor]:
        """The output of this stage's last layer. Backward does not need the others where norms keep copies in fp32."""
        for index in self.layers:
            hidden = self.hf.model.vision_tower.encoder.layer[index](hidden)
        return [hidden]

    def finish(self, outputs: list[torch.Tensor], batch: EncoderBatch) -> list[torch.Tensor]:
        """Features of each sample, [kept_tokens, hidden_size of the LLM]."""
        model = self.hf.model
        patches = model.vision_tower.layernorm(outputs[-1])[:, 1:]
        num_items, num_patches, width = patches.shape
        side = round(num_patches**0.5)
        shuffled = model.pixel_shuffle(patches.reshape(num_items, side, side, width), self.hf.config.downsample_ratio)
        per_item = model.multi_modal_projector(shuffled.flatten(1, 2))
        of_samples = per_item.split([sum(medium.num_items for medium in media) for media in batch.media])
        return [own.flatten(0, 1)[:kept] for own, kept in zip(of_samples, batch.kept_tokens, strict=True)]
