"""How large each microbatch should be in each module. Equal sizes are not best: small ones fill and drain a pipeline
fast.

If samples could be split arbitrarily and all replicas did the same, the shortest step would be a linear program: the
time of a computation is convex in its loads, and it begins when the computations that it waits for have ended. Solved
once a run, for kinds of samples, the program gives the sizes to aim at.
"""

import math
from dataclasses import replace

import numpy as np

from dflop.costs import Loads
from dflop.costs.forms import PackedForms
from dflop.plan import PLACEMENTS, PLAIN_SHARDING, Plan
from dflop.plan.passes import BACKWARD, FORWARD
from dflop.schedule.batch_problem import seconds_of_columns
from dflop.schedule.linear_program import LinearProgram
from dflop.schedule.pricer import Pricer
from dflop.schedule.stage_costs import loads_of
from dflop.schedule.stage_forms import stage_forms
from dflop.shapes import SampleShapes
from dflop.step import CompiledPlan, Computation, compile_plan, computations_of
from dflop.step.simulation_kernel import DP, FIRST_NODE, FIRST_WORKER, SPAN
from dflop.step.syncs import SyncParts, sync_parts

__all__ = ["ideal_shares"]

# Samples are sorted into so many kinds by their items per token: a microbatch that has less of one module's load may
# have more of another's.
NUM_KINDS = 12
# The linear program has many best solutions. A small cost on how far a microbatch's sizes differ between modules picks
# one that a packing of whole samples can follow; with a tenth of this cost some steps came out 2 % longer.
APART_COST = 0.03
# Columns of a module's loads: those of `Loads`, and, for an encoder, the tokens of its features.
_TOKENS, _FEATURES = 1, 4


def ideal_shares(pricer: Pricer, samples: SampleShapes, batch_size: int) -> np.ndarray:
    """Each microbatch's size as a multiple of the mean size, [num_microbatches, num_loads], for batches of `samples`.

    The columns are those of the balancing problem (`Pricer.problem`). All sizes are 1 where the solver fails. This
    takes tens of milliseconds for four to eight stages and 16 microbatches.
    """
    loads = _loads(pricer, samples)
    order = np.argsort(samples.num_items.sum(axis=1) / np.maximum(1, samples.llm_tokens), kind="stable")
    kinds = np.array_split(order, min(NUM_KINDS, len(samples)))
    in_batch = batch_size / len(samples)
    totals = np.array([loads[kind].sum(axis=0) for kind in kinds]) * in_batch
    step = _StepProgram(pricer, totals, np.array([len(kind) for kind in kinds]) * in_batch)
    size = _sizes(pricer, totals)
    num_microbatches, num_loads = pricer.plan.num_microbatches, size.shape[1]
    apart = step.program.variables(num_loads - 1, num_microbatches)
    for load in range(num_loads - 1):
        difference = (size[:, load] - size[:, -1])[:, None].repeat(step.part.shape[2], 1)
        for microbatch in range(num_microbatches):
            for sign in (1.0, -1.0):
                step.program.require((apart[load, microbatch], 1.0), (step.part[:, microbatch], sign * difference))
    solution = step.program.minimise((step.end, 1.0), (apart, APART_COST))
    if solution is None:
        return np.ones((num_microbatches, num_loads))
    return np.einsum("kje,kf->jf", solution[step.part], size)


def _loads(pricer: Pricer, shapes: SampleShapes) -> np.ndarray:
    """The loads that each sample adds to each module, and the tokens of its features, [num_samples, num_modules, 5]."""
    columns = []
    for grid in pricer.plan.grids:
        features = np.zeros(len(shapes)) if grid.module == "llm" else shapes.kept_by(grid.module)
        columns.append(np.column_stack([*loads_of(grid.module, shapes), features]))
    return np.stack(columns, axis=1).astype(float)


def _sizes(pricer: Pricer, totals: np.ndarray) -> np.ndarray:
    """What all samples of each kind add up to, in units of a mean microbatch, [num_kinds, num_loads].

    The columns are those of the balancing problem. The number of replicas that share a load cancels out.
    """
    plan = pricer.plan
    of_modules = {
        grid.module: pricer.stage_costs.additive_loads_s(grid.module, Loads(*totals[:, number, :_FEATURES].T))
        for number, grid in enumerate(plan.grids)
    }
    size = seconds_of_columns(plan, of_modules)
    whole = size.sum(axis=0)
    return plan.num_microbatches * np.divide(size, whole, out=np.zeros_like(size), where=whole > 0)


class _StepProgram:
    """A linear program for the step of one LLM replica and its part of the encoders.

    Its free variables say which part of each kind of samples goes to which microbatch and encoder replica.
    """

    def __init__(self, pricer: Pricer, totals: np.ndarray, num_samples: np.ndarray) -> None:
        """`totals` [num_kinds, num_modules, 5] are the summed loads of each kind's samples, `num_samples` [num_kinds]
        their numbers."""
        plan = pricer.plan
        compiled = compile_plan(_one_replica(plan), pricer.stage_costs.trained)
        self._forms, self._stages = stage_forms(pricer), compiled.stages
        # Replicas of a stage differ only in their links: the fastest link counts.
        first = pricer.compiled.stages[:, FIRST_NODE]
        self._chain_latency_s = np.minimum.reduceat(self._forms.chain_latency_s, first)
        self._chain_token_s = np.minimum.reduceat(self._forms.chain_token_s, first)
        self._num_encoders = len(plan.grids) - 1
        # How many replicas of each encoder belong to one replica of the LLM.
        self._replicas = [int(compiled.stages[stage, DP]) for stage in self._forms.first_stage[:-2]]
        self.program = LinearProgram()
        # The part of each kind that goes to each microbatch and, there, to each replica of the first encoder, if any.
        shape = len(totals), plan.num_microbatches, *(self._replicas[:1] or [1])
        self.part = self.program.variables(*shape)
        self.end = self.program.variables(1)[0]
        # Loads and times are in units of their means, so that all numbers are of the order of one.
        whole = totals.sum(axis=0)
        self._means = whole / np.array([[grid.dp * plan.num_microbatches] for grid in plan.grids])
        self.unit_s = self._mean_s([1.0, *self._means[-1, :_FEATURES]])
        of_whole = np.divide(totals, whole, out=np.zeros_like(totals), where=whole > 0) * plan.num_microbatches
        llm_dp = plan.grid("llm").dp
        self._text, self._media = self._cells(of_whole, num_samples, llm_dp, self._cap(pricer, whole))
        syncs = (pricer.sync_s, pricer.early_sync_s, pricer.late_sync_s)
        syncs = (None if sync is None else sync[first].repeat(compiled.stages[:, DP]) for sync in syncs)
        self._add_computations(compiled, sync_parts(compiled, *syncs), llm_dp)

    def _mean_s(self, mean: list[float]) -> float:
        """About the forward plus backward seconds of the LLM's slowest stage; `mean` is 1, then the mean loads."""
        terms_s = (
            np.add.reduceat(np.maximum(terms.forms.lines @ mean, terms.least), terms.first[:-1])
            for terms in (self._forms.forward, self._forms.backward)
        )
        return float(sum(terms_s)[self._forms.first_stage[-2] :].max())

    def _cap(self, pricer: Pricer, whole: np.ndarray) -> float:
        """The most tokens that a bucket may hold, in units of the mean bucket; 1 where even the mean is too large."""
        items_per_token = {}
        if pricer.placement.shares_ranks:
            modules = [grid.module for grid in pricer.plan.grids[:-1]]
            items_per_token = dict(zip(modules, whole[:-1, 0] / whole[-1, _TOKENS], strict=True))
        cap = pricer.memory.max_bucket_tokens(items_per_token)
        return max(1.0, cap / self._means[-1, _TOKENS])

    def _cells(
        self, of_whole: np.ndarray, num_samples: np.ndarray, llm_dp: int, cap: float
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Variables for the loads of the LLM, [num_microbatches, 5], and of each encoder, [num_microbatches,
        num_replicas, 5]."""
        program = self.program
        num_kinds, num_microbatches, _ = self.part.shape
        text = program.variables(num_microbatches, 5)
        media = [program.variables(num_microbatches, replicas, 5) for replicas in self._replicas]
        # The media of a sample may go to any replica of each encoder, independently of those of the first encoder.
        parts = [self.part, *(program.variables(num_kinds, num_microbatches, count) for count in self._replicas[1:])]
        for of_kind in self.part:
            program.require((of_kind, 1.0), at_least=1.0)
            program.require((of_kind, -1.0), at_least=-1.0)
        for microbatch in range(num_microbatches):
            of_kinds = self.part[:, microbatch]
            program.require((of_kinds, num_samples[:, None]), at_least=llm_dp)  # No bucket is empty.
            program.require((text[microbatch, _TOKENS], -1.0), at_least=-cap)
            for load in range(5):
                program.require((text[microbatch, load], 1.0), (of_kinds, -of_whole[:, -1, load, None]))
                for encoder, its_part in enumerate(parts[: self._num_encoders]):
                    for replica in range(self._replicas[encoder]):
                        of_replica = -self._replicas[encoder] * of_whole[:, encoder, load]
                        program.require(
                            (media[encoder][microbatch, replica, load], 1.0),
                            (its_part[:, microbatch, replica], of_replica),
                        )
            for other in parts[1:]:
                for kind in range(num_kinds):
                    for sign in (1.0, -1.0):
                        program.require((of_kinds[kind], sign), (other[kind, microbatch], -sign))
        return text, media

    def _add_computations(self, compiled: CompiledPlan, syncs: SyncParts, llm_dp: int) -> None:
        """Require that computations wait for each other, and that the step ends after each worker's last computation
        and its gradient syncs."""
        program, forms = self.program, self._forms
        computations, last = computations_of(compiled)
        ends, begins = program.variables(len(computations)), []
        for number, computed in enumerate(computations):
            module = forms.module[computed.stage]
            cell, mean = self._cell_of(computed), self._means[module]
            took = program.variables(1)[0]
            self._add_duration(took, computed.which, computed.stage, cell, mean)
            begun = (ends[number], 1.0), (took, -1.0)
            begins.append(begun)
            program.require(*begun)
            if computed.which == FORWARD and computed.microbatch == 0 and len(syncs.gathered_s):
                node = self._stages[computed.stage, FIRST_NODE] + computed.replica
                program.require((ends[number], 1.0), at_least=syncs.gathered_s[node] / self.unit_s)
            for before in computed.on_workers:
                program.require(*begun, (ends[before], -1.0))
            if computed.neighbour >= 0:
                sender = computations[computed.neighbour].stage if computed.which == FORWARD else computed.stage
                sent = _TOKENS if module == self._num_encoders else _FEATURES
                token_s = self._chain_token_s[sender] * mean[sent] / self.unit_s
                latency = self._chain_latency_s[sender] / self.unit_s
                program.require(*begun, (ends[computed.neighbour], -1.0), (cell[sent], -token_s), at_least=latency)
            for other in computed.bridged:
                media = computed if module < self._num_encoders else computations[other]
                encoder = forms.module[media.stage]
                replicas = slice(*forms.first_replica[encoder : encoder + 2])
                token_s = forms.bridge_token_s[replicas].min() / llm_dp * self._means[encoder, _FEATURES] / self.unit_s
                latency = forms.bridge_latency_s[replicas].min() / self.unit_s
                features = self._cell_of(media)[_FEATURES]
                program.require(*begun, (ends[other], -1.0), (features, -token_s), at_least=latency)
        for worker, number in enumerate(last):
            self._require_end(ends[number], syncs.rest_s[worker])
        if len(syncs.early_s):
            self._add_early_parts(compiled, computations, begins, syncs)

    def _add_early_parts(
        self, compiled: CompiledPlan, computations: list[Computation], begins: list[tuple], syncs: SyncParts
    ) -> None:
        """Require that the early parts of a worker's syncs follow each other, each from the start of its node's last
        backward on, and that the step ends after them. `begins` are the starts of the computations."""
        ends = {}
        for computed, begun in zip(computations, begins, strict=True):
            if computed.which != BACKWARD or computed.microbatch < compiled.num_microbatches - 1:
                continue
            stage = compiled.stages[computed.stage]
            early = syncs.early_s[stage[FIRST_NODE] + computed.replica] / self.unit_s
            first_worker = stage[FIRST_WORKER] + computed.replica * stage[SPAN]
            for worker in range(first_worker, first_worker + stage[SPAN]):
                end = self.program.variables(1)[0]
                (finish, _), (took, _) = begun
                self.program.require((end, 1.0), (finish, -1.0), (took, 1.0), at_least=early)
                if worker in ends:
                    self.program.require((end, 1.0), (ends[worker], -1.0), at_least=early)
                ends[worker] = end
        for worker, end in ends.items():
            self._require_end(end, syncs.rest_s[worker])

    def _require_end(self, before: int, seconds: float) -> None:
        """Require that the step ends at least so many seconds after this variable."""
        self.program.require((self.end, 1.0), (before, -1.0), at_least=seconds / self.unit_s)

    def _cell_of(self, computed: Computation) -> np.ndarray:
        """The variables of a computation's loads, [5]."""
        module = self._forms.module[computed.stage]
        return (
            self._text[computed.microbatch]
            if module == self._num_encoders
            else self._media[module][computed.microbatch, computed.replica]
        )

    def _add_duration(self, took: int, which: int, stage: int, cell: np.ndarray, mean: np.ndarray) -> None:
        """Require that the variable `took` is at least the time of a computation.

        Its loads are the variables `cell`, in units of `mean`.
        """
        terms = self._forms.forward if which == FORWARD else self._forms.backward
        share, parts = 1.0 / self.unit_s, []
        *limited, last = range(terms.first[stage], terms.first[stage + 1])
        for number in limited:
            part = self.program.variables(1)[0]
            self.program.require((part, 1.0), at_least=terms.least[number] * share)
            self._require_form(((part, 1.0),), terms.forms, number, cell, mean, share)
            parts.append((part, -1.0))
        self._require_form(((took, 1.0), *parts), terms.forms, last, cell, mean, share)

    def _require_form(
        self,
        terms: tuple[tuple[np.ndarray | int, float], ...],
        forms: PackedForms,
        number: int,
        cell: np.ndarray,
        mean: np.ndarray,
        share: float,
    ) -> None:
        """Require that the sum of the terms is at least `share` times a function of the cell's loads."""
        form = forms.lines[number] * share
        above = [*terms, (cell[:_FEATURES], -form[1:] * mean[:_FEATURES])]
        for load, at, slope in forms.hinges[number]:
            load = int(load)
            if slope * mean[load] * share > 1e-6:  # Fits leave slopes of rounding noise.
                beyond = self.program.variables(1)[0]
                self.program.require((beyond, 1.0), (cell[load], -1.0), at_least=-at / mean[load])
                above.append((beyond, -slope * mean[load] * share))
        self.program.require(*above, at_least=form[0])


def _one_replica(plan: Plan) -> Plan:
    """The plan with a single LLM replica; encoders on ranks of their own have a single replica, too.

    They share no parameters: all replicas are taken to do the same, so none waits for another.
    """
    *encoders, llm = (replace(grid, sharding=PLAIN_SHARDING, shards=None) for grid in plan.grids)
    placement, one = PLACEMENTS[plan.placement], replace(llm, num_ranks=llm.tp * llm.pp, rank_offset=0, cp=1)
    if placement.shares_ranks:
        num_ranks = len(placement.encoder_stages(llm.pp)) * llm.tp
        # Where an encoder replica lies on the ranks of several LLM replicas, only a part of it belongs to this one.
        tp = [math.gcd(encoder.tp, llm.tp) if placement.fills_bubbles else encoder.tp for encoder in encoders]
        shared = (replace(grid, num_ranks=num_ranks, tp=size) for grid, size in zip(encoders, tp, strict=True))
        return replace(plan, grids=(*shared, one))
    grids, first_rank = [], 0
    for grid in (*encoders, one):
        grids.append(replace(grid, num_ranks=grid.tp * grid.pp, rank_offset=first_rank))
        first_rank += grids[-1].num_ranks
    return replace(plan, grids=tuple(grids))
