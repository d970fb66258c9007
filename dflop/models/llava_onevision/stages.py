"""LLaVA-OneVision's encoder as a stage, and how the whole model is cut into stages."""

import math

import torch
from torch.nn.functional import interpolate
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration
from transformers.models.llava_onevision import modeling_llava_onevision as modeling

from dflop.base import UserError
from dflop.models.division import Division, check_kind
from dflop.models.microbatch import EncoderBatch, MediumLayout
from dflop.models.stages import EncoderStage, LlmStage, cut_llm, keep_layers

__all__ = ["VisionStage", "cut"]


def cut(hf: LlavaOnevisionForConditionalGeneration, module: str, layers: range) -> EncoderStage | LlmStage:
    """The stage of these layers of a module, cut in place from the whole model.

    Raises:
        UserError: when the encoder's last stage lacks a layer whose output is a feature.
    """
    if module == "llm":
        return cut_llm(hf, layers, of_encoders=("vision_tower", "multi_modal_projector", "image_newline"))
    hf.model.language_model, hf.lm_head = None, None
    tower = hf.model.vision_tower
    is_first, is_last = keep_layers(tower.encoder.layers, layers)
    if not is_first:
        tower.embeddings = None
    if not is_last:
        hf.model.multi_modal_projector = hf.model.image_newline = None
        for name in ("post_layernorm", "head"):
            if hasattr(tower, name):
                setattr(tower, name, None)
    elif not is_first and (behind := _least_layers(hf.config)) > len(layers):
        raise UserError(
            f"`vision_feature_layer` is {hf.config.vision_feature_layer}: the last of the encoder's pipeline stages "
            f"must have {behind} layers, and has {len(layers)}; use `plan.fixed.vision.pp: 1`"
        )
    return VisionStage(hf, layers, is_first=is_first, is_last=is_last)


def _least_layers(config: LlavaOnevisionConfig) -> int:
    """How many layers the last stage must have to hold all outputs that features are made of."""
    num_layers = config.vision_config.num_hidden_layers
    return max(-layer - 1 if layer < 0 else num_layers - layer for layer in _feature_layers(config))


def _feature_layers(config: LlavaOnevisionConfig) -> list[int]:
    """The layers whose outputs are features, counted from the embedding (0) on, or back from the last layer (-1)."""
    chosen = config.vision_feature_layer
    return [chosen] if isinstance(chosen, int) else list(chosen)


class VisionStage(EncoderStage):
    """SigLIP's layers, the projector, and the layout of its features as the LLM reads them."""

    # Features are outputs of layers, before this norm.
    unread = tuple(f"model.vision_tower.post_layernorm.{name}" for name in ("weight", "bias"))

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

    def hidden_shape(self, num_items: int, layer: int) -> tuple[int, ...]:
        """[num_items, num_patches, hidden_size]."""
        config = self.hf.config.vision_config
        return (num_items, (config.image_size // config.patch_size) ** 2, config.hidden_size)

    def embed(self, batch: EncoderBatch) -> torch.Tensor:
        """Embedded patches [num_items, num_patches, hidden_size]."""
        return self.hf.model.vision_tower.embeddings(batch.items)

    def encode(self, hidden: torch.Tensor, batch: EncoderBatch) -> list[torch.Tensor | None]:
        """The input, and the output of each of this stage's layers; None but for the last and for features."""
        outputs, read = [hidden], {place % (len(self.layers) + 1) for place in self._places() if self.is_last}
        for place, index in enumerate(self.layers):
            outputs.append(self.hf.model.vision_tower.encoder.layers[index](outputs[-1], None))
            if place not in read:
                outputs[place] = None
        return outputs

    def _places(self) -> list[int]:
        """Where the last stage's features are in the result of `encode`, some counted from its end."""
        return [layer - self.layers.start if layer >= 0 else layer for layer in _feature_layers(self.hf.config)]

    def finish(self, outputs: list[torch.Tensor], batch: EncoderBatch) -> list[torch.Tensor]:
        """Features of each sample, [kept_tokens, hidden_size of the LLM]."""
        model, config = self.hf.model, self.hf.config
        hidden = torch.cat([outputs[place] for place in self._places()], dim=-1)
        if config.vision_feature_select_strategy == "default":
            hidden = hidden[:, 1:]
        # One split, whose backward is one copy; that of a slice a medium would fill a tensor of all items each time.
        sizes = [medium.num_items for media in batch.media for medium in media]
        per_medium = iter(model.multi_modal_projector(hidden).split(sizes))
        features = []
        for media, kept in zip(batch.media, batch.kept_tokens, strict=True):
            parts = []
            for medium in media:
                part = next(per_medium)
                if medium.kind == "video":
                    parts += [model.apply_pooling(part).flatten(0, 1), model.image_newline[None].to(part.dtype)]
                else:
                    parts += self._of_picture(part, medium)
            features.append(torch.cat(parts)[:kept])
        return features

    def _of_picture(self, crops: torch.Tensor, medium: MediumLayout) -> list[torch.Tensor]:
        """A picture's features as the LLM reads them, from those of its crops [num_items, num_patches, width].

        As transformers' `pack_image_features`, which also copies the number of features to the device, and waits.
        """
        config, newline = self.hf.config, self.hf.model.image_newline.to(crops.dtype)
        if len(crops) == 1:
            return [crops[0], newline[None]]
        size, whole = (medium.height, medium.width), config.vision_config.image_size
        grid = modeling.get_anyres_image_grid_shape(size, config.image_grid_pinpoints, whole)
        side = whole // config.vision_config.patch_size
        # [width, rows of patches, columns of patches]
        picture = crops[1:].unflatten(1, (side, side)).unflatten(0, grid).permute(4, 0, 2, 1, 3).contiguous()
        picture = modeling.unpad_image(picture.flatten(3, 4).flatten(1, 2), size)
        most = int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
        excess = math.sqrt(picture[0].numel() / (most * side**2))
        if excess > 1.1:
            smaller = [int(length // excess) for length in picture.shape[1:]]
            picture = interpolate(picture[None], smaller, mode="bilinear")[0]
        lines = torch.cat([picture, newline[:, None, None].expand(-1, picture.shape[1], 1)], dim=-1)
        return [crops[0], lines.flatten(1).T]
