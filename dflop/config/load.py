"""Loading a config: its layers are merged over the defaults and checked. Parts of a config can be taken out of it."""

import dataclasses
from collections.abc import Iterable, Mapping
from functools import cache, reduce
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dflop.base import UserError
from dflop.config.devices import with_device_figures
from dflop.config.layers import Layer, read_layer
from dflop.config.messages import UNKNOWN_KEY, message_of
from dflop.config.schema import Config, FixedPlan
from dflop.config.together import check_together

__all__ = ["load_config", "merged", "restrict", "select_keys", "set_steps", "with_value", "without_today"]


# The number of steps where neither `train.steps` nor `train.epochs` is given.
_STEPS = 20
# Steps between checkpoints. On GPUs, where a step takes seconds and a checkpoint of a 7B 96 GB, these are minutes.
_CHECKPOINT_EVERY = {"cpu": 10, "cuda": 100}


def load_config(*layers: Layer, has_cluster: bool = True) -> Config:
    """Merge the layers over the defaults, left to right, check the result, and fill in what the device model gives.

    `has_cluster` is false for a part of a config that does not give the number of devices: then it is not checked
    whether they are enough.

    Raises:
        UserError: naming the key, its value and what would be right.
    """
    read = [read_layer(layer) for layer in layers]
    values = reduce(merged, (values for values, _ in read), _plain(Config()))
    config = _checked(_resolved(values), read)
    check_together(config, has_cluster=has_cluster)
    schedule = config.schedule
    if schedule.deterministic:
        schedule = dataclasses.replace(schedule, correction="off")
    train = config.train
    if train.steps is None and train.epochs is None:
        train = dataclasses.replace(train, steps=_STEPS)
    if train.checkpoint_every is None:
        train = dataclasses.replace(train, checkpoint_every=_CHECKPOINT_EVERY[config.cluster.device])
    return dataclasses.replace(config, cluster=with_device_figures(config), schedule=schedule, train=train)


def merged(below: Any, above: Any) -> Any:
    """Values over others: mappings key by key, all else whole."""
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    return {**below, **{key: merged(below.get(key), value) for key, value in above.items()}}


def _resolved(values: dict[str, Any]) -> dict[str, Any]:
    """The values with each `${key}` replaced by the value of that key."""
    if "${" not in str(values):
        return values
    from omegaconf import OmegaConf  # takes half as long to import as all of the config
    from omegaconf.errors import OmegaConfBaseException

    OmegaConf.clear_resolver("oc.env")  # what the environment holds would be kept in `results/`
    try:
        return OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:  # a `${key}` that leads nowhere
        key = " ".join(str(error.full_key).split())  # a key with a line break takes one line of the message, too
        raise UserError(
            f"`{key}`: {str(error).splitlines()[0]}; `${{…}}` may name the config's own keys alone"
        ) from None


def _checked(values: dict[str, Any], layers: list[tuple[dict[str, Any], str]]) -> Config:
    """The config with these values. A message names the last of the layers that has the wrong key."""
    try:
        return _check().validate_python(values)
    except ValidationError as found:
        errors = found.errors(include_url=False)
    error = min(errors, key=lambda error: error["type"] != UNKNOWN_KEY)  # these first: others may follow from them
    where = [name for holds, name in layers if _holds(holds, error["loc"])]
    raise UserError(": ".join([*where[-1:], message_of(error)]))


@cache
def _check() -> TypeAdapter:
    return TypeAdapter(Config)


def _holds(values: Any, place: tuple[int | str, ...]) -> bool:
    """Whether a layer has a key, e.g. ("train", "lr"). It has modules beside the other keys of `plan.fixed`."""
    for name in place:
        if name == "modules" and isinstance(values, Mapping) and name not in values:
            continue
        try:
            values = values[name]
        except (KeyError, IndexError, TypeError):
            return False
    return True


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


def with_value(config: Any, key: str, value: Any) -> Any:
    """A copy of the config, or of one of its sections, in which this dotted key has another value. `restrict` may have
    removed others."""
    name, _, below = key.partition(".")
    changed = object.__new__(type(config))
    for item in dataclasses.fields(config):
        if hasattr(config, item.name):
            object.__setattr__(changed, item.name, getattr(config, item.name))
    object.__setattr__(changed, name, with_value(getattr(config, name), below, value) if below else value)
    return changed


def set_steps(config: Config, steps: int) -> None:
    """Set `train.steps`, and `train.epochs` to None, in the config itself.

    `dataclasses.replace` cannot copy a config from which `restrict` removed keys.
    """
    object.__setattr__(config, "train", dataclasses.replace(config.train, steps=steps, epochs=None))


def without_today(config: Config) -> None:
    """Set `plan.today` to None, in the config itself as `set_steps` does."""
    object.__setattr__(config, "plan", dataclasses.replace(config.plan, today=None))


def _without_others(section: Any, wanted: list[list[str]]) -> Any:
    restricted = dataclasses.replace(section)
    for item in dataclasses.fields(section):
        below = [path[1:] for path in wanted if path[0] == item.name]
        if not below:
            object.__delattr__(restricted, item.name)
        elif all(below):
            object.__setattr__(restricted, item.name, _without_others(getattr(section, item.name), below))
    return restricted
