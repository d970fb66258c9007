"""What goes wrong on other people's machines: no memory, no compiler, ever new lengths. Each is survived, and said."""

import os

import torch
from stage_cases import Case, build

from dflop.costs.design import Point
from dflop.models.compilation import compile_layers, compiles_layers
from dflop.models.compile_log import compiled_so_far
from dflop.models.microbatch import SegmentEnds
from tests.gpu.benches import bench_of, spec_of
from tests.gpu.check import Figures, Setting

__all__ = ["survived"]

_NUM_LENGTHS = 100


def survived(setting: Setting) -> Figures:
    """What happens without a compiler, and on GPUs without memory and with a hundred lengths."""
    figures = _without_compiler(setting)
    if setting.device == "cuda":
        figures |= _with_new_lengths(setting) | _without_memory(setting)
    return figures


def _without_compiler(setting: Setting) -> Figures:
    before = {name: os.environ.get(name) for name in ("PATH", "CC", "CXX")}
    os.environ["PATH"] = "/nowhere"
    for name in ("CC", "CXX"):
        os.environ.pop(name, None)
    try:
        compiles, warning = compiles_layers("on", torch.device(setting.device))
    finally:
        os.environ |= {name: value for name, value in before.items() if value is not None}
    return {"is compiled without a compiler": float(compiles), "what is said without a compiler": warning or "nothing"}


def _with_new_lengths(setting: Setting) -> Figures:
    """Graphs of a compiled LLM that meets a new length of microbatch each time."""
    stage = build(Case(precision="bf16", noise=0.02)).to(setting.device)
    compile_layers(stage)
    for number in range(_NUM_LENGTHS):
        length = 8 + 13 * number
        hidden = torch.randn(1, length, 128, device=setting.device, dtype=torch.bfloat16, requires_grad=True)
        rotary = stage.hf.model.language_model.rotary_emb(hidden, torch.arange(length, device=setting.device)[None])
        made, ends = hidden, SegmentEnds([length // 2, length]).to(hidden.device)
        for layer in stage.hf.model.language_model.layers:
            made = layer(made, attention_mask=None, position_embeddings=rotary, segment_ends=ends)
        made.sum().backward()
    compiled = compiled_so_far()
    return {
        f"graphs for {_NUM_LENGTHS} lengths": float(compiled.num_ended),
        f"functions that run eager after {_NUM_LENGTHS} lengths": float(compiled.num_eager),
    }


def _without_memory(setting: Setting) -> Figures:
    """A point that is too large gives rows without seconds, and the next one is measured."""
    spec = spec_of("llava_onevision", "tiny", setting)
    bench = bench_of(spec, "llm", 2, setting, is_compiled=False)
    held = torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(held + 0.02)
    large, small = (Point("layers", 2, False, segments=(2048,) * count) for count in (1024, 1))
    found = [bench.measure(point, 0)[0]["seconds"] for point in (large, small)]
    torch.cuda.set_per_process_memory_fraction(1.0)
    without, behind = ("none" if seconds is None else seconds for seconds in found)
    return {"seconds of a point without memory": without, "seconds of the one behind it": behind}
