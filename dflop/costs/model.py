"""The cost model: seconds and bytes of any stage for any microbatch, from the fitted tables.

A stage is made of parts (`StageKind`). Every part's time and memory never fall when a load of the microbatch grows.
Methods raise `UserError` when there are no costs for a stage's module at its tp.
"""

from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np

from dflop.costs.fitted import FittedCosts
from dflop.costs.forms import forms_at, pack_forms
from dflop.costs.memory import StageMemory, memory_of_parts
from dflop.costs.stage_kind import ALL_PARTS, PARTS, StageKind, as_tabled
from dflop.models.loads import Coefficients, Loads

__all__ = ["NO_WORKING_BYTES", "CostModel"]

# Where replicas share no parameters.
NO_WORKING_BYTES = dict.fromkeys(PARTS, 0.0)


class CostModel(FittedCosts):
    """Seconds and bytes of stages, from the fitted costs of their parts. Results have the shape of the loads."""

    __slots__ = ()

    def stage_time(self, kind: StageKind, loads: Loads) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward seconds of each microbatch; a microbatch without any load takes no time."""
        return self.stage_times([kind], loads)[0]

    def stage_times(self, kinds: Sequence[StageKind], loads: Loads) -> list[tuple[np.ndarray, np.ndarray]]:
        """`stage_time` of several kinds of one module's stages at one tp; parts that they share are computed once."""
        empty = (np.asarray(loads.num_items) == 0) & (np.asarray(loads.num_tokens) == 0)
        (about,) = {(kind.module, kind.tp) for kind in kinds}
        parts = tuple(dict.fromkeys(part for kind in kinds for part, _ in kind.parts))
        passes = []
        for way in (0, 1):  # one pass after the other, so that fewer arrays are held
            of_part = self._part_times(*about, loads, parts, way)
            passes.append([np.where(empty, 0.0, kind.total(of_part)) for kind in kinds])
        return list(zip(*passes, strict=True))

    def part_times(
        self, module: str, tp: int, loads: Loads, parts: Sequence[str] = ALL_PARTS
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Forward and backward seconds of one unit of each of these parts: convex in the loads, and never falling."""
        forward, backward = (self._part_times(module, tp, loads, tuple(parts), way) for way in (0, 1))
        return forward, backward

    def _part_times(
        self, module: str, tp: int, loads: Loads, parts: tuple[str, ...], way: int
    ) -> dict[str, np.ndarray]:
        """Seconds of these parts, forward (0) or backward (1).

        One kernel computes all of them: the search for plans calls this thousands of times with small arrays.
        """
        if (module, tp, "packed") not in self._parts:
            packed = tuple(pack_forms(list(forms.values())) for forms in self.part_forms(module, tp))
            self._parts[module, tp, "packed"] = packed
        places = np.array([ALL_PARTS.index(part) for part in parts])
        at = np.array(loads, dtype=float)
        seconds = forms_at(self._parts[module, tp, "packed"][way], places, at.reshape(len(at), -1))
        return dict(zip(parts, seconds.reshape(len(parts), *at.shape[1:]), strict=True))

    def time_forms(self, kind: StageKind) -> tuple[Coefficients, Coefficients]:
        """Forward and backward seconds as functions of a microbatch's loads, for kernels and linear programs."""
        forward, backward = self.part_forms(kind.module, kind.tp)
        return kind.total(forward), kind.total(backward)

    def additive_loads_s(
        self, kind: StageKind, loads: Loads, *, has_backward: bool = True, least: bool = False
    ) -> np.ndarray:
        """Forward plus backward seconds that each sample adds to a microbatch, without the microbatch's constants.

        With `least`, a lower bound of these seconds that holds for any other samples in the microbatch.
        """
        passes = self.part_forms(kind.module, kind.tp)[: 1 + has_backward]
        # Keep this order of the sum: another order rounds differently, and so breaks ties between samples differently.
        total = np.zeros(np.shape(loads.num_items))
        for part, times in kind.parts:
            for forms in passes:
                total += times * forms[part].without_const(least=least)(loads)
        return total

    def part_forms(self, module: str, tp: int) -> tuple[dict[str, Coefficients], ...]:
        """Forward and backward seconds of each of `ALL_PARTS`, as functions of a microbatch's loads."""
        if (module, tp) not in self._parts:
            self.require(module, tp)
            keys = {part: (module, tp, *as_tabled(part)) for part in ALL_PARTS}
            self._parts[module, tp] = tuple(
                {part: self.times[*key, direction] for part, key in keys.items()}
                for direction in ("forward", "backward")
            )
        return self._parts[module, tp]

    def stage_memory(
        self, kind: StageKind, loads: Loads, working_bytes: Mapping[str, float] = NO_WORKING_BYTES
    ) -> StageMemory:
        """Bytes of each microbatch; each part needs its `working_bytes` on top while it computes."""
        kept, passing = self._memory_of_parts(kind, working_bytes)
        total, each = memory_of_parts(
            kind,
            {part: form(loads) for part, form in kept.items()},
            {part: form(loads) for part, form in passing.items()},
        )
        return StageMemory(total, reduce(np.maximum, each, 0.0))

    def stage_memory_forms(
        self, kind: StageKind, working_bytes: Mapping[str, float] = NO_WORKING_BYTES
    ) -> tuple[Coefficients, list[Coefficients]]:
        """`stage_memory` as functions of a microbatch's loads: one for the activations, and several for the transient,
        which is the largest of their values and 0."""
        return memory_of_parts(kind, *self._memory_of_parts(kind, working_bytes))

    def stage_parameter_bytes(self, kind: StageKind) -> float:
        """Bytes of a stage's parameters on one rank, in fp32."""
        self.require(kind.module, kind.tp)
        sizes = {part: self.parameter_bytes[kind.module, kind.tp, as_tabled(part)[0]] for part, _ in kind.parts}
        return kind.total(sizes)

    def _memory_of_parts(
        self, kind: StageKind, working_bytes: Mapping[str, float]
    ) -> tuple[dict[str, Coefficients], dict[str, Coefficients]]:
        """What each part keeps of a microbatch, and what it needs on top while it computes."""
        self.require(kind.module, kind.tp)
        keys = {part: (kind.module, kind.tp, *as_tabled(part)) for part, _ in kind.parts}
        return (
            {part: self.activations[key] for part, key in keys.items()},
            {part: self.transients[key].raised_by(working_bytes[as_tabled(part)[0]]) for part, key in keys.items()},
        )
