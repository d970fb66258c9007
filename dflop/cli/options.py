"""What the commands share: their options, the part of the config that each reads, and what its output says of it."""

import hashlib
import json
from pathlib import Path

import click

from dflop.runtime import UserError

__all__ = ["FILE", "FOLDER", "config_digest", "config_option", "load_for", "meta_of"]

FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)


def config_option(function):
    return click.option(
        "--config",
        "configs",
        multiple=True,
        metavar="FILE|TEXT|KEY=VALUE",
        help="A config file, its text ({train: {lr: 0.1}}), or one key (train.lr=0.1); later ones win. Repeatable.",
    )(function)


def load_for(command: str, configs: tuple[str, ...]):
    """The config with the keys that `command` reads, from what `--config` named."""
    from dflop.config import load_config, restrict
    from dflop.runtime.commands import COMMANDS

    if not configs:
        raise UserError(f"`dflop {command}` needs a config: --config config/config.yaml")
    reads = COMMANDS[command].reads
    return restrict(load_config(*configs, has_cluster="cluster.num_nodes" in reads or "cluster" in reads), reads)


def meta_of(command: str, config) -> dict[str, str]:
    """What a DuckDB file says of its making."""
    from dflop.runtime.commands import code_digest

    return {"config_digest": config_digest(command, config), "code_digest": code_digest(command)}


def config_digest(command: str, config, **beside: object) -> str:
    """Of the keys that `command` reads, and of what else its output depends on."""
    from dflop.config import select_keys
    from dflop.runtime.commands import COMMANDS

    keys = json.dumps(select_keys(config, COMMANDS[command].reads) | beside, sort_keys=True)
    return hashlib.sha256(keys.encode()).hexdigest()[:16]
