"""The best plans side by side, with their bottleneck, idle share and memory."""

import polars as pl

from dflop.plan import PLAIN_SHARDING, Plan
from dflop.report.facts import Facts
from dflop.report.picture import Panel, Picture, as_given, hover, kind, layer, log_axis, names, number, rows
from dflop.report.style import colour, format_seconds, module_colour
from dflop.search import FINALISTS_PERCENT

__all__ = ["best_plans", "draw", "draw_plans", "is_plan", "modules_of", "plan_labels", "plans_finding"]

_MOST_PLANS = 12
# Step times whose ratio is smaller are called the same.
_ALIKE = 1.005
_SAME = ("placement", "num_microbatches", "checkpointing", "schedule", "num_chunks")
_HEIGHT = 40  # of a plan's row
_LEFT = {"align": "left", "baseline": "middle"}
_SHAPES = ("circle", "square", "triangle-up", "diamond")


def draw(facts: Facts) -> Picture:
    return draw_plans(facts.run.candidates, facts.run.plan, facts.config.cluster.memory_gib)


def draw_plans(candidates: pl.DataFrame, chosen: Plan, memory_gib: float) -> Picture:
    """The picture of the table `candidates.parquet`; `memory_gib` is the memory of a device."""
    candidates = candidates.sort("rank")
    modules = modules_of(candidates)
    shown = best_plans(candidates, chosen, modules)
    is_chosen = [is_plan(row, chosen, modules) for row in shown.iter_rows(named=True)]
    best_s = shown["step_s"][0]
    table = pl.DataFrame(
        {
            "place": [str(place) for place in range(1, len(shown) + 1)],
            "label": [f"{place}: {label}" for place, label in enumerate(plan_labels(candidates, shown, modules), 1)],
            "said": [
                f"{format_seconds(step_s)} · {'chosen' if mark else f'{step_s / best_s:.2f}x'} · bound by {bound}"
                for step_s, mark, bound in zip(shown["step_s"], is_chosen, shown["bottleneck"], strict=True)
            ],
            "weight": ["bold" if mark else "normal" for mark in is_chosen],
            "colour": [_bound_colour(bound) for bound in shown["bottleneck"]],
            "step_s": shown["step_s"],
            "idle": shown["idle"],
        }
    )
    panels = [_step_panel(table), _idle_panel(table), _memory_panel(shown, table["place"], modules, memory_gib)]
    note = _note(candidates, shown)
    return Picture(section="plan", finding=plans_finding(candidates, chosen), note=note, panels=panels, columns=3)


def _step_panel(table: pl.DataFrame) -> Panel:
    """A bar for each plan's step time, with the plan above it and what bounds it inside."""
    bold = {"fontWeight": {"expr": "datum.weight"}}
    words = [{"field": "label", "title": "plan"}, {"field": "said", "title": "step"}]
    axis = {"grid": False, "format": "~g"}
    x = number("step_s", "predicted seconds", axis=axis, scale={"domain": [0, 1.02 * table["step_s"].max()]})
    steps = {
        "data": rows(table),
        "encoding": {"y": names("place", axis=None), "tooltip": words},
        "layer": [
            layer("bar", look={"height": 14, "yOffset": 8}, x=x, color=as_given("colour")),
            layer("text", look=_LEFT | bold | {"dy": -9}, x={"value": 0}, text="label"),
            layer("text", look=_LEFT | bold | {"dy": 8.5, "color": "#ffffff"}, x={"value": 5}, text="said"),
        ],
    }
    return Panel(title="Expected step time, and what bounds it", view=steps, height=_HEIGHT * len(table), share=2.4)


def _idle_panel(table: pl.DataFrame) -> Panel:
    """A bar for each plan's idle share."""
    scale = {"domain": [0, 1.3 * max(0.05, table["idle"].max())]}
    x = number("idle", "idle share of rank time", axis={"format": ".0%", "grid": False}, scale=scale)
    idle = {
        "data": rows(table.select("place", "idle")),
        "encoding": {"y": names("place"), "x": x},
        "layer": [
            layer("bar", look={"height": 14}),
            layer("text", look=_LEFT | {"dx": 4}, text=number("idle", format=".0%")),
        ],
    }
    return Panel(title="Idle", view=idle, height=_HEIGHT * len(table))


def _memory_panel(shown: pl.DataFrame, places: pl.Series, modules: list[str], memory_gib: float) -> Panel:
    """A mark for each module's peak memory on its fullest device, beside the memory of a device."""
    sizes = shown.select(pl.col(f"{module}_memory_bytes").alias(module) / 2**30 for module in modules)
    held = sizes.with_columns(places).unpivot(index="place", variable_name="module", value_name="gib")
    held = held.with_columns(
        size=pl.col("module").replace_strict({name: 40 + 90 * at for at, name in enumerate(modules)})
    )
    low = held["gib"].min()
    is_far = low < memory_gib / 10
    x = number("gib", f"peak, GiB of a device's {memory_gib:.3g}", scale={"domain": [0, memory_gib * 1.2]})
    x |= log_axis(low / 1.6, memory_gib * 1.6) if is_far else {"axis": {"format": "~g"}}
    colours = kind("module", {module: module_colour(module) for module in modules}, legend={"orient": "bottom"})
    shapes = kind("module", dict(zip(modules, _SHAPES * len(modules), strict=False)))
    # Modules that share devices have the same value, so the marks are rings, each around the one before.
    ring = {"strokeWidth": 2, "opacity": 1}
    dashed = {"color": colour("ink"), "strokeDash": [4, 2]}
    said, y, size = hover(module="", gib=".3~g"), names("place"), number("size", scale=None)
    memory = {
        "layer": [
            layer("rule", look=dashed, data={"values": [{"gib": memory_gib}]}, x=x),
            layer("point", look=ring, data=rows(held), x=x, y=y, color=colours, shape=shapes, size=size, tooltip=said),
        ]
    }
    return Panel(title="Memory", view=memory, height=_HEIGHT * len(shown))


def modules_of(candidates: pl.DataFrame) -> list[str]:
    return [name.removesuffix("_memory_bytes") for name in candidates.columns if name.endswith("_memory_bytes")]


def best_plans(candidates: pl.DataFrame, chosen: Plan, modules: list[str]) -> pl.DataFrame:
    """The best plans. The chosen plan is always among them; if its rank is too low, it comes last."""
    place = next((at for at, row in enumerate(candidates.iter_rows(named=True)) if is_plan(row, chosen, modules)), 0)
    if place < _MOST_PLANS:
        return candidates.head(_MOST_PLANS)
    return pl.concat([candidates.head(_MOST_PLANS - 1), candidates[place : place + 1]])


def is_plan(row: dict, plan: Plan, modules: list[str]) -> bool:
    """Whether a row of `candidates.parquet` is this plan."""
    same_grids = all(
        (row[f"{module}_tp"], row[f"{module}_pp"], row[f"{module}_dp"])
        == (plan.grid(module).tp, plan.grid(module).pp, plan.grid(module).dp)
        # Older tables know no sharding.
        and row.get(f"{module}_sharding", plan.grid(module).sharding) == plan.grid(module).sharding
        and row.get(f"{module}_shards", plan.grid(module).num_shards) == plan.grid(module).num_shards
        and tuple(row.get(f"{module}_recomputed") or ()) == plan.grid(module).recomputed
        and tuple(row.get(f"{module}_offloaded") or ()) == plan.grid(module).offloaded
        and tuple(row.get(f"{module}_attention_kept") or ()) == plan.grid(module).attention_kept
        for module in modules
    )
    llm = plan.grid("llm")
    rest = (*(row[name] for name in _SAME), tuple(row["llm_layers"] or ()), row.get("llm_cp", llm.cp))
    is_offloaded = row.get("offloads_optimizer", False) == plan.offloads_optimizer
    return same_grids and is_offloaded and rest == (*(getattr(plan, name) for name in _SAME), llm.layers, llm.cp)


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
            if row.get(f"{module}_cp", 1) > 1:
                sizes.append(f"cp{row[f'{module}_cp']}")
            parts.append(f"{module} {' '.join(sizes)}")
        parts.append(f"{row['num_microbatches']} mb")
        if row["checkpointing"]:
            counts = [f"{module} {sum(layers)}" for module in modules if (layers := row.get(f"{module}_recomputed"))]
            if kept := row.get("llm_attention_kept"):
                counts.append(f"({sum(kept)} but attention)")
            parts.append(" ".join(["ckpt", *counts]))
        if offloaded := [f"{module} {sum(layers)}" for module in modules if (layers := row.get(f"{module}_offloaded"))]:
            parts.append(" ".join(["host", *offloaded]))
        if row.get("offloads_optimizer"):
            parts.append("host optimizer")
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
    modules = modules_of(candidates)
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
    if chosen_s <= (1 + FINALISTS_PERCENT / 100) * faster["step_s"].min():
        return f"; of the plans priced within {FINALISTS_PERCENT} % of that, it takes least once batches are scheduled"
    return ""


def _note(candidates: pl.DataFrame, shown: pl.DataFrame) -> str:
    note = "dp, pp, tp: data-parallel replicas, pipeline stages, tensor-parallel ranks; mb: microbatches"
    if any(name.endswith("_sharding") and (shown[name] != PLAIN_SHARDING).any() for name in shown.columns):
        note += "; parameters/8: shared among 8 replicas"
    if "llm_cp" in shown.columns and shown["llm_cp"].max() > 1:
        note += "; cp: replicas that compute a long sample together"
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
    return colour("other") if module == "bubble" else module_colour(module)
