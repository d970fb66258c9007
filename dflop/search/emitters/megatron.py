"""Megatron-LM's flags."""

from collections.abc import Sequence

from dflop.models import ModelSpec
from dflop.plan import Plan
from dflop.search.emitted import Emitted, Framework, encoders_beside, joined, recomputed_otherwise

__all__ = ["FRAMEWORK"]


def _flags(plan: Plan, spec: ModelSpec, micro_batch: int) -> Emitted:
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
        flags["--pipeline-model-parallel-layout"] = _layout(layers, llm.pp)
        beyond.append(
            f"layers of each stage: {joined(layers)}, where E is the embedding, t a layer and L the loss; "
            "a Megatron without `--pipeline-model-parallel-layout` knows "
            "`--decoder-first-pipeline-num-layers` and `--decoder-last-pipeline-num-layers`"
        )
    elif plan.num_chunks > 1:
        flags["--num-virtual-stages-per-pipeline-rank"] = str(plan.num_chunks)
    if plan.schedule not in ("1f1b", "interleaved_1f1b"):
        beyond.append(f"schedule {plan.schedule}: Megatron-LM runs 1F1B, interleaved where there are virtual stages")
    _recompute_in_flags(emitted, plan.recomputed_of("llm", spec.module("llm").num_layers), layers)
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
    beyond += encoders_beside(plan, spec, "Megatron-LM's flags know one grid, that of the LLM")
    return emitted


def _recompute_in_flags(emitted: Emitted, recomputed: Sequence[int], layers: Sequence[int]) -> None:
    """Flags for recomputing all layers, or an equal number of first layers in every stage, also in virtual ones."""
    if not any(recomputed):
        return
    emitted.flags["--recompute-granularity"] = "full"
    if list(recomputed) == list(layers):
        emitted.flags |= {"--recompute-method": "uniform", "--recompute-num-layers": "1"}
        return
    most = max(recomputed)
    emitted.flags |= {"--recompute-method": "block", "--recompute-num-layers": str(most)}
    emitted.beyond += recomputed_otherwise("stage", recomputed, [min(most, count) for count in layers])


def _layout(layers: list[int], pp: int) -> str:
    """The value of `--pipeline-model-parallel-layout`: the first chunks of all ranks, then their second ones, …"""
    stages = ["t" * count if count < 4 else f"t*{count}" for count in layers]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    assert len(stages) % pp == 0
    return "|".join(stages)


FRAMEWORK = Framework("Megatron-LM with Megatron Core 0.16", _flags)
