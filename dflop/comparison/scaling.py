"""The comparison at several sizes of the cluster, with equally many samples for each device and step; and its table."""

import math
from collections.abc import Mapping, Sequence

import polars as pl

from dflop.base import UserError
from dflop.comparison.compare import OURS, SystemRow
from dflop.comparison.table import comparison_frame
from dflop.config import Config

__all__ = ["keys_of_size", "scaling_frame", "scaling_text"]


def keys_of_size(config: Config, num_devices: int) -> tuple[str, ...]:
    """The keys, as `--config` takes them, that give the config's cluster `num_devices` devices of the same kind.

    The global batch keeps its number of samples for each device. `plan.today`, which describes a layout for the
    config's own number of devices, is set to null for any other number.

    Raises:
        UserError: where the devices do not make whole nodes, or the batch would not be a whole number of samples.
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
        *(["plan.today=null"] if config.plan.today and num_devices != cluster.num_devices else []),
    )


def scaling_frame(found: Mapping[int, Sequence[SystemRow]]) -> pl.DataFrame:
    """The tables of `comparison_frame` for all numbers of devices, with the number in the column `devices`."""
    frames = (comparison_frame(rows).select(pl.lit(size).alias("devices"), pl.all()) for size, rows in found.items())
    return pl.concat(frames, how="vertical_relaxed")


def scaling_text(found: Mapping[int, Sequence[SystemRow]]) -> str:
    """A line for each system, with two columns for each size: the step time, and its ratio to ours."""
    lines = [f"{'system':<34}" + "".join(f"{f'{size} devices':>20}" for size in found)]
    for name in [row.name for row in max(found.values(), key=len)]:  # today's layout has a row at one size only
        cells = []
        for rows in found.values():
            steps_s = {row.name: row.step_s for row in rows}
            step_s, ours_s = steps_s.get(name), steps_s[OURS]
            if step_s is None:
                cells.append("of another size")
            else:
                cells.append(f"{step_s:.4g} s  {step_s / ours_s:.3f}x" if math.isfinite(step_s) else "nothing fits")
        lines.append(f"{name:<34}" + "".join(f"{cell:>20}" for cell in cells))
    said = "Predicted: the step, and how many times that of dflop it is. The batch grows with the devices."
    return "\n".join([*lines, "", said])
