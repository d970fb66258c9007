"""A plan as flags of another framework, with a list of what these flags cannot express.

Flags give the layout only: parallel sizes, layers of each stage, schedule, microbatches, recomputed layers, sharding.
What a framework cannot express is printed as sentences. The regrouping of batches is always among them: it takes
`dflop.BalancedBatchSampler` in a loop of the user's own. Flags are those of the releases in `FRAMEWORKS`.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from dflop.base import UserError
from dflop.models import ModelSpec
from dflop.plan import Plan

__all__ = ["FRAMEWORKS", "Emitted", "emit"]


@dataclass(kw_only=True, slots=True)
class Emitted:
    """Flags of a framework's launch command, and sentences on what they do not express.

    A flag has one value, a list of values or, as a switch, None.
    """

    flags: dict[str, str | list[str] | None] = field(default_factory=dict)
    beyond: list[str] = field(default_factory=list)

    def to_text(self, framework: str, plan: Plan) -> str:
        """The flags, one a line and ready to be pasted, and the sentences as comments of the shell."""
        lines = [f"# {plan}", f"# as flags of {FRAMEWORKS[framework].release}:"]
        values = {name: [value] if isinstance(value, str) else value or [] for name, value in self.flags.items()}
        lines.append(" \\\n".join(shlex.join([name, *words]) for name, words in values.items()))
        if self.beyond:
            lines += ["", "# What these flags cannot express, or express differently:"]
            lines += [f"# - {sentence}" for sentence in self.beyond]
        return "\n".join(lines)


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


def _megatron(plan: Plan, spec: ModelSpec, micro_batch: int) -> Emitted:
    llm = plan.grid("llm")
    emitted = Emitted(
        flags={
            "--tensor-model-parallel-size": str(llm.tp),
            "--pipeline-model-parallel-size": str(llm.pp),
            "--micro-batch-size": str(micro_batch),
            "--global-batch-size": str(micro_batch * plan.num_buckets),
        }
    )
    flags, beyond = emitted.flags, emitted.beyond
    if llm.tp > 1:
        flags["--sequence-parallel"] = None
    layers = [len(part) for part in plan.layers_of("llm", spec.module("llm").num_layers)]
    if len(set(layers)) > 1:
        flags["--pipeline-model-parallel-layout"] = _megatron_layout(layers, llm.pp)
        beyond.append(
            f"layers of each stage: {_joined(layers)}, where E is the embedding, t a layer and L the loss; "
            "a Megatron without `--pipeline-model-parallel-layout` knows "
            "`--decoder-first-pipeline-num-layers` and `--decoder-last-pipeline-num-layers`"
        )
    elif plan.num_chunks > 1:
        flags["--num-virtual-stages-per-pipeline-rank"] = str(plan.num_chunks)
    if plan.schedule not in ("1f1b", "interleaved_1f1b"):
        beyond.append(f"schedule {plan.schedule}: Megatron-LM runs 1F1B, interleaved where there are virtual stages")
    _recompute_in_megatron(emitted, plan.recomputed_of("llm", spec.module("llm").num_layers), layers)
    if llm.gathers:
        # The first demands the others.
        switches = ("--use-torch-fsdp2", "--no-gradient-accumulation-fusion", "--untie-embeddings-and-output-weights")
        flags |= dict.fromkeys(switches)
        beyond.append(
            "`--use-torch-fsdp2` demands that the embedding and the head are not tied, and that "
            "`CUDA_DEVICE_MAX_CONNECTIONS` is not 1"
        )
        if llm.num_shards != llm.dp:
            beyond.append(
                f"parameters shared among {llm.num_shards} replicas of {llm.dp}: `--use-torch-fsdp2` shares them by "
                "all; for such a sharding see the documentation of Megatron-FSDP"
            )
    else:
        # Plans are priced with gradient syncs that hide behind passes.
        flags |= dict.fromkeys(("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"))
    beyond += _of_encoders(plan, spec, "Megatron-LM's flags know one grid, that of the LLM")
    return emitted


def _recompute_in_megatron(emitted: Emitted, recomputed: Sequence[int], layers: Sequence[int]) -> None:
    """Flags for recomputing all layers, or an equal number of first layers in every stage, also in virtual ones."""
    if not any(recomputed):
        return
    emitted.flags["--recompute-granularity"] = "full"
    if list(recomputed) == list(layers):
        emitted.flags |= {"--recompute-method": "uniform", "--recompute-num-layers": "1"}
        return
    most = max(recomputed)
    emitted.flags |= {"--recompute-method": "block", "--recompute-num-layers": str(most)}
    emitted.beyond += _of_recomputed("stage", recomputed, [min(most, count) for count in layers])


def _megatron_layout(layers: list[int], pp: int) -> str:
    """The value of `--pipeline-model-parallel-layout`: the first chunks of all ranks, then their second ones, …"""
    stages = ["t" * count if count < 4 else f"t*{count}" for count in layers]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    assert len(stages) % pp == 0
    return "|".join(stages)


def _torchtitan(plan: Plan, spec: ModelSpec, micro_batch: int) -> Emitted:
    llm = plan.grid("llm")
    shards = llm.num_shards if llm.gathers else 1
    emitted = Emitted(
        flags={
            "--parallelism.tensor_parallel_degree": str(llm.tp),
            "--parallelism.pipeline_parallel_degree": str(llm.pp),
            "--parallelism.data_parallel_shard_degree": str(shards),
            "--parallelism.data_parallel_replicate_degree": str(llm.dp // shards),
            "--training.global_batch_size": str(micro_batch * plan.num_buckets),
        }
    )
    flags, beyond = emitted.flags, emitted.beyond
    num_layers = spec.module("llm").num_layers
    layers = [len(part) for part in plan.layers_of("llm", num_layers)]
    if llm.pp == 1:
        flags["--training.local_batch_size"] = str(micro_batch)
    else:
        flags["--training.local_batch_size"] = str(micro_batch * plan.num_microbatches)
        flags["--parallelism.pipeline_parallel_microbatch_size"] = str(micro_batch)
        known = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B"}
        if plan.schedule in known:
            flags["--parallelism.pipeline_parallel_schedule"] = known[plan.schedule]
        else:
            beyond.append(f"schedule {plan.schedule}: torch.distributed.pipelining has none that is the same")
        if len(set(layers)) == 1:
            flags["--parallelism.pipeline_parallel_layers_per_stage"] = str(layers[0])
            flags["--parallelism.pipeline_parallel_first_stage_less_layers"] = "0"
            flags["--parallelism.pipeline_parallel_last_stage_less_layers"] = "0"
        else:
            flags["--parallelism.module_fqns_per_model_part"] = _torchtitan_modules(layers)
            beyond.append(f"layers of each stage: {_joined(layers)}; torchtitan 0.2 calls `lm_head` `output`")
    if not llm.gathers and llm.dp > 1:
        older = ", and torchtitan 0.2 demands it beside tensor or pipeline parallelism" if llm.tp * llm.pp > 1 else ""
        beyond.append(
            f"optimiser state shared among {llm.dp} replicas that keep whole parameters (ZeRO-1): replicas keep all of "
            "it here, which takes more memory; `--parallelism.data_parallel_shard_degree` shares parameters as well"
            + older
        )
    beyond += _of_encoders(plan, spec, "torchtitan's flags know one mesh, that of the LLM")
    # A subcommand, which takes all that follows it as its own, stands last.
    _recompute_in_torchtitan(emitted, plan.recomputed_of("llm", num_layers), layers, llm.pp)
    return emitted


def _torchtitan_modules(layers: Sequence[int]) -> list[str]:
    """The modules of each stage, by the names that torchtitan's LLMs have."""
    numbers = iter(range(sum(layers)))
    stages = [[f"layers.{number}" for number in islice(numbers, count)] for count in layers]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "lm_head"]
    return [",".join(stage) for stage in stages]


def _recompute_in_torchtitan(emitted: Emitted, recomputed: Sequence[int], layers: Sequence[int], pp: int) -> None:
    """Flags for recomputing all layers or none, and what release 0.2 says instead.

    Release 0.2 can also recompute the last of every two, three, … layers: a process numbers the layers of all its
    stages from 1 on, and recomputes those whose number is a multiple of `every`. Of its flags that recompute enough on
    every rank, the ones that are named recompute least.
    """
    needed = [sum(recomputed[rank::pp]) for rank in range(pp)]
    if not any(needed):
        emitted.flags["activation-checkpoint:none"] = None
        emitted.beyond.append("torchtitan 0.2 says `--activation_checkpoint.mode none` instead of the last flag")
        return
    held = [sum(layers[rank::pp]) for rank in range(pp)]
    emitted.flags["activation-checkpoint:full"] = None
    emitted.beyond += _of_recomputed("pipeline rank", needed, held)
    every = min(num_layers // count for num_layers, count in zip(held, needed, strict=True) if count)
    older = "`--activation_checkpoint.mode full`"
    if every > 1:
        counts = _joined([num_layers // every for num_layers in held])
        older = (
            f"`--activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option {every}`, which "
            f"recomputes {counts} layers, the last of every {every} that a rank holds, where the plan recomputes the "
            "first ones of each stage, which can take less memory,"
        )
    emitted.beyond.append(f"torchtitan 0.2 says {older} instead of the last flag")


def _of_recomputed(place: str, planned: Sequence[int], flagged: Sequence[int]) -> list[str]:
    """A sentence on how many layers the plan and the flags recompute in each place, if these numbers differ."""
    if list(planned) == list(flagged):
        return []
    return [
        f"recomputed layers of each {place}: {_joined(planned)}; the flags are the same for all and recompute "
        f"{_joined(flagged)}, which takes longer"
    ]


def _of_encoders(plan: Plan, spec: ModelSpec, why: str) -> list[str]:
    sentences = []
    for grid in plan.grids[:-1]:
        num_layers = spec.module(grid.module).num_layers
        layers = _joined([len(part) for part in plan.layers_of(grid.module, num_layers)])
        recomputed = plan.recomputed_of(grid.module, num_layers)
        stages = f"{grid.pp} stage{'s' if grid.pp > 1 else ''} ({layers} layers)"
        layout = f"{grid.module}: tp {grid.tp}, {stages}, {grid.dp} replicas"
        recomputing = f", recomputing {_joined(recomputed)} of its {layers} layers, which no flag says"
        recomputing = recomputing if any(recomputed) else ""
        if plan.placement == "monolithic":
            where = "inside the LLM's first stage on the LLM's grid: put it into your model there"
            sentences.append(f"{layout}, {where}{recomputing}")
            continue
        sentences.append(f"{layout} ({plan.placement}): {why}; it takes a grid and a loop of your own{recomputing}")
    return sentences


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


def _joined(counts: Sequence[int]) -> str:
    return "+".join(map(str, counts))


@dataclass(frozen=True, slots=True)
class _Framework:
    """A framework: the release whose flags are emitted, and `flags_of(plan, spec, micro_batch)`, which makes them."""

    release: str
    flags_of: Callable[[Plan, ModelSpec, int], Emitted]


FRAMEWORKS = {
    "megatron": _Framework("Megatron-LM with Megatron Core 0.16", _megatron),
    "torchtitan": _Framework("torchtitan 0.3", _torchtitan),
}
