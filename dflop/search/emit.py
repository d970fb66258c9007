"""A plan as flags or config file of another framework, with a list of what these cannot express.

Flags give the layout only: parallel sizes, layers of each stage, schedule, microbatches, recomputed layers, sharding.
What a framework cannot express is printed as sentences; what that costs is in `comparison.emitted_plan`. Flags are
those of the releases in `FRAMEWORKS`, one framework a file in `emitters/`.
"""

from dflop.models import ModelSpec
from dflop.plan import Grid, Plan
from dflop.search.emitted import Emitted, joined
from dflop.search.emitters import FRAMEWORKS

__all__ = ["FRAMEWORKS", "Emitted", "emit"]


def emit(framework: str, plan: Plan, spec: ModelSpec, global_batch_size: int) -> Emitted:
    """The plan in a framework's flags, for a plan that its `refusal` has nothing against."""
    # Frameworks give all microbatches the same number of samples: the rounded mean of the plan's.
    micro_batch = max(1, round(global_batch_size / plan.num_buckets))
    about, cp = FRAMEWORKS[framework], plan.grid("llm").cp
    emitted = about.flags_of(plan, spec, micro_batch)
    if cp > 1:
        # In front, as a subcommand of torchtitan takes all that follows it.
        emitted.flags = {about.cp_key: cp if about.is_config else str(cp)} | emitted.flags
        emitted.beyond.append(
            f"long samples: the plan divides these alone, over up to {cp} replicas, and `{about.cp_key}` every sample "
            f"over {cp} devices, so that lengths must be multiples of {about.cp_runs * cp}; "
            f"steps as these {about.form} have it are priced without it, with whole samples"
        )
    emitted.beyond += [
        *_made_otherwise(plan, emitted.plan, spec, about.form),
        "who computes which samples: this plan's step is that of regrouped batches; `dflop.BalancedBatchSampler` "
        "regroups them in a loop of your own",
        "lengths and precision: predicted steps are those of microbatches of packed samples, in `train.precision`; "
        "how long microbatches are, and the precision, is left to the framework's own settings",
    ]
    if global_batch_size % plan.num_buckets:
        emitted.beyond.append(
            f"{global_batch_size} samples do not divide by {plan.num_buckets} microbatches: these {about.form} give "
            f"each {micro_batch}, {micro_batch * plan.num_buckets} in all"
        )
    return emitted


def _made_otherwise(plan: Plan, made: Plan, spec: ModelSpec, form: str) -> list[str]:
    """Sentences on what replicas share and which layers are recomputed, where the framework's plan differs."""
    sentences = []
    for what, of_grid in (("what replicas share", _shared), ("recomputed layers", _recomputed)):
        planned, flagged = ([f"{grid.module} {of_grid(own, grid, spec)}" for grid in own.grids] for own in (plan, made))
        if differ := [(ours, theirs) for ours, theirs in zip(planned, flagged, strict=True) if ours != theirs]:
            ours, theirs = map(", ".join, zip(*differ, strict=True))
            sentences.append(f"{what}: {ours}; as these {form} have it: {theirs}")
    if any(kept := plan.attention_kept_of("llm")):
        sentences.append(
            f"recomputed but for attention: {joined(kept)} layers of the LLM; these {form} recompute layers as a "
            "whole. Nearest is torchtitan's selective mode, which keeps attention's results and every second product"
        )
    if offloaded := [f"{grid.module} {joined(grid.offloaded)}" for grid in plan.grids if any(grid.offloaded)]:
        sentences.append(f"layers in host memory: {', '.join(offloaded)}; these {form} keep all of them on the device")
    if plan.offloads_optimizer:
        sentences.append(f"the optimiser's state in host memory between steps; these {form} keep it on the device")
    return sentences


def _shared(plan: Plan, grid: Grid, spec: ModelSpec) -> str:
    return f"parameters among {grid.num_shards}" if grid.gathers else "the optimiser's state (ZeRO-1)"


def _recomputed(plan: Plan, grid: Grid, spec: ModelSpec) -> str:
    """The recomputed layers of each of the LLM's stages, or all of an encoder's, whose stages no framework has."""
    counts = plan.recomputed_of(grid.module, spec.module(grid.module).num_layers)
    return joined(counts if grid.module == "llm" else [sum(counts)])
