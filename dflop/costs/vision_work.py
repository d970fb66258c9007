"""What an encoder's patches, layers and projector do in one forward pass, for the counts of `work`."""

from dataclasses import dataclass

from dflop.costs.work import Layer, ModuleWork, PartWork, coefficients, size_of
from dflop.models import ModelSpec
from dflop.runtime import UserError

__all__ = ["vision_work"]

# Forward kernels of eager PyTorch, about: products, casts, norms and pointwise operations.
_NUM_KERNELS = {"layer": 30, "first": 10, "last": 20}


def vision_work(spec: ModelSpec, tp: int) -> ModuleWork:
    """Counts of the vision encoder and its projector on each of `tp` ranks; see `module_work`."""
    kind = _internvl(spec) if spec.family == "internvl" else _llava_onevision(spec)
    hidden, positions = spec.module("vision").hidden_size, kind.positions
    return ModuleWork(
        layer=kind.layer.work(
            tp,
            "num_items",
            positions,
            ("num_items", positions**2),
            causal=False,
            num_kernels=_NUM_KERNELS["layer"],
        ),
        first=_first(spec, kind),
        last=_last(spec, kind, tp),
        input_bytes=coefficients(num_items=4.0 * positions * hidden),
        stage_bytes=coefficients(),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Encoder:
    """What the families' encoders differ in.

    An item has `positions` in the layers and `projected` of `projector_width` before the projector. `in_vectors` and
    `out_vectors` are parameters that are no matrices, before and behind the layers; `shuffle` and `shuffle_saved` bytes
    a projected position, moved and kept. A last norm may be there (`has_norm`) and not run.
    """

    layer: Layer
    positions: int
    projected: int
    projector_width: int
    in_vectors: int
    out_vectors: int
    shuffle: float
    shuffle_saved: float
    has_norm: bool
    norm_runs: bool
    has_biases: bool


def _llava_onevision(spec: ModelSpec) -> _Encoder:
    config, vision = spec.hf_config, spec.hf_config.get("vision_config", {})
    if vision.get("vision_use_head", True):
        raise UserError(
            f"the encoder of {spec.name} has SigLIP's pooling head, of which no analytic costs are known; set "
            "`vision_config.vision_use_head` to false (the model does not use the head) or `costs.source: measured`"
        )
    hidden, patches = spec.module("vision").hidden_size, _num_patches(spec)
    layers = config.get("vision_feature_layer", -1)
    return _Encoder(
        layer=_layer(spec, qkv_bias=True),
        positions=patches,
        projected=patches - (config.get("vision_feature_select_strategy", "full") == "default"),
        projector_width=hidden * (1 if isinstance(layers, int) else len(layers)),
        # The patch embedding's bias and the positions; behind, the newline between rows of patches.
        in_vectors=hidden + hidden * patches,
        out_vectors=spec.module("llm").hidden_size,
        shuffle=0.0,
        shuffle_saved=0.0,
        # The features are read from before SigLIP's last norm.
        has_norm=True,
        norm_runs=False,
        has_biases=bool(config.get("multimodal_projector_bias", True)),
    )


def _internvl(spec: ModelSpec) -> _Encoder:
    vision, rules = spec.hf_config.get("vision_config", {}), spec.rules
    hidden, positions = spec.module("vision").hidden_size, _num_patches(spec) + 1
    wide = hidden * int(1 / rules.downsample_ratio) ** 2
    has_norm = not vision.get("use_mean_pooling", True)
    places = positions if vision.get("use_absolute_position_embeddings", True) else 0
    return _Encoder(
        layer=_layer(
            spec,
            qkv_bias=bool(vision.get("attention_bias", False)),
            head_norm=hidden if vision.get("use_qk_norm", False) else 0,
            rms_norm=vision.get("norm_type") == "rms_norm",
            scaled=True,
        ),
        positions=positions,
        projected=rules.tokens_per_tile,
        projector_width=wide,
        # The patch embedding's bias, the class token, positions and mask; behind, the projector's norm.
        in_vectors=hidden * (2 + places + bool(vision.get("use_mask_token", False))),
        out_vectors=2 * wide,
        # Pixel shuffle copies twice, then comes a norm.
        shuffle=24.0 * wide,
        shuffle_saved=4.0 * wide + 8.0,
        has_norm=has_norm,
        norm_runs=has_norm,
        has_biases=True,
    )


def _layer(
    spec: ModelSpec, *, qkv_bias: bool, head_norm: int = 0, rms_norm: bool = False, scaled: bool = False
) -> Layer:
    sizes = spec.module("vision")
    return Layer(
        hidden=sizes.hidden_size,
        query=sizes.hidden_size,
        key_value=sizes.hidden_size,
        inner=size_of(spec, "vision_config", "intermediate_size"),
        num_heads=sizes.num_heads,
        head_norm=head_norm,
        rms_norm=rms_norm,
        gated=False,
        rotary=False,
        scaled=scaled,
        qkv_bias=qkv_bias,
        out_bias=True,
        mlp_bias=True,
    )


def _first(spec: ModelSpec, kind: _Encoder) -> PartWork:
    """The patch embedding, whole on every rank."""
    hidden, patches, rules = spec.module("vision").hidden_size, _num_patches(spec), spec.rules
    pixels, patch = 3 * rules.image_size**2, 3 * rules.patch_size**2
    return PartWork(
        dense_flops=coefficients(num_items=2.0 * patches * patch * hidden),
        square_flops=coefficients(),
        causal=False,
        matmul_bytes=coefficients(num_items=2.0 * (pixels + patches * hidden)),
        # The pixels' cast, positions added.
        pointwise_bytes=coefficients(num_items=6.0 * pixels + 10.0 * kind.positions * hidden),
        reduced_bytes=(coefficients(), coefficients()),
        saved_bytes=coefficients(2.0 * patch * hidden, num_items=2.0 * pixels),
        size=coefficients(num_items=patches * hidden),
        num_parameters=patch * hidden + kind.in_vectors,
        num_matrix_parameters=patch * hidden,
        num_kernels=_NUM_KERNELS["first"],
    )


def _last(spec: ModelSpec, kind: _Encoder, tp: int) -> PartWork:
    """The last norm and the projector."""
    hidden, out = spec.module("vision").hidden_size, spec.module("llm").hidden_size
    wide, positions, projected = kind.projector_width, kind.positions, kind.projected
    projector = (wide * out + out * out) / tp
    return PartWork(
        dense_flops=coefficients(num_items=2.0 * projected * projector),
        square_flops=coefficients(),
        causal=False,
        matmul_bytes=coefficients(num_items=2.0 * projected * (wide + 2 * out / tp + out)),
        # The last norm; shuffling, a cast, the activation, rows put together.
        pointwise_bytes=coefficients(
            num_items=8.0 * kind.norm_runs * positions * hidden
            + projected * (kind.shuffle + 6.0 * wide + 4.0 * out / tp + 4.0 * out)
        ),
        reduced_bytes=(
            coefficients(num_items=2.0 * projected * out),
            coefficients(num_items=2.0 * projected * wide),
        ),
        saved_bytes=coefficients(
            2.0 * projector,
            num_items=kind.norm_runs * positions * (4.0 * hidden + 8.0)
            + projected * (kind.shuffle_saved + 2.0 * wide + 4.0 * out / tp),
        ),
        size=coefficients(num_items=projected * out / tp),
        num_parameters=kind.out_vectors + 2 * kind.has_norm * hidden + projector + kind.has_biases * (out / tp + out),
        num_matrix_parameters=projector,
        num_kernels=_NUM_KERNELS["last"],
    )


def _num_patches(spec: ModelSpec) -> int:
    return (spec.rules.image_size // spec.rules.patch_size) ** 2
