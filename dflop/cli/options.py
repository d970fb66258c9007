"""Shared by the commands: options, the part of the config that each reads, and the `meta` table of their outputs."""

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import click

from dflop.base import UserError

__all__ = [
    "FILE",
    "FOLDER",
    "RUN_CONFIG",
    "config_digest",
    "config_option",
    "folder_of",
    "leave_out_impossible_today",
    "load_compared",
    "load_for",
    "meta_of",
    "run_argument",
]

FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)


def config_option(function):
    """Add `--config` to a command."""
    return click.option(
        "--config",
        "configs",
        multiple=True,
        metavar="FILE|TEXT|KEY=VALUE",
        help="A config file, its text ({train: {lr: 0.1}}), or one key (train.lr=0.1); later ones win. Repeatable.",
    )(function)


def run_argument(**files: str) -> Callable[[Callable], Callable]:
    """Add the argument RUN to a command: a run of the workflow, by its name or folder, instead of a config and files.

    `files` maps options to the files of the run's folder that they stand for; "" is the folder itself. Options that are
    given beside the run replace these, and configs are merged over the run's own. Without a run, all of these options
    must be given.
    """

    def decorate(function: Callable) -> Callable:
        @click.argument("run", required=False)
        @functools.wraps(function)
        def command(run: str | None, configs: tuple[str, ...], **given: object) -> None:
            missing = [name for name in files if given[name] is None]
            if run is None and missing:
                context = click.get_current_context()
                option = next(parameter.opts[0] for parameter in context.command.params if parameter.name == missing[0])
                raise UserError(f"`{context.command_path}` needs {option}, or a run: its name or folder")
            if run is not None:
                folder = folder_of(run)
                given |= {name: folder / files[name] for name in missing}
                configs = (str(folder / RUN_CONFIG), *configs)
            function(configs=configs, **given)

        return command

    return decorate


# The file in a run's folder with the whole config with which the workflow was last started.
RUN_CONFIG = "config.yaml"


def folder_of(run: str) -> Path:
    """The folder of a run of the workflow, given its name or folder.

    Raises:
        UserError: where there is none.
    """
    folder = next((path for path in (Path(run), Path("results") / run) if path.is_dir()), None)
    if folder is None:
        raise UserError(f"there is no run `{run}`: neither {run} nor {Path('results') / run} is a folder")
    if not (folder / RUN_CONFIG).is_file():
        raise UserError(
            f"{folder} holds no {RUN_CONFIG}, which the workflow writes when it starts; give --config and the files"
        )
    return folder


def load_for(command: str, configs: tuple[str, ...]):
    """The config with the keys that `command` reads, from the values of `--config`.

    Raises:
        UserError: without any `--config`, or for a bad config.
    """
    from dflop.base.commands import COMMANDS
    from dflop.config import load_config, restrict

    if not configs:
        raise UserError(f"`dflop {command}` needs a config: --config config/config.yaml")
    reads = COMMANDS[command].reads
    return restrict(load_config(*configs, has_cluster="cluster.num_nodes" in reads or "cluster" in reads), reads)


def load_compared(config, shapes: Path, costs: Path):
    """The spec, the cost model and the samples that systems are compared on, and a row for each sample that is left out
    because no plan holds it."""
    from dflop.costs import CostModel
    from dflop.models import load_model_spec
    from dflop.search import leave_out_what_no_plan_holds
    from dflop.shapes import load_samples

    spec, cost_model = load_model_spec(config.model), CostModel.load(costs)
    samples, _ = load_samples(shapes, spec.encoders)
    cost_model.require_made_for(spec, config)
    leave_out_impossible_today(config, spec, cost_model)
    return spec, cost_model, *leave_out_what_no_plan_holds(config, spec, cost_model, samples)


def leave_out_impossible_today(config, spec, cost_model) -> None:
    """Print a warning and take `plan.today` out of the config, where no plan for the devices agrees with it."""
    from dflop.comparison import todays_layout_note
    from dflop.config import without_today

    if note := todays_layout_note(config, spec, cost_model.layouts):
        click.echo(f"warning: {note}", err=True)
        without_today(config)


def meta_of(command: str, config) -> dict[str, str]:
    """Digests of the config and the code that a DuckDB file is made with, for its `meta` table."""
    from dflop.base.commands import code_digest

    return {"config_digest": config_digest(command, config), "code_digest": code_digest(command)}


def config_digest(command: str, config, **beside: object) -> str:
    """A digest of the config keys that `command` reads, and of `beside`, what else its output depends on."""
    from dflop.base.commands import COMMANDS
    from dflop.config import select_keys

    keys = json.dumps(select_keys(config, COMMANDS[command].reads) | beside, sort_keys=True)
    return hashlib.sha256(keys.encode()).hexdigest()[:16]
