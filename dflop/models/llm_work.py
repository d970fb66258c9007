"""The work of a Llama's or Qwen's embedding, layers and head in one forward pass, as the counts of `work`."""

from dataclasses import replace

from dflop.base import UserError
from dflop.models.loads import Coefficients, ramp
from dflop.models.spec import ModelSpec
from dflop.models.work import Layer, ModuleWork, PartWork, coefficients, size_of

__all__ = ["llm_work", "targets_at_once"]

# The approximate number of kernels of a forward pass in eager PyTorch: products, norms, rotary positions, pointwise
# operations.
_NUM_KERNELS = {"layer": 40, "first": 6, "last": 15}
_TEXT_TYPES = ("llama", "qwen2", "qwen3")
# The logits that are in memory at a time, in fp32. A matrix product of that many rows is as fast as a larger one.
_LOGITS_BYTES = 512 * 2**20
# Matrix products are fast for multiples of this number of rows.
_ROWS = 128


def targets_at_once(vocabulary: float) -> int:
    """For how many targets a rank holds logits at a time, if it has `vocabulary` ids of the vocabulary: at most 512 MiB
    of them in fp32."""
    return max(1, int(_LOGITS_BYTES / (4 * vocabulary * _ROWS))) * _ROWS


def llm_work(spec: ModelSpec, tp: int, *, is_tied: bool, kind: str | None = None, num_deepstack: int = 0) -> ModuleWork:
    """Counts of the LLM in `text_config` on each of `tp` ranks; `is_tied` says that its head is its embedding.

    `kind` names the LLM whose layers it has (llama, qwen2 or qwen3), if its `model_type` is another name. The features
    that are added after the first `num_deepstack` layers are counted with the embedding.

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
        # The cosines and sines of rotary positions.
        stage_bytes=coefficients(num_tokens=4.0 * head_dim),
    )


def _embedding(hidden: int, vocabulary: float, num_deepstack: int) -> PartWork:
    """The embedding, of which this rank holds `vocabulary` ids, and the insertion of the encoders' features, also of
    those that are added after later layers."""
    embedding = PartWork(
        dense_flops=coefficients(),
        square_flops=coefficients(),
        causal=True,
        matmul_bytes=coefficients(),
        pointwise_bytes=coefficients(num_tokens=12.0 * hidden * (1 + num_deepstack)),
        reduced_bytes=(coefficients(num_tokens=2.0 * hidden), coefficients()),
        # Token ids and the features' positions. `schedule.edge_bytes` counts the features themselves.
        saved_bytes=coefficients(num_tokens=16.0),
        size=coefficients(),
        num_parameters=vocabulary * hidden,
        num_matrix_parameters=0.0,
        num_kernels=_NUM_KERNELS["first"],
    )
    return replace(embedding, frozen=replace(embedding, saved_bytes=coefficients(num_tokens=8.0)))  # no ids


def _head(hidden: int, vocabulary: float, tp: int, *, is_tied: bool) -> PartWork:
    """The last norm, the head on target positions only, and the loss, computed for a chunk of targets at a time."""
    matrix, num_kept = vocabulary * hidden, targets_at_once(vocabulary)

    def chunk(number: int, bytes_of_logit: float) -> Coefficients:
        return ramp("num_targets", number * num_kept, (number + 1) * num_kept, bytes_of_logit * vocabulary)

    eager = PartWork(
        dense_flops=coefficients(num_targets=2.0 * matrix),
        square_flops=coefficients(),
        causal=True,
        matmul_bytes=coefficients(num_targets=2.0 * (hidden + vocabulary)),
        # The norm, the logits in fp32, and their softmax.
        pointwise_bytes=coefficients(num_targets=40.0 * hidden + 14.0 * vocabulary),
        # Two all-reduces of the loss's three numbers a target.
        reduced_bytes=(coefficients(num_targets=12.0), coefficients(num_targets=2.0 * hidden)),
        # The norm's input in fp32, what its weight multiplies, its output, and a chunk's log-probabilities in fp32.
        saved_bytes=coefficients(num_targets=24.0 + 8.0 * hidden) + chunk(0, 4.0),
        size=coefficients(num_targets=hidden / tp),
        num_parameters=(0 if is_tied else matrix) + hidden,
        num_matrix_parameters=matrix,
        num_kernels=_NUM_KERNELS["last"],
        # In forward, a chunk's logits beside its log-probabilities. In backward, after the log-probabilities are freed,
        # the gradients of the logits and of the matrix, both in bf16; then the latter beside the next chunk's logits
        # and their gradient.
        passing_bytes=(
            chunk(0, 4.0),
            coefficients(2.0 * matrix) + chunk(0, -2.0),
            coefficients(2.0 * matrix) + chunk(0, -4.0) + chunk(1, 6.0),
        ),
    )
    # For the other chunks, the logits are computed again in fp32, and the matrix's gradient is added to the sum so far.
    again = replace(
        eager, pointwise_bytes=coefficients(num_targets=14.0 * vocabulary + 4.0 * matrix / num_kept), passing_bytes=()
    )
    fused = replace(
        eager,
        # The norm is one kernel. The loss reads the logits twice: for the sum over the vocabulary, and for the loss.
        pointwise_bytes=coefficients(num_targets=4.0 * hidden + 4.0 * vocabulary),
        # The norm's input and output, and all logits in bf16. The gradient of the logits overwrites them.
        saved_bytes=coefficients(num_targets=20.0 + 4.0 * hidden + 2.0 * vocabulary),
        num_kernels=3,
        passing_bytes=(coefficients(2.0 * matrix),),
    )
    eager = replace(eager, num_kept=num_kept, again=again)
    # Only an eager norm, of several kernels, keeps the values that its weight multiplies.
    fused = replace(fused, frozen=_frozen(fused, bytes_for_weights=0.0))
    return replace(eager, fused=fused, frozen=_frozen(eager, bytes_for_weights=2.0 * hidden))


def _frozen(head: PartWork, *, bytes_for_weights: float) -> PartWork:
    """The head without its matrix's gradient, and without the `bytes_for_weights` bytes a target that are kept for the
    gradients of weights."""
    return replace(
        head,
        saved_bytes=head.saved_bytes + coefficients(num_targets=-bytes_for_weights),
        passing_bytes=tuple(replace(form, const=0.0) for form in head.passing_bytes),
    )
