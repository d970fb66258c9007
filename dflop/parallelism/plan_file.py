"""Reading a plan: what `plan.yaml` holds may have been written by hand, so every field is checked.

Messages name the field as it stands in the file, its value and what would be right.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from dflop.parallelism.grid import Grid
from dflop.parallelism.placements import PLACEMENTS
from dflop.parallelism.plan import Plan
from dflop.parallelism.schedules import SCHEDULES
from dflop.parallelism.shardings import PLAIN_SHARDING, SHARDINGS
from dflop.runtime import UserError, way_out_of

__all__ = ["load_plan", "plan_from_dict"]

# More than any cluster or batch has: what is larger is a slip, and would take hours to lay out.
_MOST_RANKS = 1_000_000
_MOST_MICROBATCHES = 65_536
_MOST_LAYERS = 10_000
_PLAN_FIELDS = ("placement", "grids", "num_microbatches", "checkpointing", "schedule", "num_chunks")
_GRID_FIELDS = ("num_ranks", "tp", "pp", "dp", "rank_offset", "layers", "sharding", "shards")


def plan_from_dict(values: Mapping[str, Any]) -> Plan:
    """The plan that `to_dict` gave. As in older files, `num_chunks` may be missing, and a grid's `dp`, `layers`,
    `sharding` and `shards`.

    Raises:
        UserError: naming a field that is missing, unknown or no value of its kind, or a `dp` that is not the grid's.
    """
    plan = _mapping(values, "plan", _PLAN_FIELDS)
    if "grids" not in plan:
        raise UserError("`plan.grids` is missing; it must hold a grid for each module")
    grids = _mapping(plan["grids"], "plan.grids")
    return Plan(
        placement=_choice(plan, "plan", "placement", PLACEMENTS),
        grids=tuple(
            sorted(
                (_grid(str(module), grid) for module, grid in grids.items()),
                key=lambda grid: (grid.module == "llm", grid.rank_offset),
            )
        ),
        num_microbatches=_whole(plan, "plan", "num_microbatches", 1, _MOST_MICROBATCHES),
        checkpointing=_switch(plan, "checkpointing"),
        schedule=_choice(plan, "plan", "schedule", SCHEDULES),
        num_chunks=_whole({"num_chunks": 1} | plan, "plan", "num_chunks", 1, _MOST_LAYERS),
    )


def load_plan(path: Path) -> Plan:
    """The plan of a `plan.yaml`.

    Raises:
        UserError: when the file is missing, holds no plan, or one that cannot be.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; make it with `dflop plan`") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        what = " ".join(str(error).split())
        raise UserError(f"{path} holds no plan ({what}); make it again with `dflop plan`") from None
    if not isinstance(values, Mapping) or not isinstance(values.get("plan"), Mapping):
        raise UserError(f"{path} holds no plan (no section `plan`); make it again with `dflop plan`")
    try:
        return plan_from_dict(values["plan"])
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _grid(module: str, values: Any) -> Grid:
    where = f"plan.grids.{module}"
    own = _mapping(values, where, _GRID_FIELDS)
    given = own.get("layers")
    if given is not None and not isinstance(given, list):
        raise UserError(f"`{where}.layers` is {given!r}; it must be a list of whole numbers, one a stage, or null")
    layers = {f"layers[{number}]": count for number, count in enumerate(given or ())}
    grid = Grid(
        module=module,
        num_ranks=_whole(own, where, "num_ranks", 1, _MOST_RANKS),
        tp=_whole(own, where, "tp", 1, _MOST_RANKS),
        pp=_whole(own, where, "pp", 1, _MOST_RANKS),
        rank_offset=_whole(own, where, "rank_offset", 0, _MOST_RANKS),
        layers=tuple(_whole(layers, where, name, 1, _MOST_LAYERS) for name in layers),
        sharding=_choice({"sharding": PLAIN_SHARDING} | own, where, "sharding", SHARDINGS),
        shards=None if own.get("shards") is None else _whole(own, where, "shards", 1, _MOST_RANKS),
    )
    if "dp" in own and (dp := _whole(own, where, "dp", 1, _MOST_RANKS)) != grid.dp:
        raise UserError(
            f"`{where}.dp` is {dp}, but num_ranks: {grid.num_ranks} with tp: {grid.tp} and pp: {grid.pp} make "
            f"dp: {grid.dp}; for dp: {dp} use num_ranks: {dp * grid.tp * grid.pp}, or leave dp out"
        )
    return grid


def _mapping(values: Any, where: str, fields: Collection[str] = ()) -> Mapping[str, Any]:
    """A section of the file; where its `fields` are given it may have no others."""
    if not isinstance(values, Mapping):
        raise UserError(f"`{where}` is {values!r}; it must hold {', '.join(fields) or 'a grid for each module'}")
    for key in values if fields else ():
        if key not in fields:
            way_out = way_out_of(str(key), fields, f"{where}.")
            raise UserError(f"unknown field `{where}.{key}` (value {values[key]!r}); {way_out}")
    return values


def _field(values: Mapping[str, Any], where: str, name: str, wanted: str) -> Any:
    if name not in values:
        raise UserError(f"`{where}.{name}` is missing; it must be {wanted} (`dflop plan` writes a whole plan)")
    return values[name]


def _whole(values: Mapping[str, Any], where: str, name: str, least: int, most: int) -> int:
    wanted = f"a whole number from {least} to {most}"
    value = _field(values, where, name, wanted)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UserError(f"`{where}.{name}` is {_as_written(value)}; it must be {wanted}")
    return value


def _switch(plan: Mapping[str, Any], name: str) -> bool:
    value = _field(plan, "plan", name, "true or false")
    if not isinstance(value, bool):
        raise UserError(f"`plan.{name}` is {_as_written(value)}; it must be true or false")
    return value


def _choice(values: Mapping[str, Any], where: str, name: str, choices: Collection[str]) -> str:
    wanted = f"one of {', '.join(choices)}"
    value = _field(values, where, name, wanted)
    if not isinstance(value, str) or value not in choices:
        raise UserError(f"`{where}.{name}` is {_as_written(value)}; it must be {wanted}")
    return value


def _as_written(value: Any) -> str:
    """A value as it stands in YAML: `true`, `null`."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)
