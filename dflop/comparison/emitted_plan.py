"""A plan in another trainer's words (`search.emit`), with the price of the plan that the trainer makes of them.

That plan is priced on the batches of the search, as the systems of the comparison are: with random batches, as trainers
draw them, and with our sampler's. Where it does not fit into memory, the keys are named with which it would.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

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
from dflop.shapes import SampleShapes

__all__ = ["EmittedPlans"]

# Another plan is named where a step takes less than this share of the time.
_WORTH_A_WORD = 0.97


class EmittedPlans:
    """Plans in frameworks' flags, priced for one config, model and dataset."""

    def __init__(self, config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes) -> None:
        self._config, self._spec, self._costs = config, spec, costs
        self._batches = GroupedBatches(config, spec, costs, samples)
        self._limit_bytes = config.cluster.memory_gib * 2**30
        self.pricer = cache(self._pricer)

    def _pricer(self, plan: Plan, policy: Policy) -> PlanPricer:
        """The pricer of a plan on the search's batches, grouped by the quick form of a policy."""
        return PlanPricer(plan, self._config, self._spec, self._costs, self._batches, policy)

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
        at_random = f"{self._takes(made, RANDOM)} with random batches"
        if made == plan:
            yield f"{planned}, all of which these {form} say; {at_random}"
        else:
            by_sampler = self._takes(made, WITH_SAMPLER.policy)
            yield f"{planned}; as these {form} have it: {at_random}, {by_sampler} with dflop's sampler"
        if self._beyond_bytes(made):
            yield self._way_out(framework, plan, emitted)
        usual = {other: self._emit(framework, other).plan for other in others if other != plan}
        steps = {
            other: self._step_s(own, RANDOM)
            for other, own in usual.items()
            if not self._without_costs(own) and not self._beyond_bytes(own)
        }
        fastest = min(steps, key=steps.__getitem__, default=None)
        if fastest and (self._beyond_bytes(made) or steps[fastest] < _WORTH_A_WORD * self._step_s(made, RANDOM)):
            yield f"With random batches another plan is faster, {fastest}: {steps[fastest]:.3g} s; `plan.fixed` pins it"

    def _emit(self, framework: str, plan: Plan) -> Emitted:
        return emit(framework, plan, self._spec, self._config.train.global_batch_size)

    def _without_costs(self, plan: Plan) -> str:
        """The first module that there are no costs for as the plan divides it; empty where there is none."""
        known = self._costs.layouts
        return next(
            (f"{own.module} with {own.layout}" for own in plan.grids if own.layout not in known[own.module]), ""
        )

    def _takes(self, plan: Plan, policy: Policy) -> str:
        if needed_bytes := self._beyond_bytes(plan, policy):
            return f"no fit ({needed_bytes / 2**30:.3g} GiB a device of {self._config.cluster.memory_gib:.4g})"
        return f"{self._step_s(plan, policy):.3g} s"

    def _beyond_bytes(self, plan: Plan, policy: Policy = RANDOM) -> float:
        """Bytes that the fullest device needs where that is more than there are; else 0."""
        needed_bytes = self.pricer(plan, policy).needed_bytes()
        return needed_bytes if needed_bytes > self._limit_bytes else 0

    def _way_out(self, framework: str, plan: Plan, emitted: Emitted) -> str:
        """A line on the fastest way in which random batches fit, or else on the nearest: to recompute all that flags
        can say, smaller microbatches, or both."""
        size, num_microbatches = self._config.train.global_batch_size, plan.num_microbatches
        found: dict[str, Emitted] = {}
        while num_microbatches * plan.grid("llm").dp <= size:
            other = replace(plan, num_microbatches=num_microbatches)
            smaller = [f"{num_microbatches} microbatches"] if num_microbatches > plan.num_microbatches else []
            for way, words in ((other, smaller), (_recomputing_all(other), ["full recomputing", *smaller])):
                if words and not FRAMEWORKS[framework].refusal(way):
                    found[" and ".join(words)] = self._emit(framework, way)
            num_microbatches *= 2
        fitting = {words: way for words, way in found.items() if not self._beyond_bytes(way.plan)}
        if fitting:
            words = min(fitting, key=lambda words: self._step_s(fitting[words].plan, RANDOM))
        else:
            words = min(found, key=lambda words: self._beyond_bytes(found[words].plan))
        takes = self._takes(found[words].plan, RANDOM)
        return f"With {words}{_changed(emitted, found[words])}: {takes} with random batches"


def _recomputing_all(plan: Plan) -> Plan:
    grids = tuple(replace(grid, recomputed=()) for grid in plan.grids)
    return replace(plan, grids=grids, checkpointing=True)


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
