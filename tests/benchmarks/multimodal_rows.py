"""Published runs of multimodal LLMs as they are priced: models, plans and shapes, and what of these is assumed.

Models that dflop does not train are priced as the family here that computes nearly the same: CLIP as SigLIP (no class
token), RICE-ViT and Pixtral as Qwen3-VL's encoder without DeepStack, InternLM2.5 and Vicuna as Llamas.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from dflop.models import family_of
from dflop.models.presets import LLMS
from dflop.models.spec import ModelSpec
from dflop.plan.trained import EVERYTHING, TrainedSet

__all__ = ["NOT_PRICED", "NUM_STEPS", "Row", "Sample", "rows", "spec_of"]

# Runs of class A, B and C that have no row, and why.
NOT_PRICED = {
    "swift_qwen2_5_omni_7b_megatron": "the mix of text, pictures and sound is not known",
    "swift_qwen2_5_14b_8k_megatron": "its layout is not given",
    "llava_ov15_8b_midtraining": "its layout is not given",
    "nanovlm_222m_h100": "its batches are not given",
    "user_llava_grouping": "its hardware is not given",
    "hf_batch_rebalance_memory": "of a card without a data sheet here, with padded batches",
}
# Steps of whole runs: an epoch of 558,128 or 665,298 samples.
NUM_STEPS = {
    f"llava15_{size}_{stage}": steps for size in ("7b", "13b") for stage, steps in (("pretrain", 2181), ("sft", 5198))
}

PROJECTOR, NOT_THE_ENCODER = TrainedSet(named=("projector",)), TrainedSet(named=("projector", "llm"))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """`num_items` items of the encoder, of which `kept` tokens are among the LLM's `tokens`."""

    num_items: int
    kept: int
    tokens: int
    sum_sq_items: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run as it is priced: every replica's microbatches all hold `samples`.

    Where the encoder has another tp than the LLM (`encoder_tp`), the groups of ranks that hold copies of it compute the
    same. With `cp`, as many replicas of the LLM compute each sample; items are those that each of them encodes. With
    `encoder_shares`, as many of them each compute another part of the microbatches. Replicas that share
    gradients, too (`shares_gradients`, ZeRO-2), hold fewer bytes.
    """

    name: str
    spec: ModelSpec
    assumed: str
    samples: tuple[Sample, ...]
    num_microbatches: int
    device: str = "a800-80g"
    implementation: str = "megatron"
    of_encoder: str = ""
    num_devices: int = 8
    tp: int = 1
    pp: int = 1
    cp: int = 1
    layers: tuple[int, ...] = ()
    num_chunks: int = 1
    encoder_tp: int = 0
    encoder_shares: int = 1
    sharding: str = "optimizer"
    shares_gradients: bool = False
    recomputed: tuple[int, ...] = ()
    recomputes_encoder: bool = False
    trained: TrainedSet = EVERYTHING


# ---------------------------------------------------------------- models


@cache
def spec_of(name: str) -> ModelSpec:
    family, fields = _MODELS[name]()
    return family_of(family).make_spec(name, fields, {})


def _internvl(text: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "internvl", family_of("internvl").presets["internvl_8b"] | {"text_config": text}


def _llava(text: dict[str, Any], side: int = 336, patch: int = 14, **vision: int) -> tuple[str, dict[str, Any]]:
    """A LLaVA of plain pictures, each one item."""
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    } | vision
    kept = {"model_type": "siglip_vision_model", "image_size": side, "patch_size": patch, "vision_use_head": False}
    return "llava_onevision", {
        "model_type": "llava_onevision",
        "vision_config": sizes | kept,
        "text_config": text,
        "image_grid_pinpoints": [[side, side]],
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
    }


def _native(preset: str, vision: dict[str, Any], text: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Pictures of any size whose patches all attend to each other, without DeepStack."""
    fields = family_of("qwen3_vl").presets[preset]
    text = fields["text_config"] | (text or {})
    vision = fields["vision_config"] | {"deepstack_visual_indexes": [], "patch_size": 14} | vision
    return "qwen3_vl", fields | {
        "vision_config": vision | {"out_hidden_size": text["hidden_size"]},
        "text_config": text,
    }


def _llama(
    hidden: int, inner: int, layers: int, heads: int, kv: int, vocabulary: int, kind: str = "llama", **more: Any
):
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return dict(zip(names, (hidden, inner, layers, heads, kv), strict=True)) | {
        "model_type": kind,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        **more,
    }


def _preset(family: str, name: str) -> tuple[str, dict[str, Any]]:
    return family, family_of(family).presets[name]


_PIXTRAL = {"depth": 24, "hidden_size": 1024, "intermediate_size": 6144}
_MINISTRAL = {"hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 26, "vocab_size": 131_072}
_MODELS: dict[str, Callable[[], tuple[str, dict[str, Any]]]] = {
    "internvl2_5_8b": lambda: _internvl(_llama(4096, 14336, 32, 32, 8, 92_553)),
    "internvl3_5_8b": lambda: _internvl(_llama(4096, 12288, 36, 32, 8, 151_936, "qwen3", head_dim=128)),
    "llava_ov_1_5_4b": lambda: _native("qwen3_vl_4b", {}),
    "qwen2_5_vl_7b": lambda: _preset("qwen2_5_vl", "qwen2_5_vl_7b"),
    "qwen3_vl_4b": lambda: _preset("qwen3_vl", "qwen3_vl_4b"),
    "ministral3_3b": lambda: _native("qwen3_vl_4b", _PIXTRAL, _MINISTRAL),
    "llava_1_5_7b": lambda: _llava(_llama(4096, 11008, 32, 32, 32, 32_000)),
    "llava_1_5_13b": lambda: _llava(_llama(5120, 13824, 40, 40, 40, 32_000)),
    "llava_tiny": lambda: _llava(
        _llama(624, 1664, 12, 12, 12, 8_193),
        hidden_size=624,
        intermediate_size=2496,
        num_hidden_layers=12,
        num_attention_heads=12,
    ),
    "nanovlm": lambda: _llava(
        _llama(576, 1536, 30, 9, 3, 49_152, tie_word_embeddings=True),
        224,
        16,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
    ),
    "qwen2_5_72b": lambda: _llava(LLMS["qwen2.5_72b"]),
    "qwen2_5_14b": lambda: _llava(
        LLMS["qwen2.5_32b"] | {"intermediate_size": 13824, "num_hidden_layers": 48, "vocab_size": 152_064}
    ),
}


def _picture(spec: ModelSpec, tokens: int, side: int) -> Sample:
    """A sample with one square picture of `side` pixels, and `tokens` tokens in all."""
    count = spec.rules.image(side, side, 1)
    return Sample(
        num_items=count.num_items, kept=count.num_tokens, tokens=tokens, sum_sq_items=count.sum_sq_items
    )  # fmt: skip


def _text(tokens: int) -> Sample:
    return Sample(num_items=0, kept=0, tokens=tokens)


# ---------------------------------------------------------------- rows


def rows() -> list[Row]:
    """All rows, in one long function, as they are a table."""
    tile_packs = tuple(Sample(num_items=12, kept=3072, tokens=4096) for _ in range(4))
    qwen, ov, llava, tiny = map(spec_of, ("qwen2_5_vl_7b", "llava_ov_1_5_4b", "llava_1_5_7b", "llava_tiny"))
    forge_packs = {"tp": 4, "num_microbatches": 16, "samples": tile_packs, "recomputed": (12,)}
    full = "packs are full: 16,384 tokens in four samples, 48 tiles"
    forge_ov = {"spec": ov, "tp": 2, "pp": 2, "num_microbatches": 16, "recomputed": (4, 4)}
    small = {"spec": qwen, "tp": 4, "pp": 2, "num_microbatches": 32}
    hetero = small | {"samples": (_picture(qwen, 1024, 672), _picture(qwen, 1024, 672))}
    tp_pictures = small | {"samples": (_picture(qwen, 390, 448),), "recomputed": (14, 14)}
    unknown = "microbatches of 2,048 tokens, 1,152 of them of two pictures; the source gives none"
    alike = "as lf_qwen2_5_vl_7b_pretrain_tp4_pp2, which is as fast"
    one_llava = Sample(num_items=1, kept=576, tokens=640)
    ov_packs = {
        share: tuple(_picture(ov, 959, round(28 * (959 * share) ** 0.5)) for _ in range(4))
        for share in (0.3, 0.55, 0.8)
    }
    rows = [
        Row(name="lf_internvl2_5_8b_tp4_dp2", spec=spec_of("internvl2_5_8b"), assumed=full, **forge_packs),
        Row(name="lf_internvl3_5_8b_tp4_dp2", spec=spec_of("internvl3_5_8b"), assumed=full, **forge_packs),
        *(
            Row(
                name=f"lf_llava_ov_1_5_4b_tp2_pp2_dp2{'' if share == 0.55 else f'/{share:.0%}'}",
                samples=samples,
                assumed=f"four samples a pack, {share:.0%} of the tokens visual",
                **forge_ov,
            )
            for share, samples in ov_packs.items()
        ),
        Row(
            name="lf_qwen2_5_vl_7b_pretrain_tp4_pp2",
            samples=(_picture(qwen, 390, 448),),
            assumed="256 of the 390 tokens of a picture",
            layers=(6, 8, 6, 8),
            num_chunks=2,
            recomputed=(6, 8, 6, 8),
            encoder_tp=2,
            **small,
        ),
        Row(
            name="lf_qwen2_5_vl_7b_dp8",
            spec=qwen,
            num_microbatches=4,
            samples=(_picture(qwen, 88, 224),),
            assumed="64 of the 88 tokens of a picture",
        ),
        Row(name="lf_hetero_dp_base", assumed=unknown, encoder_tp=4, **hetero),
        Row(name="lf_hetero_dp_encoder_on_all_tp_ranks", assumed=unknown, encoder_tp=1, encoder_shares=4, **hetero),
        *(Row(name=f"lf_hetero_tp_{tp}", assumed=alike, encoder_tp=tp, **tp_pictures) for tp in (4, 2, 1)),
        Row(
            name="mcore_mimo_llava7b_projector_packed_dp8",
            spec=llava,
            device="h100-80g",
            of_encoder="eager",
            num_microbatches=4,
            samples=(one_llava,) * 4,
            trained=PROJECTOR,
            assumed="four samples of 640 tokens a pack",
        ),
        Row(
            name="mcore_mimo_llava7b_projector_cp2",
            spec=llava,
            device="h100-80g",
            of_encoder="eager",
            num_microbatches=4,
            cp=2,
            samples=(Sample(num_items=2, kept=576, tokens=2048),) * 8,
            trained=PROJECTOR,
            assumed="both ranks of a sample encode all its pictures",
        ),
        *(
            Row(
                name=f"veomni_fsdp_sp/{sp}x{tokens}",
                spec=spec_of("qwen2_5_72b"),
                device="h100-80g",
                implementation="fused",
                num_devices=32,
                num_microbatches=1,
                cp=sp,
                samples=(_text(tokens),),
                sharding="parameters",
                recomputed=(80,),
                assumed="a dense 72B on 32 H100s, all layers recomputed",
            )
            for tokens in (8192, 16384, 32768, 65536, 131072)
            for sp in (4, 8)
            if (sp, tokens) != (4, 131072)  # out of memory there
        ),
        *(
            Row(
                name=f"mcore_llava_tiny_{card}",
                spec=tiny,
                device=f"{card}-80g",
                num_microbatches=1,
                samples=(Sample(num_items=1, kept=576, tokens=1601),) * 4,
                assumed="all shapes are known; a gated MLP of as many weights in the LLM",
            )
            for card in ("h100", "a100")
        ),
        *(
            Row(
                name=name,
                spec=spec,
                device="h100-80g",
                implementation="eager",
                num_microbatches=1,
                samples=(_picture(spec, tokens, side),),
                sharding="parameters",
                trained=NOT_THE_ENCODER,
                assumed=f"{of_picture} of the {tokens} tokens of a picture{others}",
            )
            for name, spec, tokens, side, of_picture, others in (
                ("automodel_qwen3_vl_4b_rdr", spec_of("qwen3_vl_4b"), 607, 640, 400, ""),
                ("automodel_ministral3_3b_medpix", spec_of("ministral3_3b"), 561, 504, 324, "; sizes are, too"),
            )
        ),
        *(
            Row(
                name=f"swift_qwen2_5_vl_7b_recompute/{number}",
                spec=qwen,
                device="a100-80g",
                implementation="fused",
                of_encoder="eager",
                num_devices=4,
                num_microbatches=1,
                samples=(_clip(qwen, 600, 12, 224),) * 4,
                sharding="parameters",
                recomputed=(28 * of_llm,),
                recomputes_encoder=bool(of_encoder),
                assumed="A100s; clips of twelve frames of 224 px (384 tokens) and 216 tokens of text; Liger's kernels",
            )
            for number, (of_llm, of_encoder) in enumerate(((1, 1), (1, 0), (0, 1), (0, 0)))
        ),
        Row(
            name="swift_qwen2_5_vl_7b_megatron_full",
            spec=qwen,
            device="a100-80g",
            num_devices=2,
            tp=2,
            num_microbatches=4,
            samples=(_picture(qwen, 256, 336),) * 8,
            recomputed=(28,),
            trained=TrainedSet(named=("llm",)),
            assumed="A100s; eight samples a pack with pictures of 144 tokens",
        ),
        *(
            Row(
                name=f"swift_qwen2_5_14b_8k_{name}",
                spec=spec_of("qwen2_5_14b"),
                implementation="eager",
                num_microbatches=2,
                samples=(_text(8192),),
                sharding=sharding,
                recomputed=(48,),
                shares_gradients=name == "zero2",
                assumed="packs of one segment",
            )
            for name, sharding in (("zero3", "parameters"), ("zero2", "optimizer"))
        ),
        *(
            Row(
                name=f"llava15_{size}_{stage}",
                spec=spec_of(f"llava_1_5_{size}"),
                device="a100-80g",
                implementation="eager",
                num_microbatches=1,
                samples=(Sample(num_items=1, kept=576, tokens=tokens),) * num_samples,
                sharding=sharding,
                recomputed=(32 if size == "7b" else 40,),
                trained=trained,
                assumed=f"{tokens} tokens a sample with padding, {num_samples} a device at once",
            )
            for stage, tokens, num_samples, sharding, trained in (
                ("pretrain", 640, 32, "optimizer", PROJECTOR),
                ("sft", 976, 16, "parameters", NOT_THE_ENCODER),
            )
            for size in ("7b", "13b")
        ),
        *(
            Row(
                name=f"nanovlm_222m_memory/{batch}",
                spec=spec_of("nanovlm"),
                device="h100-80g",
                implementation="eager",
                num_devices=1,
                num_microbatches=1,
                samples=(Sample(num_items=1, kept=64, tokens=128),) * batch,
                assumed="layers in bf16, where the run's autocast keeps some values in fp32",
            )
            for batch in (16, 64, 256)
        ),
    ]
    return rows


def _clip(spec: ModelSpec, tokens: int, num_frames: int, side: int) -> Sample:
    count = spec.rules.video(num_frames, side, side)
    return Sample(num_items=count.num_items, kept=count.num_tokens, tokens=tokens, sum_sq_items=count.sum_sq_items)
