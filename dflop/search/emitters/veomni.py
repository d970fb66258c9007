"""VeOmni's config: the section `train` of its YAML file. It has neither tensor nor pipeline parallelism."""

from dflop.models import ModelSpec
from dflop.plan import Plan
from dflop.search.emitted import (
    Emitted,
    Framework,
    encoders_beside,
    recomputed_by_module,
    recomputed_otherwise,
    split_or_apart,
)

__all__ = ["FRAMEWORK"]


def _keys(plan: Plan, spec: ModelSpec, micro_batch: int) -> Emitted:
    llm = plan.grid("llm")
    shards = llm.num_shards if llm.gathers else 1
    recomputed, layers = recomputed_by_module(plan, spec)
    emitted = Emitted(
        flags={
            "train.micro_batch_size": micro_batch,
            "train.global_batch_size": micro_batch * plan.num_buckets,
            "train.dyn_bsz": False,
            "train.accelerator.dp_replicate_size": llm.dp // shards,
            "train.accelerator.dp_shard_size": shards,
            "train.accelerator.fsdp_config.fsdp_mode": "fsdp2" if llm.gathers else "ddp",
            "train.gradient_checkpointing.enable": any(recomputed.values()),
        }
    )
    beyond = emitted.beyond
    beyond.append(
        "with `dyn_bsz: true` it packs samples by their tokens, up to `micro_batch_size` x `max_seq_len`; a step then "
        "has another number of samples than the plan's, and the sizes above mean tokens"
    )
    if not llm.gathers and llm.dp > 1:
        beyond.append(
            f"optimiser state shared among {llm.dp} replicas that keep whole parameters (ZeRO-1): replicas keep all of "
            "it with `ddp`, which takes more memory; `fsdp2` shares parameters as well"
        )
    if any(recomputed.values()):
        beyond += recomputed_otherwise("module", list(recomputed.values()), list(layers.values()))
    beyond += encoders_beside(plan, spec, "VeOmni knows one mesh", recomputing_is_said=True)
    return emitted


FRAMEWORK = Framework("VeOmni 0.1.12", _keys, is_config=True, refusal=split_or_apart)
