"""LLaVA-OneVision's encoder as a stage, and how the whole model is cut into stages."""

import torch
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

from dflop.base import UserError
from dflop.models.division import Division, check_kind
from dflop.models.microbatch import EncoderBatch
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
                    packed, _ = model.pack_image_features(
                        [part],
                        [(medium.height, medium.width)],
                        image_newline=model.image_newline,
                        vision_aspect_ratio=config.vision_aspect_ratio,
                    )
                    parts.append(packed[0])
            features.append(torch.cat(parts)[:kept])
        return features
