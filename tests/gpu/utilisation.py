"""The share of the card's peak that layers reach, forward and backward, and what keeps the card from working.

FLOPs are those that `dflop/costs/counted.py` counts on tensors without values. The peak is that of the data sheet; of a
card without one, what a large product reaches is taken to be 80 % of it, as on an H100.
"""

import gc
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from dflop.costs.counted import CountedStage, counting
from dflop.costs.design import Point
from dflop.costs.made_up import MadeUpRuns
from dflop.models import ModelSpec
from tests.gpu.benches import bench_of, spec_of, why_left_out
from tests.gpu.check import Figures, Setting
from tests.gpu.clock import data_sheet, seconds_of

__all__ = ["idle_and_waits", "of_layers"]

_DEPTH = 2
_PRODUCT_SIZE = 8192


class _Layers(NamedTuple):
    """Two layers of a preset's module, and the loads of microbatches by name. With `eager`, uncompiled ones as well."""

    name: str
    family: str
    preset: str
    module: str
    loads: dict[str, dict]
    eager: bool = False


_TEXT = {f"8k tokens in {count}": {"segments": (8192 // count,) * count} for count in (1, 8, 64)}
_LAYERS = (
    _Layers("Qwen2-7B", "llava_onevision", "llava_ov_7b", "llm", _TEXT, eager=True),
    _Layers(
        *("SigLIP", "llava_onevision", "llava_ov_7b", "vision"),
        {f"{count} tiles": {"num_items": count} for count in (8, 32, 128)},
        eager=True,
    ),
    _Layers("InternViT-6B", "internvl", "internvl_38b", "vision", {"32 tiles": {"num_items": 32}}),
    _Layers("Qwen2.5-VL vision", "qwen2_5_vl", "qwen2_5_vl_7b", "vision", {"80k patches": {"num_items": 80_000}}),
    _Layers("Whisper", "qwen2_5_omni_thinker", "qwen2_5_omni_7b", "audio", {"64 windows": {"num_items": 64}}),
)


def of_layers(setting: Setting) -> Iterator[Figures]:
    """Shares of the peak, compiled, and eager of the two most frequent ones; and a large product's FLOP/s."""
    device, rate = torch.device(setting.device), _product_rate(setting)
    known, figures = data_sheet(device), {}
    yield {"a product of 8192 x 8192 x 8192, FLOP/s": rate}
    peak = known.peak_flops_per_s if known else rate / 0.8
    for layers in _LAYERS[:2] if setting.is_fast else _LAYERS:
        if reason := why_left_out(layers.family):
            yield {f"left out: {layers.name}": reason}
            continue
        spec = spec_of(layers.family, layers.preset, setting)
        for is_compiled in (True, False) if layers.eager and not setting.is_fast else (True,):
            bench = bench_of(spec, layers.module, _DEPTH, setting, is_compiled=is_compiled)
            for name, loads in list(layers.loads.items())[: 1 if setting.is_tiny else None]:
                point = Point("layers", _DEPTH, False, **(_tiny(loads) if setting.is_tiny else loads))
                seconds = sum(row["seconds"] for row in bench.measure(point, 1))
                how = "compiled" if is_compiled else "eager"
                figures[f"{layers.name}, {how}, {name}"] = _flops(spec, layers.module, point) / seconds / peak
                yield figures
            del bench
            gc.unfreeze()  # a bench exempts all objects, itself included
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if not (setting.is_fast or setting.is_tiny):
        one, many = (figures[f"Qwen2-7B, compiled, 8k tokens in {count}"] for count in (1, 64))
        yield {"Qwen2-7B: 64 segments beside one": many / one}


def _tiny(loads: dict) -> dict:
    return {"segments": (64,)} if "segments" in loads else {"num_items": 8}


def _product_rate(setting: Setting) -> float:
    """FLOP/s of one large product in bf16, on random numbers: those of a constant draw less power, and run faster."""
    device, size = torch.device(setting.device), 128 if setting.is_tiny else _PRODUCT_SIZE
    one, other = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: one @ other, device)


def _flops(spec: ModelSpec, module: str, point: Point) -> float:
    """FLOPs of products and attention, forward and backward. Counted attention is over all positions as one segment."""
    with counting(1) as ranks:
        stage = CountedStage(spec, module, _DEPTH, ranks)
        run = stage.run(point)
        squares = stage.runs.loads(point)["sum_sq_tokens"]
    share = squares / point.size**2 if module == "llm" or stage.has_runs else 1.0
    return sum(own.product_flops + share * own.attention_flops for own in (run.forward, run.backward))


def idle_and_waits(setting: Setting) -> Iterator[Figures]:
    """Of the LLM's layers: the share of time in which the card does nothing, and how often the host waits for it."""
    spec = spec_of("llava_onevision", "llava_ov_7b", setting)
    depth, device = (1, 4)[not setting.is_tiny], torch.device(setting.device)
    bench = bench_of(spec, "llm", depth, setting)
    runs = MadeUpRuns(spec, "llm", bench.stage, torch.bfloat16)
    for num_tokens in (64,) if setting.is_tiny else (1024, 2048, 4096, 8192):
        # New segments in each microbatch, as in training.
        cuts = [num_tokens // 2 - step for step in range(6)]
        points = [Point("whole", depth, False, segments=(cut, num_tokens - cut), num_targets=cut) for cut in cuts]
        ready = [runs.make(point) for point in points]
        for run in ready[:2]:
            _pass(run)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        with profile(activities=activities) as profiled:
            with record_function("microbatches"):
                for run in ready[2:]:
                    _pass(run)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        idle, num_waits = _read(profiled, device)
        waits = {f"waits of the host a microbatch of {num_tokens} tokens": num_waits / len(ready[2:])}
        yield {f"idle at {num_tokens} tokens": idle} | waits
        print(profiled.key_averages().table(sort_by="self_device_time_total", row_limit=25))


def _pass(run) -> None:
    outputs = run.forward()
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def _read(profiled: profile, device: torch.device) -> tuple[float, int]:
    """The share of time between the first and the last kernel in which none runs, and the waits of the host."""
    events = list(profiled.events())
    on = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    (host,) = [event for event in events if event.name == "microbatches" and event.device_type == DeviceType.CPU]
    kernels = [event for event in events if event.device_type == on and event.name != "microbatches"]
    spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
    waits = [
        event
        for event in events
        if event.name in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
        and host.time_range.start <= event.time_range.start <= host.time_range.end
    ]
    return idle_share(spans), len(waits)


def idle_share(spans: list[tuple[float, float]]) -> float:
    """Of spans that are sorted by their start: the share of the time from the first to the last that none covers."""
    covered, end = 0.0, spans[0][0]
    for start, stop in spans:
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1 - covered / (end - spans[0][0])
