"""Loading a config: its layers are merged over the defaults and checked. Parts of a config can be taken out of it."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dflop.config.devices import with_device_figures
from dflop.config.keys import refuse_misfits, type_message
from dflop.config.layers import Layer, read_layer, with_pins_by_module
from dflop.config.schema import Config, FixedGrid, FixedPlan
from dflop.config.values import check_values
from dflop.runtime import UserError

__all__ = ["load_config", "restrict", "select_keys", "set_steps"]


# The number of steps where neither `train.steps` nor `train.epochs` is given.
_STEPS = 20


def load_config(*layers: Layer, has_cluster: bool = True) -> Config:
    """Merge the layers over the defaults, left to right, check the result, and fill in what the device model gives.

    `has_cluster` is false for a part of a config that does not give the number of devices: then it is not checked
    whether they are enough.

    Raises:
        UserError: naming the key, its value and what would be right.
    """
    node = OmegaConf.structured(Config)
    for layer in layers:
        values, where = read_layer(layer)
        refuse_misfits(values, where)
        try:
            node = OmegaConf.merge(node, with_pins_by_module(values))
        except OmegaConfBaseException as error:
            raise UserError(type_message(error, values, where)) from None
    try:
        config: Config = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:  # a `${…}` that leads nowhere
        raise UserError(f"`{error.full_key}`: {str(error).splitlines()[0]}") from None
    fixed, today = (_without_open_grids(pins) for pins in (config.plan.fixed, config.plan.today))
    config = dataclasses.replace(config, plan=dataclasses.replace(config.plan, fixed=fixed, today=today))
    check_values(config, has_cluster=has_cluster)
    schedule = config.schedule
    if schedule.deterministic:
        schedule = dataclasses.replace(schedule, correction="off")
    train = config.train
    if train.steps is None and train.epochs is None:
        train = dataclasses.replace(train, steps=_STEPS)
    return dataclasses.replace(config, cluster=with_device_figures(config), schedule=schedule, train=train)


def _without_open_grids(pins: FixedPlan | None) -> FixedPlan | None:
    """The pins without grids that pin nothing."""
    if pins is None:
        return None
    return dataclasses.replace(pins, modules={name: grid for name, grid in pins.modules.items() if grid != FixedGrid()})


def select_keys(config: Config, keys: Iterable[str]) -> dict[str, Any]:
    """The part of a config under the given dotted keys, as plain dicts and lists (for JSON and digests)."""
    part: dict[str, Any] = {}
    for key in keys:
        value, target = config, part
        *path, leaf = key.split(".")
        for name in path:
            value = getattr(value, name)
            target = target.setdefault(name, {})
        target[leaf] = _plain(getattr(value, leaf))
    return part


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if not dataclasses.is_dataclass(value):
        return value
    part = {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    return part.pop("modules") | part if isinstance(value, FixedPlan) else part


def restrict(config: Config, keys: Iterable[str]) -> Config:
    """The config with these dotted keys alone: reading any other key raises AttributeError."""
    return _without_others(config, [key.split(".") for key in keys])


def set_steps(config: Config, steps: int) -> None:
    """Set `train.steps`, and `train.epochs` to None, in the config itself.

    `dataclasses.replace` cannot copy a config from which `restrict` removed keys.
    """
    object.__setattr__(config, "train", dataclasses.replace(config.train, steps=steps, epochs=None))


def _without_others(section: Any, wanted: list[list[str]]) -> Any:
    restricted = dataclasses.replace(section)
    for item in dataclasses.fields(section):
        below = [path[1:] for path in wanted if path[0] == item.name]
        if not below:
            object.__delattr__(restricted, item.name)
        elif all(below):
            object.__setattr__(restricted, item.name, _without_others(getattr(section, item.name), below))
    return restricted
