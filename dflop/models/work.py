"""What the parts of a module do in one forward pass: FLOPs, bytes moved, bytes kept, parameters.

Every count is a linear function of a microbatch's loads and follows from the config alone. Here stand the types, and
the transformer layer that LLMs and encoders share. `llm_work` and `vit_work` count a whole LLM and a whole vision
encoder; a family calls them with its own widths, or counts for itself.

Counted is what `dflop profile-costs` would see with `train.precision: bf16` on a GPU: Hugging Face's layers in eager
PyTorch, weights and residual stream in bf16, norms and the loss in fp32 inside, FlashAttention on packed segments. Not
counted: the optimiser, gradient sync, workspace inside a pass other than the MLP's and the head's, and the kernels'
padding. Backward does twice the matrix products of forward, and those of logits that were not kept once more.

The same is counted for layers whose pointwise operations are fused (`IMPLEMENTATIONS`): a norm with the sum before it,
the rotary positions of queries and keys, and the gated activation are one kernel each. What these keep for backward are
their inputs in bf16 and what matrices read.

Tensor parallelism divides as Megatron's does: heads, the MLP's inner width, the projector's, and the vocabulary.
Norms, the residual stream, the patch embedding and biases after a reduction are whole on every rank (no
sequence parallelism), for two all-reduces of the hidden states a layer in forward and two in backward.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from dflop.models.loads import FEATURES, Coefficients, Loads
from dflop.models.spec import ModelSpec
from dflop.runtime import UserError

__all__ = ["IMPLEMENTATIONS", "Layer", "ModuleWork", "PartWork", "coefficients", "size_of"]

# Each pointwise operation is a kernel of its own (`eager`); those of layers are fused, as torch.compile does it
# (`compiled`); those of layers and of the loss are, as in Megatron (`fused`).
IMPLEMENTATIONS = ("eager", "compiled", "fused")
_NOTHING = Coefficients(0.0, (0.0,) * len(FEATURES))


@dataclass(frozen=True, kw_only=True, slots=True)
class PartWork:
    """What a layer, or the first or last part of a module, does on one tensor-parallel rank in one forward pass.

    `square_flops` is attention over the whole square of every segment, which is what torch's FlopCounterMode
    counts; the variable-length kernels skip the half above the diagonal where the module is `causal`.
    `num_matrix_parameters` are those that products read. The most of `passing_bytes` lives for a moment beside what is
    saved; `put_off_bytes` are kept of a layer whose matrices' gradients are put off. `reduced_bytes` go through
    all-reduces, in forward and in backward. `size` is what the speed of matrix products depends on. `fused` is the same
    part with fused pointwise operations, None where these change nothing. Backward does the work of `again` once more
    for the targets that are more than `num_kept`.
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
    put_off_bytes: Coefficients = _NOTHING
    fused: "PartWork | None" = None
    num_kept: float = math.inf
    again: "PartWork | None" = None

    def most_passing_bytes(self, loads: Loads) -> np.ndarray:
        nothing = np.zeros(np.shape(loads.num_items))
        return np.max([nothing, *(passing(loads) for passing in self.passing_bytes)], axis=0)

    def loads_again(self, loads: Loads) -> Loads:
        """Those of what `again` is done for."""
        return loads._replace(num_targets=np.maximum(loads.num_targets - self.num_kept, 0.0))

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

    def by(self, implementation: str) -> "ModuleWork":
        """The module as one of `IMPLEMENTATIONS` does it."""
        fused = {"eager": (), "compiled": ("layer",), "fused": ("first", "layer", "last")}[implementation]
        return replace(self, **{name: getattr(self, name).fused or getattr(self, name) for name in fused})


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A transformer layer by its widths; every method counts for one position, on one of `tp` ranks.

    `head_norm` is the width that a norm of the queries sees: all of them, one head, or 0 for none. With `stacked_qkv`
    one matrix gives queries, keys and values.
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
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool

    @property
    def qkv(self) -> int:
        return self.query + 2 * self.key_value

    @property
    def num_ups(self) -> int:
        return 2 if self.gated else 1

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
        """What autograd keeps: of root-mean-square norms an fp32 copy of their input, of all else bf16; what a norm
        gives is kept once for all matrices that read it."""
        norms = 2 * (6 * self.hidden + 4 if self.rms_norm else 2 * self.hidden + 8)
        inputs = 2 * 2 * self.hidden
        scales = 4 * self.hidden * self.scaled
        attention = 4 * self.query + 4 * self.key_value + 4 * self.num_heads
        if self.head_norm:
            attention += 6 * (self.query + self.key_value) + 4 * (self.query + self.key_value) // self.head_norm
        if self.stacked_qkv:  # the values are kept as a part of what the matrix gives
            attention += 2 * (self.query + self.key_value)
        mlp = (8 if self.gated else 4) * self.inner
        return norms + inputs + scales + (attention + mlp) / tp

    def fused_saved_bytes(self, tp: int) -> float:
        """As `saved_bytes`, of fused operations: what a norm sees in bf16 and its statistics; of the gated activation
        its two inputs, and its product for the matrix that reads it."""
        norms = 2 * (2 * self.hidden + (4 if self.rms_norm else 8))
        inputs = 2 * 2 * self.hidden
        scales = 2 * self.hidden * self.scaled
        attention = 4 * self.query + 4 * self.key_value + 4 * self.num_heads
        if self.head_norm:
            attention += 2 * (self.query + self.key_value)
        mlp = (6 if self.gated else 4) * self.inner
        return norms + inputs + scales + (attention + mlp) / tp

    def put_off_bytes(self, tp: int) -> float:
        """What the gradients of the matrices are made from, in bf16: their inputs, which those that read the same one
        share, and the gradients of what they give."""
        inputs = 2 * self.hidden + (self.query + self.inner) / tp
        gradients = 2 * self.hidden + (self.qkv + self.num_ups * self.inner) / tp
        return 2.0 * (inputs + gradients)

    def passing_bytes(self, tp: int, *, is_fused: bool = False) -> tuple[tuple[float, float], ...]:
        """What backward holds at most beside what is saved, a constant and bytes a position.

        The gradient of the layer's output is there throughout. At the MLP's last matrix come the gradient of its input
        and its own, in bf16; at a gated product those of both factors, when that input has been given up. A
        root-mean-square norm of several kernels makes the gradients of its steps in fp32, 16 bytes, beside that of what
        it gives; by then the MLP has given up what it kept, and what the norm gave is gone."""
        inner = 2.0 * self.inner / tp
        at_matrix = 2.0 * self.hidden * self.inner / tp, 2.0 * self.hidden + inner
        forms = [at_matrix]
        if self.gated:
            forms.append((0.0, 2.0 * self.hidden + 2.0 * inner))
        if self.rms_norm and not is_fused:
            forms.append((0.0, 18.0 * self.hidden - (8 if self.gated else 4) * self.inner / tp))
        return tuple(forms)

    def matmul_bytes(self, tp: int) -> float:
        """Operands and results of the products and of attention, in bf16."""
        whole = (5 + self.num_ups) * self.hidden
        divided = self.qkv + self.query + 2 * (self.query + self.key_value) + (self.num_ups + 1) * self.inner
        return 2.0 * (whole + divided / tp)

    def pointwise_bytes(self, tp: int) -> float:
        """What unfused kernels read and write: norms, rotary positions, activation, residual sums."""
        whole = 2 * (36 if self.rms_norm else 4) + 12 + 8 * self.scaled
        per_head = 20 * self.rotary + 36 * bool(self.head_norm)
        divided = per_head * (self.query + self.key_value) + (10 if self.gated else 4) * self.inner
        return whole * self.hidden + divided / tp

    def fused_pointwise_bytes(self, tp: int) -> float:
        """As `pointwise_bytes`, of fused operations: a norm reads two tensors and writes their sum and its norm; the
        rotary positions read and write once, and so does the gated activation."""
        per_head = 4 * (self.rotary or bool(self.head_norm))
        divided = per_head * (self.query + self.key_value) + (6 if self.gated else 4) * self.inner
        return 2 * 8 * self.hidden + divided / tp

    def work(
        self, tp: int, load: str, positions: int, squares: tuple[str, int], *, causal: bool, num_kernels: int
    ) -> PartWork:
        """For a `load` that brings so many positions, and for `squares`, a load and the squares that it brings."""

        def per_load(count: float) -> Coefficients:
            return coefficients(**{load: positions * count})

        def passing(forms: tuple[tuple[float, float], ...]) -> tuple[Coefficients, ...]:
            return tuple(coefficients(const, **{load: positions * count}) for const, count in forms)

        matrices = self.num_matrix_parameters(tp)
        reduced_bytes = per_load(2 * 2.0 * self.hidden)
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
            put_off_bytes=per_load(self.put_off_bytes(tp)),
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
        return replace(eager, fused=fused)


def coefficients(const: float = 0.0, **per_load: float) -> Coefficients:
    """A linear function of the loads that are named."""
    return Coefficients(float(const), tuple(float(per_load.get(feature, 0.0)) for feature in FEATURES))


def size_of(spec: ModelSpec, section: str, key: str) -> int:
    """A field of the model's config.

    Raises:
        UserError: when it is not there.
    """
    size = spec.hf_config.get(section, {}).get(key)
    if size is None:
        raise UserError(
            f"the config of {spec.name} has no `{section}.{key}`, which analytic costs follow from; write it into "
            "the checkpoint's config.json"
        )
    return size
