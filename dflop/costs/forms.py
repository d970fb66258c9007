"""Functions of the loads as arrays, and how compiled kernels read them.

`pack_forms` lays out the functions of several stages (`CostModel.time_forms`, `stage_memory_forms`) in arrays of one
shape; `form_at` evaluates one of them inside a kernel, as `Coefficients` does it with numpy.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflop.models.loads import Coefficients
from dflop.runtime.kernels import kernel

__all__ = ["PackedForms", "PackedTerms", "form_at", "largest_at", "pack_forms", "pack_terms", "terms_at"]


class PackedForms(NamedTuple):
    """Functions of a microbatch's loads, one a stage."""

    lines: np.ndarray  # [num_stages, 5]: a constant, and a unit of each load
    hinges: np.ndarray  # [num_stages, num_hinges, 3]: load, at, slope; a slope of 0 where a stage has fewer


class PackedTerms(NamedTuple):
    """Several functions a stage, each with the least that it counts as."""

    first: np.ndarray  # [num_stages + 1]: of each stage, and behind all
    forms: PackedForms
    least: np.ndarray  # [num_terms]


def pack_terms(of_stages: Sequence[Sequence[tuple[Coefficients, float]]]) -> PackedTerms:
    terms = [term for of_stage in of_stages for term in of_stage]
    return PackedTerms(
        first=np.cumsum([0, *map(len, of_stages)]),
        forms=pack_forms([form for form, _ in terms]),
        least=np.array([least for _, least in terms]),
    )


def pack_forms(forms: Sequence[Coefficients]) -> PackedForms:
    hinges = np.zeros((len(forms), max((len(form.hinges) for form in forms), default=0), 3))
    for stage, form in enumerate(forms):
        if form.hinges:
            hinges[stage, : len(form.hinges)] = form.hinges
    return PackedForms(np.array([[form.const, *form.per_load] for form in forms]).reshape(-1, 5), hinges)


@kernel(inline="always")
def form_at(forms, stage, loads):
    """A stage's function at a microbatch's loads [4]."""
    total = forms.lines[stage, 0]
    for load in range(4):
        total += forms.lines[stage, 1 + load] * loads[load]
    hinges = forms.hinges[stage]
    for hinge in range(len(hinges)):
        total += hinges[hinge, 2] * max(0.0, loads[int(hinges[hinge, 0])] - hinges[hinge, 1])
    return total


@kernel
def terms_at(terms, stage, loads):
    """The sum of a stage's functions at a microbatch's loads [4], none less than it counts at least; 0 without any."""
    total = 0.0
    if terms is None:
        return total
    for number in range(terms.first[stage], terms.first[stage + 1]):
        total += max(form_at(terms.forms, number, loads), terms.least[number])
    return total


@kernel
def largest_at(terms, stage, loads):
    """The largest of a stage's functions at a microbatch's loads [4], and of the least that each counts as."""
    largest = 0.0
    for number in range(terms.first[stage], terms.first[stage + 1]):
        largest = max(largest, form_at(terms.forms, number, loads), terms.least[number])
    return largest
