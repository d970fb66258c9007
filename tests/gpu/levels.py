"""What layers keep from forward to backward, and the seconds they take, at each level of recomputation, and where some
keep it in host memory.

Beside both stands what plans predict from the card's data sheet, where there is one.
"""

import gc
import statistics
from collections.abc import Iterator

import numpy as np
import torch

from dflop.base import UserError
from dflop.costs.analytic import analytic_points
from dflop.costs.design import Point
from dflop.costs.fit import fit_model, median_points
from dflop.costs.measure import Bench
from dflop.costs.stage_kind import StageKind
from dflop.models import ModelSpec, offloading
from dflop.models.compilation import RECOMPUTES_POINTWISE
from dflop.models.loads import FEATURES, Loads
from dflop.plan.layout_key import LayoutKey
from tests.gpu.benches import bench_of, spec_of
from tests.gpu.check import Figures, Setting
from tests.gpu.clock import data_sheet

__all__ = ["of_layers"]

_DEPTH, _REPEATS = 4, 7
# Of so many layers of the LLM, so many are offloaded: as many as a plan would, at 50 GB/s.
_DEEPER, _NUM_OFFLOADED = 8, 2
_LAYERS = {
    "Qwen2-7B": ("llm", {"segments": (4096, 4096)}),
    "SigLIP": ("vision", {"num_items": 64}),
}
_TINY = {"llm": {"segments": (64, 64)}, "vision": {"num_items": 8}}
# By level, how many layers are recomputed, and how many of these but for attention.
_LEVELS = {"kept": (0, 0), "recomputed but for attention": (_DEPTH, _DEPTH), "recomputed": (_DEPTH, 0)}


def of_layers(setting: Setting) -> Iterator[Figures]:
    """Bytes that a layer keeps, and seconds of its forward and backward: measured, and what is predicted over that. Of
    kept layers also over those of layers for which torch's partitioner has its defaults."""
    known = data_sheet(torch.device(setting.device))
    for name, (module, loads) in _LAYERS.items():
        spec = spec_of("llava_onevision", "llava_ov_7b", setting)
        point = Point("layers", _DEPTH, False, **(_TINY[module] if setting.is_tiny else loads))
        bench, found = bench_of(spec, module, _DEPTH, setting), {}
        at = Loads(*(np.array([float(bench._runs.loads(point)[feature])]) for feature in FEATURES))
        model = None
        if known is not None:
            try:
                points = analytic_points(spec, module, 1, known, "compiled")
                model = fit_model(median_points(points.measurements), points.parameters, "analytic")
            except UserError as too_old:
                yield {f"left out: what is predicted of {name}": str(too_old)}
        for level, (num_recomputed, num_attention_kept) in _LEVELS.items():
            if num_attention_kept and module != "llm":
                continue
            seconds, kept_bytes = found[level] = _measured(bench, point, num_recomputed, num_attention_kept)
            yield {f"bytes of a layer, {name}, {level}": kept_bytes}
            yield {f"seconds of a layer, {name}, {level}": seconds}
            if model is None:
                continue
            kind = StageKind(
                module=module,
                layout=LayoutKey(),
                num_layers=_DEPTH,
                is_first=False,
                is_last=False,
                num_recomputed=num_recomputed,
                num_attention_kept=num_attention_kept,
            )
            predicted_s = sum(float(own[0]) for own in model.stage_time(kind, at)) / _DEPTH
            predicted_bytes = float(model.stage_memory(kind, at).activation_bytes[0]) / _DEPTH
            yield {f"predicted over measured bytes, {name}, {level}": predicted_bytes / kept_bytes}
            yield {f"predicted over measured seconds, {name}, {level}": predicted_s / seconds}
        del bench
        _forget(setting)
        seconds, kept_bytes = _as_torch_keeps(spec, module, point, setting)
        yield {f"bytes of a layer over torch's defaults, {name}": found["kept"][1] / kept_bytes}
        yield {f"seconds of a layer over torch's defaults, {name}": found["kept"][0] / seconds}
        if module == "llm":
            yield from _offloaded(spec, module, setting)
            _forget(setting)


def _offloaded(spec: ModelSpec, module: str, setting: Setting) -> Iterator[Figures]:
    """Seconds of layers of which some keep their tensors in host memory, over those of layers that keep them on the
    device; and the bytes that have left, over those of as many layers."""
    loads = _TINY[module] if setting.is_tiny else _LAYERS["Qwen2-7B"][1]
    point, bench = Point("layers", _DEEPER, False, **loads), bench_of(spec, module, _DEEPER, setting)
    if setting.is_tiny:
        offloading.LEAST_BYTES = 1 << 12
    bench._carry(point)
    run, found = bench._runs.make(point), []
    for num_offloaded in (0, _NUM_OFFLOADED):
        bench.stage.set_offloaded(num_offloaded)
        kept_bytes, _ = bench._bytes(run)
        found.append((statistics.median(sum(bench._timed(run)) for _ in range(_REPEATS)), kept_bytes))
    (kept_s, kept_bytes), (offloaded_s, left_bytes) = found
    what = f"{_NUM_OFFLOADED} of {_DEEPER} layers offloaded"
    yield {f"seconds over those of kept layers, {what}": offloaded_s / kept_s}
    yield {
        f"bytes that left over those of layers, {what}": (kept_bytes - left_bytes)
        / (kept_bytes * _NUM_OFFLOADED / _DEEPER)
    }


def _measured(bench: Bench, point: Point, num_recomputed: int, num_attention_kept: int) -> tuple[float, float]:
    """Seconds of a layer's forward and backward, and bytes that it keeps."""
    bench._carry(point)
    bench.stage.set_recomputed(num_recomputed, num_attention_kept=num_attention_kept)
    run = bench._runs.make(point)
    kept_bytes, _ = bench._bytes(run)
    seconds = statistics.median(sum(bench._timed(run)) for _ in range(_REPEATS))
    return seconds / _DEPTH, kept_bytes / _DEPTH


def _as_torch_keeps(spec, module: str, point: Point, setting: Setting) -> tuple[float, float]:
    switches = dict(RECOMPUTES_POINTWISE)
    RECOMPUTES_POINTWISE.clear()
    try:
        return _measured(bench_of(spec, module, _DEPTH, setting), point, 0, 0)
    finally:
        RECOMPUTES_POINTWISE.update(switches)
        _forget(setting)


def _forget(setting: Setting) -> None:
    """Give back what a bench held, which exempts all objects, itself included; and graphs of layers."""
    torch._dynamo.reset()
    gc.unfreeze()
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.empty_cache()
