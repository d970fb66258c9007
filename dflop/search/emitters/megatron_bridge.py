"""Megatron-Bridge's config: a YAML file that overrides fields of a recipe's `ConfigContainer`."""

from dflop.models import ModelSpec
from dflop.plan import Plan
from dflop.search.emitted import Emitted, Framework, encoders_beside
from dflop.search.megatron_layout import megatron_layout

__all__ = ["FRAMEWORK"]


def _keys(plan: Plan, spec: ModelSpec, micro_batch: int) -> Emitted:
    llm = plan.grid("llm")
    layout = megatron_layout(plan, spec, has_hybrid=True)
    keys, beyond = {f"model.{name}": value for name, value in layout.flags.items()}, layout.beyond
    keys |= {
        "train.micro_batch_size": micro_batch,
        "train.global_batch_size": micro_batch * plan.num_buckets,
        "ddp.use_distributed_optimizer": True,
        "ddp.overlap_grad_reduce": True,
        "ddp.overlap_param_gather": True,
    }
    if llm.cp > 1:
        # It demands both of fine-tuning: a device may hold no target of its part of a sample.
        keys |= {"model.calculate_per_token_loss": True, "ddp.average_in_collective": False}
    if llm.gathers:
        keys |= {
            "ddp.use_megatron_fsdp": True,
            "ddp.data_parallel_sharding_strategy": "optim_grads_params",
            "checkpoint.ckpt_format": "fsdp_dtensor",  # the only one that Megatron-FSDP writes
        }
        if llm.num_shards != llm.dp:
            keys["ddp.num_distributed_optimizer_instances"] = llm.dp // llm.num_shards
        beyond.append("Megatron-FSDP demands that `CUDA_DEVICE_MAX_CONNECTIONS` is not 1")
    beyond += encoders_beside(plan, spec, "a Megatron-Bridge config knows one grid, that of the LLM")
    return Emitted(plan=layout.plan, flags=keys, beyond=beyond)


FRAMEWORK = Framework("Megatron-Bridge 0.3", _keys, "model.context_parallel_size", is_config=True)
