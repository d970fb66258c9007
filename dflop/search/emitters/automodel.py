"""NeMo AutoModel's recipe: the sections `step_scheduler` and `distributed` of its YAML file."""

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
    recomputed_by_module,
    shared_beyond_cp,
)

__all__ = ["FRAMEWORK"]


def _keys(plan: Plan, spec: ModelSpec, micro_batch: int) -> Emitted:
    plan = shared_beyond_cp(plan)
    llm = plan.grid("llm")
    of_rank = micro_batch * (plan.num_microbatches if llm.pp > 1 else 1)
    recomputed, layers = recomputed_by_module(plan, spec)
    stages = [len(part) for part in plan.layers_of("llm", layers["llm"])]
    flagged = {module: layers[module] if count else 0 for module, count in recomputed.items()}
    of_stages = {module: (count,) for module, count in flagged.items()}
    of_stages["llm"] = stages if flagged["llm"] else (0,) * len(stages)
    emitted = Emitted(
        plan=on_one_mesh(plan, spec, of_stages, as_fsdp2(llm)),
        flags={
            "step_scheduler.global_batch_size": micro_batch * plan.num_buckets,
            "step_scheduler.local_batch_size": of_rank,
            "distributed.strategy": "fsdp2",
            "distributed.tp_size": llm.tp,
            "distributed.pp_size": llm.pp,
            "distributed.dp_size": llm.dp // llm.cp,
        },
    )
    keys, beyond = emitted.flags, emitted.beyond
    if llm.tp > 1:
        keys["distributed.sequence_parallel"] = True
    if emitted.plan.grid("llm").gathers and plan.num_microbatches > 1:
        # Otherwise whole gradients are kept to the last microbatch.
        keys["distributed.defer_fsdp_grad_sync"] = False
    if llm.gathers and llm.num_shards != llm.dp:
        keys["distributed.dp_replicate_size"] = copies_and_shards(llm)[0]
    if any(recomputed.values()):
        keys["distributed.activation_checkpointing"] = True
        encoders = [grid.module for grid in plan.grids[:-1]]
        if not all(recomputed.values()):
            named = {"language": recomputed["llm"], **{module: recomputed[module] for module in encoders}}
            keys["distributed.activation_checkpointing_scope"] = [name for name, count in named.items() if count]
    if llm.pp > 1:
        _pipeline(emitted, plan, stages, micro_batch)
    beyond += encoders_beside(plan, spec, "AutoModel knows one mesh, that of the LLM")
    return emitted


def _pipeline(emitted: Emitted, plan: Plan, layers: Sequence[int], micro_batch: int) -> None:
    section = "distributed.pipeline."
    emitted.flags[section + "pp_schedule"] = TORCH_SCHEDULES[plan.schedule]
    emitted.flags[section + "pp_microbatch_size"] = micro_batch
    if len(set(layers)) == 1:
        emitted.flags[section + "layers_per_stage"] = layers[0]
        return
    emitted.flags[section + "module_fqns_per_model_part"] = _modules(layers)
    emitted.beyond.append(
        f"layers of each stage: {joined(layers)}, by the names of models whose LLM is `model.language_model` and whose "
        "encoder is `model.visual`; look up those of yours"
    )


def _modules(layers: Sequence[int]) -> list[list[str]]:
    """The modules of each stage; those that compute positions are in all."""
    llm = "model.language_model."
    numbers = iter(range(sum(layers)))
    stages = [[f"{llm}layers.{number}" for number in islice(numbers, count)] for count in layers]
    stages[0] = [f"{llm}embed_tokens", "model.visual", *stages[0]]
    stages[-1] += [f"{llm}norm", "lm_head"]
    return [[*stage, f"{llm}rotary_emb"] for stage in stages]


def _refusal(plan: Plan) -> str | None:
    pp = plan.grid("llm").pp
    if plan.num_microbatches < pp:
        return f"its pipelines take at least as many microbatches as stages, {pp}, and the plan has fewer"
    return None


FRAMEWORK = Framework("NeMo AutoModel 0.7", _keys, "distributed.cp_size", is_config=True, refusal=_refusal)
