"""A plan in another trainer's words (`search.emit`), with the price of the plan that the trainer makes of them.

That plan is priced on the batches of the search, as the systems of the comparison are: with random batches, as trainers
draw them, and with our sampler's. Where it does not fit into memory, the keys are those of a variant that does.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial

import numpy as np

from dflop.balance import LPT, RANDOM, Policy
from dflop.base import UserError
from dflop.comparison.systems.fsdp_balanced import SYSTEM as WITH_SAMPLER
from dflop.config import Config
from dflop.costs import CostModel
from dflop.models import ModelSpec
from dflop.plan import Plan
from dflop.plan.trained import EVERYTHING, TrainedSet
from dflop.search import Candidate, GroupedBatches, PlanPricer
from dflop.search.emit import FRAMEWORKS, Emitted, emit
from dflop.search.levels import without_recomputed
from dflop.shapes import SampleShapes

__all__ = ["EmittedPlans"]

# Another plan is named where a step takes less than this share of the time.
_WORTH_A_WORD = 0.97


class EmittedPlans:
    """Plans in frameworks' flags, priced for one config, model and dataset."""

    def __init__(self, config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes) -> None:
        self._config, self._spec, self._costs = config, spec, costs
        self._batches = cache(partial(GroupedBatches, config, spec, costs, samples))
        self._limit_bytes = config.cluster.memory_gib * 2**30
        self.pricer = cache(self._pricer)

    def _pricer(self, plan: Plan, policy: Policy) -> PlanPricer:
        """The pricer of a plan on the search's batches, grouped by the quick form of a policy."""
        batches = self._batches(plan.grid("llm").cp)
        return PlanPricer(plan, self._config, self._spec, self._costs, batches, policy)

    def text(self, framework: str, chosen: Candidate, others: Iterable[Plan]) -> str:
        """The chosen plan in a framework's flags or, where it cannot run that plan, the fastest of the others it can.

        Raises:
            UserError: when the framework can run none of them.
        """
        about, used, step_s = FRAMEWORKS[framework], chosen.plan, chosen.step_s
        able = [plan for plan in dict.fromkeys(others) if not about.refusal(plan)]
        if refusal := about.refusal(chosen.plan):
            if not able:
                raise UserError(
                    f"{about.release} cannot run the plan ({chosen.plan}) or any other that was priced: {refusal}; "
                    "`plan.fixed` can pin a layout that it can"
                )
            used = min(able, key=self._step_s)
            step_s = self._step_s(used)
        ways = self._ways(framework, used)
        words = self._words_of_printed(ways)
        emitted, prices = ways[words], list(self._prices(framework, used, step_s, ways, words, able))
        remarks = list(self._remarks(emitted.plan, words))
        if refusal:
            emitted.beyond.insert(
                0,
                f"the chosen plan, {chosen.plan}: {refusal}. The plan above is the fastest of those priced that it can "
                f"run: its expected step takes {step_s:.3g} s instead of {chosen.step_s:.3g} s",
            )
        if self._config.model.trained != EVERYTHING:
            emitted.beyond.insert(0, _of_trained(self._config.model.trained))
        return emitted.to_text(about, used, remarks, prices)

    def _step_s(self, plan: Plan, policy: Policy = LPT) -> float:
        return self.pricer(plan, policy).mean_step_s()

    def _ways(self, framework: str, plan: Plan) -> dict[str, Emitted]:
        """The plan's own flags under "", and under words what may need less memory: to recompute all layers that flags
        can say, smaller microbatches, or both."""
        size, num_microbatches = self._config.train.global_batch_size, plan.num_microbatches
        ways = {"": self._emit(framework, plan)}
        while num_microbatches * plan.grid("llm").dp <= size:
            other = replace(plan, num_microbatches=num_microbatches)
            smaller = [f"{num_microbatches} microbatches"] if num_microbatches > plan.num_microbatches else []
            for way, words in ((other, smaller), (_recomputing_all(other), ["full recomputing", *smaller])):
                if words and not FRAMEWORKS[framework].refusal(way):
                    ways[" and ".join(words)] = self._emit(framework, way)
            num_microbatches *= 2
        return ways

    def _words_of_printed(self, ways: Mapping[str, Emitted]) -> str:
        """The way to print: the plan's own flags where they fit or nothing does, else the fastest way that fits with
        dflop's sampler or, where none does, with random batches."""
        policies = (WITH_SAMPLER.policy, RANDOM)
        own = ways[""].plan
        if self._without_costs(own) or not all(self._beyond_bytes(own, policy) for policy in policies):
            return ""
        for policy in policies:
            steps = {words: self._fitting_s(way.plan, policy) for words, way in ways.items()}
            fastest = min(steps, key=steps.__getitem__)
            if steps[fastest] < np.inf:
                return fastest
        return ""

    def _remarks(self, made: Plan, words: str) -> Iterator[str]:
        """Lines on memory before the flags: why these are not the plan's, and what they need."""
        if self._without_costs(made):
            return
        if words:
            yield f"They are not the plan's own, which do not fit into memory; these do, with {words}."
        if self._beyond_bytes(made):
            fits = not self._beyond_bytes(made, WITH_SAMPLER.policy)
            needed = "need dflop's sampler: with random batches they do" if fits else "do"
            yield f"They {needed} not fit into memory."

    def _prices(
        self,
        framework: str,
        plan: Plan,
        step_s: float,
        ways: Mapping[str, Emitted],
        words: str,
        others: Iterable[Plan],
    ) -> Iterator[str]:
        """Lines on what a step takes with the flags of the way `words`, and how it would be faster or fit."""
        emitted, form = ways[words], FRAMEWORKS[framework].form
        made, planned = emitted.plan, f"Predicted step: {step_s:.3g} s as planned"
        if unknown := self._without_costs(made):
            yield f"{planned}; as these {form} have it: not known, for want of costs of {unknown}"
            return
        if made == plan:
            yield f"{planned}, all of which these {form} say; {self._takes(made, RANDOM)} with random batches"
        else:
            but = ", but with whole samples" if plan.grid("llm").cp > 1 else ""
            yield f"{planned}; as these {form} have it{but}: {self._both(made)}"
        if words:
            yield f"With the plan's own {form}{_changed(emitted, ways[''])}: {self._both(ways[''].plan)}"
        random_s = self._fitting_s(made, RANDOM)
        if self._beyond_bytes(made):
            nearest = min((name for name in ways if name), key=lambda name: self._at_random(ways[name].plan))
            if nearest != words:
                yield f"With {nearest}{_changed(emitted, ways[nearest])}: {self._both(ways[nearest].plan)}"
            random_s = self._fitting_s(ways[nearest].plan, RANDOM)
        usual = {other: self._emit(framework, other).plan for other in others}
        steps = {other: self._fitting_s(own, RANDOM) for other, own in usual.items() if not self._without_costs(own)}
        fastest = min(steps, key=steps.__getitem__, default=plan)
        if steps.get(fastest, np.inf) < _WORTH_A_WORD * random_s:
            yield f"With random batches another plan is faster, {fastest}: {steps[fastest]:.3g} s; `plan.fixed` pins it"

    def _emit(self, framework: str, plan: Plan) -> Emitted:
        return emit(framework, plan, self._spec, self._config.train.global_batch_size)

    def _without_costs(self, plan: Plan) -> str:
        """The first module that there are no costs for as the plan divides it; empty where there is none."""
        known = self._costs.layouts
        return next(
            (f"{own.module} with {own.layout}" for own in plan.grids if own.layout not in known[own.module]), ""
        )

    def _both(self, plan: Plan) -> str:
        at_random, by_sampler = (self._takes(plan, policy) for policy in (RANDOM, WITH_SAMPLER.policy))
        return f"{at_random} with random batches, {by_sampler} with dflop's sampler"

    def _takes(self, plan: Plan, policy: Policy) -> str:
        if needed_bytes := self._beyond_bytes(plan, policy):
            return f"no fit ({needed_bytes / 2**30:.3g} GiB a device of {self._config.cluster.memory_gib:.4g})"
        return f"{self._step_s(plan, policy):.3g} s"

    def _fitting_s(self, plan: Plan, policy: Policy) -> float:
        """The step; infinite where it does not fit."""
        return np.inf if self._beyond_bytes(plan, policy) else self._step_s(plan, policy)

    def _at_random(self, plan: Plan) -> tuple[float, float]:
        """Sorts plans by random batches: those that fit by their steps, and behind them the others by their bytes."""
        return self._beyond_bytes(plan), self._fitting_s(plan, RANDOM)

    def _beyond_bytes(self, plan: Plan, policy: Policy = RANDOM) -> float:
        """Bytes that the fullest device needs where that is more than there are; else 0."""
        needed_bytes = self.pricer(plan, policy).needed_bytes()
        return needed_bytes if needed_bytes > self._limit_bytes else 0


def _recomputing_all(plan: Plan) -> Plan:
    return replace(without_recomputed(plan), checkpointing=True)


def _changed(before: Emitted, after: Emitted) -> str:
    """The flags of `after` that `before` has not, and those of `before` that `after` has not, in brackets."""
    new = {name: value for name, value in after.flags.items() if before.flags.get(name, ...) != value}
    words = [f"`{name}`" if value is None else f"`{name} {str(value).lower()}`" for name, value in new.items()]
    words += [f"without `{name}`" for name in before.flags if name not in after.flags]
    return f" ({', '.join(words)})" if words else ""


def _of_trained(trained: TrainedSet) -> str:
    parts = ", ".join(trained.named) or "all parts"
    if trained.frozen:
        parts += f" but {', '.join(trained.frozen)}"
    if trained.lora:
        parts += f", and adapters of rank {trained.lora.rank} in {', '.join(trained.lora.modules)},"
    return f"what is trained: the plan is priced with {parts} trained; where more is trained it may not fit"
