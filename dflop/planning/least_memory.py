"""Bytes that a plan needs at the very least, from some of its replicas: what cannot fit is not priced.

The fullest replica holds at least the mean, and what any one holds. A stage of `1f1b` and its like holds as many
consecutive microbatches as stages follow it, and one; an encoder that shares all ranks holds those of the whole step.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from dflop.costs import NO_WORKING_BYTES, PARTS, CostModel, resident_bytes, stage_kinds, working_bytes
from dflop.costs.forms import PackedForms, PackedTerms, form_at, largest_at, pack_forms, pack_terms
from dflop.models import ModelSpec
from dflop.models.work import coefficients
from dflop.parallelism import PLACEMENTS, SCHEDULES, SHARDINGS
from dflop.planning.grouped_batches import GroupedBatches
from dflop.planning.space import Splits, even_layers, llm_layers
from dflop.pricing import loads_of
from dflop.runtime.kernels import kernel

__all__ = ["LeastMemory"]


class LeastMemory:
    """What rows of the search space need on the first batch."""

    def __init__(
        self,
        spec: ModelSpec,
        costs: CostModel,
        batches: GroupedBatches,
        splits: Splits,
        grouping: str,
        frozen: Collection[str],
        value_bytes: int,
    ) -> None:
        self._spec, self._costs, self._batches, self._splits = spec, costs, batches, splits
        self._group = getattr(batches, grouping)
        self._frozen, self._value_bytes = frozenset(frozen), value_bytes
        self._token_bytes = spec.module("llm").hidden_size * value_bytes
        self._loads = lru_cache(maxsize=2048)(self._replica_loads)
        self._most_items = batches.shapes[0].num_items.max(axis=0).astype(float).tolist()
        self._stages = lru_cache(maxsize=4096)(self._stage_bytes)

    def of_llm(self, row: Mapping[str, Any]) -> np.ndarray:
        """Bytes of tensors of each of the LLM's stages, for the mean replica and a few full ones [num_replicas, pp]."""
        pp, count = row["llm_pp"], row["num_microbatches"]
        layers = llm_layers(row, self._splits, self._spec.module("llm").num_layers)
        gathers = SHARDINGS[row["llm_sharding"]].gathers
        stages = self._stages("llm", row["llm_tp"], layers, row["checkpointing"], gathers)
        replicas, _ = self._loads(row["llm_dp"], count)
        resident, *forms = stages
        schedule = SCHEDULES[row["schedule"]]
        in_flight = np.array([schedule.ahead(stage, pp, count, row["num_chunks"]) + 1 for stage in range(pp)])
        return _held(self._resident("llm", resident, row["llm_dp"], row["llm_shards"]), *forms, replicas, in_flight)

    def least_bytes(self, row: Mapping[str, Any], of_llm: np.ndarray) -> float:
        """Bytes of a device with the encoders; `of_llm` is the LLM's share of them."""
        placement = PLACEMENTS[row["placement"]]
        mean, fullest = of_llm[0].mean(), of_llm.max()
        _, items = self._loads(row["llm_dp"], row["num_microbatches"])
        resident, of_mean, of_any = 0.0, 0.0, 0.0
        for encoder, own, most in zip(self._spec.encoders, items, self._most_items, strict=True):
            layers = even_layers(encoder.num_layers, row[f"{encoder.name}_pp"])
            gathers = SHARDINGS[row[f"{encoder.name}_sharding"]].gathers
            stages = self._stages(encoder.name, row[f"{encoder.name}_tp"], layers, row["checkpointing"], gathers)
            dp, shards = row[f"{encoder.name}_dp"], row[f"{encoder.name}_shards"]
            parameters = self._resident(encoder.name, stages[0], dp, shards)
            share = row["llm_dp"] / row[f"{encoder.name}_dp"]
            each = own * share if encoder.name not in self._frozen else np.zeros_like(own)
            if not placement.shares_ranks:
                fullest = max(fullest, self._apart(row, encoder.name, parameters, *stages[1:], each))
                continue
            resident += parameters[0]
            per_item = stages[1].lines[0, 1]  # constants are not certain, since a replica may have no item
            # Items are dealt to the least loaded: no rank has less than the mean and the largest sample's.
            of_mean += per_item * each.sum()
            of_any += per_item * max(0.0, each.sum() - most)
        if placement.encodes_all_first:
            return self.of_device(resident + max(mean + of_mean, fullest + of_any))
        if placement.uses_all_ranks:
            return self.of_device(resident + fullest)
        if placement.shares_ranks:
            return self.of_device(max(fullest, of_llm[:, 0].max() + resident))
        return self.of_device(fullest)

    def _apart(
        self,
        row: Mapping[str, Any],
        encoder: str,
        resident: np.ndarray,
        kept: PackedForms,
        passing: PackedTerms,
        items: np.ndarray,
    ) -> float:
        """Bytes of the fullest stage of an encoder on ranks of its own, for the mean replica's items
        [num_microbatches]."""
        pp, count, num_stages = row["llm_pp"], row["num_microbatches"], row[f"{encoder}_pp"]
        ahead = min(pp, SCHEDULES[row["schedule"]].ahead(0, pp, count, row["num_chunks"]) + 1)
        return max(
            resident[stage]
            + _fullest(
                kept.lines[stage, 1] * items,
                _without_consts(passing, stage, items),
                # As far as the LLM's first stage runs ahead, and the stages between.
                min(count, ahead + num_stages - stage),
            )
            for stage in range(num_stages)
        )

    def of_device(self, tensors: float) -> float:
        """With what every process holds beside its tensors."""
        return float(self._costs.overhead_bytes + tensors * (1 + self._costs.allocator_share))

    def _replica_loads(self, dp: int, num_microbatches: int) -> tuple[np.ndarray, np.ndarray]:
        """Loads of text of the mean and of a few full replicas [num_replicas, 4, num_microbatches], and the items that
        come with the mean's for each encoder [num_encoders, num_microbatches]."""
        shapes = self._batches.shapes[0]
        rank, microbatch = self._group(0, dp, num_microbatches)
        cell = rank * num_microbatches + microbatch

        def of_replicas(loads: Iterable[np.ndarray]) -> np.ndarray:
            each = [np.bincount(cell, weights=load, minlength=dp * num_microbatches) for load in loads]
            return np.array(each).reshape(-1, dp, num_microbatches)

        text, items = of_replicas(loads_of("llm", shapes)), of_replicas(shapes.num_items.T)
        tokens = text[1]
        full = {
            int(tokens.sum(axis=1).argmax()),
            int(tokens.max(axis=1).argmax()),
            int(text[3].max(axis=1).argmax()),
        }
        return np.stack([text.mean(axis=1), *(text[:, replica] for replica in sorted(full))]), items.mean(axis=1)

    def _stage_bytes(
        self, module: str, tp: int, layers: tuple[int, ...], checkpointing: bool, gathers: bool
    ) -> tuple[np.ndarray, PackedForms, PackedTerms]:
        """Of each stage its parameters' bytes [num_stages], and functions (`CostModel.stage_memory_forms`) of what a
        microbatch keeps and of what comes on top."""
        working, last = NO_WORKING_BYTES, len(layers) - 1
        if gathers:
            sizes = {part: self._costs.parameter_bytes[module, tp, part] for part in PARTS}
            how = {"value_bytes": self._value_bytes, "is_frozen": module in self._frozen}
            working = working_bytes(module, sizes, **how)
        parameters, kept, passing = [], [], []
        asked = {}  # stages of as many layers between the ends are alike
        for stage, kind in enumerate(stage_kinds(module, tp, layers, checkpointing=checkpointing)):
            if kind not in asked:
                own, on_top = self._costs.stage_memory_forms(kind, working)
                asked[kind] = self._costs.stage_parameter_bytes(kind), own, [(form, 0.0) for form in on_top]
            size, own, on_top = asked[kind]
            if last:
                # What came in, which layers that are recomputed keep anyway, and what went out.
                num_held = (stage == 0 or not checkpointing) + (stage < last)
                own = own + coefficients(num_tokens=num_held * self._token_bytes)
            parameters.append(size)
            kept.append(own)
            passing.append(on_top)
        return np.array(parameters), pack_forms(kept), pack_terms(passing)

    def _resident(self, module: str, parameter_bytes: np.ndarray, dp: int, shards: int) -> np.ndarray:
        how = {"value_bytes": self._value_bytes, "is_frozen": module in self._frozen}
        return resident_bytes(parameter_bytes, dp, num_shards=shards, **how)


def _without_consts(passing: PackedTerms, stage: int, items: np.ndarray) -> np.ndarray:
    """What microbatches with so many items need on top, [num_microbatches], without constants."""
    own = slice(passing.first[stage], passing.first[stage + 1])
    at, slope = (passing.forms.hinges[own, :, place, None] for place in (1, 2))  # [num_forms, num_hinges, 1]
    beyond = (slope * np.maximum(items - at, 0.0)).sum(axis=1)
    return (passing.forms.lines[own, 1:2] * items + beyond).max(axis=0)


@kernel
def _held(resident, kept_forms, passing_forms, replicas, in_flight):
    """Bytes of each LLM rank of a pipeline, for replicas' loads [num_replicas, 4, num_microbatches].

    `in_flight` [pp] is how many microbatches each rank holds at least, where the batch has as many.
    """
    held = np.zeros((len(replicas), len(in_flight)))
    for replica in range(len(replicas)):
        loads = replicas[replica].copy()
        if replica == 0:
            # Of the mean it is certain what tokens take: that of targets grows more slowly beyond a chunk of them.
            loads[3] = 0.0
        held[replica] = _held_by_one(resident, kept_forms, passing_forms, loads, in_flight)
    return held


@kernel
def _held_by_one(resident, kept_forms, passing_forms, loads, in_flight):
    pp, num_stages, num_microbatches = len(in_flight), len(resident), loads.shape[1]
    held, most = np.zeros(pp), np.zeros(pp)
    kept, passing = np.zeros(num_microbatches), np.zeros(num_microbatches)
    for stage in range(num_stages):
        rank = stage % pp
        held[rank] += resident[stage]
        for microbatch in range(num_microbatches):
            kept[microbatch] = form_at(kept_forms, stage, loads[:, microbatch])
            passing[microbatch] = largest_at(passing_forms, stage, loads[:, microbatch])
        if num_stages == pp:
            most[rank] = _fullest(kept, passing, min(num_microbatches, in_flight[rank]))
        elif stage < num_stages - pp:  # of the last chunk nothing is certain
            held[rank] += kept[:pp].sum()
    return held + most


@kernel
def _fullest(kept, passing, num_in_flight):
    """The most that so many consecutive microbatches keep while the last of them is computed."""
    now, most = 0.0, 0.0
    for microbatch in range(len(kept)):
        now += kept[microbatch]
        if microbatch >= num_in_flight:
            now -= kept[microbatch - num_in_flight]
        most = max(most, now + passing[microbatch])
    return most
