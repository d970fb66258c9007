"""Pricing an assignment: from who computes which samples to the times of every stage, by the cost model.

This is where a plan, a model's costs and a batch's shapes meet. Planning and scheduling both ask here.
"""

import copy
import heapq
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numba import njit

from dflop.balancing import BatchProblem
from dflop.config import ClusterConfig
from dflop.costs import CostModel, Loads
from dflop.data import SampleShapes
from dflop.models import ModelSpec
from dflop.pipeline import (
    PLACEMENTS,
    SCHEDULES,
    Node,
    Plan,
    StageTimes,
    Timeline,
    compile_plan,
    nodes_of,
    peak_bytes,
    simulate,
    simulate_step_s,
)
from dflop.pricing.correction import NO_CORRECTIONS, Corrections
from dflop.pricing.stage_costs import StageCosts, loads_of
from dflop.pricing.transfers import Transfers
from dflop.runtime import UserError

__all__ = ["BYTES_PER_VALUE", "WEIGHT_SHARE", "Assignment", "Pricer"]

BYTES_PER_VALUE = {"fp32": 4, "bf16": 2, "fp64": 8}
# Of a backward pass, where the costs do not know better.
WEIGHT_SHARE = 0.5
# What no sample takes: an hour.
MOST_SAMPLE_S = 3600.0
# Of a bucket's tokens, how many are learned, and in how many samples they come, where nobody says.
_TARGET_SHARE = 0.25
_SAMPLES_A_BUCKET = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Where each sample of a batch goes: `llm_dp_rank` and `microbatch` are [num_samples].

    `encoder_rank` [num_samples, num_encoders] is, of each encoder in the plan's order, the dp rank that computes the
    sample's media.
    """

    llm_dp_rank: np.ndarray
    microbatch: np.ndarray
    encoder_rank: np.ndarray


class Pricer:
    """Stage times, step times and memory of one plan."""

    def __init__(
        self,
        plan: Plan,
        costs: CostModel,
        spec: ModelSpec,
        cluster: ClusterConfig,
        *,
        frozen: Collection[str] = (),
        precision: str = "fp32",
    ) -> None:
        assert len(plan.grids) == 2, "samples know the items of one encoder"
        self.plan, self.costs, self.cluster = plan, costs, cluster
        self.placement = PLACEMENTS[plan.placement]
        self.stage_costs = StageCosts(plan, costs, spec, frozen)
        self.transfers = Transfers(plan, costs.links, cluster)
        self.compiled = compile_plan(plan, frozen)
        self.bytes_per_token = spec.module("llm").hidden_size * BYTES_PER_VALUE[precision]
        self.stages = self.stage_costs.stages

    @property
    def corrections(self) -> Corrections:
        return self.stage_costs.corrections

    def corrected(self, corrections: Corrections = NO_CORRECTIONS) -> "Pricer":
        """The same plan priced by the cost table with these corrections, and no others."""
        other = copy.copy(self)  # what is compiled and cached holds no times of computations
        other.stage_costs = self.stage_costs.corrected(corrections)
        return other

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """What the rows of stage times stand for."""
        return nodes_of(self.plan)

    @property
    def encoder(self) -> str:
        return self.plan.grids[0].module

    def problem(self, shapes: SampleShapes) -> BatchProblem:
        """The batch as a balancing problem: what each sample adds to its bucket, on each module's slowest stage.

        All buckets of a microbatch share the encoder's replicas, so an encoder's load counts by the ratio of
        the LLM's replicas to its own. A monolithic encoder's counts together with the LLM's first stage.

        Buckets are kept within an even part of the memory where the batch allows it. Where it does not, a bucket may
        hold more than that if others hold less, which is for `memory_bytes` to say of a whole assignment.

        Raises:
            UserError: the costs of a sample cannot be true, or the samples are too few for the buckets.
        """
        encoder, llm = self.plan.grids
        encoding_s, llm_s = (
            self.stage_costs.additive_loads_s(grid.module, loads_of(grid.module, shapes)) for grid in (encoder, llm)
        )
        self._check_costs(shapes, encoding_s.max(axis=0), llm_s.max(axis=0))
        if self.placement.has_bridges:
            first_s = encoding_s.max(axis=0) * (llm.dp / encoder.dp)
        else:
            first_s = encoding_s[0] + llm_s[0]
        num_tokens = max(1, int(shapes.llm_tokens.sum()))
        cap = self.max_bucket_tokens(
            float(shapes.num_items[:, 0].sum() / num_tokens) if self.placement.shares_ranks else 0.0,
            float(shapes.target_tokens.sum() / num_tokens),
        )
        is_even = shapes.llm_tokens.max(initial=0) <= cap and num_tokens <= cap * llm.dp * self.plan.num_microbatches
        return BatchProblem(
            loads_s=np.column_stack([first_s, llm_s.max(axis=0)]),
            llm_tokens=shapes.llm_tokens,
            num_dp_ranks=llm.dp,
            num_microbatches=self.plan.num_microbatches,
            max_bucket_tokens=cap if is_even else None,
        )

    def _check_costs(self, shapes: SampleShapes, encoding_s: np.ndarray, llm_s: np.ndarray) -> None:
        """No sample takes less than no time, none an LLM no time, none a stage longer than `MOST_SAMPLE_S`."""
        for module, loads_s, least in ((self.encoder, encoding_s, "0"), ("llm", llm_s, "more than 0")):
            is_wrong = ~((loads_s >= 0) & (loads_s <= MOST_SAMPLE_S))
            if module == "llm":
                is_wrong |= loads_s == 0
            if is_wrong.any():
                sample = int(is_wrong.argmax())
                raise UserError(
                    f"the costs say that sample {shapes.sample_id[sample]!r} ({shapes.num_items[sample].sum()} items, "
                    f"{shapes.llm_tokens[sample]} LLM tokens) takes a stage of {module} {loads_s[sample]:.3g} s, which "
                    f"must be {least} to {MOST_SAMPLE_S:.0f}; measure them anew (delete costs/ of the run, or "
                    "`dflop profile-costs` and `dflop fit-costs`)"
                )

    def assign(self, shapes: SampleShapes, llm_dp_rank: np.ndarray, microbatch: np.ndarray) -> Assignment:
        """Complete an assignment: give media to the encoder's replicas, largest first to the least loaded.

        Disjoint encoders balance each microbatch, colocated ones, which do all forwards before anything else, what
        they have been given so far; monolithic ones take what their LLM replica does.
        """
        encoder_rank = np.empty((len(shapes), len(shapes.encoders)), dtype=np.int64)
        for column, encoder in enumerate(shapes.encoders):
            if not self.placement.has_bridges:
                encoder_rank[:, column] = llm_dp_rank
                continue
            num_items = shapes.num_items[:, column].astype(np.int64)
            order = np.lexsort((np.arange(len(shapes)), -num_items, microbatch))
            starts_anew = not self.placement.shares_ranks
            encoder_rank[:, column] = _deal(order, microbatch, num_items, self.plan.grid(encoder).dp, starts_anew)
        return Assignment(llm_dp_rank=llm_dp_rank, microbatch=microbatch, encoder_rank=encoder_rank)

    def stage_times(self, shapes: SampleShapes, assignment: Assignment) -> StageTimes:
        """Predicted seconds of every computation, transfer and gradient sync of the step.

        The weights' part of a backward is taken to be half of it: the gradients of a matrix's input and of its weights
        are products of the same size. Attention, which has no weights, is thereby shared out too. What travels
        inside an encoder is priced as if it were its features: no shape says how much it is.
        """
        of_module = self._of_modules(shapes, assignment)
        forward_s, backward_s = self.stage_costs.stage_times({name: loads for name, (loads, _) in of_module.items()})
        sent_bytes = {module: tokens * self.bytes_per_token for module, (_, tokens) in of_module.items()}
        splits = SCHEDULES[self.plan.schedule].splits_backward
        return StageTimes(
            forward_s=forward_s,
            backward_s=backward_s,
            weight_s=WEIGHT_SHARE * backward_s * self.trains[:, None] if splits else None,
            chain_s=self.transfers.chain_s(sent_bytes),
            bridges=self.transfers.bridges(
                assignment.encoder_rank[:, 0],
                assignment.llm_dp_rank,
                assignment.microbatch,
                shapes.kept_tokens[:, 0] * self.bytes_per_token,
            ),
            sync_s=self.sync_s,
        )

    def loads(self, shapes: SampleShapes, assignment: Assignment) -> dict[str, Loads]:
        """Each module's loads, arrays [dp, num_microbatches]."""
        return {module: loads for module, (loads, _) in self._of_modules(shapes, assignment).items()}

    def step_s(self, shapes: SampleShapes, assignment: Assignment) -> float:
        return simulate_step_s(self.compiled, self.stage_times(shapes, assignment))

    def timeline(self, times: StageTimes) -> Timeline:
        return simulate(self.compiled, times)

    def lower_bound_s(self, shapes: SampleShapes) -> float:
        """No schedule of this batch is faster: each stage's work over its replicas, and its largest sample.

        Where modules share ranks, nor than all of the work over all ranks, or what the first stage does of both.
        """
        encoder, llm = self.plan.grids
        works_s = [
            self.stage_costs.additive_loads_s(grid.module, loads_of(grid.module, shapes), least=True)
            for grid in (encoder, llm)
        ]
        bounds = []
        for grid, work_s in zip((encoder, llm), works_s, strict=True):
            bounds += [work_s.sum(axis=1).max() / grid.dp, work_s.max()]
        if self.placement.encodes_all_first:
            rank_s = encoder.tp * works_s[0].sum() + llm.tp * works_s[1].sum()
            bounds.append(rank_s / self.plan.world_size)
        elif self.placement.shares_ranks:
            both_s = works_s[0][0] + works_s[1][0]
            bounds += [both_s.sum() / llm.dp, both_s.max()]
        return float(max(bounds))

    def memory_bytes(self, shapes: SampleShapes, assignment: Assignment) -> dict[str, float]:
        """Predicted peak of each module's fullest rank: what is resident, and the microbatches in flight.

        Where modules share ranks, a rank holds both, and counts for both.
        """
        tensors = self.resident_bytes + self._peak_bytes(self._of_modules(shapes, assignment))
        held = self.held_bytes(tensors)
        return {grid.module: float(held[self._workers(grid.module)].max()) for grid in self.plan.grids}

    def held_bytes(self, tensor_bytes: np.ndarray) -> np.ndarray:
        """What a process with such tensors holds."""
        return self.costs.overhead_bytes + tensor_bytes * (1 + self.costs.allocator_share)

    @property
    def limit_bytes(self) -> float:
        """What a device has."""
        return self.cluster.memory_gib * 2**30

    def max_bucket_tokens(self, items_per_token: float = 0.0, target_share: float = _TARGET_SHARE) -> int:
        """LLM tokens that all buckets may hold so that the fullest LLM rank stays within the device's memory.

        `items_per_token` is what comes with them to encoders on the same ranks, `target_share` of them are learned.
        These are means: a bucket with more of either may take more than is counted here.

        Raises:
            UserError: when the parameters alone exceed it.
        """
        encoder, llm = self.plan.grids
        own = self._workers("llm")
        room = self.require_room()
        peaks = []
        for tokens in (0.0, 1000.0):
            media, text = (np.zeros((grid.dp, self.plan.num_microbatches)) for grid in (encoder, llm))
            share = tokens * llm.dp / encoder.dp
            full = text + tokens
            # As if all of the text were features, where these are sent at all.
            sent = media + share if self.placement.has_bridges else media
            learned = Loads(text, full, full**2 / _SAMPLES_A_BUCKET, full * target_share)
            items = Loads(media + share * items_per_token, media, media, media)
            peaks.append(self._peak_bytes({encoder.module: (items, sent), "llm": (learned, full)}))
        nothing, much = (peak[own] for peak in peaks)
        room = room - self.resident_bytes[own] - nothing
        return int((room / np.maximum((much - nothing) / 1000, 1e-9)).min())

    def require_room(self) -> float:
        """Bytes of tensors that a device has room for.

        Raises:
            UserError: a module's parameters, gradients and optimiser state alone take as much.
        """
        room = (self.limit_bytes - self.costs.overhead_bytes) / (1 + self.costs.allocator_share)
        for grid in self.plan.grids:
            resident = self.resident_bytes[self._workers(grid.module)].max()
            if room <= resident:
                raise UserError(
                    f"{self.plan}: the parameters, gradients and optimiser state of {grid.module} take "
                    f"{resident / 2**30:.3g} GiB a device and what every process holds "
                    f"{self.costs.overhead_bytes / 2**30:.3g} GiB, `cluster.memory_gib` is {self.cluster.memory_gib}; "
                    "use more pipeline stages or devices with more memory"
                )
        return room

    def extrapolated(self, shapes: SampleShapes, assignment: Assignment) -> np.ndarray:
        """Which nodes' microbatches hold loads outside of what was measured, bool [num_nodes, num_microbatches]."""
        by_module = self._outside(shapes, assignment)
        return np.concatenate([by_module[stage.module] for stage in self.stages])

    def extrapolated_share(self, shapes: SampleShapes, assignment: Assignment) -> float:
        """The share of the microbatches whose loads lie outside of what was measured."""
        return float(np.concatenate([flags.ravel() for flags in self._outside(shapes, assignment).values()]).mean())

    def _outside(self, shapes: SampleShapes, assignment: Assignment) -> dict[str, np.ndarray]:
        """By module, bool [dp, num_microbatches]."""
        flags = {}
        for grid in self.plan.grids:
            loads, _ = self._of_modules(shapes, assignment)[grid.module]
            flags[grid.module] = self.costs.is_extrapolated(
                grid.module, grid.tp, loads, checkpointing=self.plan.checkpointing
            )
        return flags

    @cached_property
    def trains(self) -> np.ndarray:
        """Which nodes compute gradients of weights, [num_nodes]."""
        own = [stage.module not in self.stage_costs.frozen for stage in self.stages]
        return np.repeat(own, [stage.dp for stage in self.stages])

    @cached_property
    def sync_s(self) -> np.ndarray:
        """The gradient sync of each node, [num_nodes]."""
        own = [self.transfers.gradient_sync_s(stage, self.stage_costs.parameter_bytes(stage)) for stage in self.stages]
        return np.repeat(own, [stage.dp for stage in self.stages]) * self.trains

    def _workers(self, module: str) -> np.ndarray:
        """Indices of the workers that carry a module."""
        own = [stage for stage in self.stages if stage.module == module]
        return np.unique(
            np.concatenate([np.arange(stage.first_worker, stage.first_worker + stage.dp * stage.span) for stage in own])
        )

    @cached_property
    def resident_bytes(self) -> np.ndarray:
        """Parameters, gradients and optimiser state on each worker's ranks, [num_workers]."""
        resident = np.zeros(self.compiled.num_workers)
        for stage in self.stages:
            workers = slice(stage.first_worker, stage.first_worker + stage.dp * stage.span)
            resident[workers] += self.stage_costs.resident_bytes(stage)
        return resident

    def _peak_bytes(self, of_module: dict[str, tuple[Loads, np.ndarray]]) -> np.ndarray:
        """What each worker's ranks hold at most of microbatches, [num_workers]: activations, and what crosses edges.

        An edge's tokens are held as they came or wait to leave, once forward and once backward.
        """
        kept, transient = zip(*self.stage_bytes(of_module), strict=True)
        return peak_bytes(self.compiled, np.concatenate(kept), np.concatenate(transient))

    def stage_bytes(self, of_module: dict[str, tuple[Loads, np.ndarray]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each stage what microbatches of such loads and edge tokens keep, and what comes on top meanwhile."""
        memories = self.stage_costs.memories({name: loads for name, (loads, _) in of_module.items()})
        both = []
        for stage, memory in zip(self.stages, memories, strict=True):
            _, tokens = of_module[stage.module]
            activations = memory.activation_bytes if self.stage_costs.has_backward(stage.module) else 0.0
            both.append((activations + 2.0 * tokens * self.bytes_per_token, memory.transient_bytes))
        return both

    def _of_modules(self, shapes: SampleShapes, assignment: Assignment) -> dict[str, tuple[Loads, np.ndarray]]:
        """Each module's loads, and the tokens that cross its stages' edges; arrays [dp, num_microbatches]."""
        of_module = {}
        for grid in self.plan.grids:
            if grid.module == "llm":
                replica = assignment.llm_dp_rank
            else:
                replica = assignment.encoder_rank[:, shapes.encoders.index(grid.module)]
            cell = replica * self.plan.num_microbatches + assignment.microbatch

            def summed(values: np.ndarray, cell: np.ndarray = cell, dp: int = grid.dp) -> np.ndarray:
                return np.bincount(cell, weights=values, minlength=dp * self.plan.num_microbatches).reshape(dp, -1)

            loads = Loads(*(summed(load) for load in loads_of(grid.module, shapes)))
            of_module[grid.module] = loads, summed(self.edge_tokens(grid.module, shapes))
        return of_module

    def edge_tokens(self, module: str, shapes: SampleShapes) -> np.ndarray:
        """Tokens of each sample that come into a stage of the module or go out, [num_samples]."""
        if module == "llm" and self.plan.num_stages("llm") > 1:
            return shapes.llm_tokens
        if not self.placement.has_bridges:
            return np.zeros_like(shapes.llm_tokens)
        return shapes.kept_tokens.sum(axis=1) if module == "llm" else shapes.kept_by(module)


@njit(cache=True)
def _deal(order, microbatch, num_items, num_encoders, starts_anew):
    """Each sample's encoder replica: samples come in `order`, by microbatch; `starts_anew` with each of them.

    Of replicas with as much in the microbatch the one is next that has least of all so far: else the same one would
    have the largest sample of every microbatch.
    """
    encoder_rank = np.zeros(len(order), dtype=np.int64)
    total = np.zeros(num_encoders, dtype=np.int64)
    loads = [(0, 0, replica) for replica in range(num_encoders)]
    current = -1
    for sample in order:
        if starts_anew and microbatch[sample] != current:
            loads = [(0, total[replica], replica) for replica in range(num_encoders)]
            heapq.heapify(loads)
        current = microbatch[sample]
        load, _, replica = loads[0]
        encoder_rank[sample] = replica
        total[replica] += num_items[sample]
        heapq.heapreplace(loads, (load + num_items[sample], total[replica], replica))
    return encoder_rank
