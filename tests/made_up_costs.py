"""Costs that nobody measured: round numbers, and the measurements that a device with such costs would give."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from dflop.costs import CostModel, Loads, StageKind, fit_costs
from dflop.costs.fit import PIECES
from dflop.models.loads import FEATURES, Coefficients
from dflop.plan.layout_key import LayoutKey
from dflop.store import write_costs

__all__ = ["MadeUpFrames", "made_up_costs", "measure_as", "write_made_up_costs"]

_NUM_TOKENS = (32, 64, 128, 256, 512, 768, 1024, 2048)
_NUM_ITEMS = (1, 2, 3, 5, 8, 13, 21, 34)
_TARGET_SHARES = (0.5, 0.05)


def made_up_costs() -> CostModel:
    """Round numbers of the tiny model's order: an item weighs as much as 20 tokens, backward twice forward."""
    times, activations, transients, parameter_bytes = {}, {}, {}, {}
    nothing = Coefficients(0.0, (0.0, 0.0, 0.0, 0.0))
    for module, layer, first, last in (
        ("vision", Coefficients(2e-4, (1e-4, 0, 0, 0)), (1e-4, (1e-4, 0, 0, 0)), (2e-4, (1e-4, 0, 0, 0))),
        ("llm", Coefficients(1e-4, (0, 5e-6, 1e-9, 0)), (5e-5, (0, 1e-6, 0, 0)), (1.5e-4, (0, 0, 0, 4e-6))),
    ):
        is_llm = module == "llm"
        parts = {
            "stage": Coefficients(2e-5, nothing.per_load),
            "layer": layer,
            "first": Coefficients(*first),
            "last": Coefficients(*last),
        }
        kept = {
            "stage": nothing,
            "layer": Coefficients(0.0, (0, 3_000.0, 0, 0) if is_llm else (40_000.0, 0, 0, 0)),
            "first": Coefficients(0.0, (0, 500.0, 0, 0) if is_llm else (4_000.0, 0, 0, 0)),
            "last": Coefficients(0.0, (0, 0, 0, 8e3) if is_llm else (9_000.0, 0, 0, 0)),
        }
        inputs = Coefficients(0.0, (0, 512.0, 0, 0) if is_llm else (13_000.0, 0, 0, 0))
        for part, forward in parts.items():
            for checkpointing in (False, True) if part in ("stage", "layer") else (False,):
                key = (module, LayoutKey(), part, checkpointing)
                again = 1 if checkpointing and part == "layer" else 0
                times[*key, "forward"] = forward
                times[*key, "backward"] = (2 + again) * forward
                activations[key] = inputs if again else kept[part]
                transients[key] = kept["layer"] if again else 0.25 * kept[part]
        parameter_bytes |= {
            (module, LayoutKey(), part): size
            for part, size in (("stage", 0.0), ("layer", 5e5), ("first", 1e5), ("last", 2e5))
        }
    return CostModel(
        times=times,
        activations=activations,
        transients=transients,
        parameter_bytes=parameter_bytes,
        attention_bytes={("llm", LayoutKey()): 600.0},
    )


def write_made_up_costs(
    path: Path,
    noise: float = 0.0,
    tp_sizes: Sequence[int] = (1,),
    modules: tuple[str, ...] = ("vision", "llm"),
) -> None:
    """Write a `costs.duckdb` as fitted to what such a device would show: it takes as long for every tp and encoder."""
    frames = measure_as(_with_encoders(made_up_costs(), modules), modules=modules, noise=noise)
    measurements, parameters = (
        pl.concat(frame.with_columns(tp=pl.lit(tp, frame.schema["tp"])) for tp in tp_sizes)
        for frame in (frames.measurements, frames.parameters)
    )
    frames = frames._replace(measurements=measurements, parameters=parameters)
    frames.write(path, fit_costs(frames.measurements, frames.parameters))


def _with_encoders(costs: CostModel, modules: Sequence[str]) -> CostModel:
    """The costs, of every encoder those of the first one."""
    tables = {name: dict(getattr(costs, name)) for name in ("times", "activations", "transients", "parameter_bytes")}
    for table in tables.values():
        table |= {
            (module, *key[1:]): value for key, value in table.items() if key[0] == "vision" for module in modules[1:-1]
        }
    return replace(costs, **tables)


class MadeUpFrames(NamedTuple):
    """What `dflop profile-costs` would write."""

    measurements: pl.DataFrame
    parameters: pl.DataFrame
    device: pl.DataFrame

    def write(self, path: Path, tables: dict[str, pl.DataFrame]) -> None:
        meta = {"source": "measured", "created": "2025-01-01T00:00:00+00:00"}
        write_costs(path, {"measurements": self.measurements, "device": self.device, **tables}, meta)


def measure_as(
    model: CostModel,
    *,
    modules: tuple[str, ...] = ("vision", "llm"),
    noise: float = 0.0,
    repeats: int = 2,
    seed: int = 0,
) -> MadeUpFrames:
    """What a device with exactly these costs would show."""
    rng = np.random.default_rng(seed)
    frames = []
    for module in modules:
        for piece, depth, checkpointing in (
            *(("layers", depth, checkpointing) for depth in (1, 4) for checkpointing in (False, True)),
            ("first", 0, False),
            ("last", 0, False),
            ("whole", 2, False),
            ("whole", 3, True),
        ):
            points = _points(module, piece)
            loads = Loads(*(points[name].to_numpy().astype(float) for name in FEATURES))
            parts = PIECES.get(piece, ("stage", "layer", "first", "last"))
            each = {part: depth if part == "layer" else 1 for part in parts}
            keys = {part: (module, LayoutKey(), part, checkpointing and part in ("stage", "layer")) for part in parts}
            saved = sum(count * model.activations[keys[part]](loads) for part, count in each.items())
            passing = np.max([model.transients[keys[part]](loads) for part in parts], axis=0)
            if piece == "whole":
                kind = StageKind.whole(module, LayoutKey(), depth, num_recomputed=depth if checkpointing else 0)
                passing = model.stage_memory(kind, loads).transient_bytes
            for direction in ("forward", "backward"):
                seconds = sum(count * model.times[*keys[part], direction](loads) for part, count in each.items())
                frames += [
                    points.with_columns(
                        module=pl.lit(module),
                        tp=1,
                        piece=pl.lit(piece),
                        num_layers=depth,
                        checkpointing=checkpointing,
                        seconds=pl.Series(seconds * np.exp(noise * rng.normal(size=len(points)))),
                        attention_s=pl.lit(None, pl.Float64),
                        saved_bytes=pl.Series(saved).round().cast(pl.Int64),
                        peak_bytes=pl.Series(saved + passing).round().cast(pl.Int64),
                        repeat=repeat,
                        **{"pass": pl.lit(direction)},
                    )
                    for repeat in range(repeats)
                ]
    parameters = [
        {"module": module, "tp": layout.tp, "part": part, "parameter_bytes": size, "targets_at_once": math.inf}
        | {"attention_bytes": model.attention_bytes.get((module, layout))}
        for (module, layout, part), size in model.parameter_bytes.items()
        if module in modules and part != "stage"
    ]
    device = pl.DataFrame({"device": ["a made-up processor"], "overhead_bytes": [0], "allocator_share": [0.0]})
    device = device.with_columns(update_bytes_per_s=pl.lit(None, pl.Float64))
    return MadeUpFrames(pl.concat(frames), pl.DataFrame(parameters), device)


def _points(module: str, piece: str) -> pl.DataFrame:
    nothing = dict.fromkeys(FEATURES, 0)
    if module != "llm":
        return pl.DataFrame([nothing | {"num_items": count} for count in _NUM_ITEMS])
    lengths = (32, 2048) if piece in ("layers", "whole") else (2048,)
    shares = _TARGET_SHARES if piece in ("last", "whole") else (0.0,)
    return pl.DataFrame(
        [
            nothing
            | {
                "num_tokens": tokens,
                "sum_sq_tokens": tokens * min(tokens, length),
                "num_targets": int(tokens * share) + (share > 0),
            }
            for tokens in _NUM_TOKENS
            for length in lengths
            for share in shares
        ]
    )
