"""A plan as flags of another framework, with a list of what these flags cannot express.

Flags give the layout only: parallel sizes, layers of each stage, schedule, microbatches, recomputed layers, sharding.
What a framework cannot express is printed as sentences. The regrouping of batches is always among them: it takes
`dflop.BalancedBatchSampler` in a loop of the user's own. Flags are those of the releases in `FRAMEWORKS`, one framework
a file in `emitters/`.
"""

from dflop.base import UserError
from dflop.models import ModelSpec
from dflop.plan import Plan
from dflop.search.emitted import Emitted
from dflop.search.emitters import FRAMEWORKS

__all__ = ["FRAMEWORKS", "Emitted", "emit"]


def emit(framework: str, plan: Plan, spec: ModelSpec, global_batch_size: int) -> Emitted:
    """The plan in a framework's flags.

    Raises:
        UserError: for a framework that is not among `FRAMEWORKS`.
    """
    if framework not in FRAMEWORKS:
        raise UserError(
            f"a plan has no flags for the framework {framework!r}; it must be one of {', '.join(FRAMEWORKS)}"
        )
    # Frameworks give all microbatches the same number of samples: the rounded mean of the plan's.
    micro_batch = max(1, round(global_batch_size / plan.num_buckets))
    emitted = FRAMEWORKS[framework].flags_of(plan, spec, micro_batch)
    emitted.beyond += _of_batches(plan, global_batch_size, micro_batch)
    return emitted


def _of_batches(plan: Plan, global_batch_size: int, micro_batch: int) -> list[str]:
    sentences = [
        "who computes which samples: the predicted step is that of regrouped batches; `dflop.BalancedBatchSampler` "
        "regroups them in a loop of your own",
        "lengths and precision: the predicted step is that of microbatches of packed samples, in `train.precision`; "
        "these flags keep the framework's microbatches of one length, and its precision",
    ]
    if global_batch_size % plan.num_buckets:
        sentences.append(
            f"{global_batch_size} samples do not divide by {plan.num_buckets} microbatches: the flags give each "
            f"{micro_batch}, {micro_batch * plan.num_buckets} in all"
        )
    return sentences
