"""The kind of a pipeline stage: to the cost model, stages of equal kind cost the same.

A stage is made of parts: the part `stage` that every stage has (rotary positions, its output); its layers, each a part
`layer`; where it begins the module, `first` (embedding; patches and positions); and where it ends the module, `last`
(norm, head and loss; projector and token layout). Recomputed layers are parts of another kind (`recomputed_layer`, or
`attention_kept_layer` where they are recomputed but for attention), and so are those whose saved tensors wait in host
memory (`offloaded_layer`); a stage that recomputes any has the part `recomputing_stage` in place of `stage`. In
backward, frozen layers among trained ones are such parts with `passing_` in their names. The costs of a stage (seconds,
bytes, forms of the loads) are the sums of those of its parts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import add
from typing import TypeVar

import numpy as np

from dflop.plan.layout_key import LayoutKey
from dflop.plan.trained import EVERYTHING, FROZEN, PARTS, SOME, WHOLE, StageWays, TrainedSet

__all__ = ["ALL_PARTS", "KEPT_PARTS", "PARTS", "StageKind", "as_tabled", "counts_of", "stage_kinds"]

T = TypeVar("T")

_ALL_WHOLE = StageWays()

# `PARTS` are the names in the cost tables. For recomputing parts, the tables have a column instead; of the layer that
# passes gradients on they have the shares of a trained layer's costs, and of one that keeps attention's results what
# these take.
_OTHERS = {
    "recomputing_stage": ("stage", True),
    "recomputed_layer": ("layer", True),
    "attention_kept_layer": ("layer", True),
    "offloaded_layer": ("layer", False),
    "passing_layer": ("layer", False),
    "recomputed_passing_layer": ("layer", True),
    "attention_kept_passing_layer": ("layer", True),
    "offloaded_passing_layer": ("layer", False),
}
ALL_PARTS = (*PARTS, *_OTHERS)
# The parts of stages that recompute nothing.
KEPT_PARTS = (*PARTS, "passing_layer")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageKind:
    """`num_layers` layers of a module, each divided as `layout` says, with embedding (`is_first`), head (`is_last`).

    Of the layers with a backward, the first `num_offloaded` keep their activations in host memory. The next
    `num_recomputed` keep only their inputs, and recompute their activations in backward; the last `num_attention_kept`
    of these keep what attention reads and makes as well. `ways` says which parts have a backward, and which have
    gradients of weights.
    """

    module: str
    layout: LayoutKey
    num_layers: int
    is_first: bool
    is_last: bool
    num_recomputed: int = 0
    num_attention_kept: int = 0
    num_offloaded: int = 0
    ways: StageWays = _ALL_WHOLE

    @classmethod
    def whole(
        cls,
        module: str,
        layout: LayoutKey,
        num_layers: int,
        *,
        num_recomputed: int = 0,
        num_attention_kept: int = 0,
        trained: TrainedSet = EVERYTHING,
    ) -> "StageKind":
        """A module that is one stage."""
        return stage_kinds(module, layout, [num_layers], [num_recomputed], trained, [num_attention_kept])[0]

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Each of `ALL_PARTS` that the stage has, and how often."""
        counts = self.num_layers, self.num_recomputed, self.num_attention_kept, self.num_offloaded
        return _parts(*counts, self.is_first, self.is_last)

    @property
    def parts_with_backward(self) -> tuple[tuple[str, int], ...]:
        """Those of `parts` in which gradients are computed."""
        ways = self.ways
        if not (ways.num_still or ways.still or ways.passing):
            return self.parts
        counts = {part: count for part, count in self.parts if as_tabled(part)[0] not in ("layer", *ways.still)}
        counts |= Counter(self.layers_with_backward)
        return tuple((part, counts[part]) for part in ALL_PARTS if part in counts)

    @property
    def layers_with_backward(self) -> list[str]:
        """The layers that have a backward, in the order of a forward, as names of their parts in backward."""
        names = []
        of_each = ("offloaded_",) * self.num_offloaded
        of_each += ("recomputed_",) * (self.num_recomputed - self.num_attention_kept)
        of_each += ("attention_kept_",) * self.num_attention_kept
        for place in range(self.num_layers - self.ways.num_still):
            how = of_each[place] if place < len(of_each) else ""
            passes = "passing_" * (place in self.ways.passing)
            names.append(f"{how}{passes}layer")
        return names

    @property
    def num_whole(self) -> int:
        """How many layers have gradients of all their weights."""
        return self.num_layers - self.ways.num_frozen - self.ways.num_in_part

    def trained_units(self) -> list[tuple[str, str, int]]:
        """The parts with weights, in which way they are trained, and how often: no entry for frozen ones."""
        units = [("first", self.ways.first, int(self.is_first)), ("last", self.ways.last, int(self.is_last))]
        units += [("layer", WHOLE, self.num_whole), ("layer", SOME, self.ways.num_in_part)]
        return [unit for unit in units if unit[1] != FROZEN and unit[2]]

    def total(self, of_part: Mapping[str, T], parts: Sequence[tuple[str, int]] | None = None) -> T:
        """The sum of a quantity over the stage's parts or some of them, given for one unit of each part.

        The quantity is anything that can be added and multiplied by a count: arrays of seconds or bytes at some loads,
        functions of the loads (`Coefficients`), or numbers. Kernels that sum over a stage's parts (`totals_at`,
        `memories_of_kinds`) have the same results.
        """
        parts = self.parts if parts is None else parts
        each = [of_part[part] if count == 1 else count * of_part[part] for part, count in parts]
        return reduce(add, each) if each else 0.0 * of_part[self.parts[0][0]]


@lru_cache(maxsize=4096)
def counts_of(kinds: tuple[StageKind, ...]) -> np.ndarray:
    """How often each kind has each of `ALL_PARTS` in forward and in backward, [2, num_kinds, num_parts]."""
    both = [[dict(kind.parts) for kind in kinds], [dict(kind.parts_with_backward) for kind in kinds]]
    return np.array([[[counts.get(part, 0) for part in ALL_PARTS] for counts in of_pass] for of_pass in both])


@lru_cache(maxsize=1024)
def _parts(
    num_layers: int, num_recomputed: int, num_attention_kept: int, num_offloaded: int, is_first: bool, is_last: bool
) -> tuple[tuple[str, int], ...]:
    recomputes = int(num_recomputed > 0)
    counts = 1 - recomputes, num_layers - num_recomputed - num_offloaded, int(is_first), int(is_last)
    counts += recomputes, num_recomputed - num_attention_kept, num_attention_kept, num_offloaded
    return tuple((part, count) for part, count in zip(ALL_PARTS, counts, strict=False) if count)


def as_tabled(part: str) -> tuple[str, bool]:
    """The name in the cost tables of one of `ALL_PARTS`, and whether it is a recomputing part. A layer that passes
    gradients on is a layer there."""
    return _OTHERS.get(part, (part, False))


def stage_kinds(
    module: str,
    layout: LayoutKey,
    layers: Sequence[int],
    recomputed: Sequence[int] = (),
    trained: TrainedSet = EVERYTHING,
    attention_kept: Sequence[int] = (),
    offloaded: Sequence[int] = (),
) -> list[StageKind]:
    """The kinds of a module's stages, in order, from the number of layers in each stage.

    `recomputed` gives as many numbers: how many of its layers each stage recomputes, none by default; `attention_kept`
    how many of these it recomputes but for attention, and `offloaded` how many it keeps in host memory. Layers without
    a backward do not count.
    """
    recomputed = recomputed or (0,) * len(layers)
    attention_kept, offloaded = attention_kept or (0,) * len(layers), offloaded or (0,) * len(layers)
    ways, kinds, start = trained.ways(module, sum(layers)), [], 0
    for stage, (count, num_recomputed, num_kept, num_offloaded) in enumerate(
        zip(layers, recomputed, attention_kept, offloaded, strict=True)
    ):
        within = ways.within(range(start, start + count))
        start += count
        away = min(num_offloaded, count - within.num_still)
        again = min(num_recomputed, count - within.num_still - away)
        kinds.append(
            StageKind(
                module=module,
                layout=layout,
                num_layers=count,
                is_first=stage == 0,
                is_last=stage == len(layers) - 1,
                num_recomputed=again,
                num_attention_kept=min(num_kept, again),
                num_offloaded=away,
                ways=within,
            )
        )
    return kinds
