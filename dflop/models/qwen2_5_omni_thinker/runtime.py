"""Building and feeding Qwen2.5-Omni's thinker: its Hugging Face config for a tokenizer, its stages, its items."""

from collections.abc import Mapping
from copy import deepcopy

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2_5OmniThinkerForConditionalGeneration
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

from dflop.base import UserError
from dflop.models.microbatch import EncoderBatch, MediumLayout, TextBatch
from dflop.models.qwen2_5_omni_thinker.layout import lay_out_sounds
from dflop.models.qwen2_5_omni_thinker.presets import make_spec
from dflop.models.qwen2_5_omni_thinker.processing import Qwen25OmniPatches, Qwen25OmniSounds
from dflop.models.qwen2_5_omni_thinker.stages import cut
from dflop.models.qwen2_5_vl import runtime as qwen2_5_vl
from dflop.models.qwen2_5_vl.layout import lay_out
from dflop.models.runtime import FamilyRuntime, MadeUpMedia
from dflop.models.spec import ModelSpec

__all__ = ["RUNTIME"]

if not hasattr(modeling, "Qwen2_5OmniThinkerModel"):  # whose parts had other names before
    raise UserError(
        f"`model.family: qwen2_5_omni_thinker` cannot be built with transformers {transformers.__version__}: "
        "pip install 'transformers>=5.23'"
    )

# Checkpoints on the hub and from `save_pretrained` have the tensor names of the family's first version. In a checkpoint
# of the whole model, the thinker's names begin with `thinker.`, and the parts that speak are not read.
_FIRST_NAMES = (
    (r"^(talker|token2wav)\..*", ""),
    (r"^thinker\.", ""),
    (r"^(audio_tower|visual)\.", r"model.\1."),
    (r"^model\.(?!language_model\.|visual\.|audio_tower\.)", "model.language_model."),
)
_IDS = {f"{kind}_token_id": kind for kind in ("image", "video", "audio")}
_IDS |= {"vision_start_token_id": "<|vision_bos|>", "vision_end_token_id": "<|vision_eos|>"}
_IDS |= {"audio_start_token_id": "<|audio_bos|>", "audio_end_token_id": "<|audio_eos|>"}


def with_depth(spec: ModelSpec, module: str, num_layers: int) -> ModelSpec:
    """The model with `num_layers` layers in one module. In the vision encoder, none of these has window attention."""
    if module != "audio":
        return make_spec(spec.name, qwen2_5_vl.fields_with_depth(spec, module, num_layers))
    fields = deepcopy(spec.hf_config)
    fields["audio_config"]["encoder_layers"] = num_layers
    return make_spec(spec.name, fields)


def make_up_media(spec: ModelSpec, module: str, num_items: int) -> MadeUpMedia:
    """Pictures as for Qwen2.5-VL, or a sound of `num_items` whole chunks."""
    if module == "vision":
        return qwen2_5_vl.make_up_media(spec, module, num_items)
    num_mels, chunk = spec.hf_config["audio_config"].get("num_mel_bins", 128), spec.rules.chunk_frames
    sound = MediumLayout("audio", num_items, 0, 0, (num_items * chunk, 1, 1))
    return MadeUpMedia(item_shape=(num_mels, chunk), media=(sound,))


def plain_inputs(media: Mapping[str, EncoderBatch], text: TextBatch) -> dict[str, torch.Tensor]:
    """Patches as for Qwen2.5-VL, the sounds' mel frames padded to the longest, and attention masks, from which
    transformers computes positions."""
    seen = {name: batch for name, batch in media.items() if name == "vision"}
    inputs = qwen2_5_vl.plain_inputs(seen, text)
    inputs.pop("mm_token_type_ids", None)
    if "second_per_grid_ts" in inputs:
        inputs["video_second_per_grid"] = inputs.pop("second_per_grid_ts")
    inputs["attention_mask"] = torch.ones_like(text.token_ids)[None]
    if "audio" in media:
        (layouts,) = media["audio"].media
        chunks = media["audio"].items.split([medium.num_items for medium in layouts])
        frames = [
            own.transpose(0, 1).flatten(1)[:, : medium.grid[0]].T for own, medium in zip(chunks, layouts, strict=True)
        ]
        inputs["input_features"] = pad_sequence(frames, batch_first=True).transpose(1, 2)
        masks = [torch.ones(len(own), dtype=torch.long) for own in frames]
        inputs["feature_attention_mask"] = pad_sequence(masks, batch_first=True)
    return inputs


RUNTIME = FamilyRuntime(
    architecture=Qwen2_5OmniThinkerForConditionalGeneration,
    token_fields=_IDS,
    cut=cut,
    weight_renamings=_FIRST_NAMES,
    packs_media=True,
    processors={"vision": Qwen25OmniPatches, "audio": Qwen25OmniSounds},
    layouts={"vision": lay_out, "audio": lay_out_sounds},
    with_depth=with_depth,
    make_up_media=make_up_media,
    plain_inputs=plain_inputs,
)
