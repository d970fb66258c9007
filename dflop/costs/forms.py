"""Forms, that is functions of a microbatch's loads (`Coefficients`), as arrays that compiled kernels can read.

`pack_forms` lays out the functions of several stages (`CostModel.time_forms`, `stage_memory_forms`), or of a module's
parts, in arrays of one shape. Inside kernels, `form_at` evaluates one of them, `forms_at` several, and `totals_at` sums
of them, with the same results as `Coefficients` and `StageKind.total`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflop.base.kernels import kernel
from dflop.models.loads import Coefficients

__all__ = [
    "PackedForms",
    "PackedTerms",
    "form_at",
    "forms_at",
    "largest_at",
    "pack_forms",
    "pack_terms",
    "terms_at",
    "totals_at",
]


class PackedForms(NamedTuple):
    """Functions of a microbatch's loads, one a stage."""

    lines: np.ndarray  # [num_stages, 5]: a constant, then the slope of each load
    hinges: np.ndarray  # [num_stages, num_hinges, 3]: index of the load, at, slope; 0 where a stage has fewer


class PackedTerms(NamedTuple):
    """Several functions a stage, called terms. A term with a value below its `least` counts as `least`."""

    first: np.ndarray  # [num_stages + 1]: the index of each stage's first term, then the number of terms
    forms: PackedForms
    least: np.ndarray  # [num_terms]


def pack_terms(of_stages: Sequence[Sequence[tuple[Coefficients, float]]]) -> PackedTerms:
    """Pack each stage's terms, given as (function, least)."""
    terms = [term for of_stage in of_stages for term in of_stage]
    return PackedTerms(
        first=np.cumsum([0, *map(len, of_stages)]),
        forms=pack_forms([form for form, _ in terms]),
        least=np.array([least for _, least in terms]),
    )


def pack_forms(forms: Sequence[Coefficients]) -> PackedForms:
    """Pack one function a stage."""
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
def forms_at(forms, places, loads):
    """The values [num_places, num_microbatches] of the functions at these places, for loads [4, num_microbatches]."""
    found = np.empty((len(places), loads.shape[1]))
    for row in range(len(places)):
        for microbatch in range(loads.shape[1]):
            found[row, microbatch] = form_at(forms, places[row], loads[:, microbatch])
    return found


@kernel
def totals_at(forward, backward, counts, loads):
    """Sums of functions, [2 (forward, backward), num_kinds, num_microbatches], for loads [4, num_microbatches].

    Each is taken `counts` [2, num_kinds, num_forms] times. A microbatch without items and tokens has sums of 0.
    """
    _, num_kinds, num_forms = counts.shape
    totals, each = np.zeros((2, num_kinds, loads.shape[1])), np.zeros((2, num_forms))
    is_used = np.array([counts[:, :, form].any() for form in range(num_forms)])
    for microbatch in range(loads.shape[1]):
        if loads[0, microbatch] == 0 and loads[1, microbatch] == 0:
            continue
        for form in range(num_forms):
            if is_used[form]:
                each[0, form] = form_at(forward, form, loads[:, microbatch])
                each[1, form] = form_at(backward, form, loads[:, microbatch])
        for kind in range(num_kinds):
            for form in range(num_forms):
                totals[0, kind, microbatch] += counts[0, kind, form] * each[0, form]
                totals[1, kind, microbatch] += counts[1, kind, form] * each[1, form]
    return totals


@kernel
def terms_at(terms, stage, loads):
    """The sum of a stage's terms at a microbatch's loads [4]; 0 where it has none."""
    total = 0.0
    for number in range(terms.first[stage], terms.first[stage + 1]):
        total += max(form_at(terms.forms, number, loads), terms.least[number])
    return total


@kernel
def largest_at(terms, stage, loads):
    """The largest of a stage's terms at a microbatch's loads [4], and at least 0."""
    largest = 0.0
    for number in range(terms.first[stage], terms.first[stage + 1]):
        largest = max(largest, form_at(terms.forms, number, loads), terms.least[number])
    return largest
