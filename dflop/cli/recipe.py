"""The command that trains by a recipe: the workflow once for each of its stages."""

import contextlib
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dflop.base import UserError
from dflop.cli.options import FILE

if TYPE_CHECKING:
    from dflop.config.recipe import Recipe, Stage

__all__ = ["recipe_command"]

_CONFIG, _DEMO_DATA = Path("config/config.yaml"), "results/demo-data/"
_CACHED = ("profile_costs", "profile_links", "search_plan")


@click.command("recipe", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("recipe", type=FILE)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def recipe_command(recipe: Path, arguments: tuple[str, ...]) -> None:
    """Train by a recipe's stages, one after the other; each begins with the weights of the one before.

    RECIPE is a file such as config/recipes/llava_onevision.yaml. All else goes to Snakemake, which is called once for
    each stage: dflop recipe RECIPE --profile slurm. What is done already is not done again.
    """
    from dflop.config.recipe import read_recipe
    from dflop.report.page.recipe import write_recipe_page

    if given := next((name for name in arguments if name.startswith("--configfile")), None):
        raise UserError(f"{given} would replace the stages' own configs; put its keys into {recipe}, beside `stages`")
    read = read_recipe(recipe)
    for number, stage in enumerate(read.stages):
        _check(stage, is_first=number == 0)
    _write_configs(read)
    if "--cache" not in arguments:  # stages that train the same parts share what was measured
        arguments = (*(arguments or ("--cores", "all")), "--cache", *_CACHED)
    for number, stage in enumerate(read.stages, start=1):
        click.echo(f"stage {number} of {len(read.stages)}: {stage.name} (results/{stage.run})", err=True)
        code = _run(["snakemake", *arguments, "--configfile", str(_config_of(read, stage))])
        if page := write_recipe_page(Path("results", read.name), read):
            click.echo(f"{page}: the stages so far", err=True)
        if code:
            raise UserError(
                f"stage `{stage.name}` ended with exit code {code}, see above; the same command goes on there"
            )


def _check(stage: "Stage", *, is_first: bool) -> None:
    """Refuse a stage that cannot be run, before any stage is: its config, its model, the parts that it trains, what it
    pins, its manifests and their media's folders, and the weights that the first stage begins with."""
    from dflop.comparison import check_pins
    from dflop.config import load_config
    from dflop.models import check_adapter, check_parts, check_weights, load_model_spec, load_runtime
    from dflop.shapes import list_sources

    try:
        config = load_config(*([_CONFIG] if _CONFIG.is_file() else []), stage.config)
        spec = load_model_spec(config.model)
        check_parts(spec, config.train.part_names)
        check_pins(config, spec)
        runtime = load_runtime(spec.family)
        runtime.check_trained(spec, runtime.make_config(spec, {}, 0), config.model.trained, config.train.part_names)
        if is_first:  # the others' are written by the stage before
            check_weights(config.model.weights)
            check_adapter(spec, config.model)
        for source in list_sources(config.data):
            if str(source.path).startswith(_DEMO_DATA):  # the workflow makes the demo's
                continue
            source.files()
            source.check_media_root()
    except UserError as error:
        raise UserError(f"stage `{stage.name}`: {error}") from None


def _config_of(recipe: "Recipe", stage: "Stage") -> Path:
    return Path("results", recipe.name, "stages", f"{stage.name}.yaml")


def _write_configs(recipe: "Recipe") -> None:
    import yaml

    from dflop.base import written_whole

    for stage in recipe.stages:
        path = _config_of(recipe, stage)
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as beside:
            beside.write_text(yaml.safe_dump(dict(stage.config), sort_keys=False), encoding="utf-8")


def _run(command: Sequence[str]) -> int:
    """Run Snakemake. Ctrl-C reaches it, too, and SIGTERM is passed on; it ends in order, and then this does."""
    try:
        process = subprocess.Popen(command)
    except FileNotFoundError:
        raise UserError("snakemake is not installed here: pip install 'dflop[slurm]', or snakemake itself") from None
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
