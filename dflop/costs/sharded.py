"""Seconds of passes and bytes on devices where a module's parameters are sharded among its replicas.

Every layer is a unit of its own, as are the module's first and last part (FSDP2's `fully_shard` on each). A unit's
parameters are gathered while the unit before it computes. After its backward, its gradients are summed into the shards
while the next unit computes. So a unit takes the time of its computing or of the transfers beside it, whichever is
longer. Only the first gather and the last sum are waited for. Where the same cores compute and communicate, nothing is
hidden, and a pass takes the sum of both. The time of such a pass never falls when a load grows, and is convex in the
loads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple, TypeVar

import numpy as np

from dflop.costs.stage_kind import StageKind

__all__ = ["Moving", "PassTerm", "ShardedPass", "sharded_passes", "working_bytes"]

Seconds = TypeVar("Seconds", float, np.ndarray)
_UNITS = ("first", "layer", "last")
# A field of `Moving`, and the unit whose parameters or gradients move.
_Move = tuple[str, str]


class Moving(NamedTuple):
    """Seconds to gather a unit's parameters, and to sum its gradients into the shards, for each kind of unit.

    They are numbers, or arrays that broadcast with the times of the parts.
    """

    gather_s: Mapping[str, float | np.ndarray]
    reduce_s: Mapping[str, float | np.ndarray]

    @classmethod
    def over(
        cls,
        parameter_bytes: Mapping[str, float],
        latency_s: Seconds,
        byte_s: Seconds,
        *,
        value_bytes: int,
        trained_bytes: Mapping[str, float],
    ) -> "Moving":
        """The seconds over a link on which a gradient sync takes `latency_s`, and `byte_s` for each byte.

        A gather and a sum each take half of a sync. `parameter_bytes` are in fp32, and so are `trained_bytes`, those of
        them that have gradients. Parameters move as values of `value_bytes`, gradients in fp32 at least.
        """

        def seconds(num_values: float, size: int) -> float | np.ndarray:
            return 0.5 * (latency_s + num_values * size * byte_s)

        nothing = 0.0 * latency_s
        return cls(
            {part: seconds(parameter_bytes[part] / 4, value_bytes) for part in _UNITS},
            {
                part: seconds(trained_bytes[part] / 4, max(4, value_bytes)) if trained_bytes[part] else nothing
                for part in _UNITS
            },
        )


class _Units(NamedTuple):
    """`count` units of a part, each with these moves beside its computing."""

    part: str
    moves: tuple[_Move, ...]
    count: int


class PassTerm(NamedTuple):
    """`count` units of a part, each with transfers of `moved_s` seconds beside its computing."""

    part: str
    count: int
    moved_s: float | np.ndarray


@dataclass(frozen=True, slots=True)
class ShardedPass:
    """The sum of `exposed_s` and of each term's count times the longer of computing and moving."""

    exposed_s: float | np.ndarray
    terms: tuple[PassTerm, ...]

    def seconds(self, part_s: Mapping[str, np.ndarray]) -> np.ndarray:
        """Seconds of the pass where one unit of each part computes for `part_s` seconds."""
        total = self.exposed_s
        for part, count, moved_s in self.terms:
            total = total + count * np.maximum(part_s[part], moved_s)
        return np.asarray(total)


def sharded_passes(kind: StageKind, moving: Moving, *, is_hidden: bool = True) -> tuple[ShardedPass, ShardedPass]:
    """Forward and backward of a module of one stage. Backward ends at the last part that has one.

    `is_hidden` is whether devices compute while they communicate. Where some layers are trained and others are not, all
    are taken to sum as many gradients as the layer with the most. The backward begins with the unit that the forward
    ended with. This unit is taken to be still gathered, since backward is taken to follow shortly after forward.
    """
    forward, backward = _units(kind.num_layers, kind.num_recomputed, tuple(kind.layers_with_backward))
    goes_back = dict(kind.parts_with_backward)
    if kind.ways.num_still == kind.num_layers:
        backward = [_Units(part, (), count) for part, count in goes_back.items()]
    elif "first" not in goes_back:
        backward = [unit for unit in backward if unit.part != "first"]
    ends_with = "first" if "first" in goes_back else "last" if kind.ways.num_still == kind.num_layers else "layer"
    return (
        _pass(moving, ("gather_s", "first"), forward, is_hidden),
        _pass(moving, ("reduce_s", ends_with), backward, is_hidden),
    )


@lru_cache(maxsize=1024)
def _units(num_layers: int, num_recomputed: int, goes_back: tuple[str, ...]) -> tuple[list[_Units], list[_Units]]:
    """The units of forward and backward in order. The last layers go back, as these parts."""
    units = ["first", *["layer"] * num_layers, "last"]
    num_still = num_layers - len(goes_back)
    parts = ["first", *["layer"] * num_still, *goes_back, "last"]
    of_forward = [part.replace("passing_", "") for part in parts]  # a forward is the same
    forward = [(part, (("gather_s", behind),)) for part, behind in zip(of_forward, units[1:], strict=False)]
    forward.append(("last", ()))
    backward = [("last", (("gather_s", units[-2]),))]
    for place in range(len(units) - 2, num_still, -1):
        backward.append((parts[place], (("reduce_s", units[place + 1]), ("gather_s", units[place - 1]))))
    backward.append(("first", (("reduce_s", units[1]),)))
    stage = ("recomputing_stage" if num_recomputed else "stage", ())
    return _alike([stage, *forward]), _alike([stage, *backward])


def _alike(units: list[tuple[str, tuple[_Move, ...]]]) -> list[_Units]:
    """Equal neighbours as one entry."""
    return [_Units(*unit, len(list(alike))) for unit, alike in groupby(units)]


def _pass(moving: Moving, exposed: _Move, units: list[_Units], is_hidden: bool) -> ShardedPass:
    """The pass of these units, each entry as one term."""
    exposed_s = _seconds(moving, (exposed,))
    terms = [PassTerm(part, count, _seconds(moving, moves)) for part, moves, count in units]
    if not is_hidden:
        exposed_s = sum((term.count * term.moved_s for term in terms), exposed_s)
        terms = [term._replace(moved_s=0.0 * exposed_s) for term in terms]
    return ShardedPass(exposed_s, tuple(terms))


def _seconds(moving: Moving, moves: Sequence[_Move]) -> float | np.ndarray:
    """Seconds of these moves, one after the other."""
    return sum((getattr(moving, way)[unit] for way, unit in moves), 0.0 * moving.gather_s["first"])


def working_bytes(
    module: str, parameter_bytes: Mapping[str, float], *, value_bytes: int, trained_bytes: Mapping[str, float]
) -> dict[str, float]:
    """Bytes that passes need beside their activations, while each of `PARTS` computes.

    The bytes of `stage` are those of moments when no part's own workspace is held.

    During a layer's backward, this layer and the one before it are gathered, and the gradients of the unit after it
    are being summed into the shards, in fp32 at least. The layer's own gradients appear one by one; all of them are
    there only when its workspace is free. When a unit's backward ends, its gathered parameters are freed, and its
    gradients exist both in the computing precision and in fp32. An LLM's embedding and head are units of their own
    where they are separate parameters (`Stage.units`). Other parameters at a module's ends stay gathered from forward
    to backward. Gradients of adapters exist in both precisions as well; they are those of one layer.
    """
    layer, first, last = (parameter_bytes[part] / 4 for part in ("layer", "first", "last"))
    are_units = module == "llm" and last >= first
    kept = 0.0 if are_units else first + last
    behind = last if are_units else 0.0
    held_bytes = max(4, value_bytes)
    gathered = value_bytes * (kept + layer + max(layer, behind))
    if not any(trained_bytes.values()):
        return {"stage": gathered, "layer": gathered, "first": value_bytes * first, "last": value_bytes * last}
    if trained_bytes["layer"] < parameter_bytes["layer"]:
        both = (value_bytes + held_bytes) / 4
        gathered += both * trained_bytes["layer"]
        of_ends = value_bytes * kept + both * (trained_bytes["first"] + trained_bytes["last"])
        return {
            "stage": max(gathered, of_ends),
            "layer": gathered,
            "first": value_bytes * (kept or first),
            "last": value_bytes * (kept or last),
        }
    others_gradients = value_bytes * (0.0 if are_units else last) + held_bytes * max(layer, behind)
    at_layer = value_bytes * (kept + 2 * layer) + others_gradients
    ends = max(first, last) if are_units else kept
    return {
        "stage": max(gathered, at_layer + value_bytes * layer, (value_bytes + held_bytes) * ends),
        "layer": at_layer,
        "first": value_bytes * (kept or first),
        "last": value_bytes * (kept or last),
    }
