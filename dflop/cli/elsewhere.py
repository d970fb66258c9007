"""Planning for users who train elsewhere: a manifest and a Hugging Face config become a run's folder, without a GPU.

The folder holds what the workflow would make from them with analytic costs, so that `dflop plan`, `dflop report` and
`dflop compare` take it like any other run. The workflow itself does not use this module.
"""

import functools
import hashlib
import json
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from dflop.base import UserError, written_whole
from dflop.cli.options import FILE, FOLDER, RUN_CONFIG

__all__ = ["emit_option", "from_manifest", "print_in_words_of"]

# The given config is merged over these defaults: eight H100s, and every tensor-parallel size that such a node allows.
# Shards are large, because processes are started for each of them, and because here shards are never redone singly.
_DEFAULTS: dict[str, Any] = {
    "data": {"samples_per_shard": 250_000},
    "cluster": {"device": "cuda", "devices_per_node": 8, "device_model": "h100-80g"},
    "costs": {"source": "analytic", "tp_sizes": [1, 2, 4, 8]},
    "train": {"precision": "bf16", "global_batch_size": 64},
}
_SHAPES_KEY, _COSTS_KEY = "shapes/key", "costs/key"


def from_manifest(function: Callable) -> Callable:
    """Add `--manifest` and `--model` to a command on a run. With a manifest, the run is made before the command and its
    report is written after it."""

    @click.option(
        "--manifest",
        type=FILE,
        help="Plan for this data on devices that are not at hand, without a GPU. Pictures whose sizes the records hold "
        "need not be there; clips and sounds must be. RUN names the folder that is made; without it, the manifest "
        "does.",
    )
    @click.option(
        "--model", type=FOLDER, help="With --manifest: a folder with the config.json of a Hugging Face model."
    )
    @functools.wraps(function)
    def command(
        run: str | None, configs: tuple[str, ...], manifest: Path | None, model: Path | None, **given: Any
    ) -> None:
        if manifest is None:
            if model:
                raise UserError("--model goes with --manifest; elsewhere `model.path` of the config says it")
            function(run=run, configs=configs, **given)
            return
        folder = _make_run(run, manifest, model, configs)
        given |= {name: given[name] or folder / file for name, file in _WRITTEN.items()} | {"explain": True}
        function(run=str(folder), configs=(), **given)
        _report(folder)

    return command


_WRITTEN = {"out": "plan.yaml", "candidates": "candidates.parquet"}


def emit_option(function: Callable) -> Callable:
    """Add `--emit` to a command. Its choices are the names of files, so that `dflop --help` need not load these."""
    names = [file.name for file in pkgutil.iter_modules([str(Path(__file__).parents[1] / "search" / "emitters")])]
    return click.option(
        "--emit", type=click.Choice(names), help="Print the plan as flags or config of this framework, too."
    )(function)


def print_in_words_of(
    framework: str,
    found: Any,
    baselines: Any,
    plan_file: Path | None,
    *,
    config: Any,
    spec: Any,
    costs: Any,
    samples: Any,
) -> None:
    """Print the plan that was found as flags or config of a framework (`comparison.emitted_plan`). Beside the plan's
    file, if it is written, goes a file with the same."""
    from dflop.base import written_whole
    from dflop.comparison import EmittedPlans
    from dflop.search.emit import FRAMEWORKS

    others = [candidate.plan for candidate in found.candidates]
    others += [baseline.plan for baseline in baselines if baseline.plan]
    text = EmittedPlans(config, spec, costs, samples).text(framework, found.best, others)
    click.echo(f"\n{text}")
    if plan_file:
        kind = "yaml" if FRAMEWORKS[framework].is_config else "txt"
        with written_whole(beside := plan_file.with_name(f"plan.{framework}.{kind}")) as path:
            path.write_text(f"{text}\n", encoding="utf-8")
        click.echo(f"\n{beside}: the same as a file")


def _make_run(run: str | None, manifest: Path, model: Path | None, configs: tuple[str, ...]) -> Path:
    """Make the config, the shapes and the analytic costs of a run; return its folder."""
    import yaml

    from dflop.comparison import check_pins
    from dflop.config import load_config, select_keys
    from dflop.models import load_model_spec

    sources = {"data": {"sources": [_source(manifest)]}}
    layers: list[Any] = [_DEFAULTS, {"run": manifest.name.partition(".")[0]}, sources]
    layers += [*([_of_model(model)] if model else []), *configs, *([{"run": run}] if run else [])]
    config = load_config(*layers)
    named = {Path(source.path).resolve() for source in config.data.sources}
    if manifest.resolve() not in named:  # the given config, such as that of another run, has sources of its own
        click.echo(f"`data.sources` of the config are set aside: the plan is for {manifest}", err=True)
        config = load_config(*layers, sources)
    if config.costs.source != "analytic":
        raise UserError("`costs.source` is not 'analytic': costs are measured by the workflow, on the device")
    check_pins(config, load_model_spec(config.model))
    folder = Path("results") / config.run
    _take(folder)
    values = select_keys(config, [section.name for section in fields(config)])
    with written_whole(folder / RUN_CONFIG) as path:
        path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    text = json.dumps(values)
    _make_shapes(config, text, folder, manifest)
    _make_costs(config, text, folder)
    return folder


def _take(folder: Path) -> None:
    """Mark a folder as made by this command, with a file in it.

    Raises:
        UserError: when the folder holds a run that the workflow made, which is never overwritten.
    """
    marker = folder / _SHAPES_KEY
    if marker.is_file():
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(
            f"{folder} holds a run that the workflow made, and planning from a manifest would replace its files; give "
            "it a name of its own, such as `dflop plan what-if --manifest …`"
        )
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()


def _source(manifest: Path) -> dict[str, Any]:
    if not manifest.is_file():
        raise UserError(
            f"{manifest} does not exist; name a manifest: JSON, JSONL, Parquet, a tar file or a list of them"
        )
    return {"path": str(manifest), "trust_sizes": True}


def _of_model(folder: Path) -> Mapping[str, Any]:
    """The config section of a model with a `config.json`. Without a tokenizer, the small bundled one counts tokens."""
    from dflop.models import family_for
    from dflop.models.checkpoint import read_hf_config
    from dflop.shapes.text import BUNDLED_TOKENIZER

    model_type = read_hf_config(folder).get("model_type")
    model: dict[str, Any] = {"path": str(folder), "family": family_for(model_type) or model_type}
    if not (folder / "tokenizer.json").is_file():
        model["tokenizer"] = str(BUNDLED_TOKENIZER)
    return {"model": model}


def _make_shapes(config: Any, text: str, folder: Path, manifest: Path) -> None:
    """Make `shapes.duckdb`, unless it is there already from the same manifest, config keys and code."""
    from dflop.cli.data import merge_shapes, profile_shapes
    from dflop.shapes import list_shards, list_sources

    stat = manifest.stat()
    key = _key(config, ("profile-shapes", "merge-shapes"), stat.st_size, stat.st_mtime_ns)
    if _is_made(out := folder / "shapes.duckdb", kept := folder / _SHAPES_KEY, key):
        return
    for source in list_sources(config.data):
        for shard in list_shards(source, config.data.samples_per_shard, config.seed):
            rows = folder / "shapes" / f"{shard.name}.parquet"
            profile_shapes.callback(configs=(text,), shard=shard.name, out=rows, workers=None)
    merge_shapes.callback(configs=(text,), shapes=folder / "shapes", out=out, bounds=None)
    with written_whole(kept) as path:
        path.write_text(key, encoding="utf-8")


def _make_costs(config: Any, text: str, folder: Path) -> None:
    """Make `costs.duckdb`, with every tensor-parallel size of the config that divides a module's heads, unless it is
    there already from the same config keys and code."""
    from dflop.cli.costs import fit_costs_command, profile_costs
    from dflop.models import able_tp_sizes, load_model_spec

    key = _key(config, ("profile-costs", "fit-costs"), list(config.costs.tp_sizes))
    if _is_made(out := folder / "costs.duckdb", kept := folder / _COSTS_KEY, key):
        return
    paths = []
    for module, tp_sizes in able_tp_sizes(load_model_spec(config.model), config.costs.tp_sizes).items():
        for tp in tp_sizes:
            paths.append(folder / "costs" / f"{module}.tp{tp}.parquet")
            profile_costs.callback(configs=(text,), module=module, tp=tp, bounds=None, out=paths[-1])
    fit_costs_command.callback(measurements=tuple(paths), links_path=None, out=out)
    with written_whole(kept) as path:
        path.write_text(key, encoding="utf-8")


def _key(config: Any, commands: tuple[str, ...], *known: Any) -> str:
    """A digest that changes where what these commands make may change: of their code, of the config keys that they
    read, of the model's `config.json`, and of `known`."""
    from dflop.base.commands import COMMANDS, code_digest
    from dflop.config import select_keys
    from dflop.models.checkpoint import read_hf_config

    model = read_hf_config(Path(config.model.path)) if config.model.path else None
    behind = [select_keys(config, COMMANDS[name].reads) for name in commands]
    text = json.dumps([*known, model, *behind, *map(code_digest, commands)])
    return hashlib.sha256(text.encode()).hexdigest()


def _is_made(path: Path, kept: Path, key: str) -> bool:
    return path.is_file() and kept.is_file() and kept.read_text(encoding="utf-8") == key


def _report(folder: Path) -> None:
    from dflop.cli.options import load_for
    from dflop.report import write_report

    config = load_for("report", (str(folder / RUN_CONFIG),))
    page, *_ = write_report(config, folder, folder / "report")
    click.echo(f"{page}: the plan as a page")
