"""Lower bounds of a plan's memory, from some of its replicas: plans that cannot fit are not priced.

The fullest replica holds at least as much as the mean, and as any other. A stage under 1F1B or a similar schedule holds
one consecutive microbatch more than there are stages after it. An encoder that shares all ranks holds those of the
whole step.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from dflop.balance import Policy
from dflop.base.kernels import kernel
from dflop.costs import NO_WORKING_BYTES, PARTS, CostModel, StageKind, resident_parts, stage_kinds, working_bytes
from dflop.costs.forms import PackedForms, PackedTerms, form_at, largest_at, pack_forms, pack_terms
from dflop.models import ModelSpec
from dflop.models.loads import Coefficients, coefficients
from dflop.plan import PLACEMENTS, SCHEDULES, SHARDINGS
from dflop.plan.layout_key import LayoutKey
from dflop.plan.trained import TrainedSet
from dflop.schedule import sums_by_cell
from dflop.search.grouped_batches import GroupedBatches
from dflop.search.levels import Recomputed, at_levels, of_stages
from dflop.search.space import Splits, even_layers, llm_layers

__all__ = ["LeastMemory"]


class _OfEncoders(NamedTuple):
    """The least bytes of the encoders' tensors: on the mean of the LLM's devices, on each of them, on those of its
    first stage, and on a device of the encoders' own."""

    on_mean: float = 0.0
    on_all: float = 0.0
    on_first: float = 0.0
    apart: float = 0.0


class LeastMemory:
    """The least bytes that rows of the search space need."""

    def __init__(
        self,
        spec: ModelSpec,
        costs: CostModel,
        batches: GroupedBatches,
        splits: Splits,
        policy: Policy,
        trained: TrainedSet,
        value_bytes: int,
    ) -> None:
        self._spec, self.costs, self._batches, self._splits = spec, costs, batches, splits
        self._group, self._cells = partial(batches.group, policy), partial(batches.cells, policy)
        self._trained, self._value_bytes = trained.among(spec.modules), value_bytes
        self._token_bytes = spec.module("llm").hidden_size * value_bytes
        self._loads = lru_cache(maxsize=2048)(self._replica_loads)
        self._most_items = batches.shapes[0].num_items.max(axis=0).astype(float).tolist()
        self._stages = lru_cache(maxsize=4096)(self._stage_bytes)
        self._kinds = lru_cache(maxsize=4096)(self._kind_bytes)

    def of_llm(self, row: Mapping[str, Any], recomputed: Recomputed) -> np.ndarray:
        """Bytes of the LLM's tensors on each of its pipeline ranks, [num_replicas, pp].

        They are those of the mean replica, then of a few full ones.
        """
        pp, count = row["llm_pp"], row["num_microbatches"]
        layers = llm_layers(row, self._splits, self._spec.module("llm").num_layers)
        gathers = SHARDINGS[row["llm_sharding"]].gathers
        stages = self._stages("llm", LayoutKey.of_row(row, "llm_"), layers, recomputed, gathers)
        replicas, _ = self._loads(row["llm_dp"], count)
        resident, *forms = stages
        in_flight = _in_flight(row["schedule"], pp, count, row["num_chunks"])
        return _held(self._resident(row, "llm", resident), *forms, replicas, in_flight)

    def least_recomputed(
        self,
        row: Mapping[str, Any],
        limit_bytes: float,
        ends: Sequence[np.ndarray],
        *,
        beside_encoders: bool = False,
    ) -> Recomputed:
        """What of each LLM stage has to be recomputed at least so that a device can hold it.

        With `beside_encoders`, the device also holds encoders that share it, with all their layers recomputed. `ends`
        are the LLM's bytes (`of_llm`) with no layer recomputed and with all of them.
        """
        pp, layers = row["llm_pp"], llm_layers(row, self._splits, self._spec.module("llm").num_layers)
        beside = self._of_encoders(row, recomputes=True) if beside_encoders else _OfEncoders()

        def on_devices(of_llm: np.ndarray) -> np.ndarray:
            tensors = of_llm.max(axis=0) + beside.on_all
            if pp == 1:
                tensors = np.maximum(tensors, of_llm[0] + beside.on_mean)
            return self.costs.held_bytes(tensors)

        layout = LayoutKey.of_row(row, "llm_")
        spares = self._batches.spares_attention(self.costs, layout)
        num_layers = np.array(layers).reshape(-1, pp).sum(axis=0)
        fewest, enough = np.zeros_like(num_layers), num_layers * (1 + spares)
        plain, again = (on_devices(of_llm) for of_llm in ends)
        # Bytes fall about evenly with each level, but less where layers are recomputed as a whole after all of them are
        # but for attention: so the first guess between two known levels is mostly right, or else the second.
        lower, upper, num_guesses = fewest, enough, -int(spares)
        while (fewest < enough).any():
            guess = lower + np.ceil((upper - lower) * (plain - limit_bytes) / np.maximum(plain - again, 1.0))
            guess = {-1: num_layers, 0: guess, 1: guess - 1}.get(num_guesses, (fewest + enough) // 2)
            levels = np.clip(guess, fewest, np.maximum(enough - 1, fewest)).astype(int)
            both = at_levels(levels, num_layers, spares_attention=spares)
            needed = on_devices(self.of_llm(row, of_stages(*both, layers)))
            fits = needed <= limit_bytes
            enough = np.where(fits, levels, enough)
            fewest = np.minimum(np.where(fits, fewest, levels + 1), enough)
            if num_guesses < 0:
                lower, plain = np.where(fits, lower, levels), np.where(fits, plain, needed)
                upper, again = np.where(fits, levels, upper), np.where(fits, needed, again)
            num_guesses += 1
        if spares:  # what also the last level has, at which one layer is not recomputed
            enough = np.where(enough < num_layers, enough, enough + 1)
            return of_stages(np.minimum(enough, num_layers - 1), np.clip(2 * num_layers - enough, 0, enough), layers)
        return of_stages(enough, 0 * enough, layers)

    def least_of_encoders(self, row: Mapping[str, Any], of_llm: np.ndarray, limit_bytes: float) -> float:
        """The least share of the encoders' layers that has to be recomputed so that a device can hold them and the LLM.

        No layer of the LLM is recomputed. The encoders' bytes fall linearly with that share.
        """
        limit = self.costs.most_tensor_bytes(limit_bytes)
        plain, again = (self._of_encoders(row, recomputes=recomputes) for recomputes in (False, True))
        shares = [0.0]
        for llm, before, after in (
            (of_llm[0].mean(), plain.on_mean, again.on_mean),
            (of_llm.max(), plain.on_all, again.on_all),
        ):
            if llm + before > limit and before > after:
                shares.append((llm + before - limit) / (before - after))
        return min(1.0, max(shares))

    def least_bytes(self, row: Mapping[str, Any], of_llm: np.ndarray, *, recomputes: bool) -> float:
        """The least bytes of a device with the LLM and the encoders.

        With `recomputes`, all layers of the encoders are recomputed, else none; `of_llm` are the LLM's bytes for that.
        """
        beside, mean, fullest = self._of_encoders(row, recomputes=recomputes), of_llm[0].mean(), of_llm.max()
        tensors = max(
            mean + beside.on_mean, fullest + beside.on_all, of_llm[:, 0].max() + beside.on_first, beside.apart
        )
        return self.costs.held_bytes(float(tensors))

    def _of_encoders(self, row: Mapping[str, Any], *, recomputes: bool) -> "_OfEncoders":
        placement = PLACEMENTS[row["placement"]]
        _, items = self._loads(row["llm_dp"], row["num_microbatches"])
        resident, of_mean, of_any, apart = 0.0, 0.0, 0.0, 0.0
        for encoder, num_items, most in zip(self._spec.encoders, items, self._most_items, strict=True):
            layers = even_layers(encoder.num_layers, row[f"{encoder.name}_pp"])
            gathers = SHARDINGS[row[f"{encoder.name}_sharding"]].gathers
            recomputed = Recomputed.whole(layers if recomputes else (0,) * len(layers))
            stages = self._stages(encoder.name, LayoutKey.of_row(row, f"{encoder.name}_"), layers, recomputed, gathers)
            parameters = self._resident(row, encoder.name, stages[0])
            share = row["llm_dp"] / row[f"{encoder.name}_dp"]
            each = num_items * share if self._trained.trains(encoder.name) else np.zeros_like(num_items)
            if not placement.shares_ranks:
                apart = max(apart, self._apart(row, encoder.name, parameters, *stages[1:], each))
                continue
            resident += parameters[0]
            per_item = stages[1].lines[0, 1]  # without constants, since a replica may have no item
            # Items are dealt to the least loaded replica: none has less than the mean minus the largest sample's.
            of_mean += per_item * each.sum()
            of_any += per_item * max(0.0, each.sum() - most)
        if placement.encodes_all_first:
            return _OfEncoders(on_mean=resident + of_mean, on_all=resident + of_any)
        if placement.uses_all_ranks:
            return _OfEncoders(on_all=resident)
        return _OfEncoders(on_first=resident if placement.shares_ranks else 0.0, apart=apart)

    def _apart(
        self,
        row: Mapping[str, Any],
        encoder: str,
        resident: np.ndarray,
        kept: PackedForms,
        passing: PackedTerms,
        items: np.ndarray,
    ) -> float:
        """The least bytes of tensors on the fullest stage of an encoder on ranks of its own.

        `items` are those of the mean replica, [num_microbatches].
        """
        pp, count, num_stages = row["llm_pp"], row["num_microbatches"], row[f"{encoder}_pp"]
        ahead = min(pp, SCHEDULES[row["schedule"]].ahead(0, pp, count, row["num_chunks"]) + 1)
        return max(
            resident[stage]
            + _fullest(
                kept.lines[stage, 1] * items,
                _without_consts(passing, stage, items),
                # As many as the LLM's first stage runs ahead, and one more for each stage between.
                min(count, ahead + num_stages - stage),
            )
            for stage in range(num_stages)
        )

    def _replica_loads(self, dp: int, num_microbatches: int) -> tuple[np.ndarray, np.ndarray]:
        """The LLM's loads on the mean replica of the first batch and on a few full ones of all batches,
        [num_replicas, 4, num_microbatches]; and each encoder's items that belong to the mean replica, [num_encoders,
        num_microbatches]."""
        grouped = dp, num_microbatches
        each = [self._cells(batch, *grouped, "llm").loads for batch in range(len(self._batches))]
        text = np.array([np.stack(loads) for loads in each]).swapaxes(0, 1)  # [4, num_batches, dp, num_microbatches]
        of_replicas = text.reshape(4, -1, num_microbatches)
        tokens, targets = of_replicas[1], of_replicas[3]
        full = {int(most.argmax()) for most in (tokens.sum(axis=1), tokens.max(axis=1), targets.max(axis=1))}
        _, microbatch = self._group(0, *grouped)
        items = np.ascontiguousarray(self._batches.shapes[0].num_items.T, dtype=float)
        means = sums_by_cell(microbatch, items, num_microbatches) / dp
        replicas = [text[:, 0].mean(axis=1), *(of_replicas[:, replica] for replica in sorted(full))]
        return np.ascontiguousarray(replicas), means

    def _stage_bytes(
        self, module: str, layout: LayoutKey, layers: tuple[int, ...], recomputed: Recomputed, gathers: bool
    ) -> tuple[np.ndarray, PackedForms, PackedTerms]:
        """The bytes of each stage's trained and frozen parameters, [2, num_stages], and functions
        (`CostModel.stage_memory_forms`) for the bytes that a microbatch keeps on each stage, and for those that come on
        top.

        Where layers are recomputed, only the bytes on top at the other parts of the stage count.
        """
        kinds = stage_kinds(module, layout, layers, recomputed.layers, self._trained, recomputed.attention_kept)
        parameters, kept, passing = zip(*(self._kinds(kind, gathers) for kind in kinds), strict=True)
        return np.array(parameters).T, pack_forms(kept), pack_terms(passing)

    def _kind_bytes(
        self, kind: StageKind, gathers: bool
    ) -> tuple[tuple[float, float], Coefficients, list[tuple[Coefficients, float]]]:
        """The bytes of `_stage_bytes` for a stage of this kind."""
        working = NO_WORKING_BYTES
        if gathers:
            sizes = {part: self.costs.parameter_bytes[kind.module, kind.layout, part] for part in PARTS}
            how = {"value_bytes": self._value_bytes, "trained_bytes": self.costs.trained_bytes(kind)}
            working = working_bytes(kind.module, sizes, **how)
        kept, on_top = self.costs.stage_memory_forms(kind, working)
        if kind.num_recomputed:
            on_top = [form for (part, _), form in zip(kind.parts, on_top, strict=True) if "layer" not in part]
        if not kind.parts_with_backward:
            kept = coefficients()  # what it keeps is gone once it is sent, before the next microbatch if need be
        elif not (kind.is_first and kind.is_last):
            # The input, unless a recomputed layer keeps it anyway, and the output.
            num_held = (kind.is_first or not kind.num_recomputed) + (not kind.is_last)
            kept = kept + coefficients(num_tokens=num_held * self._token_bytes)
        return self.costs.trained_and_frozen_bytes(kind), kept, [(form, 0.0) for form in on_top]

    def _resident(self, row: Mapping[str, Any], module: str, parameter_bytes: np.ndarray) -> np.ndarray:
        """Bytes that ranks always hold of each of a module's stages, [num_stages], for `parameter_bytes` of
        `_stage_bytes`."""
        how = {"num_shards": row[f"{module}_shards"], "offloads_optimizer": row["offloads_optimizer"]}
        return sum(resident_parts(*parameter_bytes, row[f"{module}_dp"], value_bytes=self._value_bytes, **how))


@lru_cache(maxsize=1024)
def _in_flight(schedule: str, pp: int, num_microbatches: int, num_chunks: int) -> np.ndarray:
    """The least number of microbatches that each pipeline rank holds if the batch has as many, [pp]."""
    ahead = SCHEDULES[schedule].ahead
    return np.array([ahead(stage, pp, num_microbatches, num_chunks) + 1 for stage in range(pp)])


def _without_consts(passing: PackedTerms, stage: int, items: np.ndarray) -> np.ndarray:
    """Bytes on top of what is kept, [num_microbatches], for microbatches with `items`, without constants.

    A constant may be negative, for parts that find others' activations freed. What is kept must then be taken without
    its constants, too: they are no smaller.
    """
    of_stage = slice(passing.first[stage], passing.first[stage + 1])
    at, slope = (passing.forms.hinges[of_stage, :, place, None] for place in (1, 2))  # [num_forms, num_hinges, 1]
    beyond = (slope * np.maximum(items - at, 0.0)).sum(axis=1)
    return (passing.forms.lines[of_stage, 1:2] * items + beyond).max(axis=0)


@kernel
def _held(resident, kept_forms, passing_forms, replicas, in_flight):
    """The least bytes of tensors on each LLM rank of a pipeline, [num_replicas, pp], for loads `replicas`
    [num_replicas, 4, num_microbatches].

    `in_flight` [pp] is the least number of microbatches that each rank holds if the batch has as many.
    """
    held = np.zeros((len(replicas), len(in_flight)))
    for replica in range(len(replicas)):
        loads = replicas[replica].copy()
        if replica == 0:
            # Targets do not count for the mean replica: their bytes grow more slowly beyond a chunk of logits, so the
            # bytes at the mean may exceed the mean of the bytes.
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
        elif stage < num_stages - pp:  # nothing is certain about the last chunk
            held[rank] += kept[:pp].sum()
    return held + most


@kernel
def _fullest(kept, passing, num_in_flight):
    """The peak bytes over time of `num_in_flight` consecutive microbatches, while the last of them is computed."""
    now, most = 0.0, 0.0
    for microbatch in range(len(kept)):
        now += kept[microbatch]
        if microbatch >= num_in_flight:
            now -= kept[microbatch - num_in_flight]
        most = max(most, now + passing[microbatch])
    return most
