"""The page of a recipe: a row for each of its stages, with a link to the stage's own report."""

import json
from pathlib import Path
from typing import Any

from dflop.base import written_whole
from dflop.config.recipe import Recipe, Stage
from dflop.report.page.build import environment
from dflop.report.style import PALETTE

__all__ = ["write_recipe_page"]


def write_recipe_page(folder: Path, recipe: Recipe) -> Path | None:
    """Write `index.html` into the recipe's folder, which lies beside those of its stages' runs. Return its path, or
    None where no stage has a report yet."""
    rows = [_row(folder.parent / stage.run, stage) for stage in recipe.stages]
    if not any(row["figures"] for row in rows):
        return None
    path = folder / "index.html"
    text = environment().get_template("recipe.html.jinja").render(name=recipe.name, rows=rows, palette=PALETTE)
    with written_whole(path) as beside:
        beside.write_text(text, encoding="utf-8")
    return path


def _row(run: Path, stage: Stage) -> dict[str, Any]:
    """A stage's name and what it leaves untrained; `figures` are its report's, None where there is none yet."""
    summary = run / "report/summary.json"
    figures = json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else None
    model = stage.config.get("model") or {}
    adapted = (model.get("lora") or {}).get("modules", ["llm"]) if model.get("lora") is not None else []
    named = model.get("train") or ()
    limits = [f"all but {', '.join(named)}"] if named else []
    limits += [*model.get("freeze", ()), *(f"{name} but its adapters" for name in adapted)]
    return {"name": stage.name, "run": run.name, "frozen": ", ".join(limits) or "nothing", "figures": figures}
