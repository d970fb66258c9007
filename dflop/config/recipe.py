"""Recipes: stages of training that follow each other, each a run of the workflow that begins with the weights of the
stage before.

A recipe's file is a config with two more keys: `recipe`, its name, and `stages`, a list of configs with a `name` each.
The keys beside them are for all stages; a stage's own are merged over them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflop.base import UserError
from dflop.config.layers import read_layer
from dflop.config.load import merged

__all__ = ["Recipe", "Stage", "read_recipe"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: its run's name, and what its config has beside `config/config.yaml`."""

    name: str
    run: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe's name and its stages in order; `results/<name>` holds their configs."""

    name: str
    stages: tuple[Stage, ...]


def read_recipe(path: Path) -> Recipe:
    """Read a recipe's file. The values of the stages' configs are not checked here.

    Raises:
        UserError: naming the file, the key and what would be right.
    """
    if not path.is_file():
        raise UserError(f"the recipe {path} does not exist; config/recipes has some to start from")
    values, where = read_layer(path)
    name, entries = values.pop("recipe", None), values.pop("stages", None)
    _check_name(f"{where}: `recipe`", name)
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{where}: `stages` must be a list of configs, each with a `name`")
    stages: list[Stage] = []
    for number, entry in enumerate(entries):
        place = f"{where}: `stages[{number}]"
        if not isinstance(entry, dict):
            raise UserError(f"{place}` is {entry!r}; it must be a config with a `name`")
        own, _ = read_layer(entry)
        _check_name(f"{place}.name`", stage := own.pop("name", None))
        if stage in (earlier.name for earlier in stages):
            raise UserError(f"{place}.name` is {stage!r}, as an earlier stage's is; give each its own")
        for model in (values.get("model"), own.get("model", {})):
            if model is not None and not isinstance(model, dict):
                raise UserError(f"{place}.model` is {model!r}; it must hold keys such as `family` and `path`")
        config = merged(values, own)
        run = f"{name}-{stage}"
        if "run" in config:
            raise UserError(f"{place}` has `run: {config['run']}`; its run is called {run}, take the key out")
        if stages:
            if "weights" in own.get("model", {}):
                raise UserError(f"{place}.model.weights` is given; a stage begins with the weights of the one before")
            if config.get("model", {}).get("adapter"):
                raise UserError(
                    f"{place}` has `model.adapter`; a stage begins with the weights of the one before, into which its "
                    "adapters are merged: give it to the first stage alone"
                )
            config = merged(config, {"model": {"weights": f"results/{stages[-1].run}/train/model"}})
        stages.append(Stage(stage, run, config | {"run": run}))
    return Recipe(name, tuple(stages))


def _check_name(key: str, name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(f"{key} is {name!r}; it must be a name of letters, digits, dot, dash and underscore")
