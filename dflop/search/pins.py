"""The pins of `plan.fixed` or `plan.today` in messages: as text, and which of them no plan can have."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dflop.base import UserError
from dflop.config import Config, FixedGrid, FixedPlan
from dflop.models import ModelSpec, check_tp
from dflop.plan import PLACEMENTS
from dflop.plan.layout_key import LayoutKey

__all__ = ["impossible_pin", "without_each"]

_SIZES = ("tp", "pp", "dp")


def without_each(fixed: FixedPlan) -> dict[str, FixedPlan]:
    """For each pin as text, such as `llm tp=2`, the pins without it."""
    without = {}
    for module, grid in fixed.modules.items():
        for size in (*_SIZES, "sharding", "cp"):
            if value := getattr(grid, size):
                modules = fixed.modules | {module: replace(grid, **{size: None})}
                without[f"{module} {size}={value}"] = replace(fixed, modules=modules)
    for key in ("placement", "num_microbatches", "checkpointing", "schedule"):
        if (value := getattr(fixed, key)) is not None:
            without[f"{key}={value}"] = replace(fixed, **{key: None})
    return without


def impossible_pin(
    config: Config,
    spec: ModelSpec,
    layouts: Mapping[str, Sequence[LayoutKey]],
    fixed: FixedPlan,
    placements: Sequence[str],
    pins_are: str,
) -> str | None:
    """A pinned size that no plan has, whatever else is pinned, and what it can be; None where there is no such size.

    `layouts` are those of a layer that there are costs for, by module.
    """
    for module, grid in fixed.modules.items():
        if grid.tp and (why := _why_no_tp(config, spec, layouts[module], module, grid.tp)):
            return f"`{pins_are}.{module}.tp` is {grid.tp}: {why}"
        num_layers = spec.module(module).num_layers
        if grid.pp and grid.pp > num_layers:
            return (
                f"`{pins_are}.{module}.pp` is {grid.pp}: {module} of {spec.name} has {num_layers} layers; "
                f"use at most {num_layers}"
            )
    return _other_number(config, spec, fixed, placements, pins_are)


def _why_no_tp(config: Config, spec: ModelSpec, layouts: Sequence[LayoutKey], module: str, tp: int) -> str | None:
    per_node, known = config.cluster.devices_per_node, [layout.tp for layout in layouts]
    able = " or ".join(str(size) for size in known if per_node % size == 0)
    try:
        check_tp(spec, module, tp)
    except UserError as error:
        return str(error)
    if able and per_node % tp:
        return f"such groups lie within a node, of {per_node} devices (`cluster.devices_per_node`); use {able}"
    if able and tp not in known:
        return f"there are costs at tp {', '.join(map(str, known))} alone; add {tp} to `costs.tp_sizes`, or use {able}"
    return None


def _other_number(
    config: Config, spec: ModelSpec, fixed: FixedPlan, placements: Sequence[str], pins_are: str
) -> str | None:
    """The complaint about pinned sizes whose product is no number of devices that modules can have."""
    cluster = config.cluster
    there_are = f"`cluster` has {cluster.num_devices} ({cluster.num_nodes} x {cluster.devices_per_node})"
    shares = {PLACEMENTS[name].shares_ranks for name in placements}
    grids = {module.name: fixed.modules.get(module.name, FixedGrid()) for module in spec.modules}
    if shares == {True}:
        given = {size: value for size in _SIZES if (value := getattr(grids["llm"], size))}
        product, is_whole = math.prod(given.values()), len(given) == len(_SIZES)
        if cluster.num_devices % product or (is_whole and product != cluster.num_devices):
            sizes = " x ".join(f"{size} {value}" for size, value in given.items())
            needed = f"{'' if is_whole else 'a divisor of '}{cluster.num_devices}"
            return (
                f"`{pins_are}.llm` is {sizes} = {product} devices, and {there_are}, all of which the LLM has in "
                f"{' and '.join(placements)} plans; make it {needed}"
            )
    if shares == {False} and all(getattr(grid, size) for grid in grids.values() for size in _SIZES):
        number = sum(grid.least_ranks for grid in grids.values())
        if number != cluster.num_devices:
            parts = " + ".join(f"{module} {grid.least_ranks}" for module, grid in grids.items())
            return f"`{pins_are}` is {parts} = {number} devices, and {there_are}; make it {cluster.num_devices}"
    return None
