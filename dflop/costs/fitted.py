"""The fitted costs of each part, as `costs.duckdb` holds them: reading them, checking them, and what they cover."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from dflop.base import UserError
from dflop.config import Config
from dflop.costs.link_model import LinkModel
from dflop.models import ModelSpec, digest_of_spec
from dflop.models.loads import FEATURES, Coefficients, Hinge, Loads, main_load
from dflop.plan.layout_key import LayoutKey
from dflop.store import read_tables

__all__ = ["ATTENTION", "FittedCosts", "LoadRange", "attention_of", "column_of"]

# In `times`, the name of the seconds of attention in the forward of an LLM's layer, beside those of its parts.
ATTENTION = "attention"

# Upper limits of the numbers in the tables: an hour, and more bytes than any cluster has.
_MOST_S, _MOST_BYTES = 3600.0, 1e18
_MADE_FOR = ("model", "precision", "device_model")
Bytes = TypeVar("Bytes", float, np.ndarray)
_TABLES = ("time_model", "memory_model", "load_range", "device", "link_model", "meta")


def column_of(feature: str, unit: str) -> str:
    """The fitted tables' column for a load: `num_items` and `s` -> `per_item_s`."""
    return f"per_{feature.removeprefix('num_').removesuffix('s')}_{unit}"


def attention_of(
    times: Mapping[tuple[str, LayoutKey, str, bool, str], Coefficients], module: str, layout: LayoutKey
) -> Coefficients:
    """Of a layer's forward the seconds of attention: as they were clocked, or else those that grow with squared
    lengths."""
    per_load = times[module, layout, "layer", False, "forward"].per_load
    squares = tuple(own * (load == "sum_sq_tokens") for load, own in zip(FEATURES, per_load, strict=True))
    return times.get((module, layout, ATTENTION, False, "forward"), Coefficients(0.0, squares))


class LoadRange(NamedTuple):
    """The smallest and the largest value of each load (in the order of `FEATURES`) that a module was measured at."""

    least: tuple[float, ...]
    most: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedCosts:
    """What every part costs: `times` in seconds by (module, layout, part, checkpointing, pass), `activations` and
    `transients` in bytes by (module, layout, part, checkpointing), `parameter_bytes` (fp32) by (module, layout, part).

    `checkpointing` is whether the layers are recomputed in backward. Of the forward of an LLM's `layer`, the seconds of
    `attention` stand in `times` besides, where it was clocked.
    """

    times: dict[tuple[str, LayoutKey, str, bool, str], Coefficients]
    activations: dict[tuple[str, LayoutKey, str, bool], Coefficients]
    transients: dict[tuple[str, LayoutKey, str, bool], Coefficients]
    parameter_bytes: dict[tuple[str, LayoutKey, str], float]
    # Of `parameter_bytes`, those that are trained where a part is trained in part, such as adapters. The tables' column
    # is called `adapter_bytes`.
    partial_bytes: dict[tuple[str, LayoutKey, str], float] = field(default_factory=dict)
    # Of a frozen layer that passes gradients on between trained ones, by (module, layout): its backward and what it
    # keeps, as shares of those of a trained layer, found at one size. Without them it counts as a trained one.
    passing: dict[tuple[str, LayoutKey], tuple[float, float]] = field(default_factory=dict)
    # Bytes a token that a layer keeps more of where it is recomputed but for attention, by (module, layout). Without
    # them it counts as recomputed as a whole.
    attention_bytes: dict[tuple[str, LayoutKey], float] = field(default_factory=dict)
    # By (module, layout, checkpointing).
    ranges: dict[tuple[str, LayoutKey, bool], LoadRange] = field(default_factory=dict)
    # Bytes that a process holds beside its tensors, and bytes that its allocator reserves without using them, as a
    # share of the tensors' bytes.
    overhead_bytes: float = 0.0
    allocator_share: float = 0.0
    # What an optimiser's step reads and writes in a second. Where nobody measured it, its time is not priced.
    update_bytes_per_s: float = math.inf
    # Bytes that a GPU holds for each communicator that its process is in.
    communicator_bytes: float = 0.0
    # Where the costs come from: measured or analytic. Everything made from analytic costs says so.
    source: str = "measured"
    # The model's digest, the precision, the device model, and by module in which way it was measured
    # (`TrainedSet.measured_as`), as far as the file says.
    made_for: dict[str, str] = field(default_factory=dict)
    links: LinkModel = field(default_factory=LinkModel)
    # A cache of the forms of modules' parts.
    _parts: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read `costs.duckdb`.

        Raises:
            UserError: when the file is missing, has another schema version, or holds no fit or impossible numbers.
        """
        tables = read_tables(path, _TABLES, made_by="fit-costs")
        times = {(*_key(row), row["pass"]): _coefficients(row, "s") for row in tables["time_model"]}
        if not times:
            raise UserError(f"{path} holds no time model; make it again with `dflop fit-costs`")
        memory = tables["memory_model"]
        kept, passing = (
            {_key(row): _coefficients(row, "bytes") for row in memory if row["kind"] == kind}
            for kind in ("activation", "transient")
        )
        ranges: dict[tuple[str, LayoutKey, bool], LoadRange] = {}
        for row in tables["load_range"]:
            bounds = (tuple(float(row[f"{end}_{feature}"]) for feature in FEATURES) for end in ("least", "most"))
            ranges[row["module"], LayoutKey.of_row(row), row["checkpointing"]] = LoadRange(*bounds)
        parameters = {_key(row)[:3]: row["parameter_bytes"] for row in memory}
        _check_tables(path, times, kept | passing, parameters, tables["device"])
        return cls(
            times=times,
            activations=kept,
            transients=passing,
            parameter_bytes=parameters,
            partial_bytes={_key(row)[:3]: row.get("adapter_bytes") or 0.0 for row in memory},
            passing={
                _key(row)[:2]: (row["passing_backward"], row["passing_kept"])
                for row in memory
                if row.get("passing_backward") is not None
            },
            attention_bytes={
                _key(row)[:2]: row["attention_bytes"] for row in memory if row.get("attention_bytes") is not None
            },
            ranges=ranges,
            overhead_bytes=max(row["overhead_bytes"] for row in tables["device"]),
            allocator_share=max(row["allocator_share"] for row in tables["device"]),
            communicator_bytes=max(row.get("communicator_bytes", 0.0) for row in tables["device"]),
            update_bytes_per_s=min(map(_update_rate, tables["device"])),
            source=next((row["value"] for row in tables["meta"] if row["key"] == "source"), "measured"),
            made_for=_made_for(tables["device"]),
            links=LinkModel.from_rows(tables["link_model"]),
        )

    def is_extrapolated(
        self, module: str, layout: LayoutKey, loads: Loads, *, checkpointing: bool = False
    ) -> np.ndarray:
        """Which microbatches have a load above or below the measured range: bools of the loads' shape."""
        outside = np.zeros(np.shape(loads.num_items), dtype=bool)
        if bounds := self.ranges.get((module, layout, checkpointing)):
            for load, least, most in zip(loads, *bounds, strict=True):
                if load is not loads.num_items or module != "llm":  # keys and values of others are never measured
                    outside |= (load > most) | ((load > 0) & (load < least))
        return outside

    @property
    def layouts(self) -> dict[str, list[LayoutKey]]:
        """The layouts of a layer that there are costs for, by module."""
        found: dict[str, set[LayoutKey]] = {}
        for module, layout, *_ in self.times:
            found.setdefault(module, set()).add(layout)
        return {module: sorted(layouts) for module, layouts in found.items()}

    def held_bytes(self, tensor_bytes: Bytes) -> Bytes:
        """Bytes that a process with these bytes of tensors holds in all, with what its allocator reserves."""
        return self.overhead_bytes + tensor_bytes * (1 + self.allocator_share)

    def most_tensor_bytes(self, limit_bytes: float) -> float:
        """The most bytes of tensors with which a process holds no more than the limit."""
        return (limit_bytes - self.overhead_bytes) / (1 + self.allocator_share)

    def require_made_for(self, spec: ModelSpec, config: Config) -> None:
        """Check that these costs were made for the config's model, precision and device model, and that their modules
        are trained, frozen or adapted as the config's.

        Raises:
            UserError: naming the first that differs.
        """
        wanted = {
            "model": digest_of_spec(spec),
            "precision": config.train.precision,
            "device_model": config.cluster.device_model,
        }
        trained = config.model.trained.among(spec.modules)
        wanted |= {module.name: trained.measured_as(module.name) for module in spec.modules}
        for key, value in wanted.items():
            if (own := self.made_for.get(key, value)) != value:
                what = f"`{key}` {own!r}, and the config has {value!r}"
                if key == "model":
                    what = "another model"
                elif key not in _MADE_FOR:
                    what = f"{key} as {own}, and by `model.train`, `model.freeze` and `model.lora` it is {value}"
                raise UserError(
                    f"the costs are of {what}; run `dflop profile-costs` and `dflop fit-costs` again with this config"
                )

    def require_modules(self, modules: Iterable[str]) -> None:
        """Raise `UserError` when there are no costs, in any layout, for one of these modules."""
        for module in modules:
            if module not in self.layouts:
                raise UserError(
                    f"no {self.source} costs for {module} ({self._known}); "
                    f"run `dflop profile-costs --module {module}`, and `dflop fit-costs` with the files of all modules"
                )

    def require(self, module: str, layout: LayoutKey) -> None:
        """Raise `UserError` when there are no costs of the module in this layout."""
        if (module, layout, "layer", False, "forward") not in self.times:
            self.require_modules([module])
            raise UserError(
                f"no {self.source} costs for {module} {layout} ({self._known}); "
                f"add {layout.tp} to `costs.tp_sizes` and run `dflop profile-costs` and `dflop fit-costs` again"
            )

    @property
    def _known(self) -> str:
        known = [f"{name} {layout}" for name, layouts in sorted(self.layouts.items()) for layout in layouts]
        return f"there are: {', '.join(known)}"


def _check_tables(
    path: Path,
    times: dict[tuple, Coefficients],
    memory: dict[tuple, Coefficients],
    parameter_bytes: dict[tuple, float],
    devices: Sequence[Mapping[str, Any]],
) -> None:
    """Refuse numbers that cannot be true: negative times, a time above an hour, or more bytes than any cluster has."""
    numbers = [("time_model", key, (fit.const, *fit.per_load), 0.0, _MOST_S) for key, fit in times.items()]
    numbers += [
        ("memory_model", key, (fit.const, *fit.per_load), -_MOST_BYTES, _MOST_BYTES) for key, fit in memory.items()
    ]
    numbers += [("memory_model", key, (size,), 0.0, _MOST_BYTES) for key, size in parameter_bytes.items()]
    least_of = {"overhead_bytes": 0.0, "allocator_share": 0.0, "communicator_bytes": 0.0, "update_bytes_per_s": 1.0}
    numbers += [
        (f"device, column {name}", (), [value], least, _MOST_BYTES)
        for row in devices
        for name, least in least_of.items()
        if (value := row.get(name)) is not None
    ]
    for table, key, values, least, most in numbers:
        for value in values:
            if not least <= value <= most:
                what = f", {key[0]} {key[1]}, part {key[2]}" if key else ""
                raise UserError(
                    f"{path}, table {table}{what}: {value:g} cannot be true, it must be from "
                    f"{least:g} to {most:g}; measure again (delete costs/ of the run, or `dflop profile-costs` and "
                    "`dflop fit-costs`)"
                )


def _update_rate(row: Mapping[str, Any]) -> float:
    rate = row.get("update_bytes_per_s")  # tables of earlier versions have none
    return math.inf if rate is None else rate


def _key(row: Mapping[str, Any]) -> tuple[str, LayoutKey, str, bool]:
    return row["module"], LayoutKey.of_row(row), row["part"], row["checkpointing"]


def _coefficients(row: Mapping[str, Any], unit: str) -> Coefficients:
    along = FEATURES.index(main_load(row["module"], row["part"]))
    return Coefficients(
        row[f"const_{unit}"],
        tuple(row[column_of(feature, unit)] for feature in FEATURES),
        tuple(Hinge(along, at, slope) for at, slope in zip(row["hinge_at"], row[f"hinge_{unit}"], strict=True)),
    )


def _made_for(device: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """`FittedCosts.made_for`, from the rows of the table `device`."""
    made_for = {key: device[0][key] for key in _MADE_FOR if key in device[0]}
    for row in device:
        if "module" in row and "is_frozen" in row:
            made_for[row["module"]] = row.get("adapters") or ("frozen" if row["is_frozen"] else "trained")
    return made_for
