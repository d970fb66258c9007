"""Reading a plan. A `plan.yaml` may have been written by hand, or be damaged, so every field is checked.

Messages name the field as it is in the file, its value, and what would be right.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired

import yaml
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from dflop.base import UserError, way_out_of
from dflop.plan.grid import Grid
from dflop.plan.placements import PLACEMENTS
from dflop.plan.plan import Plan
from dflop.plan.schedules import REMOVED_SCHEDULES, SCHEDULES
from dflop.plan.shardings import PLAIN_SHARDING, SHARDINGS

__all__ = ["check_layers", "load_plan", "plan_from_dict", "read_plan_file"]

# More than any cluster, batch or model has. A larger number is a mistake, and would take hours to lay out.
_MOST_RANKS = 1_000_000
_MOST_MICROBATCHES = 65_536
_MOST_LAYERS = 10_000
_PLAN_FIELDS = (
    *("placement", "grids", "num_microbatches", "checkpointing", "schedule", "num_chunks", "offloads_optimizer"),
)
_GRID_FIELDS = (
    *("num_ranks", "tp", "pp", "dp", "rank_offset", "layers", "recomputed", "attention_kept"),
    *("offloaded", "sharding", "shards", "cp"),
)


class _Predicted(TypedDict):
    step_s: float
    idle: float
    memory_bytes: Annotated[dict[str, float], Field(min_length=1)]
    bottleneck: str


class _PlanAndPrediction(TypedDict):
    plan: dict[str, Any]
    predicted: _Predicted


class _Unable(TypedDict):
    name: str
    why_not: str


class _Able(TypedDict):
    name: str
    step_s: float
    would_take: str
    idle: float
    plan: str
    over_batches: NotRequired[Annotated[list[float], Field(min_length=2, max_length=2)]]


class _Sections(TypedDict, total=False):
    """The sections of a `plan.yaml` that are read again. All of them may have more fields than these."""

    plan: dict[str, Any]
    predicted: _Predicted
    loading: dict[str, Any] | None
    baselines: list[_Able | _Unable]
    with_more_memory: _PlanAndPrediction
    why: str
    next: str
    num_plans: int


_SECTIONS = TypeAdapter(_Sections)


def plan_from_dict(values: Mapping[str, Any]) -> Plan:
    """The plan that `Plan.to_dict` gave. As in older files, `num_chunks` and `offloads_optimizer` may be missing, and
    `dp`, `layers`, `recomputed`, `attention_kept`, `offloaded`, `sharding`, `shards` and `cp` of a grid.

    Raises:
        UserError: naming a field that is missing, unknown or of the wrong kind, or a `dp` that does not follow from the
            grid's other fields; also as `Grid` and `Plan`.
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
        offloads_optimizer=_switch({"offloads_optimizer": False} | plan, "offloads_optimizer"),
    )


def read_plan_file(path: Path, *checked: str) -> dict[str, Any]:
    """All sections of a `plan.yaml`: `plan`, and what `dflop plan` says of it. A plan written by hand has only `plan`.

    Raises:
        UserError: when the file is missing or damaged, or when a section is not of its kind: one of those `checked`, or
            any if none is named.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or not isinstance(values.get("plan"), dict):
            raise ValueError("no section `plan`")
        sections = checked or tuple(values)
        _SECTIONS.validate_python({name: values[name] for name in sections if name in values}, strict=True)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; make it with `dflop plan`") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(name) for name in first["loc"] if not str(name).startswith("_"))
        raise UserError(f"{path}: `{where}`: {first['msg']}; make the file again with `dflop plan`") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} holds no plan ({reason}); make it again with `dflop plan`") from None
    return values


def load_plan(path: Path) -> Plan:
    """The plan in a `plan.yaml`.

    Raises:
        UserError: as `read_plan_file`, and when the plan is impossible.
    """
    values = read_plan_file(path, "plan")
    try:
        return plan_from_dict(values["plan"])
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def check_layers(path: Path, plan: Plan, num_layers: Mapping[str, int]) -> None:
    """Check the layers that a plan gives to its stages, and those that stages recompute or offload, against the model's
    number of layers, by module. `path` is the plan's file, for messages.

    Raises:
        UserError: naming the file and the grid, when they do not fit.
    """
    for grid in plan.grids:
        try:
            plan.offloaded_of(grid.module, num_layers[grid.module])
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


def _grid(module: str, values: Any) -> Grid:
    where = f"plan.grids.{module}"
    fields = _mapping(values, where, _GRID_FIELDS)
    grid = Grid(
        module=module,
        num_ranks=_whole(fields, where, "num_ranks", 1, _MOST_RANKS),
        tp=_whole(fields, where, "tp", 1, _MOST_RANKS),
        pp=_whole(fields, where, "pp", 1, _MOST_RANKS),
        rank_offset=_whole(fields, where, "rank_offset", 0, _MOST_RANKS),
        layers=_counts(fields, where, "layers", 1),
        recomputed=_counts(fields, where, "recomputed", 0),
        attention_kept=_counts(fields, where, "attention_kept", 0),
        offloaded=_counts(fields, where, "offloaded", 0),
        sharding=_choice({"sharding": PLAIN_SHARDING} | fields, where, "sharding", SHARDINGS),
        shards=None if fields.get("shards") is None else _whole(fields, where, "shards", 1, _MOST_RANKS),
        cp=_whole({"cp": 1} | fields, where, "cp", 1, _MOST_RANKS),
    )
    if "dp" in fields and (dp := _whole(fields, where, "dp", 1, _MOST_RANKS)) != grid.dp:
        raise UserError(
            f"`{where}.dp` is {dp}, but num_ranks: {grid.num_ranks} with tp: {grid.tp} and pp: {grid.pp} make "
            f"dp: {grid.dp}; for dp: {dp} use num_ranks: {dp * grid.tp * grid.pp}, or leave dp out"
        )
    return grid


def _counts(grid: Mapping[str, Any], where: str, name: str, least: int) -> tuple[int, ...]:
    """A field with one number of layers for each stage; empty if the field is missing or null."""
    given = grid.get(name)
    if given is not None and not (isinstance(given, list) and given):
        raise UserError(f"`{where}.{name}` is {given!r}; it must be a list of whole numbers, one a stage, or null")
    counts = {f"{name}[{number}]": count for number, count in enumerate(given or ())}
    return tuple(_whole(counts, where, place, least, _MOST_LAYERS) for place in counts)


def _mapping(values: Any, where: str, fields: Collection[str] = ()) -> Mapping[str, Any]:
    """A section of the file. If `fields` are given, it may have no others."""
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
        gone = ", which was removed" if value in REMOVED_SCHEDULES else ""
        raise UserError(f"`{where}.{name}` is {_as_written(value)}{gone}; it must be {wanted}")
    return value


def _as_written(value: Any) -> str:
    """A value as YAML writes it: `true`, `null`."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)
