"""Training runs of multimodal LLMs that others published, beside what analytic costs and the simulator say of them.

    python tests/benchmarks/published_multimodal.py --runs FOLDER

FOLDER holds `multimodal.yaml`, which gives each run's layout, hardware, step and memory with its sources. What a run
does not tell is assumed (`multimodal_rows.py`): above all how many tokens a microbatch has, and how many of them are of
pictures. Runs of class A are held against their price, those of B as ratios of two; C are bounds, as loading or an
unknown is in their time, and D needs what dflop does not have. Writes `results/benchmarks/published_multimodal.json`.

Implementations: `eager` is Hugging Face's code, `fused` the same with fused kernels (Liger). `megatron` has fused
kernels as well, and a host that takes `HOST_S` for a layer's pass beside its all-reduces: modules, autograd functions
and hooks in Python. It comes from runs of text. Megatron-LM's own tests train a GPT of 12 layers of 512 on 8 devices
(`tests/functional_tests/test_cases/gpt/gpt3_mcore_tp*` at d98e8a6, `local` layers), with 4,096 tokens a microbatch, on
which a device is mostly idle. With tp 1 and pp 2, tp 1 and pp 4, and tp 4, a rank runs 36, 42 and 96 passes of layers
in a step, bubbles included. They take 85, 103 and 203 ms on H100s, and 130, 169 and 291 ms on A100s. Without
all-reduces (`collective_s`) a line through these rises by 1.6 and 2.2 ms a pass.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import yaml
from multimodal_rows import NOT_PRICED, NUM_STEPS, Row, rows, spec_of
from published import DEVICES_A_NODE, REPOSITORY, whole_logits, with_device, without_recomputing

from dflop.base.devices import DeviceModel, load_device
from dflop.config.schema import AudioConfig, ClusterConfig
from dflop.costs.analytic import AnalyticPoints, points_of_stage
from dflop.costs.counted import CountedStage, counting
from dflop.costs.fit import fit_model, median_points
from dflop.plan import Grid, Plan
from dflop.plan.trained import TrainedSet
from dflop.schedule import Pricer
from dflop.shapes import SampleShapes
from dflop.shapes.samples import run_bounds

_MEMORY = ("peak_gib", "resident_gib", "held_gib")
_WHAT = ("step_s", *_MEMORY)
# Seconds of the host for one pass of a layer of Megatron's (see above), by the card beside it.
HOST_S = {"h100-80g": 1.6e-3, "a100-80g": 2.2e-3, "a800-80g": 2.2e-3}


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of a step, and GiB of the fullest device: of tensors at the peak and between steps, and what the process
    holds at the peak."""

    step_s: float
    peak_gib: float
    resident_gib: float
    held_gib: float


@dataclass(frozen=True, slots=True)
class Published:
    """What a run tells; None where it tells nothing."""

    usability: str
    step_s: float | None = None
    peak_gib: float | None = None
    resident_gib: float | None = None
    held_gib: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="a folder with multimodal.yaml")
    source = yaml.safe_load((parser.parse_args().runs / "multimodal.yaml").read_text(encoding="utf-8"))
    told, prices, table = published(source), {}, []
    print(f"{'run':43} of  {'step s':>7} {'priced':>7}  of it {'GiB':>7} {'priced':>7}  of it  what is assumed")
    for row in rows():
        prices[row.name] = priced(row)
        table.append(compared(row, told.get(row.name), prices[row.name]))
        print(line_of(table[-1]), flush=True)
    pairs = list(ratios(source, prices))
    for pair in pairs:
        both = f"{pair['published']:6.3f} {pair['priced']:6.3f}"
        print(f"{pair['name']:48} {pair['what']:5} ratio {both}  {pair['of_it']:5.2f}")
    print("\n".join(summary(table, pairs)))
    priced_ids = {row.name.split("/")[0] for row in rows()}
    for run in source["runs"]:
        if run["usability"] != "D" and run["id"] not in priced_ids:
            print(f"not priced: {run['id']}: {NOT_PRICED[run['id']]}")
    out = REPOSITORY / "results/benchmarks/published_multimodal.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"runs": table, "pairs": pairs}, indent=2) + "\n", encoding="utf-8")


def published(source: dict[str, Any]) -> dict[str, Published]:
    """The runs by the names of rows: a run with several cells or sizes has as many."""
    found, by_id = {}, {run["id"]: run for run in source["runs"]}
    for name, run in by_id.items():
        run = by_id.get(run.get("same_as"), {}) | run
        found[name] = _published(run)
        cells = {str(number): cell for number, cell in enumerate(run.get("rows", ())) if isinstance(cell, dict)}
        if "peak_mb" in run:
            sizes = zip(run["batch_size"], run["peak_mb"], strict=True)
            cells = {str(size): {"peak_allocated_mb": peak} for size, peak in sizes}
        found |= {f"{name}/{cell}": _published(run | own) for cell, own in cells.items()}
        if "columns" in run:
            found |= dict(_by_length(name, [dict(zip(run["columns"], own, strict=True)) for own in run["rows"]]))
    return found


def _by_length(name: str, cells: list[dict[str, Any]]) -> Iterator[tuple[str, Published]]:
    """VeOmni's runs of one sample at a time: tokens a second of each GPU, and bytes."""
    for cell in cells:
        if cell["veomni_tok_s_gpu"] != "OOM":
            step_s = cell["seq"] / cell["sp"] / cell["veomni_tok_s_gpu"]
            held = cell["veomni_mem_gb"] * 1e9 / 2**30
            yield f"{name}/{cell['sp']}x{cell['seq']}", Published("D", step_s, held_gib=held)


def _published(run: dict[str, Any]) -> Published:
    def gib(kind: str) -> float | None:
        return next(
            (run[kind + end] / scale for end, scale in (("_mb", 2**10), ("_bytes", 2**30)) if kind + end in run), None
        )

    step_s = run.get("step_s")
    step_s = step_s["median"] if isinstance(step_s, dict) else step_s
    if "wall_h" in run and run["id"] in NUM_STEPS:
        step_s = run["wall_h"] * 3600 / NUM_STEPS[run["id"]]
    held = run.get("mem_gib") or run.get("mem_gb")
    return Published(run["usability"], step_s, gib("peak_allocated"), gib("resident_allocated"), held)


def compared(row: Row, told: Published | None, price: Price) -> dict[str, Any]:
    """What was published beside its price. Rows that no run is named after are other assumptions of one."""
    found: dict[str, Any] = {"run": row.name, "assumed": row.assumed, "of": told.usability if told else "-"}
    for what in ("step_s", "peak_gib", "resident_gib", "held_gib"):
        found[what] = {"published": getattr(told, what, None), "priced": getattr(price, what)}
    return found


def _ratio(of: dict[str, float | None]) -> float | None:
    return of["priced"] / of["published"] if of["published"] else None


def errors_of(found: dict[str, Any]) -> dict[str, float]:
    """Prices over what was published, by the run's name and what it is."""
    return {f"{found['run']}, {what}": ratio for what in _WHAT if (ratio := _ratio(found[what]))}


def line_of(found: dict[str, Any]) -> str:
    memory = next((what for what in _MEMORY if found[what]["published"]), "peak_gib")
    line = f"{found['run']:43} {found['of']:2} "
    for what, digits in (("step_s", 3), (memory, 1)):
        of, ratio = found[what], _ratio(found[what])
        told = f"{of['published']:.{digits}f}" if ratio else ""
        line += f" {told:>7} {of['priced']:7.{digits}f}  " + (f"{ratio:5.2f}" if ratio else "     ")
    return f"{line}  {found['assumed']}"


def ratios(source: dict[str, Any], prices: dict[str, Price]) -> Iterator[dict[str, Any]]:
    """Ratios of two rows that were published, beside those of their prices."""
    for pair in source["pairs"]:
        if not {pair["a"], pair["b"]} <= set(prices):
            continue
        one, other = prices[pair["a"]], prices[pair["b"]]
        for key, what in (("step_ratio", "step_s"), ("wall_ratio", "step_s"), ("peak_ratio", "peak_gib")):
            if key in pair:
                own = getattr(one, what) / getattr(other, what)
                yield {
                    "name": pair["name"],
                    "what": what.split("_")[0],
                    "published": pair[key],
                    "priced": own,
                    "of_it": own / pair[key],
                }


def summary(table: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> Iterator[str]:
    def of_class(usability: str, whats: Sequence[str]) -> list[float]:
        rows = (row for row in table if row["of"] == usability)
        return [ratio for row in rows for what in whats if (ratio := _ratio(row[what]))]

    steps = [pair for pair in pairs if pair["what"] == "step"]
    for what, found, aim in (
        ("steps, class A", of_class("A", ["step_s"]), 0.2),
        ("steps, class B, of assumed shapes", of_class("B", ["step_s"]), 0.2),
        ("memory, class A", of_class("A", _MEMORY), 0.1),
        ("memory, class B, of assumed shapes", of_class("B", _MEMORY), 0.1),
        ("ratios of steps", [pair["of_it"] for pair in steps], 0.1),
    ):
        errors = sorted(abs(ratio - 1) for ratio in found)
        within = sum(error <= aim for error in errors)
        yield (
            f"{what}: {len(errors)}, median error {statistics.median(errors):.1%}, largest {errors[-1]:.1%}, "
            f"{within} within {aim:.0%}"
        )
    in_order = sum((pair["published"] > 1) == (pair["priced"] > 1) for pair in steps)
    yield f"order: {in_order} of {len(steps)} pairs"
    bounds = of_class("C", ["step_s"])
    num_below = sum(ratio <= 1 for ratio in bounds)
    yield f"bounds: {num_below} of {len(bounds)} steps of class C are priced below what was published"


@cache
def points_of(
    spec_name: str, module: str, tp: int, device: DeviceModel, implementation: str, trained: TrainedSet
) -> AnalyticPoints:
    spec = spec_of(spec_name)
    with counting(tp) as ranks:
        is_compiled = implementation != "eager"
        change = whole_logits if module == "llm" else lambda stage: None
        how = {"is_compiled": is_compiled, "recomputes_pointwise": False, "change": change, "trained": trained}
        stage = CountedStage(spec, module, 2, ranks, **how)
        points = points_of_stage(stage, device)
    if implementation != "megatron":
        return points
    pass_s = HOST_S[device.name] + 2 * (tp > 1) * device.collective_s
    least_s = pl.when(pl.col("piece") == "layers").then(pl.col("num_layers") * pass_s).otherwise(0.0)
    return replace(points, measurements=points.measurements.with_columns(pl.max_horizontal("seconds", least_s)))


def priced(row: Row) -> Price:
    device = load_device(row.device)
    frames, sizes = [], []
    for module in ("vision", "llm"):
        is_llm = module == "llm"
        tp = row.tp if is_llm else row.encoder_tp or row.tp
        how = row.implementation if is_llm else row.of_encoder or row.implementation
        points = points_of(row.spec.name, module, tp, device, how, row.trained)
        as_tp = pl.lit(row.tp, pl.Int64)
        share = 1.0 if is_llm else 1 / row.encoder_shares
        frames.append(points.measurements.with_columns(pl.col("seconds") * share, tp=as_tp))
        sizes.append(points.parameters.with_columns(tp=as_tp))
    # As if it were not measured: these frameworks repeat a recomputed layer to its end, where torch now stops early.
    fitted = fit_model(
        median_points(without_recomputing(pl.concat(frames))), pl.concat(sizes, how="diagonal_relaxed"), "measured"
    )
    costs = with_device(fitted, device)
    cluster = ClusterConfig(
        device="cuda",
        num_nodes=max(1, row.num_devices // DEVICES_A_NODE),
        devices_per_node=min(row.num_devices, DEVICES_A_NODE),
        memory_gib=device.memory_gib,
        intra_node_gbps=device.link_bytes_per_s * 8 / 1e9,
        inter_node_gbps=device.network_bytes_per_s * 8 / 1e9,
        device_model=row.device,
    )
    pricer = Pricer(plan_of(row), costs, row.spec, cluster, precision="bf16", trained=row.trained, audio=AudioConfig())
    shapes, replica, microbatch = shapes_of(row, pricer.plan.grid("llm").dp)
    assignment = pricer.assign(shapes, replica, microbatch)
    step_s = pricer.timeline(pricer.stage_times(shapes, assignment), assignment.slots).step_s
    fewer_bytes = 0.0
    if row.shares_gradients:
        parts = map(pricer.stage_costs.resident_parts, pricer.stages)
        fewer_bytes = sum(part.gradients for part in parts) * (1 - 1 / pricer.plan.grid("llm").dp)
        step_s -= fewer_bytes / costs.update_bytes_per_s  # nor are they set to zero
    held_bytes = max(pricer.memory_bytes(shapes, assignment).values()) - fewer_bytes * (1 + device.allocator_share)
    tensor_bytes = costs.most_tensor_bytes(held_bytes - pricer.memory.communicator_bytes)
    resident_bytes = float(pricer.memory.resident_bytes.max()) - fewer_bytes
    return Price(step_s, tensor_bytes / 2**30, resident_bytes / 2**30, held_bytes / 2**30)


def plan_of(row: Row) -> Plan:
    recomputes = row.recomputes_encoder or any(row.recomputed)
    depth = row.spec.module("vision").num_layers
    vision = Grid(
        module="vision",
        num_ranks=row.num_devices // row.pp,
        tp=row.tp,
        sharding=row.sharding,
        recomputed=(depth,) if row.recomputes_encoder else (),
    )
    llm = Grid(
        module="llm",
        num_ranks=row.num_devices,
        tp=row.tp,
        pp=row.pp,
        layers=row.layers,
        sharding=row.sharding,
        recomputed=row.recomputed if any(row.recomputed) else (),
        cp=row.cp,
    )
    return Plan(
        placement="monolithic",
        grids=(vision, llm),
        num_microbatches=row.num_microbatches,
        checkpointing=recomputes,
        schedule="interleaved_1f1b" if row.num_chunks > 1 else "1f1b",
        num_chunks=row.num_chunks,
    )


def shapes_of(row: Row, dp: int) -> tuple[SampleShapes, np.ndarray, np.ndarray]:
    """The batch's samples, with a row for each share, and the replica and the microbatch of each."""
    num_groups, size = dp // row.cp, len(row.samples)
    num_cells = num_groups * row.num_microbatches
    of = {
        name: np.repeat(np.tile([getattr(sample, name) for sample in row.samples], num_cells), row.cp)
        for name in ("num_items", "kept", "tokens", "sum_sq_items")
    }
    cell, number = np.repeat(np.arange(num_cells), size * row.cp), np.arange(num_cells * size * row.cp)
    share, degree = number % row.cp, np.full(len(number), row.cp)
    of["own"] = sum(end - start for start, end in run_bounds(of["tokens"], degree, share))
    shapes = SampleShapes(
        encoders=("vision",),
        sample_id=number,
        source=np.zeros_like(number),
        row=number,
        num_items=of["num_items"][:, None],
        kept_tokens=of["kept"][:, None],
        llm_tokens=of["own"],
        target_tokens=of["own"],
        sum_sq_items=of["sum_sq_items"][:, None].astype(float),
        **({"degree": degree, "share": share, "whole_tokens": of["tokens"]} if row.cp > 1 else {}),
    )
    return shapes, cell % num_groups * row.cp + share, cell // num_groups


if __name__ == "__main__":
    main()
