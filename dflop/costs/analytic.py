"""Costs from the model's structure and a device's data sheet, for hardware that is not at hand.

`module_work` counts what a layer, and what begins and ends a module, do in one forward pass: FLOPs, bytes moved, bytes
kept for backward, parameters, all as linear functions of a microbatch's loads and from the config alone.
`analytic_points` turns the counts into seconds on a device of `devices.yaml` and gives the frames that
measuring gives, so that `fit_costs` and all that follows take them as they take measured ones.

Counted is what `dflop profile-costs` would see with `train.precision: bf16`: Hugging Face's layers in eager
PyTorch, fp32 weights and residual stream, matrix products in bf16 (autocast, which keeps a bf16 copy of the
weights for each microbatch in flight), FlashAttention on packed segments. Not counted: the optimiser, gradient
sync, workspace inside a pass, and the kernels' padding. Backward does twice the matrix products of forward.

Tensor parallelism divides as Megatron's does: heads, the MLP's inner width, the projector's, and the vocabulary.
Norms, the residual stream, the patch embedding and biases after a reduction are whole on every rank (no
sequence parallelism), for two all-reduces of the hidden states a layer in forward and two in backward.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from dflop.costs.model import FEATURES, Coefficients, Loads
from dflop.devices import DeviceModel
from dflop.errors import UserError
from dflop.models import ModelSpec, check_tp

__all__ = ["AnalyticPoints", "ModuleWork", "PartWork", "analytic_points", "module_work"]

# What is priced: piece, number of layers, checkpointing; `whole` tells how well a fit of the others adds up.
_PIECES = (
    ("layers", 1, False),
    ("layers", 4, False),
    ("layers", 1, True),
    ("layers", 4, True),
    ("first", 0, False),
    ("last", 0, False),
    ("whole", 2, False),
    ("whole", 3, True),
)
_NUM_ITEMS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597, 2000)
_NUM_TOKENS = tuple(64 << doubling for doubling in range(12))
# The length of a microbatch's segments, and the share of its tokens that are learned.
_TEXT_FORMS = ((16_384, 0.5), (2_048, 0.05), (2_048, 0.5), (256, 0.1))

# Forward kernels of eager PyTorch, about: products, casts, norms, rotary positions and pointwise operations.
_NUM_KERNELS = {
    ("llm", "layer"): 50,
    ("llm", "first"): 10,
    ("llm", "last"): 20,
    ("vision", "layer"): 30,
    ("vision", "first"): 10,
    ("vision", "last"): 20,
}
_TEXT_TYPES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartWork:
    """What a layer, or the first or last part of a module, does on one tensor-parallel rank in one forward pass.

    `square_flops` is attention over the whole square of every segment, which is what torch's FlopCounterMode
    counts; the variable-length kernels skip the half above the diagonal where the module is `causal`.
    `num_matrix_parameters` are those that autocast copies. `reduced_bytes` go through all-reduces, in forward
    and in backward. `size` is what the speed of matrix products depends on.
    """

    dense_flops: Coefficients
    square_flops: Coefficients
    causal: bool
    matmul_bytes: Coefficients
    pointwise_bytes: Coefficients
    reduced_bytes: tuple[Coefficients, Coefficients]
    saved_bytes: Coefficients
    size: Coefficients
    num_parameters: float
    num_matrix_parameters: float
    num_kernels: int

    def attention_flops(self, loads: Loads) -> np.ndarray:
        return self.square_flops(loads) * (0.5 if self.causal else 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleWork:
    """The parts of a module. `input_bytes` is a layer's input, which is all that checkpointing keeps of it;
    `stage_bytes` is what every stage keeps once."""

    layer: PartWork
    first: PartWork
    last: PartWork
    input_bytes: Coefficients
    stage_bytes: Coefficients


@dataclass(frozen=True, slots=True)
class AnalyticPoints:
    """What measuring gives: the rows of `measurements`, and the sizes of the parts' parameters."""

    measurements: pl.DataFrame
    parameters: pl.DataFrame


def module_work(spec: ModelSpec, module: str, tp: int = 1) -> ModuleWork:
    """Counts of one module on each of `tp` ranks.

    Raises:
        UserError: when tp does not divide the module's heads, or the config lacks a size or is of an unknown kind.
    """
    check_tp(spec, module, tp)
    return _llm_work(spec, tp) if module == "llm" else _vision_work(spec, tp)


def analytic_points(spec: ModelSpec, module: str, tp: int, device: DeviceModel) -> AnalyticPoints:
    """Roofline seconds and saved bytes of `module` at two depths and over the loads that real data has.

    Matrix products take the longer of computing and moving their operands; attention is computed, pointwise
    kernels move bytes, all-reduces follow a ring, and every kernel is launched.

    Raises:
        UserError: as `module_work` does.
    """
    work = module_work(spec, module, tp)
    points = _vision_points() if module != "llm" else _llm_points()
    loads = Loads(*(np.array([point[feature] for point in points], dtype=float) for feature in FEATURES))
    nothing = np.zeros(len(points))
    kept = {part: getattr(work, part).saved_bytes(loads) for part in ("layer", "first", "last")}
    frames = []
    for direction in ("forward", "backward"):
        seconds = {
            part: _part_s(getattr(work, part), device, loads, direction, tp) for part in ("layer", "first", "last")
        }
        again_s = _part_s(work.layer, device, loads, "forward", tp) if direction == "backward" else nothing
        for piece, depth, checkpointing in _PIECES:
            layer_s = depth * (seconds["layer"] + checkpointing * again_s)
            saved = depth * (work.input_bytes(loads) if checkpointing else kept["layer"])
            # One layer at a time is computed again in full.
            transient = kept["layer"] if checkpointing else nothing
            if piece != "layers":
                ends = ("first", "last") if piece == "whole" else (piece,)
                layer_s = layer_s + sum(seconds[part] for part in ends)
                saved = saved + sum(kept[part] for part in ends)
            if piece in ("layers", "whole"):
                saved = saved + work.stage_bytes(loads)
            frames.append(
                pl.DataFrame(points).with_columns(
                    module=pl.lit(module),
                    tp=pl.lit(tp, pl.Int64),
                    piece=pl.lit(piece),
                    num_layers=pl.lit(depth, pl.Int64),
                    checkpointing=checkpointing,
                    seconds=pl.Series(layer_s),
                    peak_bytes=pl.Series(saved + transient).cast(pl.Int64),
                    saved_bytes=pl.Series(saved).cast(pl.Int64),
                    repeat=pl.lit(0, pl.Int64),
                    **{"pass": pl.lit(direction)},
                )
            )
    sizes = [
        {"module": module, "tp": tp, "part": part, "parameter_bytes": 4.0 * getattr(work, part).num_parameters}
        for part in ("layer", "first", "last")
    ]
    return AnalyticPoints(pl.concat(frames), pl.DataFrame(sizes))


def _vision_points() -> list[dict[str, int]]:
    return [dict.fromkeys(FEATURES, 0) | {"num_items": num_items} for num_items in _NUM_ITEMS]


def _llm_points() -> list[dict[str, int]]:
    return [
        {
            "num_items": 0,
            "num_tokens": num_tokens,
            "sum_sq_tokens": num_tokens * min(num_tokens, length),
            "num_targets": max(1, int(num_tokens * target_share)),
        }
        for num_tokens in _NUM_TOKENS
        for length, target_share in _TEXT_FORMS
    ]


def _part_s(part: PartWork, device: DeviceModel, loads: Loads, direction: str, tp: int) -> np.ndarray:
    """Seconds of one part in one direction.

    Beside what it computes on, forward reads the fp32 weights and writes their bf16 copies; backward turns bf16
    gradients into fp32 ones and adds them to what other microbatches left (18 bytes a parameter).
    """
    times, cast_bytes = (1, 6.0) if direction == "forward" else (2, 18.0)
    memory_rate = device.memory_bytes_per_s * device.memory_share
    computing_s = times * part.dense_flops(loads) / device.matmul_flops_per_s(part.size(loads))
    moving_s = times * (part.matmul_bytes(loads) + 2.0 * part.num_matrix_parameters) / memory_rate
    attention_s = times * part.attention_flops(loads) / (device.peak_flops_per_s * device.attention_share)
    pointwise_s = (times * part.pointwise_bytes(loads) + cast_bytes * part.num_matrix_parameters) / memory_rate
    on_the_ring = 2 * (tp - 1) / tp * part.reduced_bytes[direction == "backward"](loads)
    reducing_s = on_the_ring / (device.link_bytes_per_s * device.link_share)
    launching_s = times * part.num_kernels * device.launch_s
    return np.maximum(computing_s, moving_s) + attention_s + pointwise_s + reducing_s + launching_s


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """A transformer layer by its widths; every method counts for one position, on one of `tp` ranks.

    `head_norm` is the width that a norm of the queries sees: all of them, one head, or 0 for none.
    """

    hidden: int
    query: int
    key_value: int
    inner: int
    num_heads: int
    head_norm: int = 0
    rms_norm: bool
    gated: bool
    rotary: bool
    scaled: bool = False
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool

    @property
    def qkv(self) -> int:
        return self.query + 2 * self.key_value

    @property
    def num_ups(self) -> int:
        return 2 if self.gated else 1

    def num_casts(self, tp: int) -> int:
        """Of inputs to bf16: one a matrix, but what is cast where ranks share matrices is cast once for all of them."""
        return 3 + self.num_ups if tp == 1 else 2

    def num_matrix_parameters(self, tp: int) -> float:
        return (self.hidden * (self.qkv + self.query) + (self.num_ups + 1) * self.hidden * self.inner) / tp

    def num_parameters(self, tp: int) -> float:
        """Norms, layer scales, and the biases that follow a reduction are whole on every rank."""
        divided = self.qkv_bias * self.qkv + self.mlp_bias * self.num_ups * self.inner
        whole = 2 * self.hidden * (1 if self.rms_norm else 2)
        whole += (self.out_bias + self.mlp_bias + 2 * self.scaled) * self.hidden
        if self.head_norm == self.query:
            divided += self.query + self.key_value
        else:
            whole += 2 * self.head_norm
        return self.num_matrix_parameters(tp) + divided / tp + whole

    def saved_bytes(self, tp: int) -> float:
        """What autograd keeps: fp32 in and around norms, bf16 in and out of products and attention."""
        norms = 2 * (8 * self.hidden + 4 if self.rms_norm else 4 * self.hidden + 8)
        casts = 2 * self.num_casts(tp) * self.hidden
        scales = 4 * self.hidden * self.scaled
        attention = 4 * self.query + 4 * self.key_value + 4 * self.num_heads
        if self.head_norm:
            attention += 6 * (self.query + self.key_value) + 4 * (self.query + self.key_value) // self.head_norm
        mlp = (8 if self.gated else 4) * self.inner
        return norms + casts + scales + (attention + mlp) / tp

    def matmul_bytes(self, tp: int) -> float:
        """Operands and results of the products and of attention, in bf16."""
        whole = (5 + self.num_ups) * self.hidden
        divided = self.qkv + self.query + 2 * (self.query + self.key_value) + (self.num_ups + 1) * self.inner
        return 2.0 * (whole + divided / tp)

    def pointwise_bytes(self, tp: int) -> float:
        """What unfused kernels read and write: norms, casts, rotary positions, activation, residual sums."""
        whole = 2 * (28 if self.rms_norm else 8) + 6 * self.num_casts(tp) + 20 + 16 * self.scaled
        per_head = 36 * self.rotary + 44 * bool(self.head_norm)
        divided = per_head * (self.query + self.key_value) + (10 if self.gated else 4) * self.inner
        return whole * self.hidden + divided / tp

    def work(self, tp: int, module: str, load: str, positions: int, squares: tuple[str, int]) -> PartWork:
        """For a `load` that brings so many positions, and for `squares`, a load and the squares that it brings."""

        def per_load(count: float) -> Coefficients:
            return _coefficients(**{load: positions * count})

        matrices = self.num_matrix_parameters(tp)
        reduced_bytes = per_load(2 * 2.0 * self.hidden)
        return PartWork(
            dense_flops=per_load(2.0 * matrices),
            square_flops=_coefficients(**{squares[0]: 4.0 * self.query / tp * squares[1]}),
            causal=module == "llm",
            matmul_bytes=per_load(self.matmul_bytes(tp)),
            pointwise_bytes=per_load(self.pointwise_bytes(tp)),
            reduced_bytes=(reduced_bytes, reduced_bytes),
            saved_bytes=_coefficients(2.0 * matrices, **{load: positions * self.saved_bytes(tp)}),
            size=per_load(self.hidden / tp),
            num_parameters=self.num_parameters(tp),
            num_matrix_parameters=matrices,
            num_kernels=_NUM_KERNELS[module, "layer"],
        )


def _llm_work(spec: ModelSpec, tp: int) -> ModuleWork:
    text = spec.hf_config["text_config"]
    kind = text.get("model_type", "qwen2")
    if kind not in _TEXT_TYPES:
        raise UserError(
            f"the LLM of {spec.name} is a {kind!r}, of which no analytic costs are known (only of "
            f"{', '.join(_TEXT_TYPES)}); use `costs.source: measured`"
        )
    sizes = spec.module("llm")
    hidden = sizes.hidden_size
    head_dim = text.get("head_dim") or (128 if kind == "qwen3" else hidden // sizes.num_heads)
    vocabulary = _size_of(spec, "text_config", "vocab_size") / tp
    biased = bool(text.get("attention_bias", False)) and kind != "qwen2"
    layer = _Layer(
        hidden=hidden,
        query=sizes.num_heads * head_dim,
        key_value=sizes.num_kv_heads * head_dim,
        inner=_size_of(spec, "text_config", "intermediate_size"),
        num_heads=sizes.num_heads,
        head_norm=head_dim if kind == "qwen3" else 0,
        rms_norm=True,
        gated=True,
        rotary=True,
        qkv_bias=biased or kind == "qwen2",
        out_bias=biased,
        mlp_bias=bool(text.get("mlp_bias", False)) and kind == "llama",
    )
    matrix = vocabulary * hidden
    first = PartWork(
        dense_flops=_coefficients(),
        square_flops=_coefficients(),
        causal=True,
        matmul_bytes=_coefficients(),
        # The embedding and putting visual features in.
        pointwise_bytes=_coefficients(num_tokens=16.0 * hidden),
        # Embeddings in fp32.
        reduced_bytes=(_coefficients(num_tokens=4.0 * hidden), _coefficients()),
        # Ids, and features as if every token were visual.
        saved_bytes=_coefficients(num_tokens=16.0 + 4.0 * hidden),
        size=_coefficients(),
        num_parameters=matrix,
        num_matrix_parameters=0.0,
        num_kernels=_NUM_KERNELS["llm", "first"],
    )
    last = PartWork(
        # The head computes on target positions only.
        dense_flops=_coefficients(num_targets=2.0 * matrix),
        square_flops=_coefficients(),
        causal=True,
        matmul_bytes=_coefficients(num_targets=2.0 * (hidden + vocabulary)),
        # The norm, the logits in fp32, their softmax.
        pointwise_bytes=_coefficients(num_targets=42.0 * hidden + 14.0 * vocabulary),
        # Two all-reduces of the loss's three numbers a target.
        reduced_bytes=(_coefficients(num_targets=12.0), _coefficients(num_targets=2.0 * hidden)),
        # The norm's two, its cast, and the log-probabilities in fp32.
        saved_bytes=_coefficients(2.0 * matrix, num_targets=20.0 + 10.0 * hidden + 4.0 * vocabulary),
        size=_coefficients(num_targets=hidden / tp),
        num_parameters=(0 if _is_tied(spec) else matrix) + hidden,
        num_matrix_parameters=matrix,
        num_kernels=_NUM_KERNELS["llm", "last"],
    )
    return ModuleWork(
        layer=layer.work(tp, "llm", "num_tokens", 1, ("sum_sq_tokens", 1)),
        first=first,
        last=last,
        input_bytes=_coefficients(num_tokens=4.0 * hidden),
        # Rotary cosines and sines.
        stage_bytes=_coefficients(num_tokens=8.0 * head_dim),
    )


def _vision_work(spec: ModelSpec, tp: int) -> ModuleWork:
    vision, is_internvl = spec.hf_config.get("vision_config", {}), spec.family == "internvl"
    if not is_internvl and vision.get("vision_use_head", True):
        raise UserError(
            f"the encoder of {spec.name} has SigLIP's pooling head, of which no analytic costs are known; set "
            "`vision_config.vision_use_head` to false (the model does not use the head) or `costs.source: measured`"
        )
    sizes, rules = spec.module("vision"), spec.rules
    hidden, out = sizes.hidden_size, spec.module("llm").hidden_size
    qk_norm, rms_norm = bool(vision.get("use_qk_norm", False)), vision.get("norm_type") == "rms_norm"
    qkv_bias = bool(vision.get("attention_bias", False)) if is_internvl else True
    layer = _Layer(
        hidden=hidden,
        query=hidden,
        key_value=hidden,
        inner=_size_of(spec, "vision_config", "intermediate_size"),
        num_heads=sizes.num_heads,
        head_norm=hidden if is_internvl and qk_norm else 0,
        rms_norm=is_internvl and rms_norm,
        gated=False,
        rotary=False,
        scaled=is_internvl,
        qkv_bias=qkv_bias,
        out_bias=True,
        mlp_bias=True,
    )
    patches = (rules.image_size // rules.patch_size) ** 2
    pixels, patch = 3 * rules.image_size**2, 3 * rules.patch_size**2
    in_vectors, out_vectors = hidden, 0  # the patch embedding's bias
    if is_internvl:
        positions, projected = patches + 1, rules.tokens_per_tile
        wide = hidden * int(1 / rules.downsample_ratio) ** 2
        has_norm = not vision.get("use_mean_pooling", True)
        places = positions if vision.get("use_absolute_position_embeddings", True) else 0
        in_vectors += hidden * (1 + places + bool(vision.get("use_mask_token", False)))
        out_vectors += 2 * wide
        # Pixel shuffle copies twice, then comes a norm.
        shuffle, shuffle_saved = 24.0 * wide, 4.0 * wide + 8.0
        biases = True
    else:
        positions, has_norm = patches, True
        layers = spec.hf_config.get("vision_feature_layer", -1)
        projected = patches - (spec.hf_config.get("vision_feature_select_strategy", "full") == "default")
        wide = hidden * (1 if isinstance(layers, int) else len(layers))
        in_vectors += hidden * patches
        out_vectors += out  # the newline between rows of patches
        shuffle = shuffle_saved = 0.0
        biases = bool(spec.hf_config.get("multimodal_projector_bias", True))
    projector = (wide * out + out * out) / tp
    norm_runs = has_norm and is_internvl  # LLaVA-OneVision reads what comes before SigLIP's last norm
    first = PartWork(
        dense_flops=_coefficients(num_items=2.0 * patches * patch * hidden),
        square_flops=_coefficients(),
        causal=False,
        matmul_bytes=_coefficients(num_items=2.0 * (pixels + patches * hidden)),
        # The pixels' cast, positions added.
        pointwise_bytes=_coefficients(num_items=6.0 * pixels + 10.0 * positions * hidden),
        reduced_bytes=(_coefficients(), _coefficients()),
        saved_bytes=_coefficients(2.0 * patch * hidden, num_items=2.0 * pixels),
        size=_coefficients(num_items=patches * hidden),
        num_parameters=patch * hidden + in_vectors,
        num_matrix_parameters=patch * hidden,
        num_kernels=_NUM_KERNELS["vision", "first"],
    )
    last = PartWork(
        dense_flops=_coefficients(num_items=2.0 * projected * projector),
        square_flops=_coefficients(),
        causal=False,
        matmul_bytes=_coefficients(num_items=2.0 * projected * (wide + 2 * out / tp + out)),
        # The last norm; shuffling, a cast, the activation, rows put together.
        pointwise_bytes=_coefficients(
            num_items=8.0 * norm_runs * positions * hidden
            + projected * (shuffle + 6.0 * wide + 4.0 * out / tp + 4.0 * out)
        ),
        reduced_bytes=(
            _coefficients(num_items=2.0 * projected * out),
            _coefficients(num_items=2.0 * projected * wide),
        ),
        saved_bytes=_coefficients(
            2.0 * projector,
            num_items=norm_runs * positions * (4.0 * hidden + 8.0)
            + projected * (shuffle_saved + 2.0 * wide + 4.0 * out / tp),
        ),
        size=_coefficients(num_items=projected * out / tp),
        num_parameters=out_vectors + 2 * has_norm * hidden + projector + biases * (out / tp + out),
        num_matrix_parameters=projector,
        num_kernels=_NUM_KERNELS["vision", "last"],
    )
    return ModuleWork(
        layer=layer.work(tp, "vision", "num_items", positions, ("num_items", positions**2)),
        first=first,
        last=last,
        input_bytes=_coefficients(num_items=4.0 * positions * hidden),
        stage_bytes=_coefficients(),
    )


def _coefficients(const: float = 0.0, **per_load: float) -> Coefficients:
    return Coefficients(float(const), tuple(float(per_load.get(feature, 0.0)) for feature in FEATURES))


def _is_tied(spec: ModelSpec) -> bool:
    """Whether head and embedding are one matrix; InternVL's configs tie them where they say nothing."""
    if spec.family == "internvl":
        return spec.hf_config.get("tie_word_embeddings", True)
    text = spec.hf_config["text_config"]
    return spec.hf_config.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False)


def _size_of(spec: ModelSpec, section: str, key: str) -> int:
    size = spec.hf_config.get(section, {}).get(key)
    if size is None:
        raise UserError(
            f"the config of {spec.name} has no `{section}.{key}`, which analytic costs follow from; write it into "
            "the checkpoint's config.json"
        )
    return size
