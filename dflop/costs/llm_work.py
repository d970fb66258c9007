"""What an LLM's embedding, layers and head do in one forward pass, for the counts of `work`."""

from dflop.costs.model import Coefficients
from dflop.costs.work import Layer, ModuleWork, PartWork, coefficients, size_of
from dflop.models import ModelSpec
from dflop.runtime import UserError

__all__ = ["llm_work"]

# Forward kernels of eager PyTorch, about: products, casts, norms, rotary positions and pointwise operations.
_NUM_KERNELS = {"layer": 50, "first": 10, "last": 20}
_TEXT_TYPES = ("llama", "qwen2", "qwen3")


def llm_work(spec: ModelSpec, tp: int) -> ModuleWork:
    """Counts of the LLM on each of `tp` ranks; see `module_work`."""
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
    vocabulary = size_of(spec, "text_config", "vocab_size") / tp
    biased = bool(text.get("attention_bias", False)) and kind != "qwen2"
    layer = Layer(
        hidden=hidden,
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
    matrix = vocabulary * hidden
    first = PartWork(
        dense_flops=coefficients(),
        square_flops=coefficients(),
        causal=True,
        matmul_bytes=coefficients(),
        # The embedding and putting visual features in.
        pointwise_bytes=coefficients(num_tokens=16.0 * hidden),
        # Embeddings in fp32.
        reduced_bytes=(coefficients(num_tokens=4.0 * hidden), coefficients()),
        # Ids, and features as if every token were visual.
        saved_bytes=coefficients(num_tokens=16.0 + 4.0 * hidden),
        size=coefficients(),
        num_parameters=matrix,
        num_matrix_parameters=0.0,
        num_kernels=_NUM_KERNELS["first"],
    )
    last = PartWork(
        # The head computes on target positions only.
        dense_flops=coefficients(num_targets=2.0 * matrix),
        square_flops=coefficients(),
        causal=True,
        matmul_bytes=coefficients(num_targets=2.0 * (hidden + vocabulary)),
        # The norm, the logits in fp32, their softmax.
        pointwise_bytes=coefficients(num_targets=42.0 * hidden + 14.0 * vocabulary),
        # Two all-reduces of the loss's three numbers a target.
        reduced_bytes=(coefficients(num_targets=12.0), coefficients(num_targets=2.0 * hidden)),
        # The norm's two, its cast, and the log-probabilities in fp32.
        saved_bytes=coefficients(2.0 * matrix, num_targets=20.0 + 10.0 * hidden + 4.0 * vocabulary),
        size=coefficients(num_targets=hidden / tp),
        num_parameters=(0 if _is_tied(spec) else matrix) + hidden,
        num_matrix_parameters=matrix,
        num_kernels=_NUM_KERNELS["last"],
        passing_bytes=_passing_bytes(vocabulary, matrix),
    )
    return ModuleWork(
        layer=layer.work(tp, "num_tokens", 1, ("sum_sq_tokens", 1), causal=True, num_kernels=_NUM_KERNELS["layer"]),
        first=first,
        last=last,
        input_bytes=coefficients(num_tokens=4.0 * hidden),
        # Rotary cosines and sines.
        stage_bytes=coefficients(num_tokens=8.0 * head_dim),
    )


def _passing_bytes(vocabulary: float, matrix: float) -> tuple[Coefficients, ...]:
    """What the head's pass holds at most beside what it saves: 4 bytes a logit, the log-probabilities in fp32.

    Backward of the loss makes the gradient of the log-probabilities and that of the logits, both in fp32, before it
    lets go of any: 8 bytes a logit, and as many where ranks share the vocabulary. Of few targets, the head's own
    gradient in fp32 takes more; by then the log-probabilities are gone.
    """
    return (
        coefficients(num_targets=8.0 * vocabulary),
        coefficients(4.0 * matrix, num_targets=-4.0 * vocabulary),
    )


def _is_tied(spec: ModelSpec) -> bool:
    """Whether head and embedding are one matrix; InternVL's configs tie them where they say nothing."""
    if spec.family == "internvl":
        return spec.hf_config.get("tie_word_embeddings", True)
    text = spec.hf_config["text_config"]
    return spec.hf_config.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False)
