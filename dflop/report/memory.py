"""The page's section on memory: what the fullest device of each kind holds, by category, and what a device has."""

from dataclasses import dataclass

import numpy as np

from dflop.report.schedules import PreviewPrices
from dflop.schedule import Pricer, StepSchedule, tensor_bytes
from dflop.step import workers_of

__all__ = ["DeviceBar", "MemorySection", "memory_section"]

_GIB = 2**30
_PROCESS, _ALLOCATOR, _COMMUNICATORS = "process", "allocator", "communicators"
# Devices that carry the same stages are one kind, drawn once. If there are more kinds, the fullest are drawn.
_MOST_KINDS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBar:
    """The fullest of `num_devices` devices that carry the same stages; `parts` is its memory in GiB by category."""

    label: str
    num_devices: int
    parts: dict[str, float]
    total_gib: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySection:
    """The section.

    `scheduled_gib` is predicted for the fullest device in any of `num_scheduled` scheduled batches, and `predicted_gib`
    for the batches on which the plan was priced, which are grouped in a simpler way. `measured_gib` is the peak of
    training's fullest process; None if nothing was trained.
    """

    finding: str
    limit_gib: float
    bars: tuple[DeviceBar, ...]
    num_kinds: int
    scheduled_gib: float
    num_scheduled: int
    predicted_gib: float | None
    measured_gib: float | None


def memory_section(
    pricer: Pricer,
    schedule: StepSchedule,
    preview: PreviewPrices | None,
    predicted_bytes: dict[str, float],
    measured_bytes: dict[str, float],
) -> MemorySection:
    """The section, from the schedule of one step. `predicted_bytes` and `measured_bytes` are the plan's predicted and
    training's measured peak by module; `preview` has the prediction for the previewed batches."""
    held = tensor_bytes(pricer, schedule.shapes, schedule.assignment)
    tensors = sum(held.values())
    held |= {
        _PROCESS: np.full_like(tensors, pricer.costs.overhead_bytes),
        _ALLOCATOR: tensors * pricer.costs.allocator_share,
    }
    if pricer.memory.communicator_bytes:
        held[_COMMUNICATORS] = np.full_like(tensors, pricer.memory.communicator_bytes)
    totals = sum(held.values())
    kinds: dict[str, list[int]] = {}
    workers = workers_of(pricer.plan)
    for index, worker in enumerate(workers):
        stages = dict.fromkeys((pricer.nodes[node].module, pricer.nodes[node].pp_stage) for node in worker.nodes)
        several = {module for module, stage in stages if stage}
        several |= {grid.module for grid in pricer.plan.grids if pricer.plan.num_stages(grid.module) > 1}
        names = (f"{module} stage {stage}" if module in several else module for module, stage in stages)
        kinds.setdefault(" + ".join(names), []).append(index)
    bars = []
    for label, members in kinds.items():
        fullest = max(members, key=lambda index: totals[index])
        bars.append(
            DeviceBar(
                label=label,
                num_devices=sum(workers[index].num_ranks for index in members),
                parts={name: float(sizes[fullest]) / _GIB for name, sizes in held.items()},
                total_gib=float(totals[fullest]) / _GIB,
            )
        )
    limit_gib = pricer.memory.limit_bytes / _GIB
    fullest = max(bars, key=lambda bar: bar.total_gib)
    shown = bars if len(bars) <= _MOST_KINDS else sorted(bars, key=lambda bar: -bar.total_gib)[:_MOST_KINDS]
    most = max(fullest.parts, key=fullest.parts.__getitem__)
    return MemorySection(
        finding=(
            f"In this step the fullest device ({fullest.label}) is predicted to hold {fullest.total_gib:.3g} of "
            f"{limit_gib:.3g} GiB, most of it {_IN_WORDS.get(most, most)}"
        ),
        limit_gib=limit_gib,
        bars=tuple(shown),
        num_kinds=len(bars),
        scheduled_gib=max(fullest.total_gib, preview.memory_bytes / _GIB if preview else 0.0),
        num_scheduled=preview.num_batches if preview else 1,
        predicted_gib=max(predicted_bytes.values()) / _GIB if predicted_bytes else None,
        measured_gib=max(measured_bytes.values()) / _GIB if measured_bytes else None,
    )


_IN_WORDS = {
    "optimizer": "the optimiser's state",
    _PROCESS: "what every process holds beside its tensors",
    _ALLOCATOR: "what the allocator holds unused",
    _COMMUNICATORS: "NCCL's communicators",
}
