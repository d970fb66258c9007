"""The cost model: seconds and bytes of any stage for any microbatch, from the fitted tables.

A stage is made of parts (`StageKind`). Every part's time and memory never fall when a load of the microbatch grows.
Methods raise `UserError` when there are no costs of a stage's module at its tp.
"""

from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np

from dflop.costs.fitted import FittedCosts
from dflop.costs.memory import StageMemory, memory_of_parts
from dflop.costs.stage_kind import PARTS, StageKind
from dflop.models.loads import Coefficients, Loads

__all__ = ["NO_WORKING_BYTES", "CostModel"]

# Parts whose costs are others when their layers are recomputed in the backward pass.
_CHECKPOINTED = ("stage", "layer")
# Where replicas share no parameters.
NO_WORKING_BYTES = dict.fromkeys(PARTS, 0.0)


class CostModel(FittedCosts):
    """What stages cost, by what was fitted of their parts. Loads and what is computed of them have one shape."""

    __slots__ = ()

    def stage_time(self, kind: StageKind, loads: Loads) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward seconds of each microbatch; a microbatch without any load takes no time."""
        return self.stage_times([kind], loads)[0]

    def stage_times(self, kinds: Sequence[StageKind], loads: Loads) -> list[tuple[np.ndarray, np.ndarray]]:
        """`stage_time` of several kinds of stages, which share their parts."""
        empty = (np.asarray(loads.num_items) == 0) & (np.asarray(loads.num_tokens) == 0)
        passes = []
        for way in (0, 1):  # one pass after the other, so that fewer arrays are held
            at: dict[tuple[str, int, bool], dict[str, np.ndarray]] = {}
            seconds = []
            for kind in kinds:
                key = kind.module, kind.tp, kind.checkpointing
                if key not in at:
                    at[key] = {
                        part: form(loads)
                        for part, form in self.part_forms(key[0], key[1], checkpointing=key[2])[way].items()
                    }
                seconds.append(np.where(empty, 0.0, kind.total(at[key])))
            passes.append(seconds)
        return list(zip(*passes, strict=True))

    def part_times(
        self, module: str, tp: int, loads: Loads, *, checkpointing: bool = False
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Forward and backward seconds of each of `PARTS`, once: convex in the loads, and never falling."""
        forward, backward = self.part_forms(module, tp, checkpointing=checkpointing)
        return (
            {part: form(loads) for part, form in forward.items()},
            {part: form(loads) for part, form in backward.items()},
        )

    def time_forms(self, kind: StageKind) -> tuple[Coefficients, Coefficients]:
        """Forward and backward seconds as functions of a microbatch's loads, for kernels and linear programs."""
        forward, backward = self.part_forms(kind.module, kind.tp, checkpointing=kind.checkpointing)
        return kind.total(forward), kind.total(backward)

    def additive_loads_s(
        self, kind: StageKind, loads: Loads, *, has_backward: bool = True, least: bool = False
    ) -> np.ndarray:
        """Forward plus backward seconds that samples add to a microbatch, without its constants.

        `least` gives what they add at the very least, whatever the microbatch.
        """
        passes = self.part_forms(kind.module, kind.tp, checkpointing=kind.checkpointing)[: 1 + has_backward]
        # Summed in this order: another one rounds differently, and so breaks ties between samples another way.
        total = np.zeros(np.shape(loads.num_items))
        for part, times in kind.parts:
            for forms in passes:
                total += times * forms[part].without_const(least=least)(loads)
        return total

    def part_forms(self, module: str, tp: int, *, checkpointing: bool = False) -> tuple[dict[str, Coefficients], ...]:
        """Forward and backward seconds of each of `PARTS`."""
        self.require(module, tp)
        keys = {part: _key(module, tp, part, checkpointing) for part in PARTS}
        return tuple(
            {part: self.times[*key, direction] for part, key in keys.items()} for direction in ("forward", "backward")
        )

    def stage_memory(
        self, kind: StageKind, loads: Loads, working_bytes: Mapping[str, float] = NO_WORKING_BYTES
    ) -> StageMemory:
        """Bytes of each microbatch; `working_bytes` are needed on top while a part is at work."""
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
        """`stage_memory` as functions of a microbatch's loads: the transient is the largest of several, and of 0."""
        return memory_of_parts(kind, *self._memory_of_parts(kind, working_bytes))

    def stage_parameter_bytes(self, kind: StageKind) -> float:
        """Bytes of a stage's parameters on one rank, in fp32."""
        self.require(kind.module, kind.tp)
        return kind.total({part: self.parameter_bytes[kind.module, kind.tp, part] for part, _ in kind.parts})

    def _memory_of_parts(
        self, kind: StageKind, working_bytes: Mapping[str, float]
    ) -> tuple[dict[str, Coefficients], dict[str, Coefficients]]:
        """What each part keeps of a microbatch, and what it needs on top while it computes."""
        self.require(kind.module, kind.tp)
        keys = {part: _key(kind.module, kind.tp, part, kind.checkpointing) for part, _ in kind.parts}
        return (
            {part: self.activations[key] for part, key in keys.items()},
            {part: self.transients[key].raised_by(working_bytes[part]) for part, key in keys.items()},
        )


def _key(module: str, tp: int, part: str, checkpointing: bool) -> tuple[str, int, str, bool]:
    """Where the tables hold a part."""
    return module, tp, part, checkpointing and part in _CHECKPOINTED
