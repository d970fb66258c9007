"""Accelerate's config, as `accelerate launch --config_file` takes it: FSDP2, or DeepSpeed's ZeRO-1.

Which of them follows from the plan: ZeRO-1 is what plans mean whose replicas share nothing but the optimiser's state.
"""

from dflop.models import ModelSpec
from dflop.plan import Plan
from dflop.search.emitted import (
    Emitted,
    Framework,
    copies_and_shards,
    encoders_beside,
    on_one_mesh,
    recomputed_all_or_none,
    shared_beyond_cp,
    split_or_apart,
)

__all__ = ["FRAMEWORK"]


def _keys(plan: Plan, spec: ModelSpec, micro_batch: int) -> Emitted:
    plan = shared_beyond_cp(plan)
    llm = plan.grid("llm")
    recomputed = recomputed_all_or_none(plan, spec)
    emitted = Emitted(
        plan=on_one_mesh(plan, spec, recomputed),
        flags={
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "FSDP" if llm.gathers else "DEEPSPEED",
            "num_processes": plan.world_size,
        },
        beyond=[
            f"batches: `per_device_train_batch_size` {micro_batch} and `gradient_accumulation_steps` "
            f"{plan.num_microbatches * llm.cp} are arguments of the trainer",
            "several nodes: add `num_machines`, and on each of them `machine_rank` and `main_process_ip`",
        ],
    )
    keys, beyond = emitted.flags, emitted.beyond
    if llm.gathers:
        keys |= {
            "fsdp_config.fsdp_version": 2,
            "fsdp_config.fsdp_reshard_after_forward": True,
            "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_config.fsdp_activation_checkpointing": bool(recomputed),
        }
        if llm.num_shards != llm.dp or llm.cp > 1:
            sizes = zip(("replicate", "shard"), copies_and_shards(llm), strict=True)
            keys |= {f"parallelism_config.parallelism_config_dp_{name}_size": size for name, size in sizes}
        if plan.num_microbatches > 1:
            beyond.append(
                "gradients: `sync_each_batch: true` of the trainer's `gradient_accumulation_kwargs` shares them after "
                "each microbatch, as predicted; without it devices keep whole ones to the last"
            )
    else:
        keys |= {
            "deepspeed_config.zero_stage": 1,
            "deepspeed_config.gradient_accumulation_steps": plan.num_microbatches,
        }
        if recomputed:
            beyond.append("recomputed layers: `gradient_checkpointing` is an argument of the trainer, not of this file")
    beyond += encoders_beside(plan, spec, "Accelerate knows one mesh")
    return emitted


def _refusal(plan: Plan) -> str | None:
    if plan.grid("llm").cp > 1 and not plan.grid("llm").gathers:
        return "its context parallelism is FSDP2's, and the replicas of the plan keep whole parameters"
    return split_or_apart(plan)


_CP = "parallelism_config.parallelism_config_cp_size"
FRAMEWORK = Framework("Accelerate 1.15", _keys, _CP, is_config=True, refusal=_refusal)
