"""A plan in another trainer's words (`search.emit`), with the price of the plan that the trainer makes of them.

That plan is priced on the batches of the search, as the systems of the comparison are: with random batches, as trainers
draw them, and with our sampler's. Where it does not fit into memory, the keys are named with which it would.
"""

from collections.abc import Iterable, Iterator
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
        emitted = self._emit(framework, used)
        if refusal:
            emitted.beyond.insert(
                0,
                f"the chosen plan, {chosen.plan}: {refusal}. The plan above is the fastest of those priced that it can "
                f"run: its expected step takes {step_s:.3g} s instead of {chosen.step_s:.3g} s",
            )
        if self._config.model.trained != EVERYTHING:
            emitted.beyond.insert(0, _of_trained(self._config.model.trained))
        return emitted.to_text(about, used, list(self._prices(framework, used, step_s, able)))

    def _step_s(self, plan: Plan, policy: Policy = LPT) -> float:
        return self.pricer(plan, policy).mean_step_s()

    def _prices(self, framework: str, plan: Plan, step_s: float, others: Iterable[Plan]) -> Iterator[str]:
        """Lines on what a step takes as the flags have it, and how it would be faster or fit."""
        emitted, form = self._emit(framework, plan), FRAMEWORKS[framework].form
        made, planned = emitted.plan, f"Predicted step: {step_s:.3g} s as planned"
        if unknown := self._without_costs(made):
            yield f"{planned}; as these {form} have it: not known, for want of costs of {unknown}"
            return
        if made == plan:
            yield f"{planned}, all of which these {form} say; {self._takes(made, RANDOM)} with random batches"
        else:
            but = ", but with whole samples" if plan.grid("llm").cp > 1 else ""
            yield f"{planned}; as these {form} have it{but}: {self._both(made)}"
        if self._beyond_bytes(made):
            words, way_out = self._way_out(framework, plan)
            made = way_out.plan
            yield f"With {words}{_changed(emitted, way_out)}: {self._both(made)}"
        usual = {other: self._emit(framework, other).plan for other in others}
        steps = {other: self._random_s(own) for other, own in usual.items() if not self._without_costs(own)}
        fastest = min(steps, key=steps.__getitem__, default=plan)
        if steps.get(fastest, np.inf) < _WORTH_A_WORD * self._random_s(made):
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

    def _random_s(self, plan: Plan) -> float:
        """The step with random batches; infinite where they do not fit."""
        return np.inf if self._beyond_bytes(plan) else self._step_s(plan, RANDOM)

    def _beyond_bytes(self, plan: Plan, policy: Policy = RANDOM) -> float:
        """Bytes that the fullest device needs where that is more than there are; else 0."""
        needed_bytes = self.pricer(plan, policy).needed_bytes()
        return needed_bytes if needed_bytes > self._limit_bytes else 0

    def _way_out(self, framework: str, plan: Plan) -> tuple[str, Emitted]:
        """The fastest way in which random batches fit, or else the nearest, in words and flags: to recompute all that
        flags can say, smaller microbatches, or both."""
        size, num_microbatches = self._config.train.global_batch_size, plan.num_microbatches
        found: dict[str, Emitted] = {}
        while num_microbatches * plan.grid("llm").dp <= size:
            other = replace(plan, num_microbatches=num_microbatches)
            smaller = [f"{num_microbatches} microbatches"] if num_microbatches > plan.num_microbatches else []
            for way, words in ((other, smaller), (_recomputing_all(other), ["full recomputing", *smaller])):
                if words and not FRAMEWORKS[framework].refusal(way):
                    found[" and ".join(words)] = self._emit(framework, way)
            num_microbatches *= 2
        return min(found.items(), key=lambda way: (self._beyond_bytes(way[1].plan), self._random_s(way[1].plan)))


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
