"""How large each microbatch should be in each module: not equally large, for small ones fill and drain a pipeline fast.

If samples could be cut at will and all replicas did the same, the shortest step would be a linear program: a
computation takes a time that is convex in its loads, and begins when what it waits for has ended. Solved once a run,
for kinds of samples, the program says which sizes to aim at; solved for a batch, how short its step could be.
"""

from dataclasses import replace

import numpy as np

from dflop.balancing import NO_CAP
from dflop.costs import Loads
from dflop.data import SampleShapes
from dflop.pipeline import PLACEMENTS, Network, Plan, compile_plan, network_of
from dflop.pipeline.compiled import DP, FIRST_NODE, KIND, SPLIT_BACKWARD
from dflop.pipeline.passes import FORWARD, WEIGHT
from dflop.pricing import Pricer, loads_of
from dflop.scheduling.step_search import stage_forms

__all__ = ["ideal_shares", "relaxed_step_s"]

# Samples are told apart by their items a token: what a microbatch lacks in one module it may have more of in another.
NUM_KINDS = 12
# What a microbatch's sizes may differ by between modules costs so much of the time by which they differ. Of the many
# best solutions those are kept that a packing can follow; with a tenth of it some steps came out 2 % longer.
APART_COST = 0.03
# The largest programs known take 2 s.
_MOST_S = 30.0
# Columns of loads: as in `Loads`, and the features' tokens.
_TOKENS, _FEATURES = 1, 4


def ideal_shares(pricer: Pricer, samples: SampleShapes, batch_size: int) -> np.ndarray:
    """Each microbatch's size as a part of the mean one, [num_microbatches, num_modules], for batches of such samples.

    Equal ones where the solver fails. Takes tens of milliseconds for four to eight stages and 16 microbatches.
    """
    loads = _loads(samples)
    order = np.argsort(loads[:, 0] / np.maximum(1, samples.llm_tokens), kind="stable")
    kinds = np.array_split(order, min(NUM_KINDS, len(samples)))
    in_batch = batch_size / len(samples)
    totals = np.array([loads[kind].sum(axis=0) for kind in kinds]) * in_batch
    step = _StepProgram(pricer, totals, np.array([len(kind) for kind in kinds]) * in_batch)
    size = _sizes(pricer, totals)
    num_microbatches = pricer.plan.num_microbatches
    apart = step.program.variables(num_microbatches)
    difference = (size[:, 0] - size[:, 1])[:, None].repeat(step.part.shape[2], 1)
    for microbatch in range(num_microbatches):
        for sign in (1.0, -1.0):
            step.program.require((apart[microbatch], 1.0), (step.part[:, microbatch], sign * difference))
    solution = step.program.minimise((step.end, 1.0), (apart, APART_COST))
    if solution is None:
        return np.ones((num_microbatches, size.shape[1]))
    return np.einsum("kje,kf->jf", solution[step.part], size)


def relaxed_step_s(pricer: Pricer, shapes: SampleShapes) -> float:
    """The step of a batch whose samples could be cut at will, if all replicas did the same, in seconds.

    No schedule is faster where all samples have media and an encoder on ranks of its own has one replica: times are
    convex, so the mean of what the LLM's replicas do is possible, too, and no slower. Several encoder replicas might
    gain a little by unlike work. 512 samples in 16 microbatches take about half a second.
    """
    step = _StepProgram(pricer, _loads(shapes), np.ones(len(shapes)))
    solution = step.program.minimise((step.end, 1.0))
    assert solution is not None, "any assignment of the samples is a solution"
    return float(solution[step.end]) * step.unit_s


def _loads(shapes: SampleShapes) -> np.ndarray:
    assert len(shapes.encoders) == 1, "a cell of the program holds one encoder's items"
    loads = loads_of("llm", shapes)._replace(num_items=shapes.num_items[:, 0])
    return np.column_stack([*loads, shapes.kept_tokens[:, 0]]).astype(float)


def _sizes(pricer: Pricer, totals: np.ndarray) -> np.ndarray:
    """What kinds of these loads bring to the microbatches, in mean ones of each module, [num_kinds, num_modules]."""
    items, *text = totals[:, :_FEATURES].T
    nothing = np.zeros_like(items)
    encoder, llm = pricer.plan.grids
    encoding_s = pricer.stage_costs.additive_loads_s(encoder.module, Loads(items, nothing, nothing, nothing))
    llm_s = pricer.stage_costs.additive_loads_s(llm.module, Loads(nothing, *text))
    has_bridges = PLACEMENTS[pricer.plan.placement].has_bridges
    size = np.column_stack([encoding_s.max(axis=0) if has_bridges else encoding_s[0] + llm_s[0], llm_s.max(axis=0)])
    whole = size.sum(axis=0)
    return pricer.plan.num_microbatches * np.divide(size, whole, out=np.zeros_like(size), where=whole > 0)


class _Program:
    """A linear program in variables of at least 0, which are numbered as they come."""

    def __init__(self) -> None:
        self._num_variables = 0
        self._bounds: list[float] = []
        self._rows: list[np.ndarray] = []
        self._columns: list[np.ndarray] = []
        self._factors: list[np.ndarray] = []

    def variables(self, *shape: int) -> np.ndarray:
        first = self._num_variables
        self._num_variables += int(np.prod(shape))
        return np.arange(first, self._num_variables).reshape(shape)

    def require(self, *terms: tuple[np.ndarray, np.ndarray | float], at_least: float = 0.0) -> None:
        """The sum of all variables times their factors shall be `at_least` so much."""
        for variables, factors in terms:
            columns, factors = np.broadcast_arrays(variables, factors)
            self._rows.append(np.full(columns.size, len(self._bounds)))
            self._columns.append(columns.ravel())
            self._factors.append(factors.ravel())
        self._bounds.append(at_least)

    def minimise(self, *terms: tuple[np.ndarray, float]) -> np.ndarray | None:
        """The values of all variables for which this sum is smallest; None where the solver finds none."""
        from scipy.optimize import linprog  # takes longer to import than most commands take
        from scipy.sparse import csr_array

        goal = np.zeros(self._num_variables)
        for variables, factor in terms:
            goal[variables] = factor
        matrix = csr_array(
            (np.concatenate(self._factors), (np.concatenate(self._rows), np.concatenate(self._columns))),
            shape=(len(self._bounds), self._num_variables),
        )
        result = linprog(
            goal, A_ub=-matrix, b_ub=-np.array(self._bounds), method="highs-ipm", options={"time_limit": _MOST_S}
        )
        return result.x if result.success else None


class _StepProgram:
    """The step of one LLM replica and its part of the encoders, by which part of each kind goes where."""

    def __init__(self, pricer: Pricer, totals: np.ndarray, num_samples: np.ndarray) -> None:
        """`totals` [num_kinds, 5] are the loads of all samples of a kind, and `num_samples` [num_kinds] how many."""
        plan = pricer.plan
        llm_dp, encoder_dp, num_microbatches = plan.grid("llm").dp, plan.grids[0].dp, plan.num_microbatches
        compiled = compile_plan(_one_replica(plan), pricer.stage_costs.frozen)
        self._forms, self._stages = stage_forms(pricer, NO_CAP), compiled.stages
        # Replicas of a stage differ in their links alone: the fastest counts.
        first = pricer.compiled.stages[:, FIRST_NODE]
        self._weight_share = self._forms.weight_share[first]
        self._chain_latency_s = np.minimum.reduceat(self._forms.chain_latency_s, first)
        self._chain_token_s = np.minimum.reduceat(self._forms.chain_token_s, first)
        num_encoders = int(compiled.stages[0, DP])
        self.program = _Program()
        self.part = self.program.variables(len(totals), num_microbatches, num_encoders)
        self.end = self.program.variables(1)[0]
        # Loads and times are counted in mean ones, so that all numbers are of the order of one.
        whole = totals.sum(axis=0)
        self._mean_text, self._mean_media = (whole / (dp * num_microbatches) for dp in (llm_dp, encoder_dp))
        self._message_token_s = self._forms.bridge_token_s.min() / llm_dp
        linear = self._forms.forward.lines + self._forms.backward.lines
        self.unit_s = float((linear[self._forms.is_llm] @ [1.0, *self._mean_text[:_FEATURES]]).max())
        of_whole = np.divide(totals, whole, out=np.zeros_like(totals), where=whole > 0) * num_microbatches
        self._text, self._media = self._cells(of_whole, num_samples, llm_dp, self._cap(pricer, whole))
        self._add_computations(network_of(compiled, pricer.sync_s[first].repeat(compiled.stages[:, DP])))

    def _cap(self, pricer: Pricer, whole: np.ndarray) -> float:
        """The most tokens that a bucket may hold, in mean ones; one, where the mean batch is too large."""
        (encoder,) = pricer.plan.grids[:-1]
        items_per_token = whole[0] / whole[_TOKENS] if pricer.placement.shares_ranks else 0.0
        cap = pricer.memory.max_bucket_tokens({encoder.module: items_per_token})
        return max(1.0, cap / self._mean_text[_TOKENS])

    def _cells(
        self, of_whole: np.ndarray, num_samples: np.ndarray, llm_dp: int, cap: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Variables of the loads of text, [num_microbatches, 5], and media, [num_microbatches, num_encoders, 5]."""
        program, part = self.program, self.part
        _, num_microbatches, num_encoders = part.shape
        text, media = program.variables(num_microbatches, 5), program.variables(num_microbatches, num_encoders, 5)
        for own in part:
            program.require((own, 1.0), at_least=1.0)
            program.require((own, -1.0), at_least=-1.0)
        for microbatch in range(num_microbatches):
            own = part[:, microbatch]
            program.require((own, num_samples[:, None]), at_least=llm_dp)  # No bucket is empty.
            program.require((text[microbatch, _TOKENS], -1.0), at_least=-cap)
            for load in range(5):
                program.require((text[microbatch, load], 1.0), (own, -of_whole[:, load, None]))
                for encoder in range(num_encoders):
                    program.require(
                        (media[microbatch, encoder, load], 1.0), (own[:, encoder], -num_encoders * of_whole[:, load])
                    )
        return text, media

    def _add_computations(self, network: Network) -> None:
        program, forms, stages = self.program, self._forms, self._stages
        ends = program.variables(len(network.previous))
        for item, (which, stage, microbatch, chain, bridge) in enumerate(network.items):
            is_forward, is_llm = which == FORWARD, forms.is_llm[stage]
            for replica in range(stages[stage, DP]):
                operation = network.first_operation[item] + replica
                cell = self._text[microbatch] if is_llm else self._media[microbatch, replica]
                mean = self._mean_text if is_llm else self._mean_media
                took = program.variables(1)[0]
                self._add_duration(took, which, stage, cell, mean)
                begun = (ends[operation], 1.0), (took, -1.0)
                program.require(*begun)
                for before in network.previous[operation]:
                    if before >= 0:
                        program.require(*begun, (ends[before], -1.0))
                if chain >= 0:
                    sender = network.items[chain, 1] if is_forward else stage
                    sent = _TOKENS if is_llm else _FEATURES
                    token_s = self._chain_token_s[sender] * mean[sent] / self.unit_s
                    latency = self._chain_latency_s[sender] / self.unit_s
                    before = ends[network.first_operation[chain] + replica]
                    program.require(*begun, (before, -1.0), (cell[sent], -token_s), at_least=latency)
                if bridge >= 0:
                    token_s = self._message_token_s * self._mean_media[_FEATURES] / self.unit_s
                    latency = forms.bridge_latency_s.min() / self.unit_s
                    for other in range(stages[network.items[bridge, 1], DP]):
                        features = self._media[microbatch, other if is_llm else replica, _FEATURES]
                        before = ends[network.first_operation[bridge] + other]
                        program.require(*begun, (before, -1.0), (features, -token_s), at_least=latency)
        for worker, last in enumerate(network.last):
            program.require((self.end, 1.0), (ends[last], -1.0), at_least=network.sync_s[worker] / self.unit_s)

    def _add_duration(self, took: int, which: int, stage: int, cell: np.ndarray, mean: np.ndarray) -> None:
        """A computation `took` at least what its `cell`, loads in means of `mean`, asks for."""
        forms, is_forward = self._forms, which == FORWARD
        share = 1.0 / self.unit_s
        if which == WEIGHT:
            share *= self._weight_share[stage]
        elif not is_forward and self._stages[stage, KIND] == SPLIT_BACKWARD:
            share *= 1.0 - self._weight_share[stage]
        lines, hinges = forms.forward if is_forward else forms.backward
        form = lines[stage] * share
        terms = [(took, 1.0), (cell[:_FEATURES], -form[1:] * mean[:_FEATURES])]
        for load, at, slope in hinges[stage]:
            load = int(load)
            if slope * mean[load] * share > 1e-6:  # Fits leave slopes of rounding noise.
                beyond = self.program.variables(1)[0]
                self.program.require((beyond, 1.0), (cell[load], -1.0), at_least=-at / mean[load])
                terms.append((beyond, -slope * mean[load] * share))
        self.program.require(*terms, at_least=form[0])


def _one_replica(plan: Plan) -> Plan:
    """The plan of a single LLM replica; an encoder on ranks of its own has a single one, too."""
    encoder, llm = plan.grids
    own = replace(llm, num_ranks=llm.tp * llm.pp, rank_offset=0)
    placement = PLACEMENTS[plan.placement]
    if placement.shares_ranks:
        encoder = replace(encoder, num_ranks=len(placement.encoder_stages(llm.pp)) * llm.tp)
    else:
        encoder = replace(encoder, num_ranks=encoder.tp * encoder.pp)
        own = replace(own, rank_offset=encoder.num_ranks)
    return replace(plan, grids=(encoder, own))
