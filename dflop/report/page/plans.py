"""The page's section on the plan: what was chosen and why, the other candidates, and what more memory would bring."""

from typing import Any

import polars as pl

from dflop.models import ModelSpec
from dflop.plan import Grid, Plan, plan_from_dict
from dflop.report.charts.plans import best_plans, is_plan, modules_of, plan_labels, plans_finding
from dflop.report.run import Run

__all__ = ["plan_section"]

_GIB = 2**30
_PLACEMENTS = {
    "disjoint": "Encoder and LLM compute on devices of their own.",
    "colocated": "Every device computes a share of the encoder and a share of the LLM.",
    "monolithic": "The encoder is part of the LLM's first pipeline stage, on the LLM's grid.",
    "bubble_filled": "Devices compute their share of the encoder while they would wait for the LLM's pipeline.",
}


def plan_section(run: Run, spec: ModelSpec, memory_gib: float) -> dict[str, Any]:
    """The section, from the run's plan and candidates; `memory_gib` is the memory of a device. `with_more_memory` is a
    faster plan that does not fit, with its step time and memory, if any."""
    text, plan = run.plan_text, run.plan
    return {
        "finding": plans_finding(run.candidates, plan),
        "plan": str(plan),
        "placement": _PLACEMENTS.get(plan.placement, plan.placement),
        "why": text.get("why") or "The plan was written by hand.",
        "next": text.get("next") or "",
        "grids": [_grid(plan, spec, grid) for grid in plan.grids],
        "facts": _facts(plan, text, memory_gib),
        "candidates": _candidates(run),
        "num_candidates": len(run.candidates),
        "num_plans": text.get("num_plans") or len(run.candidates),
        "with_more_memory": _other(text.get("with_more_memory"), text),
    }


def _grid(plan: Plan, spec: ModelSpec, grid: Grid) -> dict[str, Any]:
    """One module's layout; `layers` says how many each pipeline stage has."""
    layers = [len(part) for part in plan.layers_of(grid.module, spec.module(grid.module).num_layers)]
    said = " + ".join(map(str, layers))
    if len(set(layers)) == 1 and len(layers) > 1:
        said = f"{len(layers)} x {layers[0]}"
    sharding = grid.sharding + (f" over {grid.num_shards}" if grid.gathers else "")
    return {"grid": grid, "layers": said, "sharding": sharding}


def _facts(plan: Plan, text: dict[str, Any], memory_gib: float) -> list[tuple[str, str]]:
    predicted = text.get("predicted", {})
    facts = [
        ("microbatches", str(plan.num_microbatches)),
        ("schedule", plan.schedule + (f", {plan.num_chunks} chunks" if plan.num_chunks > 1 else "")),
        ("recomputed layers", _recomputed(plan)),
    ]
    if offloaded := [f"{grid.module} {' + '.join(map(str, grid.offloaded))}" for grid in plan.grids if grid.offloaded]:
        facts.append(("layers in host memory", ", ".join(offloaded)))
    if plan.offloads_optimizer:
        facts.append(("optimiser's state", "in host memory between steps"))
    if (cp := plan.grid("llm").cp) > 1:
        facts.append(("long samples", f"over up to {cp} replicas of the LLM"))
    if predicted:
        facts.append(("bound by", predicted["bottleneck"]))
        held = max(predicted["memory_bytes"].values()) / _GIB
        facts.append(("fullest device", f"{held:.3g} of {memory_gib:.3g} GiB (predicted)"))
    if loading := text.get("loading"):
        processes = loading["processes"]
        facts.append(("loading", f"{processes} process{'es' * (processes != 1)} on the rank that loads most"))
    return facts


def _recomputed(plan: Plan) -> str:
    """For each module, how many layers of each stage are recomputed, in words."""
    if not plan.checkpointing:
        return "none"
    counts = [f"{grid.module} {' + '.join(map(str, grid.recomputed)) or 'all'}" for grid in plan.grids]
    if kept := plan.grid("llm").attention_kept:
        counts[-1] += f" ({' + '.join(map(str, kept))} of them but for attention)"
    return ", ".join(counts) if any(grid.recomputed for grid in plan.grids) else "all"


def _candidates(run: Run) -> list[dict[str, Any]]:
    """The best plans, as rows of `candidates.parquet` with more columns; `ratio` is the step time over the chosen
    plan's."""
    frame = run.candidates.sort("rank")
    modules = modules_of(frame)
    shown = best_plans(frame, run.plan, modules)
    chosen = [is_plan(row, run.plan, modules) for row in shown.iter_rows(named=True)]
    base_s = shown["step_s"][chosen.index(True)] if any(chosen) else shown["step_s"][0]
    held = pl.max_horizontal(f"{module}_memory_bytes" for module in modules)
    columns = {"label": pl.Series(plan_labels(frame, shown, modules)), "is_chosen": pl.Series(chosen)}
    return shown.with_columns(**columns, ratio=pl.col("step_s") / base_s, memory_gib=held / _GIB).to_dicts()


def _other(said: dict[str, Any] | None, text: dict[str, Any]) -> dict[str, Any] | None:
    """A plan that was not chosen. `ratio` is its step time over the chosen plan's, e.g. 1.08."""
    if not said:
        return None
    predicted = said["predicted"]
    return {
        "plan": str(plan_from_dict(said["plan"])),
        "step_s": predicted["step_s"],
        "ratio": predicted["step_s"] / text["predicted"]["step_s"],
        "memory_gib": max(predicted["memory_bytes"].values()) / _GIB,
    }
