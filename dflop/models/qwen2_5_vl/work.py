"""The work of Qwen2.5-VL's modules in one forward pass: the vision transformer with its merger, and the LLM.

The encoder's loads are its items, each of which is the patches of one token, and `sum_sq_items`, the mean over layers
with window and with full attention. So a stage with more layers of one kind than other stages is priced by this mean,
too.
"""

from dflop.models.llm_work import llm_work
from dflop.models.spec import ModelSpec
from dflop.models.work import Layer, ModuleWork, PartWork, coefficients, size_of

__all__ = ["count_work", "vision_work"]

# The approximate number of kernels of a forward pass in eager PyTorch: products, norms, rotary positions, pointwise
# operations.
_NUM_KERNELS = {"layer": 40, "first": 6, "last": 15}


def count_work(spec: ModelSpec, module: str, tp: int) -> ModuleWork:
    """Counts of one module on each of `tp` ranks.

    Raises:
        UserError: when the config lacks a size, or has an LLM that cannot be counted.
    """
    if module == "llm":
        return llm_work(spec, tp, is_tied=bool(spec.hf_config["tie_word_embeddings"]), kind="qwen2")
    return vision_work(spec, tp, stacked_qkv=True)


def vision_work(spec: ModelSpec, tp: int, *, stacked_qkv: bool) -> ModuleWork:
    """Counts of the vision encoder. With `stacked_qkv`, one matrix gives queries, keys and values."""
    sizes, patches = spec.module("vision"), spec.rules.merge_size**2
    layer = Layer(
        hidden=sizes.hidden_size,
        query=sizes.hidden_size,
        key_value=sizes.hidden_size,
        inner=size_of(spec, "vision_config", "intermediate_size"),
        num_heads=sizes.num_heads,
        rms_norm=True,
        gated=True,
        rotary=True,
        stacked_qkv=stacked_qkv,
        copies_attention=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )
    squares = ("sum_sq_tokens", patches**2)
    return ModuleWork(
        layer=layer.work(tp, "num_items", patches, squares, causal=False, num_kernels=_NUM_KERNELS["layer"]),
        first=_patches(spec),
        last=_merger(spec, tp),
        input_bytes=coefficients(num_items=2.0 * patches * sizes.hidden_size),
        # The cosines and sines of rotary positions.
        stage_bytes=coefficients(num_items=8.0 * patches * (sizes.hidden_size // sizes.num_heads)),
    )


def _patches(spec: ModelSpec) -> PartWork:
    """The patch embedding, whole on every rank, and ordering patches by windows."""
    rules, hidden = spec.rules, spec.module("vision").hidden_size
    patches, patch = rules.merge_size**2, 3 * rules.temporal_patch_size * rules.patch_size**2
    return PartWork(
        dense_flops=coefficients(num_items=2.0 * patches * patch * hidden),
        square_flops=coefficients(),
        causal=False,
        matmul_bytes=coefficients(num_items=2.0 * patches * (patch + hidden)),
        # Ordering patches.
        pointwise_bytes=coefficients(num_items=patches * 4.0 * hidden),
        reduced_bytes=(coefficients(), coefficients()),
        # The pixels, and the original indices of items.
        saved_bytes=coefficients(num_items=2.0 * patches * patch + 8.0),
        size=coefficients(num_items=patches * hidden),
        num_parameters=patch * hidden,
        num_matrix_parameters=patch * hidden,
        num_kernels=_NUM_KERNELS["first"],
    )


def _merger(spec: ModelSpec, tp: int) -> PartWork:
    """The last norm, and two matrices over the patches of a token."""
    hidden, patches, out = spec.module("vision").hidden_size, spec.rules.merge_size**2, spec.module("llm").hidden_size
    wide = patches * hidden
    matrices = (wide * wide + wide * out) / tp
    return PartWork(
        dense_flops=coefficients(num_items=2.0 * matrices),
        square_flops=coefficients(),
        causal=False,
        matmul_bytes=coefficients(num_items=2.0 * (wide + 2 * wide / tp + out)),
        # The norm, the activation, and putting features back in order.
        pointwise_bytes=coefficients(num_items=36.0 * wide + 4.0 * wide / tp + 4.0 * out),
        reduced_bytes=(coefficients(num_items=2.0 * out), coefficients(num_items=2.0 * wide)),
        # The norm's input in fp32, what its weight multiplies and its output; the activation's input and output.
        saved_bytes=coefficients(num_items=8.0 * wide + 4.0 * patches + 4.0 * wide / tp + 8.0),
        size=coefficients(num_items=wide / tp),
        num_parameters=hidden + matrices + wide / tp + out,
        num_matrix_parameters=matrices,
        num_kernels=_NUM_KERNELS["last"],
        # In the norm's backward, the gradients of its steps in fp32. The activation's input and output, the norm's
        # output, and what its weight multiplies have been freed.
        passing_bytes=(coefficients(num_items=20.0 * wide - 4.0 * wide / tp - 4.0 * wide),),
    )
