"""The plot of the plans: the best ones side by side, with their bottleneck, idle share and memory."""

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

from dflop.parallelism import PLAIN_SHARDING, Plan
from dflop.planning import FINALISTS_WITHIN
from dflop.reporting.style import INK, MODULE_SHADES, MUTED, format_seconds, heading, legend_beside_title

__all__ = ["best_plans", "draw_plans", "is_plan", "plan_labels", "plans_finding", "plans_height_in"]

_MOST_PLANS = 12
# Step times whose ratio is smaller are called the same.
_ALIKE = 1.005
_SAME = ("placement", "num_microbatches", "checkpointing", "schedule", "num_chunks")


def plans_height_in(candidates: pl.DataFrame) -> float:
    return 1.9 + 0.33 * min(_MOST_PLANS, len(candidates))


def draw_plans(figure: Figure, candidates: pl.DataFrame, chosen: Plan, memory_gib: float) -> None:
    """Draw the plot. `candidates` is the table `candidates.parquet`; `memory_gib` is the memory of a device."""
    candidates = candidates.sort("rank")
    modules = [name.removesuffix("_memory_bytes") for name in candidates.columns if name.endswith("_memory_bytes")]
    shown = best_plans(candidates, chosen, modules)
    places = np.arange(len(shown))
    is_chosen = [is_plan(row, chosen, modules) for row in shown.iter_rows(named=True)]
    steps, idle, memory = figure.subplots(1, 3, sharey=True, width_ratios=[3, 1.1, 1.5])

    bounds = shown["bottleneck"].to_list()
    seconds = shown["step_s"].to_numpy()
    steps.barh(places, seconds, height=0.66, color=[_bound_colour(bound) for bound in bounds])
    for place, (value, mark) in enumerate(zip(seconds, is_chosen, strict=True)):
        ratio = "chosen" if mark else f"{value / seconds[0]:.2f}x"
        _beside(steps, value, place, f"{format_seconds(value)} · {ratio}", "bold" if mark else "normal")
        if value > 0.25 * seconds.max():
            steps.annotate(
                bounds[place], (0, place), xytext=(5, 0), textcoords="offset points", va="center", color="white"
            )
    steps.set_xlim(0, 1.22 * seconds.max())
    steps.set_yticks(places, plan_labels(candidates, shown, modules))
    for label, mark in zip(steps.get_yticklabels(), is_chosen, strict=True):
        label.set_fontweight("bold" if mark else "normal")
    steps.tick_params(axis="y", length=0)
    steps.set_ylim(len(shown) - 0.4, -0.6)
    steps.set(xlabel="predicted seconds", title="Expected step time, and what bounds it")

    shares = shown["idle"].to_numpy()
    idle.barh(places, shares, height=0.66, color="#b9b9b9")
    for place, share in zip(places, shares, strict=True):
        _beside(idle, share, place, f"{share:.0%}")
    idle.set(xlim=(0, 1.3 * max(0.05, shares.max())), title="Idle", xlabel="share of rank time")
    idle.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    for module, marker in zip(modules, "os^D", strict=False):
        sizes = shown[f"{module}_memory_bytes"].to_numpy()
        # Modules that share devices have the same value, so the LLM's marker is a ring around the filled one.
        ring = {"markerfacecolor": "none", "markeredgewidth": 1.6, "markersize": 9} if module == "llm" else {}
        memory.plot(sizes / 2**30, places, marker, color=_shades(module)[1], label=module, **{"markersize": 5} | ring)
    memory.axvline(memory_gib, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
    memory.grid(True, axis="x")
    low = min(shown[f"{module}_memory_bytes"].min() for module in modules) / 2**30
    if low > memory_gib / 10:
        memory.set_xlim(0, memory_gib * 1.2)
        memory.xaxis.set_major_locator(MaxNLocator(4))
    else:
        memory.set_xscale("log")
        memory.set_xlim(low / 1.6, memory_gib * 1.6)
        ticks = LogLocator(subs=(1.0,) if memory_gib / low > 50 else (1.0, 2.0, 5.0)).tick_values(low, memory_gib)
        memory.xaxis.set_major_locator(FixedLocator(ticks))
        memory.xaxis.set_minor_locator(NullLocator())
    memory.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    memory.set(xlabel=f"peak, GiB of a device's {memory_gib:.3g}", title="Memory")
    handles, _ = memory.get_legend_handles_labels()
    legend_beside_title(memory, handles)
    for axes in (idle, memory):
        axes.tick_params(axis="y", length=0, labelleft=False)
    heading(figure, plans_finding(candidates, chosen), _note(candidates, shown))


def best_plans(candidates: pl.DataFrame, chosen: Plan, modules: list[str]) -> pl.DataFrame:
    """The best plans. The chosen plan is always among them; if its rank is too low, it comes last."""
    place = next((at for at, row in enumerate(candidates.iter_rows(named=True)) if is_plan(row, chosen, modules)), 0)
    if place < _MOST_PLANS:
        return candidates.head(_MOST_PLANS)
    return pl.concat([candidates.head(_MOST_PLANS - 1), candidates[place : place + 1]])


def _beside(axes: Axes, value: float, place: int, text: str, weight: str = "normal") -> None:
    axes.annotate(text, (value, place), xytext=(4, 0), textcoords="offset points", va="center", fontweight=weight)


def is_plan(row: dict, plan: Plan, modules: list[str]) -> bool:
    """Whether a row of `candidates.parquet` is this plan."""
    same_grids = all(
        (row[f"{module}_tp"], row[f"{module}_pp"], row[f"{module}_dp"])
        == (plan.grid(module).tp, plan.grid(module).pp, plan.grid(module).dp)
        # Older tables know no sharding.
        and row.get(f"{module}_sharding", plan.grid(module).sharding) == plan.grid(module).sharding
        and row.get(f"{module}_shards", plan.grid(module).num_shards) == plan.grid(module).num_shards
        and tuple(row.get(f"{module}_recomputed") or ()) == plan.grid(module).recomputed
        for module in modules
    )
    rest = (*(row[name] for name in _SAME), tuple(row["llm_layers"] or ()))
    return same_grids and rest == (*(getattr(plan, name) for name in _SAME), plan.grid("llm").layers)


def plan_labels(candidates: pl.DataFrame, shown: pl.DataFrame, modules: list[str]) -> list[str]:
    """A short label for each plan in `shown`. Sizes that are 1, and settings that are equal, in all `candidates` are
    left out."""
    labels = []
    for row in shown.iter_rows(named=True):
        parts = []
        for module in modules:
            sizes = [f"dp{row[f'{module}_dp']}"]
            if candidates[f"{module}_pp"].max() > 1:
                sizes.insert(0, f"pp{row[f'{module}_pp']}")
            if candidates[f"{module}_tp"].max() > 1:
                sizes.insert(0, f"tp{row[f'{module}_tp']}")
            if row.get(f"{module}_sharding", PLAIN_SHARDING) != PLAIN_SHARDING:
                sizes.append(f"{row[f'{module}_sharding']}/{row[f'{module}_shards']}")
            parts.append(f"{module} {' '.join(sizes)}")
        parts.append(f"{row['num_microbatches']} mb")
        if row["checkpointing"]:
            counts = [f"{module} {sum(own)}" for module in modules if (own := row.get(f"{module}_recomputed"))]
            parts.append(" ".join(["ckpt", *counts]))
        if candidates["schedule"].n_unique() > 1:
            parts.append(row["schedule"] + (f" x{row['num_chunks']}" if row["num_chunks"] > 1 else ""))
        if row["llm_layers"]:
            parts.append("+".join(map(str, row["llm_layers"])))
        if candidates["placement"].n_unique() > 1:
            parts.insert(0, row["placement"])
        labels.append(" · ".join(parts))
    return labels


def plans_finding(candidates: pl.DataFrame, chosen: Plan) -> str:
    """A sentence that compares the chosen plan with the others that were priced."""
    candidates = candidates.sort("rank")
    modules = [name.removesuffix("_memory_bytes") for name in candidates.columns if name.endswith("_memory_bytes")]
    shown = best_plans(candidates, chosen, modules)
    is_chosen = [is_plan(row, chosen, modules) for row in shown.iter_rows(named=True)]
    if len(candidates) == 1:
        return f"One plan fits; its expected step takes {format_seconds(shown['step_s'][0])}"
    best = shown["step_s"][0]
    if not is_chosen[0] and any(is_chosen):
        row = shown.row(is_chosen.index(True), named=True)
        return (
            f"The chosen plan is predicted to take {row['step_s'] / best:.2f}x as long as the fastest"
            + _why_not_first(candidates.filter(pl.col("rank") < row["rank"]), row["step_s"])
        )
    to_next, to_slowest = candidates["step_s"][1] / best, candidates["step_s"].max() / best
    finding = f"Of {len(candidates)} plans that were priced the {'chosen' if is_chosen[0] else 'best'} one is predicted"
    to_next = "to be as fast as the next" if to_next < _ALIKE else f"to be {to_next:.2f}x faster than the next"
    return f"{finding} {to_next} and {to_slowest:.2f}x faster than the slowest"


def _why_not_first(faster: pl.DataFrame, chosen_s: float) -> str:
    """Why the chosen plan is not the first in the list; `faster` are the plans before it."""
    if chosen_s <= FINALISTS_WITHIN * faster["step_s"].min():
        return "; of the plans priced within 1 % of that, it takes least once batches are scheduled"
    return ""


def _note(candidates: pl.DataFrame, shown: pl.DataFrame) -> str:
    note = "dp, pp, tp: data-parallel replicas, pipeline stages, tensor-parallel ranks; mb: microbatches"
    if any(name.endswith("_sharding") and (shown[name] != PLAIN_SHARDING).any() for name in shown.columns):
        note += "; parameters/8: shared among 8 replicas"
    if shown["checkpointing"].any():
        note += "; ckpt: activation checkpointing, of so many layers or all"
    note += "."
    if "num_batches" in shown.columns:
        counts = sorted(shown["num_batches"].unique())
        note += f" Means over {' or '.join(str(count) for count in counts)} global batches, regrouped."
    if len(shown) < len(candidates):
        is_best = shown["rank"][-1] == len(shown)
        note += f" The best {len(shown)} of {len(candidates)} are drawn." if is_best else " The chosen plan comes last."
    return note


def _bound_colour(bottleneck: str) -> str:
    module = bottleneck.split()[0]
    return MODULE_SHADES[module][1] if module in MODULE_SHADES else MUTED


def _shades(module: str) -> tuple[str, str]:
    return MODULE_SHADES.get(module, (MUTED, INK))
