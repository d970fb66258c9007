"""What the embedding, layers and head of a Llama or Qwen do in one forward pass, for the counts of `work`."""

from dataclasses import replace

from dflop.models.loads import Coefficients, ramp
from dflop.models.spec import ModelSpec
from dflop.models.work import Layer, ModuleWork, PartWork, coefficients, size_of
from dflop.runtime import UserError

__all__ = ["llm_work", "targets_at_once"]

# Forward kernels of eager PyTorch, about: products, norms, rotary positions and pointwise operations.
_NUM_KERNELS = {"layer": 40, "first": 6, "last": 15}
_TEXT_TYPES = ("llama", "qwen2", "qwen3")
# Logits that stand at a time, in fp32. Products of so many rows and a vocabulary are as fast as larger ones.
_LOGITS_BYTES = 512 * 2**20
# Numbers of rows that matrix products are good at.
_ROWS = 128


def targets_at_once(vocabulary: float) -> int:
    """Of how many targets logits stand at a time on a rank that holds so much of the vocabulary: those of 512 MiB in
    fp32, or a few less."""
    return max(1, int(_LOGITS_BYTES / (4 * vocabulary * _ROWS))) * _ROWS


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
    """The last norm, the head on target positions only, and the loss, of a chunk of targets at a time."""
    matrix, num_kept = vocabulary * hidden, targets_at_once(vocabulary)

    def chunk(number: int, bytes_of_logit: float) -> Coefficients:
        return ramp("num_targets", number * num_kept, (number + 1) * num_kept, bytes_of_logit * vocabulary)

    eager = PartWork(
        dense_flops=coefficients(num_targets=2.0 * matrix),
        square_flops=coefficients(),
        causal=True,
        matmul_bytes=coefficients(num_targets=2.0 * (hidden + vocabulary)),
        # The norm, the logits in fp32, their softmax.
        pointwise_bytes=coefficients(num_targets=40.0 * hidden + 14.0 * vocabulary),
        # Two all-reduces of the loss's three numbers a target.
        reduced_bytes=(coefficients(num_targets=12.0), coefficients(num_targets=2.0 * hidden)),
        # The norm's two, what it gives, and a chunk's log-probabilities in fp32.
        saved_bytes=coefficients(num_targets=24.0 + 8.0 * hidden) + chunk(0, 4.0),
        size=coefficients(num_targets=hidden / tp),
        num_parameters=(0 if is_tied else matrix) + hidden,
        num_matrix_parameters=matrix,
        num_kernels=_NUM_KERNELS["last"],
        # In forward the logits beside them. In backward, when they are gone, their gradient and that of the matrix,
        # both in bf16; then this beside the next chunk and its gradient.
        passing_bytes=(
            chunk(0, 4.0),
            coefficients(2.0 * matrix) + chunk(0, -2.0),
            coefficients(2.0 * matrix) + chunk(0, -4.0) + chunk(1, 6.0),
        ),
    )
    # The logits in fp32 and what is taken from them; the matrix's gradient is added to that of the chunks before.
    again = replace(
        eager, pointwise_bytes=coefficients(num_targets=14.0 * vocabulary + 4.0 * matrix / num_kept), passing_bytes=()
    )
    fused = replace(
        eager,
        # The norm in one kernel; the loss reads the logits once for their sum, and once for the loss.
        pointwise_bytes=coefficients(num_targets=4.0 * hidden + 4.0 * vocabulary),
        # The norm's input and what it gives, and all logits in bf16, whose place their gradient takes.
        saved_bytes=coefficients(num_targets=20.0 + 4.0 * hidden + 2.0 * vocabulary),
        num_kernels=3,
        passing_bytes=(coefficients(2.0 * matrix),),
    )
    return replace(eager, fused=fused, num_kept=num_kept, again=again)
