"""Memory and link speeds that a config leaves out, filled in from the data sheet of its device model."""

import dataclasses
import math
from functools import cache
from pathlib import Path

from dflop.base import UserError
from dflop.base.devices import HOP_S, NETWORK_HOP_S, DeviceModel, find_device, load_device
from dflop.config.schema import ClusterConfig, Config

__all__ = [
    "excess_memory",
    "host_bytes_per_s",
    "most_memory_gib",
    "require_known_memory",
    "ring_latency_s",
    "with_device_figures",
]

# For a device that no data sheet describes.
_MEMORY_GIB, _INTRA_NODE_GBPS, _INTER_NODE_GBPS = 4.0, 100.0, 50.0


def with_device_figures(config: Config) -> ClusterConfig:
    """The config's cluster with its memory (GiB) and link speeds (Gbit/s) filled in where they are null.

    Raises:
        UserError: for analytic costs of an unknown device, or with more memory than the data sheet says.
    """
    cluster, is_analytic = config.cluster, config.costs.source == "analytic"
    device = (load_device if is_analytic else find_device)(cluster.device_model, _models_file(cluster))
    if is_analytic and cluster.memory_gib is not None and cluster.memory_gib > device.most_memory_gib:
        raise UserError(f"{excess_memory(cluster)}; lower it, leave it out, or choose another `cluster.device_model`")
    given = {name: value for name in _figures(device) if (value := getattr(cluster, name)) is not None}
    return dataclasses.replace(cluster, **(_figures(device) | given))


def _figures(device: DeviceModel | None) -> dict[str, float]:
    if device is None:
        return {"memory_gib": _MEMORY_GIB, "intra_node_gbps": _INTRA_NODE_GBPS, "inter_node_gbps": _INTER_NODE_GBPS}
    return {
        "memory_gib": device.memory_gib,
        "intra_node_gbps": device.link_bytes_per_s * 8 / 1e9,
        "inter_node_gbps": device.network_bytes_per_s * 8 / 1e9,
    }


def excess_memory(cluster: ClusterConfig) -> str | None:
    """The complaint about a `memory_gib` that is more than the device model has; None where it is not more."""
    most_gib = most_memory_gib(cluster)
    if cluster.memory_gib <= most_gib:
        return None
    return (
        f"`cluster.memory_gib` is {cluster.memory_gib:g}, more than the {most_gib:g} that the data sheet "
        f"of `cluster.device_model` {cluster.device_model!r} says"
    )


def require_known_memory(cluster: ClusterConfig) -> None:
    """Raise a UserError for GPUs of which neither the model nor the memory is given: plans would be made for 4 GiB."""
    is_known = find_device(cluster.device_model, _models_file(cluster)) is not None
    if cluster.device == "cuda" and not is_known and cluster.memory_gib == _MEMORY_GIB:
        raise UserError(
            "plans for GPUs need `cluster.device_model`, such as h100-80g, or `cluster.memory_gib`, a card's memory"
        )


def host_bytes_per_s(cluster: ClusterConfig) -> float:
    """What a device copies to its node's memory, or from there, while all do.

    Raises:
        UserError: if no data sheet says it.
    """
    device = find_device(cluster.device_model, _models_file(cluster))
    if device is None:
        raise UserError(
            "layers and the optimiser's state are offloaded (`cluster.host_memory_gib`) as fast as "
            "`dflop profile-links` measures or a data sheet says (`host_bytes_per_s`), and there is no sheet of "
            f"`cluster.device_model` {cluster.device_model!r}: measure, name another, give a sheet in "
            "`cluster.device_models`, or leave `cluster.host_memory_gib` out"
        )
    return device.host_bytes_per_s


def ring_latency_s(cluster: ClusterConfig, num_ranks: int, num_nodes: int) -> float:
    """Seconds of a gather or a scattered sum of GPUs beside those of its bytes: a step of a ring to each of the ranks
    but one, of which as many as there are nodes but one go from node to node. Nothing on CPUs.

    NCCL tells its own algorithms apart by this formula (`src/graph/tuning.cc`).
    """
    if cluster.device != "cuda":
        return 0.0
    hop_s = _hop_s(cluster.device_model, _models_file(cluster))
    return (num_ranks - num_nodes) * hop_s + (num_nodes - 1) * NETWORK_HOP_S


@cache
def _hop_s(device_model: str, models_file: Path | None) -> float:
    device = find_device(device_model, models_file)
    return device.hop_s if device else HOP_S


def most_memory_gib(cluster: ClusterConfig) -> float:
    """The most GiB of memory that the device model's data sheet allows; infinity where it has no data sheet."""
    device = find_device(cluster.device_model, _models_file(cluster))
    return math.inf if device is None else device.most_memory_gib


def _models_file(cluster: ClusterConfig) -> Path | None:
    return Path(cluster.device_models) if cluster.device_models else None
