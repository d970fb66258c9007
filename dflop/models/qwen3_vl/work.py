"""The work of Qwen3-VL's modules in one forward pass: the vision transformer with its mergers, and the LLM.

The encoder's loads are its items, each of which is the patches of one token, and `sum_sq_items`. All mergers are
counted after the last layer, where stages run them.
"""

from dataclasses import replace

from dflop.models.llm_work import llm_work
from dflop.models.loads import Coefficients
from dflop.models.spec import ModelSpec
from dflop.models.vit_work import vit_layer
from dflop.models.work import ModuleWork, PartWork, coefficients, size_of

__all__ = ["count_work"]

# The approximate number of kernels of a forward pass in eager PyTorch: products, norms, rotary positions, pointwise
# operations.
_NUM_KERNELS = {"layer": 24, "first": 12, "merger": 6}
# How many positions of the learned grid a patch's position is interpolated from.
_NUM_NEIGHBOURS = 4


def count_work(spec: ModelSpec, module: str, tp: int) -> ModuleWork:
    """Counts of one module on each of `tp` ranks.

    Raises:
        UserError: when the config lacks a size, or has an LLM that cannot be counted.
    """
    if module == "llm":
        is_tied = bool(spec.hf_config["tie_word_embeddings"])
        return llm_work(spec, tp, is_tied=is_tied, kind="qwen3", num_deepstack=spec.num_deepstack)
    sizes, patches = spec.module("vision"), spec.rules.merge_size**2
    inner = size_of(spec, "vision_config", "intermediate_size")
    layer = replace(
        vit_layer(hidden=sizes.hidden_size, inner=inner, num_heads=sizes.num_heads),
        rotary=True,
        stacked_qkv=True,
        copies_attention=True,
    )
    squares = ("sum_sq_tokens", patches**2)
    counted = layer.work(tp, "num_items", patches, squares, causal=False, num_kernels=_NUM_KERNELS["layer"])
    input_bytes = coefficients(num_items=2.0 * patches * sizes.hidden_size)
    return ModuleWork(
        layer=_beside_gradients(counted, spec.num_deepstack * input_bytes),
        first=_patches(spec),
        last=_mergers(spec, tp),
        input_bytes=input_bytes,
        # The cosines and sines of rotary positions.
        stage_bytes=coefficients(num_items=8.0 * patches * (sizes.hidden_size // sizes.num_heads)),
    )


def _beside_gradients(layer: PartWork, waiting_bytes: Coefficients) -> PartWork:
    """The layer with `waiting_bytes` on top of what its backward holds. These are gradients of earlier layers' outputs
    that are features: they wait until backward reaches those layers. All are counted, as for the last layers."""
    others = {name: getattr(layer, name) for name in ("fused", "frozen")}
    return replace(
        layer,
        passing_bytes=tuple(own + waiting_bytes for own in layer.passing_bytes),
        **{name: _beside_gradients(other, waiting_bytes) for name, other in others.items() if other},
    )


def _patches(spec: ModelSpec) -> PartWork:
    """The patch embedding and the learned positions, whole on every rank."""
    rules, hidden = spec.rules, spec.module("vision").hidden_size
    patches, patch = rules.merge_size**2, 3 * rules.temporal_patch_size * rules.patch_size**2
    num_positions = size_of(spec, "vision_config", "num_position_embeddings")
    return PartWork(
        dense_flops=coefficients(num_items=2.0 * patches * patch * hidden),
        square_flops=coefficients(),
        causal=False,
        matmul_bytes=coefficients(num_items=2.0 * patches * (patch + hidden)),
        # Positions are looked up, weighted in fp32 and summed; their sum is added.
        pointwise_bytes=coefficients(num_items=patches * hidden * (_NUM_NEIGHBOURS * 14.0 + 14.0)),
        reduced_bytes=(coefficients(), coefficients()),
        # The pixels, and the indices and weights of positions.
        saved_bytes=coefficients(num_items=patches * (2.0 * patch + _NUM_NEIGHBOURS * 12.0)),
        size=coefficients(num_items=patches * hidden),
        num_parameters=(patch + 1 + num_positions) * hidden,
        num_matrix_parameters=patch * hidden,
        num_kernels=_NUM_KERNELS["first"],
    )


def _mergers(spec: ModelSpec, tp: int) -> PartWork:
    """The mergers, one for the last layer and one for each other layer whose output is a feature. A merger is a norm,
    and two matrices over the patches of a token. The last layer's norm is over one patch, the others' over a token."""
    hidden, patches, out = spec.module("vision").hidden_size, spec.rules.merge_size**2, spec.module("llm").hidden_size
    wide, count = patches * hidden, 1 + spec.num_deepstack
    matrices = count * (wide * wide + wide * out) / tp
    biases, norms = count * (wide / tp + out), 2 * hidden + 2 * spec.num_deepstack * wide
    return PartWork(
        dense_flops=coefficients(num_items=2.0 * matrices),
        square_flops=coefficients(),
        causal=False,
        matmul_bytes=coefficients(num_items=2.0 * count * (wide + 2 * wide / tp + out)),
        # The norm, the activation, and concatenating features.
        pointwise_bytes=coefficients(num_items=count * (4.0 * wide + 4.0 * wide / tp + 4.0 * out)),
        reduced_bytes=(coefficients(num_items=2.0 * count * out), coefficients(num_items=2.0 * count * wide)),
        # The norm's input and output with its mean and deviation, and the activation's input and output.
        saved_bytes=coefficients(
            num_items=2.0 * wide * (1 + count) + 8.0 * (patches + spec.num_deepstack) + count * 4.0 * wide / tp
        ),
        size=coefficients(num_items=wide / tp),
        num_parameters=matrices + biases + norms,
        num_matrix_parameters=matrices,
        num_kernels=_NUM_KERNELS["merger"] * count,
        # In backward, two copies of the features' gradient: each sample's is filled up to all of its tokens, then all
        # samples' are put together.
        passing_bytes=(coefficients(num_items=2 * 2.0 * count * out),),
    )
