"""The bytes on each of a plan's devices in a step, by category: for checks and for reports."""

import numpy as np

from dflop.schedule.assignment import Assignment
from dflop.schedule.pricer import Pricer
from dflop.shapes import SampleShapes

__all__ = ["MEMORY_CATEGORIES", "tensor_bytes"]

MEMORY_CATEGORIES = ("parameters", "gradients", "optimizer", "activations")


def tensor_bytes(pricer: Pricer, shapes: SampleShapes, assignment: Assignment) -> dict[str, np.ndarray]:
    """Bytes of tensors on each rank of a worker, [num_workers], by category; activations are those at the peak."""
    held = {category: np.zeros(pricer.compiled.num_workers) for category in MEMORY_CATEGORIES}
    for stage in pricer.stages:
        workers = slice(stage.first_worker, stage.first_worker + stage.dp * stage.span)
        for category, size in zip(MEMORY_CATEGORIES, pricer.stage_costs.resident_parts(stage), strict=False):
            held[category][workers] += size
    held["activations"] = pricer.activation_bytes(shapes, assignment, pricer.order(assignment.slots))
    return held
