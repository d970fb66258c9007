"""The work of the modules of Qwen2.5-Omni's thinker in one forward pass: both encoders, and the LLM.

The vision encoder and the LLM are Qwen2.5-VL's, except that the encoder's queries, keys and values have a matrix each.
An item of the audio encoder is a whole chunk of mel frames; the last chunk of a sound is padded.
"""

from dataclasses import replace

from dflop.models.llm_work import llm_work
from dflop.models.qwen2_5_vl.work import vision_work
from dflop.models.spec import ModelSpec
from dflop.models.vit_work import vit_layer
from dflop.models.work import ModuleWork, PartWork, coefficients, size_of

__all__ = ["count_work"]

# The approximate number of kernels of a forward pass in eager PyTorch: convolutions, products, norms and pointwise
# operations.
_NUM_KERNELS = {"layer": 16, "first": 8, "last": 6}
_CONVOLVED = 3  # width of the convolutions' kernels, in positions


def count_work(spec: ModelSpec, module: str, tp: int) -> ModuleWork:
    """Counts of one module on each of `tp` ranks.

    Raises:
        UserError: when the config lacks a size, or has an LLM that cannot be counted.
    """
    if module == "llm":
        return llm_work(spec, tp, is_tied=bool(spec.hf_config.get("tie_word_embeddings", False)), kind="qwen2")
    if module == "vision":
        return vision_work(spec, tp, stacked_qkv=False)
    sizes, positions = spec.module("audio"), spec.rules.chunk_frames // 2
    inner = size_of(spec, "audio_config", "encoder_ffn_dim")
    layer = replace(
        vit_layer(hidden=sizes.hidden_size, inner=inner, num_heads=sizes.num_heads), copies_attention=True
    ).work(tp, "num_items", positions, ("num_items", positions**2), causal=False, num_kernels=_NUM_KERNELS["layer"])
    return ModuleWork(
        layer=replace(layer, num_parameters=layer.num_parameters - sizes.hidden_size / tp),  # keys have no bias
        first=_convolutions(spec),
        last=_projector(spec),
        input_bytes=coefficients(num_items=2.0 * positions * sizes.hidden_size),
        stage_bytes=coefficients(),
    )


def _convolutions(spec: ModelSpec) -> PartWork:
    """The two convolutions, of which the second halves the number of frames; whole on every rank."""
    hidden, frames = spec.module("audio").hidden_size, spec.rules.chunk_frames
    num_mels, positions = size_of(spec, "audio_config", "num_mel_bins"), frames // 2
    first, second = _CONVOLVED * num_mels * hidden, _CONVOLVED * hidden * hidden
    return PartWork(
        dense_flops=coefficients(num_items=2.0 * (frames * first + positions * second)),
        square_flops=coefficients(),
        causal=False,
        matmul_bytes=coefficients(num_items=2.0 * (frames * (num_mels + 2 * hidden) + positions * hidden)),
        # The activations, zeroing frames after a sound's end, and adding positions.
        pointwise_bytes=coefficients(num_items=2.0 * hidden * (4 * frames + 4 * positions)),
        reduced_bytes=(coefficients(), coefficients()),
        # What the convolutions and the activations read, and the mask of the sounds' frames.
        saved_bytes=coefficients(num_items=2.0 * (frames * (num_mels + 2 * hidden) + positions * hidden) + frames),
        size=coefficients(num_items=positions * hidden),
        num_parameters=first + second + 2 * hidden,
        num_matrix_parameters=first + second,
        num_kernels=_NUM_KERNELS["first"],
    )


def _projector(spec: ModelSpec) -> PartWork:
    """The mean of pairs of positions, the last norm and one matrix; whole on every rank."""
    hidden, out = spec.module("audio").hidden_size, spec.module("llm").hidden_size
    positions = spec.rules.chunk_frames // 2
    tokens, matrix = positions // 2, hidden * out
    return PartWork(
        dense_flops=coefficients(num_items=2.0 * tokens * matrix),
        square_flops=coefficients(),
        causal=False,
        matmul_bytes=coefficients(num_items=2.0 * tokens * (hidden + out)),
        # Two gathers, their mean, the norm, and putting samples' features together.
        pointwise_bytes=coefficients(num_items=2.0 * tokens * (11 * hidden + 2 * out)),
        reduced_bytes=(coefficients(), coefficients()),
        # The indices of pairs, what the norm reads with its mean and deviation, and what the matrix reads.
        saved_bytes=coefficients(num_items=tokens * (16.0 + 4.0 * hidden + 8.0)),
        size=coefficients(num_items=tokens * out),
        # With the embeddings of the beginning and end of a sound, which are in checkpoints but which no pass reads.
        num_parameters=2 * hidden + matrix + out + 2 * out,
        num_matrix_parameters=matrix,
        num_kernels=_NUM_KERNELS["last"],
    )
