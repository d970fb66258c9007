"""The comparison at several sizes of the cluster, each device with as many samples a step, and the table of it."""

import math
from collections.abc import Mapping, Sequence

import polars as pl

from dflop.comparison.compare import OURS, SystemRow
from dflop.comparison.table import comparison_frame
from dflop.config import Config
from dflop.runtime import UserError

__all__ = ["keys_of_size", "scaling_frame", "scaling_text"]


def keys_of_size(config: Config, num_devices: int) -> tuple[str, ...]:
    """The keys, as `--config` takes them, that make the config's cluster one of so many devices of the same kind, and
    the batch as large for each of them.

    Raises:
        UserError: where that is no number of whole nodes, or its batch no whole number of samples.
    """
    cluster, batch_size = config.cluster, config.train.global_batch_size
    per_node = min(num_devices, cluster.devices_per_node)
    if num_devices < 1 or num_devices % per_node:
        raise UserError(f"{num_devices} devices are no whole nodes of {per_node} (`cluster.devices_per_node`)")
    if batch_size * num_devices % cluster.num_devices:
        raise UserError(
            f"{num_devices} devices would have no whole batch: `train.global_batch_size` is {batch_size} for "
            f"{cluster.num_devices} devices, of which each keeps its share; make it a multiple of them"
        )
    return (
        f"cluster.num_nodes={num_devices // per_node}",
        f"cluster.devices_per_node={per_node}",
        f"train.global_batch_size={batch_size * num_devices // cluster.num_devices}",
    )


def scaling_frame(found: Mapping[int, Sequence[SystemRow]]) -> pl.DataFrame:
    """The tables of `comparison_frame` by number of devices, which the column `devices` says."""
    frames = (comparison_frame(rows).select(pl.lit(size).alias("devices"), pl.all()) for size, rows in found.items())
    return pl.concat(frames, how="vertical_relaxed")


def scaling_text(found: Mapping[int, Sequence[SystemRow]]) -> str:
    """A line for each system, two columns for each size: the step, and how many times ours it is."""
    lines = [f"{'system':<34}" + "".join(f"{f'{size} devices':>20}" for size in found)]
    for name in [row.name for row in next(iter(found.values()))]:
        cells = []
        for rows in found.values():
            own_s, ours_s = (next(row.step_s for row in rows if row.name == wanted) for wanted in (name, OURS))
            cells.append(f"{own_s:.4g} s  {own_s / ours_s:.3f}x" if math.isfinite(own_s) else "nothing fits")
        lines.append(f"{name:<34}" + "".join(f"{cell:>20}" for cell in cells))
    said = "Predicted: the step, and how many times that of dflop it is. The batch grows with the devices."
    return "\n".join([*lines, "", said])
