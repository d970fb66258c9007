"""The LLM's layout in the words of Megatron Core, which Megatron-LM, Megatron-Bridge and ms-swift share.

Each of them has its own names for batches and for how replicas share parameters; those are in its file of `emitters/`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dflop.models import ModelSpec
from dflop.plan import PLAIN_SCHEDULE, Plan
from dflop.search.emitted import SHARED_BY_ALL, Emitted, joined, on_one_mesh

__all__ = ["megatron_layout"]


def megatron_layout(
    plan: Plan, spec: ModelSpec, of_encoders: Mapping[str, Sequence[int]] | None = None, *, has_hybrid: bool = False
) -> Emitted:
    """Parallel sizes, layers of each stage and recomputed layers, by the names of Megatron Core's fields.

    `of_encoders` are the recomputed layers of encoders, where a framework has a flag for them; with `has_hybrid`, some
    of the replicas may share parameters.
    """
    llm = plan.grid("llm")
    flags: dict[str, object] = {"tensor_model_parallel_size": llm.tp, "pipeline_model_parallel_size": llm.pp}
    beyond: list[str] = []
    if llm.tp > 1:
        flags["sequence_parallel"] = True
    layers = [len(part) for part in plan.layers_of("llm", spec.module("llm").num_layers)]
    if len(set(layers)) > 1:
        flags["pipeline_model_parallel_layout"] = _layout(layers, llm.pp)
        beyond.append(f"layers of each stage: {joined(layers)}, where E is the embedding, t a layer and L the loss")
    elif plan.num_chunks > 1:
        flags["virtual_pipeline_model_parallel_size"] = plan.num_chunks
    if plan.schedule not in ("1f1b", "interleaved_1f1b"):
        beyond.append(f"schedule {plan.schedule}: Megatron Core runs 1F1B, interleaved where there are virtual stages")
        plan = replace(plan, schedule=PLAIN_SCHEDULE)
    planned = plan.recomputed_of("llm", spec.module("llm").num_layers)
    recomputing, recomputed = _recomputing(planned, layers)
    sharing = SHARED_BY_ALL if llm.gathers and not has_hybrid else {}
    made = on_one_mesh(plan, spec, {**(of_encoders or {}), "llm": recomputed}, sharing)
    return Emitted(plan=made, flags=flags | recomputing, beyond=beyond)


def _layout(layers: list[int], pp: int) -> str:
    """The value of `pipeline_model_parallel_layout`: the first chunks of all ranks, then their second ones, …"""
    stages = ["t" * count if count < 4 else f"t*{count}" for count in layers]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    assert len(stages) % pp == 0
    return "|".join(stages)


def _recomputing(recomputed: Sequence[int], layers: Sequence[int]) -> tuple[dict[str, object], Sequence[int]]:
    """Flags for recomputing all layers, or an equal number of first layers in every stage, also in virtual ones; and
    how many layers each stage then recomputes."""
    if not any(recomputed):
        return {}, recomputed
    flags: dict[str, object] = {"recompute_granularity": "full"}
    if list(recomputed) == list(layers):
        return flags | {"recompute_method": "uniform", "recompute_num_layers": 1}, recomputed
    most = max(recomputed)
    return flags | {"recompute_method": "block", "recompute_num_layers": most}, [min(most, own) for own in layers]
