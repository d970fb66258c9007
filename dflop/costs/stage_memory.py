"""The memory of a stage on a rank, from the bytes of its parts and of its parameters."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

from dflop.base.kernels import kernel
from dflop.costs.forms import PackedForms, form_at
from dflop.costs.stage_kind import ALL_PARTS, StageKind, counts_of
from dflop.models.loads import Coefficients
from dflop.plan.leaving import most_still_here, values_of_part

__all__ = ["Resident", "StageMemory", "memories_of_kinds", "memory_of_parts", "resident_parts"]


# By part: the kinds of layers behind it in a stage.
_BEHIND = {"attention_kept_layer": ("passing_layer", "layer")}
_BEHIND["recomputed_layer"] = ("attention_kept_passing_layer", "attention_kept_layer", *_BEHIND["attention_kept_layer"])
_RECOMPUTED = tuple(_BEHIND)
_BEHIND["offloaded_layer"] = ("recomputed_passing_layer", "recomputed_layer", *_BEHIND["recomputed_layer"])


class StageMemory(NamedTuple):
    """Bytes of one stage on one rank, for each microbatch: `activation_bytes` while the microbatch is in flight, and
    `transient_bytes` on top of them while it is computed."""

    activation_bytes: np.ndarray
    transient_bytes: np.ndarray


Bytes = TypeVar("Bytes", float, np.ndarray)
Form = TypeVar("Form", np.ndarray, Coefficients)


class Resident(NamedTuple):
    """Bytes that a rank always holds of a stage: parameters in the computing precision, or shards of them; gradients;
    and the optimiser's moments and master weights."""

    parameters: float | np.ndarray
    gradients: float | np.ndarray
    optimizer: float | np.ndarray


def resident_parts(
    trained_bytes: Bytes,
    frozen_bytes: Bytes,
    dp: int,
    *,
    value_bytes: int,
    num_shards: int = 1,
    offloads_optimizer: bool = False,
) -> Resident:
    """The bytes of a stage with `dp` replicas, and so many bytes of trained and of frozen parameters in fp32.

    Parameters are values of `value_bytes`. Where they are trained, gradients and AdamW's two moments are in fp32 at
    least, and parameters in a smaller precision have fp32 masters. Moments and masters are divided among the replicas.
    With `num_shards` above 1, each group of `num_shards` replicas shards the parameters and everything else. Of trained
    parameters only the masters are then held, which serve for computing, too. Of a state in host memory
    (`offloads_optimizer`), two parts are on the device."""
    count, held_bytes = trained_bytes / 4, max(4, value_bytes)
    frozen, is_shared = frozen_bytes / 4 * (value_bytes / num_shards), num_shards > 1
    has_masters, num_owners = not is_shared and value_bytes < held_bytes, num_shards if is_shared else dp
    state_bytes = (2 + has_masters) * held_bytes
    state = count * (state_bytes / num_owners)
    if offloads_optimizer:
        state = 2 * values_of_part(count / num_owners) * state_bytes
    if is_shared:
        own = count * (held_bytes / num_shards)
        return Resident(own + frozen, own, state)
    return Resident(count * value_bytes + frozen, count * held_bytes, state)


def memory_of_parts(kind: StageKind, kept: Mapping[str, Form], passing: Mapping[str, Form]) -> tuple[Form, list[Form]]:
    """What a microbatch keeps on a stage, and what each of the stage's parts needs on top of that while it computes.

    `kept` and `passing` give both for one unit of each part: as bytes at some loads, or as functions of the loads.
    Parts without a backward keep nothing.
    """
    each = {part: passing[part] for part, _ in kind.parts}
    for (part, other), count in _freed(kind).items():
        if part not in each:  # a layer that passes gradients on: it needs no more than others
            continue
        each[part] = each[part] + -float(count) * kept[other]
    return kind.total(kept, kind.parts_with_backward), list(each.values())


def memories_of_kinds(
    kinds: Sequence[StageKind],
    kept: PackedForms,
    passing: PackedForms,
    loads: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """`memory_of_parts` of several kinds: what is kept, and the most that is needed on top, [num_kinds,
    num_microbatches] each.

    The functions are those of `ALL_PARTS`; the loads are [4, num_microbatches].
    """
    return _memories_at(*_counts_of(tuple(kinds)), kept, passing, loads)


def _freed(kind: StageKind) -> dict[tuple[str, str], int]:
    """How many units of another part have free activations when backward reaches a part, by (part, other part). A
    number below zero is of units that are there on top."""
    counts, freed = dict(kind.parts_with_backward), {}
    for part in counts:
        # Offloaded layers come first, behind them recomputed ones, then those recomputed but for attention: when
        # backward reaches any of these, the activations of the layers behind them are free.
        for other in _BEHIND.get(part, ()):
            if other in counts:
                freed[part, other] = counts[other]
        if kind.is_last and part != "last":
            # When backward reaches the layers, the activations of the head, or of an encoder's last part, are free.
            freed[part, "last"] = 1
    if kind.num_offloaded:
        # Beside these layers, the tensors of offloaded ones are on the device that come back by then.
        a_layer = "layer" if "offloaded_layer" in counts else "passing_layer"
        for part, _ in kind.parts:
            if part in ("offloaded_layer", *_RECOMPUTED):
                since = kind.num_offloaded if part in _RECOMPUTED else 0
                still_here = most_still_here(kind.num_offloaded, kind.num_layers - kind.ways.num_still, since)
                freed[part, a_layer] = freed.get((part, a_layer), 0) - still_here
    return freed


@lru_cache(maxsize=4096)
def _counts_of(kinds: tuple[StageKind, ...]) -> tuple[np.ndarray, np.ndarray]:
    """How often each kind has each of `ALL_PARTS` in forward and in backward, [2, num_kinds, num_parts], and `_freed`,
    [num_kinds, num_parts, num_parts]."""
    freed = np.zeros((len(kinds), len(ALL_PARTS), len(ALL_PARTS)))
    for place, kind in enumerate(kinds):
        for (part, other), count in _freed(kind).items():
            freed[place, ALL_PARTS.index(part), ALL_PARTS.index(other)] = count
    return counts_of(kinds), freed


@kernel
def _memories_at(counts, freed, kept_forms, passing_forms, loads):
    _, num_kinds, num_parts = counts.shape
    kept, most = np.zeros((num_kinds, loads.shape[1])), np.zeros((num_kinds, loads.shape[1]))
    is_used = np.array([counts[:, :, part].any() for part in range(num_parts)])
    own, passing = np.zeros(num_parts), np.zeros(num_parts)
    for microbatch in range(loads.shape[1]):
        for part in range(num_parts):
            if is_used[part]:
                own[part] = form_at(kept_forms, part, loads[:, microbatch])
                passing[part] = form_at(passing_forms, part, loads[:, microbatch])
        for kind in range(num_kinds):
            for part in range(num_parts):
                kept[kind, microbatch] += counts[1, kind, part] * own[part]
                if counts[0, kind, part] == 0:
                    continue
                on_top = passing[part]
                for other in range(num_parts - 1, -1, -1):  # in the order of `_freed`
                    if freed[kind, part, other] != 0:
                        on_top += -freed[kind, part, other] * own[other]
                most[kind, microbatch] = max(most[kind, microbatch], on_top)
    return kept, most
