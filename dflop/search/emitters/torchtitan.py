"""torchtitan's flags."""

from collections.abc import Sequence
from itertools import islice

from dflop.models import ModelSpec
from dflop.plan import Plan
from dflop.search.emitted import (
    TORCH_SCHEDULES,
    Emitted,
    Framework,
    as_fsdp2,
    copies_and_shards,
    encoders_beside,
    joined,
    on_one_mesh,
)

__all__ = ["FRAMEWORK"]


def _flags(plan: Plan, spec: ModelSpec, micro_batch: int) -> Emitted:
    llm = plan.grid("llm")
    num_layers = spec.module("llm").num_layers
    layers = [len(part) for part in plan.layers_of("llm", num_layers)]
    planned = plan.recomputed_of("llm", num_layers)
    made = on_one_mesh(plan, spec, {"llm": layers if any(planned) else planned}, as_fsdp2(llm))
    copies, shards = copies_and_shards(llm)
    emitted = Emitted(
        plan=made,
        flags={
            "--parallelism.tensor_parallel_degree": str(llm.tp),
            "--parallelism.pipeline_parallel_degree": str(llm.pp),
            "--parallelism.data_parallel_shard_degree": str(shards),
            "--parallelism.data_parallel_replicate_degree": str(copies),
            "--training.global_batch_size": str(micro_batch * plan.num_buckets),
        },
    )
    flags, beyond = emitted.flags, emitted.beyond
    if llm.pp == 1:
        flags["--training.local_batch_size"] = str(micro_batch)
    else:
        flags["--training.local_batch_size"] = str(micro_batch * plan.num_microbatches)
        flags["--parallelism.pipeline_parallel_microbatch_size"] = str(micro_batch)
        flags["--parallelism.pipeline_parallel_schedule"] = TORCH_SCHEDULES[plan.schedule]
        flags["--training.disable_cuda_graphs"] = None
        beyond.append(
            "`--training.disable_cuda_graphs`, which it demands of pipelines: torchtitan 0.2 has no such flag"
        )
        if len(set(layers)) == 1:
            flags["--parallelism.pipeline_parallel_layers_per_stage"] = str(layers[0])
            flags["--parallelism.pipeline_parallel_first_stage_less_layers"] = "0"
            flags["--parallelism.pipeline_parallel_last_stage_less_layers"] = "0"
        else:
            flags["--parallelism.module_fqns_per_model_part"] = _modules(layers)
            beyond.append(f"layers of each stage: {joined(layers)}; torchtitan 0.2 calls `lm_head` `output`")
    beyond += encoders_beside(plan, spec, "torchtitan's flags know one mesh, that of the LLM")
    # A subcommand, which takes all that follows it as its own, stands last.
    _recompute_in_flags(emitted, planned, layers, llm.pp)
    return emitted


def _modules(layers: Sequence[int]) -> list[str]:
    """The modules of each stage, by the names that torchtitan's LLMs have."""
    numbers = iter(range(sum(layers)))
    stages = [[f"layers.{number}" for number in islice(numbers, count)] for count in layers]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "lm_head"]
    return [",".join(stage) for stage in stages]


def _recompute_in_flags(emitted: Emitted, recomputed: Sequence[int], layers: Sequence[int], pp: int) -> None:
    """Flags for recomputing all layers or none, and what release 0.2 says instead.

    Release 0.2 can also recompute the last of every two, three, … layers: a process numbers the layers of all its
    stages from 1 on, and recomputes those whose number is a multiple of `every`. The sentence names the
    largest `every` with which each rank recomputes enough layers.
    """
    needed = [sum(recomputed[rank::pp]) for rank in range(pp)]
    if not any(needed):
        emitted.flags["activation-checkpoint:none"] = None
        emitted.beyond.append("torchtitan 0.2 says `--activation_checkpoint.mode none` instead of the last flag")
        return
    held = [sum(layers[rank::pp]) for rank in range(pp)]
    emitted.flags["activation-checkpoint:full"] = None
    every = min(num_layers // count for num_layers, count in zip(held, needed, strict=True) if count)
    older = "`--activation_checkpoint.mode full`"
    if every > 1:
        counts = joined([num_layers // every for num_layers in held])
        older = (
            f"`--activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option {every}`, which "
            f"recomputes {counts} layers, the last of every {every} that a rank holds, where the plan recomputes the "
            "first ones of each stage, which can take less memory,"
        )
    emitted.beyond.append(f"torchtitan 0.2 says {older} instead of the last flag")


FRAMEWORK = Framework("torchtitan 0.3", _flags, "--parallelism.context_parallel_degree")
