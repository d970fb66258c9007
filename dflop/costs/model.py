"""The cost model: seconds and bytes of any stage for any microbatch, from the fitted tables.

A stage is made of parts (`StageKind`). Every part's time and memory never fall when a load of the microbatch grows.
Methods raise `UserError` when there are no costs for a stage's module in its layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from dflop.costs.fitted import FittedCosts, attention_of
from dflop.costs.forms import PackedForms, forms_at, pack_forms, totals_at
from dflop.costs.stage_kind import ALL_PARTS, PARTS, StageKind, as_tabled, counts_of
from dflop.costs.stage_memory import StageMemory, memories_of_kinds, memory_of_parts
from dflop.models.loads import FEATURES, Coefficients, Loads, coefficients
from dflop.plan.layout_key import LayoutKey
from dflop.plan.trained import WHOLE

__all__ = ["NO_WORKING_BYTES", "CostModel"]

_ITEMS = FEATURES.index("num_items")
# Where replicas share no parameters.
NO_WORKING_BYTES = dict.fromkeys(PARTS, 0.0)


class CostModel(FittedCosts):
    """Seconds and bytes of stages, from the fitted costs of their parts. Results have the shape of the loads."""

    __slots__ = ()

    def stage_time(self, kind: StageKind, loads: Loads) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward seconds of each microbatch; a microbatch without any load takes no time."""
        return self.stage_times([kind], loads)[0]

    def stage_times(self, kinds: Sequence[StageKind], loads: Loads) -> list[tuple[np.ndarray, np.ndarray]]:
        """`stage_time` of several kinds of one module's stages in one layout."""
        at = np.array(loads, dtype=float)
        totals = totals_at(*self._packed_times(*_about(kinds)), counts_of(tuple(kinds)), at.reshape(len(at), -1))
        forward_s, backward_s = totals.reshape(2, len(kinds), *at.shape[1:])
        return list(zip(forward_s, backward_s, strict=True))

    def part_times(
        self, module: str, layout: LayoutKey, loads: Loads, parts: Sequence[str] = ALL_PARTS
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Forward and backward seconds of one unit of each of these parts: convex in the loads, and never falling."""
        forward, backward = (_of_parts(forms, parts, loads) for forms in self._packed_times(module, layout))
        return forward, backward

    def _packed_times(self, module: str, layout: LayoutKey) -> tuple[PackedForms, PackedForms]:
        """`part_forms` for kernels: the search for plans computes times thousands of times with small arrays."""
        if (module, layout, "times") not in self._parts:
            forward, backward = (pack_forms(list(forms.values())) for forms in self.part_forms(module, layout))
            self._parts[module, layout, "times"] = forward, backward
        return self._parts[module, layout, "times"]

    def time_forms(self, kind: StageKind) -> tuple[Coefficients, Coefficients]:
        """Forward and backward seconds as functions of a microbatch's loads, for kernels and linear programs."""
        forward, backward = self.part_forms(kind.module, kind.layout)
        return kind.total(forward), kind.total(backward, kind.parts_with_backward)

    def additive_loads_s(self, kind: StageKind, loads: Loads, *, least: bool = False) -> np.ndarray:
        """Forward plus backward seconds that each sample adds to a microbatch, without the microbatch's constants.

        With `least`, a lower bound of these seconds that holds for any other samples in the microbatch.
        """
        forward, backward = self.part_forms(kind.module, kind.layout)
        goes_back = dict(kind.parts_with_backward)
        # Keep this order of the sum: another order rounds differently, and so breaks ties between samples differently.
        total = np.zeros(np.shape(loads.num_items))
        for part, times in kind.parts:
            total += times * forward[part].without_const(least=least)(loads)
            if back := goes_back.pop(part, 0):
                total += back * backward[part].without_const(least=least)(loads)
        for part, times in goes_back.items():  # layers that pass gradients on
            total += times * backward[part].without_const(least=least)(loads)
        return total

    def part_forms(self, module: str, layout: LayoutKey) -> tuple[dict[str, Coefficients], ...]:
        """Forward and backward seconds of each of `ALL_PARTS`, as functions of a microbatch's loads."""
        if (module, layout) not in self._parts:
            self.require(module, layout)
            keys = {part: (module, layout, *as_tabled(part)) for part in ALL_PARTS}
            forward, backward = (
                {part: self.times[*key, direction] for part, key in keys.items()}
                for direction in ("forward", "backward")
            )
            share, _ = self.passing.get((module, layout), (1.0, 1.0))
            backward["passing_layer"] = share * backward["layer"]
            backward["offloaded_passing_layer"] = backward["passing_layer"]
            again = backward["recomputed_layer"].without(backward["layer"])
            backward["recomputed_passing_layer"] = (backward["passing_layer"] + again).merged()
            if (module, layout) in self.attention_bytes:
                attention = self._attention(module, layout)
                for passing in ("", "passing_"):
                    recomputed = backward[f"recomputed_{passing}layer"]
                    backward[f"attention_kept_{passing}layer"] = recomputed.without(attention)
            self._parts[module, layout] = forward, backward
        return self._parts[module, layout]

    def _attention(self, module: str, layout: LayoutKey) -> Coefficients:
        """Of an LLM layer's forward the seconds of attention, with keys and values of other replicas."""
        per_load = self.times[module, layout, "layer", False, "forward"].per_load
        return attention_of(self.times, module, layout) + coefficients(num_items=per_load[_ITEMS])

    def exchanging(self, token_bytes: float, byte_s: float, num_groups: float) -> "CostModel":
        """These costs with those of keys and values that come from other replicas, for each token of theirs (the LLM's
        `num_items`): `token_bytes` of them a layer, divided among tensor-parallel ranks, at `byte_s` seconds a byte.

        They come in forward, and again where a layer is recomputed; gradients go back. Attention's backward needs them
        as long as the layer's own. Beside them stand copies for a while: those received, gradients that are summed, and
        those that flash-attn 2 makes for each head of queries, `num_groups` for one of keys.
        """
        if ("exchanging", token_bytes, byte_s, num_groups) not in self._parts:
            found = replace(
                self, times=dict(self.times), activations=dict(self.activations), transients=dict(self.transients)
            )
            for module, layout, part, checkpointing, direction in self.times:
                if (module, part) == ("llm", "layer"):
                    own_bytes = token_bytes / layout.tp
                    num_times = 2 if checkpointing and direction == "backward" else 1
                    key = (module, layout, part, checkpointing, direction)
                    found.times[key] += coefficients(num_items=num_times * own_bytes * byte_s)
            for key in self.activations:
                module, layout, part, checkpointing = key
                if (module, part) == ("llm", "layer"):
                    kept = 0.0 if checkpointing else 1.0
                    found.activations[key] += coefficients(num_items=kept * token_bytes / layout.tp)
                    found.transients[key] += coefficients(num_items=(2 + num_groups) * token_bytes / layout.tp)
            self._parts["exchanging", token_bytes, byte_s, num_groups] = found
        return self._parts["exchanging", token_bytes, byte_s, num_groups]

    def stage_memory(
        self, kind: StageKind, loads: Loads, working_bytes: Mapping[str, float] = NO_WORKING_BYTES
    ) -> StageMemory:
        """Bytes of each microbatch; each part needs its `working_bytes` on top while it computes."""
        return self.stage_memories([kind], loads, working_bytes)[0]

    def stage_memories(
        self, kinds: Sequence[StageKind], loads: Loads, working_bytes: Mapping[str, float] = NO_WORKING_BYTES
    ) -> list[StageMemory]:
        """`stage_memory` of several kinds of one module's stages in one layout; shared parts are computed once."""
        at, forms = np.array(loads, dtype=float), self._packed_memory(*_about(kinds), working_bytes)
        of_kinds = memories_of_kinds(kinds, *forms, at.reshape(len(at), -1))
        kept, passing = (own.reshape(len(kinds), *at.shape[1:]) for own in of_kinds)
        return list(map(StageMemory, kept, passing))

    def stage_memory_forms(
        self, kind: StageKind, working_bytes: Mapping[str, float] = NO_WORKING_BYTES
    ) -> tuple[Coefficients, list[Coefficients]]:
        """`stage_memory` as functions of a microbatch's loads: one for the activations, and several for the transient,
        which is the largest of their values and 0."""
        return memory_of_parts(kind, *self._memory_of_parts(kind.module, kind.layout, working_bytes))

    def stage_parameter_bytes(self, kind: StageKind) -> float:
        """Bytes of a stage's parameters on one rank, in fp32."""
        self.require(kind.module, kind.layout)
        sizes = {part: self.parameter_bytes[kind.module, kind.layout, as_tabled(part)[0]] for part, _ in kind.parts}
        return kind.total(sizes)

    def trained_and_frozen_bytes(self, kind: StageKind) -> tuple[float, float]:
        """`stage_parameter_bytes` divided into those that have gradients and those that have none."""
        trained_bytes = sum(self._unit_bytes(kind, part, way) * count for part, way, count in kind.trained_units())
        return trained_bytes, self.stage_parameter_bytes(kind) - trained_bytes

    def trained_bytes(self, kind: StageKind) -> dict[str, float]:
        """Bytes in fp32 of the parameters that have gradients, of one unit of each of `PARTS`. Where layers are trained
        in different ways, it is the layer with the most."""
        self.require(kind.module, kind.layout)
        most = dict.fromkeys(PARTS, 0.0)
        for part, way, _ in kind.trained_units():
            most[part] = max(most[part], self._unit_bytes(kind, part, way))
        return most

    def _unit_bytes(self, kind: StageKind, part: str, way: str) -> float:
        """Bytes in fp32 of the parameters that have gradients, of one unit that is trained in this way."""
        of_part = self.parameter_bytes if way == WHOLE else self.partial_bytes
        return of_part.get((kind.module, kind.layout, part), 0.0)

    def _packed_memory(
        self, module: str, layout: LayoutKey, working_bytes: Mapping[str, float]
    ) -> tuple[PackedForms, PackedForms]:
        """`_memory_of_parts` for kernels."""
        key = (module, layout, "memory", *map(working_bytes.get, PARTS))
        if key not in self._parts:
            kept, passing = self._memory_of_parts(module, layout, working_bytes)
            self._parts[key] = pack_forms(list(kept.values())), pack_forms(list(passing.values()))
        return self._parts[key]

    def _memory_of_parts(
        self, module: str, layout: LayoutKey, working_bytes: Mapping[str, float]
    ) -> tuple[dict[str, Coefficients], dict[str, Coefficients]]:
        """What each of `ALL_PARTS` keeps of a microbatch, and what it needs on top while it computes."""
        self.require(module, layout)
        keys = {part: (module, layout, *as_tabled(part)) for part in ALL_PARTS}
        kept = {part: self.activations[key] for part, key in keys.items()}
        _, share = self.passing.get((module, layout), (1.0, 1.0))
        kept["passing_layer"] = share * kept["layer"]
        for part in ("offloaded_layer", "offloaded_passing_layer"):
            kept[part] = 0.0 * kept["layer"]  # it is in host memory
        on_top = {part: self.transients[key].raised_by(working_bytes[as_tabled(part)[0]]) for part, key in keys.items()}
        if attention_bytes := self.attention_bytes.get((module, layout)):
            own = coefficients(num_tokens=attention_bytes)
            others = coefficients(num_items=kept["layer"].per_load[_ITEMS])  # keys and values of other replicas
            for part in ("attention_kept_layer", "attention_kept_passing_layer"):
                kept[part] = kept[part] + own + others
                on_top[part] = on_top[part] + -1.0 * own  # which a recomputed layer makes again
        return kept, on_top


def _about(kinds: Sequence[StageKind]) -> tuple[str, LayoutKey]:
    """The module and the layout that all of these kinds have."""
    (about,) = {(kind.module, kind.layout) for kind in kinds}
    return about


def _of_parts(forms: PackedForms, parts: Sequence[str], loads: Loads) -> dict[str, np.ndarray]:
    """The values at the loads of the functions of these parts, out of those of `ALL_PARTS`."""
    at = np.array(loads, dtype=float)
    values = forms_at(forms, _places(tuple(parts)), at.reshape(len(at), -1))
    return dict(zip(parts, values.reshape(len(parts), *at.shape[1:]), strict=True))


@lru_cache(maxsize=256)
def _places(parts: tuple[str, ...]) -> np.ndarray:
    return np.array([ALL_PARTS.index(part) for part in parts])
