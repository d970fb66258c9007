"""Megatron-LM's flags."""

from dflop.models import ModelSpec
from dflop.plan import Plan
from dflop.search.emitted import Emitted, Framework, encoders_beside
from dflop.search.megatron_layout import megatron_layout

__all__ = ["FRAMEWORK"]

_OTHER_NAMES = {"virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank"}


def _flags(plan: Plan, spec: ModelSpec, micro_batch: int) -> Emitted:
    llm = plan.grid("llm")
    layout = megatron_layout(plan, spec)
    sizes = {"micro_batch_size": micro_batch, "global_batch_size": micro_batch * plan.num_buckets}
    emitted = Emitted(
        plan=layout.plan,
        flags={
            _OTHER_NAMES.get(name, "--" + name.replace("_", "-")): None if value is True else str(value)
            for name, value in {**layout.flags, **sizes}.items()
        },
        beyond=layout.beyond,
    )
    flags, beyond = emitted.flags, emitted.beyond
    if "--pipeline-model-parallel-layout" in flags:
        beyond.append(
            "a Megatron without `--pipeline-model-parallel-layout` knows `--decoder-first-pipeline-num-layers` and "
            "`--decoder-last-pipeline-num-layers`"
        )
    if llm.gathers:
        # The first demands the others.
        switches = ("--use-torch-fsdp2", "--no-gradient-accumulation-fusion", "--untie-embeddings-and-output-weights")
        flags |= dict.fromkeys(switches)
        beyond.append(
            "`--use-torch-fsdp2` demands that the embedding and the head are not tied, and that "
            "`CUDA_DEVICE_MAX_CONNECTIONS` is not 1"
        )
        if llm.num_shards != llm.dp:
            beyond.append("for parameters shared by some of the replicas see the documentation of Megatron-FSDP")
    else:
        # Plans are priced with gradient syncs that hide behind passes.
        flags |= dict.fromkeys(("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"))
    beyond += encoders_beside(plan, spec, "Megatron-LM's flags know one grid, that of the LLM")
    return emitted


FRAMEWORK = Framework("Megatron-LM with Megatron Core 0.16", _flags, "--context-parallel-size")
