"""VeOmni's config: the section `train` of its YAML file. It has neither tensor nor pipeline parallelism."""

from dflop.models import ModelSpec
from dflop.plan import Plan
from dflop.search.emitted import (
    Emitted,
    Framework,
    as_fsdp2,
    copies_and_shards,
    encoders_beside,
    on_one_mesh,
    recomputed_all_or_none,
    split_or_apart,
)

__all__ = ["FRAMEWORK"]


def _keys(plan: Plan, spec: ModelSpec, micro_batch: int) -> Emitted:
    llm = plan.grid("llm")
    copies, shards = copies_and_shards(llm)
    recomputed = recomputed_all_or_none(plan, spec)
    emitted = Emitted(
        plan=on_one_mesh(plan, spec, recomputed, as_fsdp2(llm)),
        flags={
            "train.micro_batch_size": micro_batch,
            "train.global_batch_size": micro_batch * plan.num_buckets,
            "train.dyn_bsz": False,
            "train.accelerator.dp_replicate_size": copies,
            "train.accelerator.dp_shard_size": shards,
            "train.accelerator.fsdp_config.fsdp_mode": "fsdp2",
            "train.gradient_checkpointing.enable": bool(recomputed),
        },
    )
    beyond = emitted.beyond
    beyond.append(
        "with `dyn_bsz: true` it packs samples by their tokens, up to `micro_batch_size` x `max_seq_len`; a step then "
        "has another number of samples than the plan's, and the sizes above mean tokens"
    )
    beyond += encoders_beside(plan, spec, "VeOmni knows one mesh")
    return emitted


FRAMEWORK = Framework(
    "VeOmni 0.1.12",
    _keys,
    "train.accelerator.ulysses_size",
    is_config=True,
    cp_runs=1,  # it exchanges heads, so that runs need no balance
    refusal=split_or_apart,
)
