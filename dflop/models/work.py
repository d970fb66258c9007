"""The work of a module's parts in one forward pass: FLOPs, bytes moved, bytes kept for backward, parameters.

Every count is a function of a microbatch's loads and follows from the config alone. This file has the types, and the
transformer layer that LLMs and encoders share. `llm_work` and `vit_work` count a whole LLM and a whole vision encoder;
a family calls them with its own widths, or counts for itself.

The counts are those that `dflop profile-costs` would measure with `train.precision: bf16` on a GPU: Hugging Face's
layers in eager PyTorch, weights and residual stream in bf16, norms and the loss computed in fp32, FlashAttention on
packed segments. Not counted are the optimiser, gradient sync, workspace inside a pass other than the MLP's, a norm's
and the head's, and the kernels' padding. Backward does twice the matrix products of forward, and computes logits that
were not kept once more. If weights are frozen (`without_training`), it does the products of forward once, for the
gradients of inputs.

The same is counted for layers whose pointwise operations are fused (`IMPLEMENTATIONS`): a norm with the sum before it,
the rotary positions of queries and keys, and the gated activation are one kernel each. For backward these keep their
inputs in bf16 and what matrices read.

Tensor parallelism divides as Megatron's does: heads, the MLP's inner width, the projector's, and the vocabulary.
Norms, the residual stream, the patch embedding and biases after a reduction are whole on every rank (no
sequence parallelism), for two all-reduces of the hidden states a layer in forward and two in backward.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from dflop.base import UserError
from dflop.models.loads import FEATURES, Coefficients, Loads
from dflop.models.spec import ModelSpec

__all__ = ["IMPLEMENTATIONS", "Layer", "ModuleWork", "PartWork", "coefficients", "size_of"]

# `eager`: each pointwise operation is a kernel of its own. `compiled`: those of layers are fused, as by torch.compile.
# `fused`: those of layers and of the loss are fused, as in Megatron.
IMPLEMENTATIONS = ("eager", "compiled", "fused")
_NOTHING = Coefficients(0.0, (0.0,) * len(FEATURES))


@dataclass(frozen=True, kw_only=True, slots=True)
class PartWork:
    """The work of a layer, or of the first or last part of a module, on one tensor-parallel rank in a forward pass.

    - `dense_flops`: FLOPs of matrix products with weights.
    - `square_flops`: FLOPs of attention over the whole square of every segment, as torch's FlopCounterMode counts them.
      If the module is `causal`, the variable-length kernels skip the half above the diagonal.
    - `matmul_bytes`, `pointwise_bytes`: bytes that matrix products and pointwise kernels read and write.
    - `reduced_bytes`: bytes that are all-reduced in forward and in backward.
    - `saved_bytes`: bytes kept for backward.
    - `passing_bytes`: bytes of temporary tensors at several moments; the largest of them adds to the peak.
    - `size`: the load that the speed of matrix products depends on.
    - `num_matrix_parameters`: those of `num_parameters` that matrix products read.
    - `num_kernels`: the approximate number of kernels.
    - `fused`: the same part with fused pointwise operations; None if these change nothing.
    - `frozen`: the part without what is kept for gradients of weights; None if nothing is kept for them.
    - `is_frozen`: whether only inputs get gradients, so that backward does half of the matrix products.
    - `again`: the work that backward repeats for all targets but `num_kept` of them.
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
    passing_bytes: tuple[Coefficients, ...] = ()
    fused: "PartWork | None" = None
    frozen: "PartWork | None" = None
    is_frozen: bool = False
    num_kept: float = math.inf
    again: "PartWork | None" = None

    def most_passing_bytes(self, loads: Loads) -> np.ndarray:
        """The largest of `passing_bytes`, in the shape of the loads."""
        nothing = np.zeros(np.shape(loads.num_items))
        return np.max([nothing, *(passing(loads) for passing in self.passing_bytes)], axis=0)

    def loads_again(self, loads: Loads) -> Loads:
        """The loads that backward repeats `again` for."""
        return loads._replace(num_targets=np.maximum(loads.num_targets - self.num_kept, 0.0))

    def attention_flops(self, loads: Loads) -> np.ndarray:
        """FLOPs of attention that the variable-length kernels compute, in the shape of the loads."""
        return self.square_flops(loads) * (0.5 if self.causal else 1.0)

    def without_training(self) -> "PartWork":
        """The part with frozen weights."""
        fused = self.fused.without_training() if self.fused else None
        return replace(self.frozen or self, is_frozen=True, fused=fused)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleWork:
    """The parts of a module. `input_bytes` is the size of a layer's input, which is all that a recomputed layer keeps;
    `stage_bytes` is what every stage keeps once, whatever its number of layers."""

    layer: PartWork
    first: PartWork
    last: PartWork
    input_bytes: Coefficients
    stage_bytes: Coefficients

    def by(self, implementation: str) -> "ModuleWork":
        """The work of the module in one of `IMPLEMENTATIONS`."""
        fused = {"eager": (), "compiled": ("layer",), "fused": ("first", "layer", "last")}[implementation]
        return replace(self, **{name: getattr(self, name).fused or getattr(self, name) for name in fused})

    def without_training(self) -> "ModuleWork":
        """The work of the frozen module if gradients must pass through it to a trained one before it."""
        return replace(self, **{name: getattr(self, name).without_training() for name in ("layer", "first", "last")})


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A transformer layer by its widths. Methods that give bytes count them for one position, on one of `tp` ranks.

    `query`, `key_value` and `inner` are the total widths of the queries, of the keys (or values), and of the MLP.
    `head_norm` is the width of the norm of queries and keys: all heads together, one head, or 0 for no norm. `scaled`
    layers multiply their outputs by learned layer scales. With `stacked_qkv` one matrix gives queries, keys and values.
    Layers that `copies_attention` join attention's outputs for segments, and so copy the output for all of them.
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
    stacked_qkv: bool = False
    copies_attention: bool = False
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool

    @property
    def qkv(self) -> int:
        return self.query + 2 * self.key_value

    @property
    def num_ups(self) -> int:
        """The number of matrices that widen the MLP's input."""
        return 2 if self.gated else 1

    def num_matrix_parameters(self, tp: int) -> float:
        return (self.hidden * (self.qkv + self.query) + (self.num_ups + 1) * self.hidden * self.inner) / tp

    def num_parameters(self, tp: int) -> float:
        """Parameters on one rank. Norms, layer scales, and biases after a reduction are whole on every rank."""
        divided = self.qkv_bias * self.qkv + self.mlp_bias * self.num_ups * self.inner
        whole = 2 * self.hidden * (1 if self.rms_norm else 2)
        whole += (self.out_bias + self.mlp_bias + 2 * self.scaled) * self.hidden
        if self.head_norm == self.query:
            divided += self.query + self.key_value
        else:
            whole += 2 * self.head_norm
        return self.num_matrix_parameters(tp) + divided / tp + whole

    def saved_bytes(self, tp: int) -> float:
        """What autograd keeps: an fp32 copy of the input of each root-mean-square norm, and bf16 tensors otherwise. A
        norm's output is kept once for all matrices that read it."""
        norms = 2 * (6 * self.hidden + 4 if self.rms_norm else 2 * self.hidden + 8)
        inputs = 2 * 2 * self.hidden
        scales = 4 * self.hidden * self.scaled
        attention = (4 + 2 * self.copies_attention) * self.query + 4 * self.key_value + 4 * self.num_heads
        if self.head_norm:
            attention += 6 * (self.query + self.key_value) + 4 * (self.query + self.key_value) // self.head_norm
        if self.stacked_qkv:  # the values are a view of the matrix's whole output, which is therefore kept
            attention += 2 * (self.query + self.key_value)
        mlp = (8 if self.gated else 4) * self.inner
        return norms + inputs + scales + (attention + mlp) / tp

    def fused_saved_bytes(self, tp: int) -> float:
        """As `saved_bytes`, with fused operations. A norm keeps its bf16 input and its statistics; a gated activation
        keeps its two inputs, and its output for the matrix that reads it."""
        norms = 2 * (2 * self.hidden + (4 if self.rms_norm else 8))
        inputs = 2 * 2 * self.hidden
        scales = 2 * self.hidden * self.scaled
        attention = (4 + 2 * self.copies_attention) * self.query + 4 * self.key_value + 4 * self.num_heads
        if self.head_norm:
            attention += 2 * (self.query + self.key_value)
        mlp = (6 if self.gated else 4) * self.inner
        return norms + inputs + scales + (attention + mlp) / tp

    def bytes_for_weights(self, tp: int, *, is_fused: bool = False) -> float:
        """Those of the saved bytes that only the gradients of weights need: the norms' outputs, the MLP's inner values,
        the input of layer scales, and for norms of several kernels, what the norms' weights multiply. The output of
        attention is not among them, because the backward of attention needs it, too, but a copy of it is."""
        of_norms = 2 * 2 * self.hidden * self.rms_norm + 2 * (self.query + self.key_value) / tp * bool(self.head_norm)
        scaled = (2 if is_fused else 4) * self.hidden * self.scaled
        copied = 2 * self.query / tp * self.copies_attention
        return 2 * 2 * self.hidden + 2 * self.inner / tp + scaled + copied + (0 if is_fused else of_norms)

    def passing_bytes(
        self, tp: int, *, is_fused: bool = False, is_frozen: bool = False
    ) -> tuple[tuple[float, float], ...]:
        """What backward holds in temporary tensors beside what is saved, at three moments: pairs of a constant and of
        bytes a position.

        The gradient of the layer's output is there at all three.
        1. At the MLP's last matrix: the gradients of its input and of the matrix itself, in bf16.
        2. At a gated product: the gradients of both factors. The last matrix's input has been freed.
        3. At a root-mean-square norm of several kernels: the gradients of its steps in fp32, 16 bytes, and that of its
           output. What the MLP kept, and the norm's output, have been freed.

        Frozen matrices have no gradient of their own. They did not keep their inputs, which then are not freed either.
        """
        inner, not_kept = 2.0 * self.inner / tp, float(is_frozen)
        of_matrix = 0.0 if is_frozen else 2.0 * self.hidden * self.inner / tp
        forms = [(of_matrix, 2.0 * self.hidden + inner)]
        if self.gated:
            forms.append((0.0, 2.0 * self.hidden + (2.0 + not_kept) * inner))
        if self.rms_norm and not is_fused:
            mlp = ((8 if self.gated else 4) - 2 * not_kept) * self.inner / tp
            forms.append((0.0, (18.0 + 2 * not_kept) * self.hidden - mlp))
        return tuple(forms)

    def matmul_bytes(self, tp: int) -> float:
        """Operands and results of the products and of attention, in bf16."""
        whole = (5 + self.num_ups) * self.hidden
        divided = self.qkv + self.query + 2 * (self.query + self.key_value) + (self.num_ups + 1) * self.inner
        return 2.0 * (whole + divided / tp)

    def pointwise_bytes(self, tp: int) -> float:
        """What unfused kernels read and write for norms, rotary positions, the activation and residual sums."""
        whole = 2 * (36 if self.rms_norm else 4) + 12 + 8 * self.scaled
        per_head = 20 * self.rotary + 36 * bool(self.head_norm)
        divided = per_head * (self.query + self.key_value) + (10 if self.gated else 4) * self.inner
        divided += 4 * self.query * self.copies_attention
        return whole * self.hidden + divided / tp

    def fused_pointwise_bytes(self, tp: int) -> float:
        """As `pointwise_bytes`, with fused operations. A norm reads two tensors and writes their sum and its norm; the
        rotary positions, and the gated activation, read their inputs and write their output once."""
        per_head = 4 * (self.rotary or bool(self.head_norm))
        divided = per_head * (self.query + self.key_value) + (6 if self.gated else 4) * self.inner
        divided += 4 * self.query * self.copies_attention
        return 2 * 8 * self.hidden + divided / tp

    def work(
        self, tp: int, load: str, positions: int, squares: tuple[str, int], *, causal: bool, num_kernels: int
    ) -> PartWork:
        """The layer's work as a function of loads: each unit of `load` brings `positions` positions, and each unit of
        the load `squares[0]` brings `squares[1]` squared positions for attention."""

        def per_load(count: float) -> Coefficients:
            return coefficients(**{load: positions * count})

        def passing(forms: tuple[tuple[float, float], ...]) -> tuple[Coefficients, ...]:
            return tuple(coefficients(const, **{load: positions * count}) for const, count in forms)

        matrices = self.num_matrix_parameters(tp)
        reduced_bytes = per_load(2 * 2.0 * self.hidden)

        def with_frozen(part: PartWork, *, is_fused: bool) -> PartWork:
            frozen = replace(
                part,
                saved_bytes=part.saved_bytes + per_load(-self.bytes_for_weights(tp, is_fused=is_fused)),
                passing_bytes=passing(self.passing_bytes(tp, is_fused=is_fused, is_frozen=True)),
            )
            return replace(part, frozen=frozen)

        eager = PartWork(
            dense_flops=per_load(2.0 * matrices),
            square_flops=coefficients(**{squares[0]: 4.0 * self.query / tp * squares[1]}),
            causal=causal,
            matmul_bytes=per_load(self.matmul_bytes(tp)),
            pointwise_bytes=per_load(self.pointwise_bytes(tp)),
            reduced_bytes=(reduced_bytes, reduced_bytes),
            saved_bytes=per_load(self.saved_bytes(tp)),
            size=per_load(self.hidden / tp),
            num_parameters=self.num_parameters(tp),
            num_matrix_parameters=matrices,
            num_kernels=num_kernels,
            passing_bytes=passing(self.passing_bytes(tp)),
        )
        fused = replace(
            eager,
            pointwise_bytes=per_load(self.fused_pointwise_bytes(tp)),
            saved_bytes=per_load(self.fused_saved_bytes(tp)),
            passing_bytes=passing(self.passing_bytes(tp, is_fused=True)),
            # The matrices, attention, two norms, rotary positions and the activation.
            num_kernels=min(num_kernels, 5 + self.num_ups + 2 + self.rotary),
        )
        return replace(with_frozen(eager, is_fused=False), fused=with_frozen(fused, is_fused=True))


def coefficients(const: float = 0.0, **per_load: float) -> Coefficients:
    """A linear function of the named loads (`FEATURES`)."""
    return Coefficients(float(const), tuple(float(per_load.get(feature, 0.0)) for feature in FEATURES))


def size_of(spec: ModelSpec, section: str, key: str) -> int:
    """The field `key` in a section of the model's config.

    Raises:
        UserError: when the config has no such field.
    """
    size = spec.hf_config.get(section, {}).get(key)
    if size is None:
        raise UserError(
            f"the config of {spec.name} has no `{section}.{key}`, which analytic costs follow from; write it into "
            "the checkpoint's config.json"
        )
    return size
