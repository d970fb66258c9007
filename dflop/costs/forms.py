"""Functions of the loads as arrays, and how compiled kernels read them.

`pack_forms` lays out the functions of several stages (`CostModel.time_forms`, `stage_memory_forms`) in arrays of one
shape; `form_at` evaluates one of them inside a kernel, as `Coefficients` does it with numpy.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflop.models.loads import Coefficients
from dflop.runtime.kernels import kernel

__all__ = ["PackedForms", "form_at", "line_at", "pack_forms"]


class PackedForms(NamedTuple):
    """Functions of a microbatch's loads, one a stage."""

    lines: np.ndarray  # [num_stages, 5]: a constant, and a unit of each load
    hinges: np.ndarray  # [num_stages, num_hinges, 3]: load, at, slope; a slope of 0 where a stage has fewer


def pack_forms(forms: Sequence[Coefficients]) -> PackedForms:
    hinges = np.zeros((len(forms), max(len(form.hinges) for form in forms), 3))
    for stage, form in enumerate(forms):
        if form.hinges:
            hinges[stage, : len(form.hinges)] = form.hinges
    return PackedForms(np.array([[form.const, *form.per_load] for form in forms]), hinges)


@kernel(inline="always")
def form_at(forms, stage, loads):
    """A stage's function at a microbatch's loads [4]."""
    total = line_at(forms.lines[stage], loads)
    hinges = forms.hinges[stage]
    for hinge in range(len(hinges)):
        total += hinges[hinge, 2] * max(0.0, loads[int(hinges[hinge, 0])] - hinges[hinge, 1])
    return total


@kernel(inline="always")
def line_at(line, loads):
    """A linear function [5] at a microbatch's loads [4]."""
    total = line[0]
    for load in range(4):
        total += line[1 + load] * loads[load]
    return total
