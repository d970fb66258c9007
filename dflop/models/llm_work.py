"""What the embedding, layers and head of a Llama or Qwen do in one forward pass, for the counts of `work`."""

from dataclasses import replace

from dflop.models.loads import Coefficients
from dflop.models.spec import ModelSpec
from dflop.models.work import Layer, ModuleWork, PartWork, coefficients, size_of
from dflop.runtime import UserError

__all__ = ["llm_work"]

# Forward kernels of eager PyTorch, about: products, norms, rotary positions and pointwise operations.
_NUM_KERNELS = {"layer": 40, "first": 6, "last": 15}
_TEXT_TYPES = ("llama", "qwen2", "qwen3")


def llm_work(spec: ModelSpec, tp: int, *, is_tied: bool, kind: str | None = None, num_deepstack: int = 0) -> ModuleWork:
    """Counts of the LLM in `text_config` on each of `tp` ranks; `is_tied` where its head is its embedding.

    `kind` is the LLM whose layers it has, where its own `model_type` names it otherwise. Adding further features behind
    `num_deepstack` layers is counted where they come in.

    Raises:
        UserError: for an LLM of another kind, or a size that the config lacks.
    """
    text = spec.hf_config["text_config"]
    kind = kind or text.get("model_type", "qwen2")
    if kind not in _TEXT_TYPES:
        raise UserError(
            f"the LLM of {spec.name} is a {kind!r}, of which no analytic costs are known (only of "
            f"{', '.join(_TEXT_TYPES)}); use `costs.source: measured`"
        )
    sizes = spec.module("llm")
    head_dim = text.get("head_dim") or (128 if kind == "qwen3" else sizes.hidden_size // sizes.num_heads)
    biased = bool(text.get("attention_bias", False)) and kind != "qwen2"
    layer = Layer(
        hidden=sizes.hidden_size,
        query=sizes.num_heads * head_dim,
        key_value=sizes.num_kv_heads * head_dim,
        inner=size_of(spec, "text_config", "intermediate_size"),
        num_heads=sizes.num_heads,
        head_norm=head_dim if kind == "qwen3" else 0,
        rms_norm=True,
        gated=True,
        rotary=True,
        qkv_bias=biased or kind == "qwen2",
        out_bias=biased,
        mlp_bias=bool(text.get("mlp_bias", False)) and kind == "llama",
    )
    vocabulary = size_of(spec, "text_config", "vocab_size") / tp
    return ModuleWork(
        layer=layer.work(tp, "num_tokens", 1, ("sum_sq_tokens", 1), causal=True, num_kernels=_NUM_KERNELS["layer"]),
        first=_embedding(sizes.hidden_size, vocabulary, num_deepstack),
        last=_head(sizes.hidden_size, vocabulary, tp, is_tied=is_tied),
        input_bytes=coefficients(num_tokens=2.0 * sizes.hidden_size),
        # Rotary cosines and sines.
        stage_bytes=coefficients(num_tokens=4.0 * head_dim),
    )


def _embedding(hidden: int, vocabulary: float, num_deepstack: int) -> PartWork:
    """The embedding, of which this rank holds `vocabulary` ids, and putting the encoders' features in: those of the
    tokens' own places, and those that wait for a layer."""
    return PartWork(
        dense_flops=coefficients(),
        square_flops=coefficients(),
        causal=True,
        matmul_bytes=coefficients(),
        pointwise_bytes=coefficients(num_tokens=12.0 * hidden * (1 + num_deepstack)),
        reduced_bytes=(coefficients(num_tokens=2.0 * hidden), coefficients()),
        # Ids; features are held as they came (`pricing.edge_bytes`).
        saved_bytes=coefficients(num_tokens=16.0),
        size=coefficients(),
        num_parameters=vocabulary * hidden,
        num_matrix_parameters=0.0,
        num_kernels=_NUM_KERNELS["first"],
    )


def _head(hidden: int, vocabulary: float, tp: int, *, is_tied: bool) -> PartWork:
    """The last norm, the head on target positions only, and the loss."""
    matrix = vocabulary * hidden
    eager = PartWork(
        dense_flops=coefficients(num_targets=2.0 * matrix),
        square_flops=coefficients(),
        causal=True,
        matmul_bytes=coefficients(num_targets=2.0 * (hidden + vocabulary)),
        # The norm, the logits in fp32, their softmax.
        pointwise_bytes=coefficients(num_targets=40.0 * hidden + 14.0 * vocabulary),
        # Two all-reduces of the loss's three numbers a target.
        reduced_bytes=(coefficients(num_targets=12.0), coefficients(num_targets=2.0 * hidden)),
        # The norm's two, what it gives, and the log-probabilities in fp32.
        saved_bytes=coefficients(num_targets=20.0 + 8.0 * hidden + 4.0 * vocabulary),
        size=coefficients(num_targets=hidden / tp),
        num_parameters=(0 if is_tied else matrix) + hidden,
        num_matrix_parameters=matrix,
        num_kernels=_NUM_KERNELS["last"],
        passing_bytes=_passing_bytes(vocabulary, matrix, tp),
    )
    fused = replace(
        eager,
        # The norm in one kernel; the loss reads the logits once for their sum, and once for the loss.
        pointwise_bytes=coefficients(num_targets=4.0 * hidden + 4.0 * vocabulary),
        # The norm's input and what it gives, and the logits in bf16, whose place their gradient takes.
        saved_bytes=coefficients(num_targets=20.0 + 4.0 * hidden + 2.0 * vocabulary),
        num_kernels=3,
        passing_bytes=(coefficients(2.0 * matrix),),
    )
    return replace(eager, fused=fused)


def _passing_bytes(vocabulary: float, matrix: float, tp: int) -> tuple[Coefficients, ...]:
    """What the head's pass holds at most beside what it saves: 4 bytes a logit, the log-probabilities in fp32.

    Backward of the loss makes the gradient of the log-probabilities and that of the logits, both in fp32, before it
    lets go of any: 8 bytes a logit. Where ranks share the vocabulary, the gradient of the logits is made at once: 4
    bytes. Of few targets, the head's own gradient in bf16 takes more; by then the log-probabilities are gone, and the
    logits' gradient is in bf16.
    """
    return (
        coefficients(num_targets=(8.0 if tp == 1 else 4.0) * vocabulary),
        coefficients(2.0 * matrix, num_targets=-2.0 * vocabulary),
    )
