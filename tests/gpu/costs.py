"""Costs of the 7B preset measured by `dflop profile-costs`, and held against microbatches that no fit has seen.

Also against the analytic costs of the card, piece by piece. The memory is that of the same microbatches.
"""

import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import torch

from dflop.base import UserError
from dflop.costs import CostModel, read_measured
from dflop.costs.analytic import analytic_points
from dflop.costs.design import LoadBounds, Point
from dflop.costs.fit import PIECES, fit_model, measured_loads, median_points, memory_errors, relative_errors
from dflop.costs.made_up import MadeUpRuns
from dflop.costs.measured import Measured
from dflop.plan.layout_key import LayoutKey
from tests.gpu.benches import bench_of, spec_of
from tests.gpu.check import Figures, Setting
from tests.gpu.clock import data_sheet

__all__ = ["of_7b"]

_FAMILY, _PRESET = "llava_onevision", "llava_ov_7b"
_MODULES = ("vision", "llm")
_BOUNDS = LoadBounds(num_items=(1, 128), num_tokens=(256, 16_384), segment_tokens=(64, 8192), target_share=(0.05, 0.5))
_TINY_BOUNDS = LoadBounds(num_items=(1, 8), num_tokens=(32, 256), segment_tokens=(32, 128), target_share=(0.1, 0.5))
_NUM_HELD_OUT, _NUM_SHAPES = 12, 20
_DEPTH = 8
_HEATING_S, _BUDGET_S = 60.0, 60.0
_FAST_SHARE = 0.3  # of these times and of the microbatches; and the LLM alone
_KEYS = ("num_items", "num_tokens", "sum_sq_tokens", "num_targets", "num_layers")


def of_7b(setting: Setting) -> Iterator[Figures]:
    """Errors of predicted seconds and bytes, and analytic seconds over measured ones."""
    parts: list[Measured] = []
    spec, device = spec_of(_FAMILY, _PRESET, setting), torch.device(setting.device)
    modules = _MODULES[1:] if setting.is_fast else _MODULES
    for module in modules:
        started = time.monotonic()
        parts.append(_profiled(module, setting))
        yield {f"seconds of profile-costs, {module}": time.monotonic() - started}
        if (known := data_sheet(device)) is not None:
            try:
                points = analytic_points(spec, module, 1, known, "compiled")
                analytic = fit_model(median_points(points.measurements), points.parameters, "analytic")
                yield _beside_analytic(module, analytic, median_points(parts[-1].measurements))
            except UserError as too_old:
                yield {f"left out: analytic seconds, {module}": str(too_old)}
    model = fit_model(
        median_points(pl.concat([part.measurements for part in parts])), pl.concat([part.parameters for part in parts])
    )
    for module in modules:
        if not setting.is_tiny:
            _heat(device, _HEATING_S * _share(setting))  # short bursts between pauses run at other clocks than training
        yield _held_out(module, model, setting)


def _profiled(module: str, setting: Setting) -> Measured:
    """What the command measures, as a user runs it."""
    out, bounds = setting.folder / "costs" / f"{module}.tp1.parquet", setting.folder / "load_bounds.json"
    out.parent.mkdir(exist_ok=True)
    bounds.write_text((_TINY_BOUNDS if setting.is_tiny else _BOUNDS).to_json())
    config = {
        "model": {"family": _FAMILY, "preset": "tiny" if setting.is_tiny else _PRESET},
        "cluster": {"device": setting.device, "devices_per_node": 1},
        "train": {"precision": "bf16"},
        "costs": {"repeats": 3, "time_budget_s": 0.1 if setting.is_tiny else _BUDGET_S * _share(setting)},
    }
    command = [sys.executable, "-m", "dflop.cli", "profile-costs", "--config", json.dumps(config), "--module", module]
    subprocess.run([*command, "--bounds", str(bounds), "--out", str(out)], check=True)
    return read_measured([Path(out)])


def _share(setting: Setting) -> float:
    return _FAST_SHARE if setting.is_fast else 1.0


def _heat(device: torch.device, seconds: float) -> None:
    """Large products until clocks are those of a card that trains."""
    values = torch.randn(8192, 8192, device=device).to(torch.bfloat16)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(20):
            values @ values
        torch.cuda.synchronize(device)


def _held_out(module: str, model: CostModel, setting: Setting) -> Figures:
    """Errors of the seconds of a whole stage's microbatches, forward and backward together, and of its bytes."""
    spec, depth = spec_of(_FAMILY, _PRESET, setting), 2 if setting.is_tiny else _DEPTH
    bench = bench_of(spec, module, depth, setting)
    held = [tensor for own in bench.stage.parameters() for tensor in (own, own.grad) if tensor is not None]
    resting_bytes = sum(own.nbytes for own in held)
    rng, points = np.random.default_rng(1), []
    for _ in range(_NUM_HELD_OUT // 3 if setting.is_tiny else round(_NUM_SHAPES * _share(setting))):
        points.append(_draw(module, depth, rng, _TINY_BOUNDS if setting.is_tiny else _BOUNDS))
    rows = [row for point in points for row in bench.measure(point, 0)]
    measured = median_points(pl.DataFrame(rows))
    seconds = (
        relative_errors(model, measured).group_by(_KEYS, maintain_order=True).agg(pl.sum("predicted_s", "seconds"))
    )
    errors = (seconds["predicted_s"] / seconds["seconds"] - 1).abs().head(_NUM_HELD_OUT)
    memory = memory_errors(model, measured)
    apart = ((memory["predicted_bytes"] - memory["peak_bytes"]) / (memory["peak_bytes"] + resting_bytes)).abs()
    figures = {
        f"median error of seconds, {module}": float(errors.median()),
        f"p95 error of seconds, {module}": float(errors.quantile(0.95, "linear")),
        f"largest error of bytes, {module}": float(apart.max()),
    }
    if bench.device.type == "cuda":
        figures[f"reserved over allocated bytes, {module}"] = _reserved_share(bench, spec, points)
    del bench, held
    gc.unfreeze()
    gc.collect()
    return figures


def _draw(module: str, depth: int, rng: np.random.Generator, bounds: LoadBounds) -> Point:
    """A microbatch of a size, lengths and a share of targets that are even on logarithmic scales."""

    def between(low: float, high: float) -> float:
        return low * (high / low) ** rng.random()

    if module != "llm":
        return Point("whole", depth, False, num_items=round(between(*bounds.num_items)))
    rest, lengths = round(between(*bounds.num_tokens)), []
    while rest > 0:
        lengths.append(min(rest, round(between(*bounds.segment_tokens))))
        rest -= lengths[-1]
    num_targets = max(1, int(sum(lengths) * between(*bounds.target_share)))
    return Point("whole", depth, False, segments=tuple(lengths), num_targets=num_targets)


def _reserved_share(bench, spec, points: list[Point]) -> float:
    """The most that the allocator reserves for microbatches of changing shapes, beside the most that they hold."""
    runs = MadeUpRuns(spec, bench.module, bench.stage, torch.bfloat16)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for point in points:
        outputs = (run := runs.make(point)).forward()
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        del outputs, run
    return torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated()


def _beside_analytic(module: str, analytic: CostModel, measured: pl.DataFrame) -> Figures:
    """The median of analytic over measured seconds, of each piece and pass."""
    figures = {}
    alone = measured.filter((pl.col("piece") != "whole") & ~pl.col("checkpointing"))
    for (piece, direction), frame in alone.group_by("piece", "pass", maintain_order=True):
        both = analytic.part_times(module, LayoutKey(), measured_loads(frame), PIECES[piece])
        times = both[direction == "backward"]
        depths = frame["num_layers"].to_numpy()
        predicted_s = sum(own * (depths if part == "layer" else 1) for part, own in times.items())
        ratio = float(np.median(predicted_s / frame["seconds"].to_numpy()))
        figures[f"analytic over measured seconds, {module} {piece} {direction}"] = ratio
    return figures
