"""A plan as flags or config file of another framework, with a list of what these cannot express.

Flags give the layout only: parallel sizes, layers of each stage, schedule, microbatches, recomputed layers, sharding.
What a framework cannot express is printed as sentences. The regrouping of batches is always among them: it takes
`dflop.BalancedBatchSampler` in a loop of the user's own. Flags are those of the releases in `FRAMEWORKS`, one framework
a file in `emitters/`. A plan that a framework cannot run at all is replaced by the fastest priced one that it can, with
what that costs.
"""

from collections.abc import Iterable

from dflop.base import UserError
from dflop.models import ModelSpec
from dflop.plan import Plan
from dflop.plan.trained import EVERYTHING, TrainedSet
from dflop.search.candidate import Candidate
from dflop.search.emitted import Emitted
from dflop.search.emitters import FRAMEWORKS

__all__ = ["FRAMEWORKS", "Emitted", "emit", "emitted_text"]


def emitted_text(
    framework: str,
    chosen: Candidate,
    others: Iterable[Candidate],
    spec: ModelSpec,
    global_batch_size: int,
    trained: TrainedSet = EVERYTHING,
) -> str:
    """The chosen plan in a framework's flags or, where it cannot run that plan, the fastest of the others it can.

    Raises:
        UserError: when the framework can run none of them.
    """
    about, used = FRAMEWORKS[framework], chosen
    refusal = about.refusal(chosen.plan)
    if refusal:
        able = [candidate for candidate in others if not about.refusal(candidate.plan)]
        if not able:
            raise UserError(
                f"{about.release} cannot run the plan ({chosen.plan}) or any other that was priced: {refusal}; "
                "`plan.fixed` can pin a layout that it can"
            )
        used = min(able, key=lambda candidate: candidate.step_s)
    emitted = emit(framework, used.plan, spec, global_batch_size)
    if refusal:
        emitted.beyond.insert(
            0,
            f"the chosen plan, {chosen.plan}: {refusal}. The plan above is the fastest of those priced that it can "
            f"run: its expected step takes {used.step_s:.3g} s, {used.step_s / chosen.step_s - 1:.0%} more than "
            f"{chosen.step_s:.3g} s",
        )
    if trained != EVERYTHING:
        emitted.beyond.insert(0, _of_trained(trained))
    return emitted.to_text(about, used.plan)


def emit(framework: str, plan: Plan, spec: ModelSpec, global_batch_size: int) -> Emitted:
    """The plan in a framework's flags.

    Raises:
        UserError: for a framework that is not among `FRAMEWORKS`, or that cannot run the plan.
    """
    if framework not in FRAMEWORKS:
        raise UserError(
            f"a plan has no flags for the framework {framework!r}; it must be one of {', '.join(FRAMEWORKS)}"
        )
    if refusal := FRAMEWORKS[framework].refusal(plan):
        raise UserError(f"{FRAMEWORKS[framework].release} cannot run the plan ({plan}): {refusal}")
    # Frameworks give all microbatches the same number of samples: the rounded mean of the plan's.
    micro_batch = max(1, round(global_batch_size / plan.num_buckets))
    emitted = FRAMEWORKS[framework].flags_of(plan, spec, micro_batch)
    emitted.beyond += _of_batches(plan, global_batch_size, micro_batch)
    return emitted


def _of_trained(trained: TrainedSet) -> str:
    parts = ", ".join(trained.named) or "all parts"
    if trained.frozen:
        parts += f" but {', '.join(trained.frozen)}"
    if trained.lora:
        parts += f", and adapters of rank {trained.lora.rank} in {', '.join(trained.lora.modules)},"
    return f"what is trained: the plan is priced with {parts} trained; where more is trained it may not fit"


def _of_batches(plan: Plan, global_batch_size: int, micro_batch: int) -> list[str]:
    sentences = [
        "who computes which samples: the predicted step is that of regrouped batches; `dflop.BalancedBatchSampler` "
        "regroups them in a loop of your own",
        "lengths and precision: the predicted step is that of microbatches of packed samples, in `train.precision`; "
        "how long microbatches are, and the precision, is left to the framework's own settings",
    ]
    if global_batch_size % plan.num_buckets:
        sentences.append(
            f"{global_batch_size} samples do not divide by {plan.num_buckets} microbatches: the flags give each "
            f"{micro_batch}, {micro_batch * plan.num_buckets} in all"
        )
    return sentences
