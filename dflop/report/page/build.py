"""The whole page: a run's results are turned into sections, which are rendered with templates.

The page contains its styles, pictures and the library that draws these, and fetches nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from dflop.base import own_version, written_whole
from dflop.report.facts import Facts
from dflop.report.page.costs import costs_section
from dflop.report.page.data import data_section
from dflop.report.page.plans import plan_section
from dflop.report.page.training import step_spread, time_section, training_section
from dflop.report.picture import Picture, page_view, script
from dflop.report.run import TrainedRun
from dflop.report.style import PALETTE, format_count, format_seconds
from dflop.schedule import BatchScheduler

__all__ = ["environment", "write_page"]

_TEMPLATES = "templates"
_TEMPLATE = "page.html.jinja"


@dataclass(frozen=True, slots=True)
class Tile:
    """A number at the top of the page; `mark` says whether it is measured or predicted."""

    label: str
    value: str
    mark: str
    note: str


def write_page(facts: Facts, pictures: Mapping[str, Picture], scheduler: BatchScheduler, out: Path) -> Path:
    """Write the page to `out` and return that path. `pictures` has the pictures by the names of their charts."""
    run, config, trained = facts.run, facts.config, facts.trained
    plan, costs = plan_section(run, facts.spec, config.cluster.memory_gib), costs_section(run)
    time = time_section(trained) if trained else None
    panels = {
        name: {f"{name}-{place}": panel for place, panel in enumerate(picture.panels) if not panel.is_table}
        for name, picture in pictures.items()
    }
    text = (
        environment()
        .get_template(_TEMPLATE)
        .render(
            name=config.run,
            model=config.model.path or f"{config.model.family}, {config.model.preset}",
            cluster=config.cluster,
            batch_size=config.train.global_batch_size,
            precision=config.train.precision,
            version=own_version(),
            created=run.costs_meta.get("created", ""),
            verdict=_verdict(plan["next"], costs, trained, time),
            tiles=_tiles(facts, costs),
            data=data_section(run.samples, run.rejects, scheduler.left_out, facts.spec),
            costs=costs,
            plan=plan,
            memory=facts.memory,
            shown=facts.shown,
            is_foreign=facts.is_foreign,
            training=training_section(trained) if trained else None,
            time=time,
            savings=facts.savings,
            predicted=run.plan_text.get("predicted"),
            trained=trained,
            preview=facts.preview,
            pictures=pictures,
            panels=panels,
            views={id: page_view(panel) for of_picture in panels.values() for id, panel in of_picture.items()},
            library=Markup(script()),
            palette=PALETTE,
        )
    )
    with written_whole(out) as beside:
        beside.write_text(text, encoding="utf-8")
    return out


def environment() -> Environment:
    """The templates of pages, with their filters."""
    templates = FileSystemLoader(Path(__file__).parent / _TEMPLATES)
    made = Environment(
        loader=templates, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    made.filters |= {
        "seconds": format_seconds,
        "count": format_count,
        "percent": lambda share: f"{share:.0%}" if share == 0 or share >= 0.01 else f"{share:.1%}",
        "times": lambda ratio: f"{ratio:.2f}x",
        "code": _with_code,
        "three": _three,
    }
    return made


def _three(value: float) -> str:
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _with_code(text: str) -> Markup:
    """A sentence as HTML, with the parts in backticks as code."""
    parts = str(escape(text)).split("`")
    return Markup("".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts)))


def _verdict(
    following: str, costs: Mapping[str, Any], trained: TrainedRun | None, time: Mapping[str, Any] | None
) -> str:
    """What bounds this run and what to change, in one sentence."""
    if time:
        return time["verdict"]
    if trained:
        return "What bounds this run is not known: no step after the warm-up was observed; train more steps"
    if not following:
        return "This plan was written by hand and not trained yet: what bounds it is not known"
    of_costs = " from analytic costs" if costs["source"] == "analytic" else ""
    return f"Not trained yet; predicted{of_costs}, it is: {following}"


def _tiles(facts: Facts, costs: Mapping[str, Any]) -> Sequence[Tile]:
    trained, savings, price = facts.trained, facts.savings, facts.config.cluster.gpu_hour_cost
    predicted: dict[str, Any] = facts.run.plan_text.get("predicted", {})
    tiles = []
    if trained and "step_s" in trained.summary:
        tiles.append(Tile("Step", format_seconds(trained.summary["step_s"]), "measured", step_spread(trained)))
        tiles.append(Tile("Idle", f"{trained.summary['idle']:.0%}", "measured", "of rank time"))
    if predicted:
        mark = "predicted" if costs["source"] == "measured" else f"predicted, {costs['source']}"
        tiles.append(Tile("Expected step", format_seconds(predicted["step_s"]), mark, "when the plan was chosen"))
        tiles.append(Tile("Expected idle", f"{predicted['idle']:.1%}", mark, "of rank time"))
    if savings:
        for other in savings.others:
            if other.why_not is None and "random" in other.name:
                far = f"; single batches {other.least:.2f}x to {other.most:.2f}x" if other.least else ""
                name, _, style = other.name.removesuffix(")").rpartition(" (")
                tiles.append(Tile(f"{style} instead", f"{other.ratio:.2f}x", "predicted", f"as long; {name}{far}"))
        cost = f", {savings.hours * price:,.2f} in money" if price else ""
        tiles.append(Tile(f"{savings.hour}s", _three(savings.hours), savings.hours_are, f"{savings.horizon}{cost}"))
    if costs["median_error"] is not None:
        tiles.append(Tile("Cost error", f"{costs['median_error']:.0%}", "measured", "median, on unseen stages"))
    return tiles
