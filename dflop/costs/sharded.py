"""What passes take and devices hold where a module's parameters are sharded among its replicas.

Every layer is a unit of its own, as are what begins the module and what ends it (FSDP2's `fully_shard` on each). A unit
is gathered while the one before it is computed; behind its backward its gradients are summed into the shards while the
next one is computed. So a unit takes as long as its computing or as what moves beside it, whichever is longer, and the
first gather and the last sum are waited for. Where the same cores compute and move, nothing is hidden, and a pass takes
the sum of both. Such a pass never falls when a load grows, and is convex in the loads.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

__all__ = ["Moving", "PassTerm", "ShardedPass", "sharded_passes", "working_bytes"]

Seconds = TypeVar("Seconds", float, np.ndarray)
_UNITS = ("first", "layer", "last")


class Moving(NamedTuple):
    """Seconds that a unit's parameters take to be gathered, and its gradients to be summed into the shards: of each
    part; numbers, or arrays that times of the parts can be compared with."""

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
        is_frozen: bool,
    ) -> "Moving":
        """Over a link whose gradient sync takes `latency_s` and `byte_s` a byte: a gather and a sum are half of one
        each. `parameter_bytes` are in fp32; parameters move as values of `value_bytes`, gradients in fp32 at least."""

        def seconds(num_values: float, size: int) -> float | np.ndarray:
            return 0.5 * (latency_s + num_values * size * byte_s)

        counts = {part: parameter_bytes[part] / 4 for part in _UNITS}
        nothing = 0.0 * latency_s
        return cls(
            {part: seconds(count, value_bytes) for part, count in counts.items()},
            {part: nothing if is_frozen else seconds(count, max(4, value_bytes)) for part, count in counts.items()},
        )


class PassTerm(NamedTuple):
    """`count` units of a part, beside each of which something moves for `moved_s`."""

    part: str
    count: int
    moved_s: float | np.ndarray


@dataclass(frozen=True, slots=True)
class ShardedPass:
    """The sum of `exposed_s` and of each term's count times the longer of computing and moving."""

    exposed_s: float | np.ndarray
    terms: tuple[PassTerm, ...]

    def seconds(self, part_s: Mapping[str, np.ndarray]) -> np.ndarray:
        """Of replicas whose parts compute so long."""
        total = self.exposed_s
        for part, count, moved_s in self.terms:
            total = total + count * np.maximum(part_s[part], moved_s)
        return np.asarray(total)


def sharded_passes(num_layers: int, moving: Moving, *, is_hidden: bool = True) -> tuple[ShardedPass, ShardedPass]:
    """Forward and backward of a module of one stage; `is_hidden` where devices compute while they communicate.

    The backward begins with the unit that the forward ended with, which is gathered again only if that was long ago;
    the way from the one pass to the other is taken to be short.
    """
    gather_s, reduce_s = moving
    units = ["first", *["layer"] * num_layers, "last"]
    forward = [(unit, gather_s[behind]) for unit, behind in itertools.pairwise(units)]
    backward = [(units[-1], gather_s[units[-2]])]
    for place in range(len(units) - 2, -1, -1):
        moved_s = reduce_s[units[place + 1]]
        backward.append((units[place], moved_s + gather_s[units[place - 1]] if place else moved_s))
    forward.append((units[-1], 0.0 * gather_s["last"]))
    return _pass(gather_s["first"], forward, is_hidden), _pass(reduce_s["first"], backward, is_hidden)


def _pass(exposed_s: float | np.ndarray, units: list[tuple[str, float | np.ndarray]], is_hidden: bool) -> ShardedPass:
    """Of units with what moves beside each of them."""
    nothing = 0.0 * exposed_s
    if not is_hidden:
        exposed_s = sum((moved_s for _, moved_s in units), exposed_s)
        units = [(unit, nothing) for unit, _ in units]
    return ShardedPass(exposed_s, (PassTerm("stage", 1, nothing), *_grouped(units)))


def _grouped(units: list[tuple[str, float | np.ndarray]]) -> list[PassTerm]:
    """Neighbours of one part that the same moves beside, as one term."""
    terms: list[PassTerm] = []
    for part, moved_s in units:
        if terms and terms[-1].part == part and np.array_equal(terms[-1].moved_s, moved_s):
            terms[-1] = terms[-1]._replace(count=terms[-1].count + 1)
        else:
            terms.append(PassTerm(part, 1, moved_s))
    return terms


def working_bytes(
    module: str, parameter_bytes: Mapping[str, float], *, value_bytes: int, is_frozen: bool
) -> dict[str, float]:
    """What passes need beside their activations, while each of `PARTS` is at work: under `stage` what does not lie
    beside the workspace of any other.

    A layer's backward has it and the layer before it gathered, and the gradients of the unit behind it on their way
    into the shards, in fp32 at least. Its own are there as they are computed, all of them when its workspace is gone.
    When a unit's backward is done it is let go, and its gradients are there in both forms. An LLM's embedding and head
    are units of their own where they are two (`Stage.units`); what else stands at a module's ends stays gathered from
    forward to backward.
    """
    layer, first, last = (parameter_bytes[part] / 4 for part in ("layer", "first", "last"))
    are_units = module == "llm" and last >= first
    kept = 0.0 if are_units else first + last
    behind = last if are_units else 0.0
    held_bytes = max(4, value_bytes)
    gathered = value_bytes * (kept + layer + max(layer, behind))
    if is_frozen:
        return {"stage": gathered, "layer": gathered, "first": value_bytes * first, "last": value_bytes * last}
    others_gradients = value_bytes * (0.0 if are_units else last) + held_bytes * max(layer, behind)
    at_layer = value_bytes * (kept + 2 * layer) + others_gradients
    ends = max(first, last) if are_units else kept
    return {
        "stage": max(gathered, at_layer + value_bytes * layer, (value_bytes + held_bytes) * ends),
        "layer": at_layer,
        "first": value_bytes * (kept or first),
        "last": value_bytes * (kept or last),
    }
