"""A plan in the words of another framework: its flags, and what of the plan it has no words for.

Only the layout is told: parallel sizes, layers of each stage, schedule, microbatches, recomputing, sharding. What a
framework cannot express is said instead of being left out in silence; that batches are regrouped is always among it,
unless the framework's own loop takes `dflop.BalancedBatchSampler`. Flags are those of Megatron-LM's `arguments.py` and
of torchtitan's `job_config.py`.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

from dflop.models import ModelSpec
from dflop.parallelism import Plan
from dflop.runtime import UserError

__all__ = ["FRAMEWORKS", "Emitted", "emit"]


@dataclass(kw_only=True, slots=True)
class Emitted:
    """Flags of a framework's launch command, and sentences on what they do not say."""

    flags: dict[str, str | None] = field(default_factory=dict)
    beyond: list[str] = field(default_factory=list)

    def to_text(self, framework: str, plan: Plan) -> str:
        """Flags a line each, to be pasted, with what is missing as comments of the shell."""
        lines = [f"# {plan}", f"# in {framework}'s words:"]
        flags = [f"{name} {shlex.quote(value)}" if value is not None else name for name, value in self.flags.items()]
        lines.append(" \\\n".join(flags))
        if self.beyond:
            lines += ["", f"# What {framework} has no words for, or says otherwise:"]
            lines += [f"# - {sentence}" for sentence in self.beyond]
        return "\n".join(lines)


def emit(framework: str, plan: Plan, spec: ModelSpec, global_batch_size: int) -> Emitted:
    """The plan in a framework's flags.

    Raises:
        UserError: for a framework that is not among `FRAMEWORKS`.
    """
    if framework not in FRAMEWORKS:
        raise UserError(f"there are no words of {framework!r} for a plan; it must be one of {', '.join(FRAMEWORKS)}")
    emitted = FRAMEWORKS[framework](plan, spec, global_batch_size)
    emitted.beyond += _of_batches(plan, global_batch_size)
    return emitted


def _megatron(plan: Plan, spec: ModelSpec, global_batch_size: int) -> Emitted:
    llm = plan.grid("llm")
    emitted = Emitted(
        flags={
            "--tensor-model-parallel-size": str(llm.tp),
            "--pipeline-model-parallel-size": str(llm.pp),
            "--micro-batch-size": str(_micro_batch(plan, global_batch_size)),
            "--global-batch-size": str(global_batch_size),
        }
    )
    flags, beyond = emitted.flags, emitted.beyond
    if llm.tp > 1:
        flags["--sequence-parallel"] = None
    layers = [len(part) for part in plan.layers_of("llm", spec.module("llm").num_layers)]
    if len(set(layers)) > 1:
        flags["--pipeline-model-parallel-layout"] = _megatron_layout(layers, llm.pp)
        beyond.append(
            f"layers of each stage: {'+'.join(map(str, layers))}, where E is the embedding, t a layer and L the loss; "
            "a Megatron without `--pipeline-model-parallel-layout` knows "
            "`--decoder-first-pipeline-num-layers` and `--decoder-last-pipeline-num-layers`"
        )
    elif plan.num_chunks > 1:
        flags["--num-virtual-stages-per-pipeline-rank"] = str(plan.num_chunks)
    if plan.schedule not in ("1f1b", "interleaved_1f1b"):
        beyond.append(f"schedule {plan.schedule}: Megatron-LM runs 1F1B, interleaved where there are virtual stages")
    if plan.checkpointing:
        flags |= {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": "1"}
    if llm.gathers:
        flags["--use-torch-fsdp2"] = None
        if llm.num_shards != llm.dp:
            beyond.append(
                f"parameters shared among {llm.num_shards} replicas of {llm.dp}: `--use-torch-fsdp2` shares them by all"
            )
    else:
        flags["--use-distributed-optimizer"] = None
    beyond += _of_encoders(plan, spec, "Megatron-LM's flags know one grid, that of the LLM")
    return emitted


def _megatron_layout(layers: list[int], pp: int) -> str:
    """The stages of `--pipeline-model-parallel-layout`: the first chunks of all ranks, then the second ones."""
    stages = ["t" * count if count < 4 else f"t*{count}" for count in layers]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    assert len(stages) % pp == 0
    return "|".join(stages)


def _torchtitan(plan: Plan, spec: ModelSpec, global_batch_size: int) -> Emitted:
    llm = plan.grid("llm")
    shards = llm.num_shards if llm.gathers else 1
    local = max(1, global_batch_size // llm.dp)
    emitted = Emitted(
        flags={
            "--parallelism.tensor_parallel_degree": str(llm.tp),
            "--parallelism.pipeline_parallel_degree": str(llm.pp),
            "--parallelism.data_parallel_shard_degree": str(shards),
            "--parallelism.data_parallel_replicate_degree": str(llm.dp // shards),
            "--training.global_batch_size": str(global_batch_size),
            "--activation_checkpoint.mode": "full" if plan.checkpointing else "none",
        }
    )
    flags, beyond = emitted.flags, emitted.beyond
    micro_batch = _micro_batch(plan, global_batch_size)
    if llm.pp == 1:
        flags["--training.local_batch_size"] = str(micro_batch)
    else:
        flags["--training.local_batch_size"] = str(local)
        flags["--parallelism.pipeline_parallel_microbatch_size"] = str(micro_batch)
        known = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B"}
        if plan.schedule in known:
            flags["--parallelism.pipeline_parallel_schedule"] = known[plan.schedule]
        else:
            beyond.append(f"schedule {plan.schedule}: torch.distributed.pipelining has none that is the same")
        layers = [len(part) for part in plan.layers_of("llm", spec.module("llm").num_layers)]
        if len(set(layers)) == 1:
            flags["--parallelism.pipeline_parallel_layers_per_stage"] = str(layers[0])
            flags["--parallelism.pipeline_parallel_first_stage_less_layers"] = "0"
            flags["--parallelism.pipeline_parallel_last_stage_less_layers"] = "0"
        else:
            beyond.append(
                f"layers of each stage: {'+'.join(map(str, layers))}; name each stage's modules in your model's "
                "pipelining function"
            )
        beyond.append("pipeline stages infer shapes from the first microbatch: pack or pad microbatches to one length")
    if not llm.gathers and llm.dp > 1:
        beyond.append(
            f"optimiser state shared among {llm.dp} replicas that keep whole parameters (ZeRO-1): replicas keep all of "
            "it here, which takes more memory; `--parallelism.data_parallel_shard_degree` shares parameters as well"
        )
    beyond += _of_encoders(plan, spec, "torchtitan's flags know one mesh, and its LLMs have no encoder of their own")
    return emitted


def _micro_batch(plan: Plan, global_batch_size: int) -> int:
    """Samples of a microbatch in the mean, rounded: frameworks give all microbatches as many."""
    return max(1, round(global_batch_size / plan.num_buckets))


def _of_encoders(plan: Plan, spec: ModelSpec, why: str) -> list[str]:
    sentences = []
    for grid in plan.grids[:-1]:
        layers = "+".join(str(len(part)) for part in plan.layers_of(grid.module, spec.module(grid.module).num_layers))
        stages = f"{grid.pp} stage{'s' if grid.pp > 1 else ''} ({layers} layers)"
        own = f"{grid.module}: tp {grid.tp}, {stages}, {grid.dp} replicas"
        if plan.placement == "monolithic":
            sentences.append(f"{own}, inside the LLM's first stage on the LLM's grid: put it into your model there")
            continue
        sentences.append(f"{own} ({plan.placement}): {why}; it takes a grid and a loop of your own")
    return sentences


def _of_batches(plan: Plan, global_batch_size: int) -> list[str]:
    sentences = [
        "who computes which samples: the predicted step is that of regrouped batches; `dflop.BalancedBatchSampler` "
        "regroups them in a loop of your own"
    ]
    if global_batch_size % plan.num_buckets:
        sentences.append(
            f"{global_batch_size} samples do not divide by {plan.num_buckets} microbatches: the flags round, the plan "
            "does not"
        )
    return sentences


FRAMEWORKS: dict[str, Callable[[Plan, ModelSpec, int], Emitted]] = {"megatron": _megatron, "torchtitan": _torchtitan}
