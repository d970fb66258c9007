"""Levels: in which order the layers of a device are recomputed, the cheapest bytes first.

A level is a number. At level 0 a device recomputes nothing of a module, and each level frees more memory than the one
before. Mostly a level is a number of layers, recomputed as a whole. Where samples are long, recomputing an LLM layer
but for attention frees more bytes for each second (`GroupedBatches.spares_attention`). Then the first levels recompute
one layer after the other but for attention, and the next ones recompute them as a whole: of four layers, level 3 has
three but for attention, level 6 two as a whole and two but for attention. Level 9, behind the last, recomputes three as
a whole and one not at all.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dflop.models import ModelSpec
from dflop.plan import PLACEMENTS, Plan
from dflop.plan.trained import TrainedSet

__all__ = [
    "Counts",
    "Levels",
    "Recomputed",
    "at_levels",
    "of_stages",
    "with_fewer_recomputed",
    "with_more_recomputed",
    "with_recomputed",
    "without_recomputed",
]

# By module, a level on each of its pipeline ranks, [pp].
Counts = Mapping[str, np.ndarray]


class Recomputed(NamedTuple):
    """How many layers each stage of a module recomputes, and how many of these but for attention, as in `Grid`."""

    layers: tuple[int, ...]
    attention_kept: tuple[int, ...]

    @classmethod
    def whole(cls, layers: Sequence[int]) -> "Recomputed":
        return cls(tuple(layers), (0,) * len(layers))


class Levels:
    """The levels of a plan's devices: those that it has (`now`), and the last (`most`)."""

    def __init__(self, plan: Plan, spec: ModelSpec, trained: TrainedSet, *, spares_attention: bool) -> None:
        self._plan, self._spec, self._spares_attention = plan, spec, spares_attention
        self.now, self.most = {}, {}
        for grid in plan.grids:
            num_layers = spec.module(grid.module).num_layers
            ways = trained.ways(grid.module)
            layers = np.array(list(map(len, plan.layers_of(grid.module, num_layers))))
            can_be = layers * (ways.num_still < len(ways.layers))
            count, recomputed, kept = (
                np.reshape(own, (-1, grid.pp)).sum(axis=0)
                for own in (can_be, plan.recomputed_of(grid.module, num_layers), plan.attention_kept_of(grid.module))
            )
            is_spared = spares_attention and grid.module == "llm"
            self.most[grid.module] = count * (1 + is_spared)
            whole = recomputed - kept
            level = np.where(whole > 0, count + whole, kept) if is_spared else recomputed
            self.now[grid.module] = np.minimum(level, self.most[grid.module])

    @property
    def all_but_one(self) -> Counts:
        """The levels at which each device recomputes all of a module's layers but one."""
        but_one = {module: np.maximum(levels - 1, 0) for module, levels in self.most.items()}
        if self._spares_attention:
            but_one["llm"] = self.most["llm"] + (self.most["llm"] > 0)
        return but_one

    def plan_at(self, levels: Counts) -> Plan:
        """The plan at these levels."""
        return with_recomputed(self._plan, levels, self._spec, spares_attention=self._spares_attention)


def with_recomputed(plan: Plan, levels: Counts, spec: ModelSpec, *, spares_attention: bool = False) -> Plan:
    """The plan at these levels of its devices. A device's chunks take turns in recomputing."""
    nothing = without_recomputed(plan)
    if not any(own.any() for own in levels.values()):
        return nothing
    grids, is_everything = [], True
    for grid in nothing.grids:
        layers = tuple(len(part) for part in plan.layers_of(grid.module, spec.module(grid.module).num_layers))
        is_spared = spares_attention and grid.module == "llm"
        on_devices = np.reshape(layers, (-1, grid.pp)).sum(axis=0)
        both = at_levels(levels[grid.module], on_devices, spares_attention=is_spared)
        recomputed = of_stages(*both, layers)
        kept = recomputed.attention_kept if any(recomputed.attention_kept) else ()
        stages = zip(grid.offloaded, layers, recomputed.layers, strict=False)  # `offloaded` may be empty
        offloaded = tuple(min(count, own - again) for count, own, again in stages)
        how = {"recomputed": recomputed.layers, "attention_kept": kept}
        grids.append(replace(grid, offloaded=offloaded if any(offloaded) else (), **how))
        is_everything &= recomputed.layers == layers and not kept
    if is_everything:
        grids = [replace(grid, recomputed=()) for grid in grids]
    return replace(plan, grids=tuple(grids), checkpointing=True)


def with_more_recomputed(
    plan: Plan,
    spec: ModelSpec,
    trained: TrainedSet,
    *,
    spares_attention: bool = False,
    parts: tuple[int, int] = (8, 16),
) -> Plan:
    """The plan with a few layers of each device recomputed in addition to those that are: of encoders on the LLM's
    ranks as long as there are such layers, then of the LLM. The same plan where all are.

    `parts` says how many a few are: of an encoder an eighth of a device's layers, of the LLM a 16th.
    """
    levels = Levels(plan, spec, trained, spares_attention=spares_attention)
    more = {
        module: np.minimum(now - (-levels.most[module] // parts[module == "llm"]), levels.most[module])
        for module, now in levels.now.items()
    }
    has_encoders_left = any((more[module] > now).any() for module, now in levels.now.items() if module != "llm")
    if PLACEMENTS[plan.placement].shares_ranks and has_encoders_left:
        more["llm"] = levels.now["llm"]
    return levels.plan_at(more)


def with_fewer_recomputed(
    plan: Plan, spec: ModelSpec, trained: TrainedSet, *, spares_attention: bool = False
) -> Iterator[Plan]:
    """The plan with ever fewer recomputed layers, one of each device at a time: first the LLM's, then the encoders'."""
    levels = Levels(plan, spec, trained, spares_attention=spares_attention)
    left = dict(levels.now)
    for of_llm in (True, False):
        modules = [module for module in left if (module == "llm") == of_llm]
        while any(left[module].any() for module in modules):
            left |= {module: np.maximum(left[module] - 1, 0) for module in modules}
            yield levels.plan_at(left)


def without_recomputed(plan: Plan) -> Plan:
    """The plan with no layer recomputed."""
    grids = tuple(replace(grid, recomputed=(), attention_kept=()) for grid in plan.grids)
    return replace(plan, grids=grids, checkpointing=False)


def at_levels(levels: np.ndarray, num_layers: np.ndarray, *, spares_attention: bool) -> tuple[np.ndarray, np.ndarray]:
    """How many of their `num_layers` devices recompute at these levels, and how many of these but for attention."""
    if not spares_attention:
        return levels, np.zeros_like(levels)
    return (
        np.where(levels > 2 * num_layers, num_layers - 1, np.minimum(levels, num_layers)),
        np.clip(2 * num_layers - levels, 0, levels),
    )


def of_stages(again: np.ndarray, kept: np.ndarray, layers: Sequence[int]) -> Recomputed:
    """What each stage recomputes where the pipeline ranks recompute `again` [pp] layers, `kept` [pp] of them but for
    attention. `layers` is the number of layers in each stage."""
    pp, recomputed, attention_kept = len(again), [0] * len(layers), [0] * len(layers)
    for device in range(pp):
        recomputed[device::pp] = _in_turns(int(again[device]), layers[device::pp])
        attention_kept[device::pp] = _in_turns(int(kept[device]), recomputed[device::pp])
    return Recomputed(tuple(recomputed), tuple(attention_kept))


def _in_turns(count: int, most: Sequence[int]) -> list[int]:
    """`count` divided into shares by handing it out one by one, none above its entry in `most`."""
    left, shares = min(count, sum(most)), [0] * len(most)
    while left:
        takers = [place for place, end in enumerate(most) if shares[place] < end][:left]
        each = min(left // len(takers), *(most[place] - shares[place] for place in takers))
        for place in takers:
            shares[place] += each
        left -= each * len(takers)
    return shares
