"""The LLM's layout in the words of Megatron Core, which Megatron-LM, Megatron-Bridge and ms-swift share.

Each of them has its own names for batches and for how replicas share parameters; those are in its file of `emitters/`.
"""

from collections.abc import Sequence

from dflop.models import ModelSpec
from dflop.plan import Plan
from dflop.search.emitted import Emitted, joined, recomputed_otherwise

__all__ = ["megatron_layout"]


def megatron_layout(plan: Plan, spec: ModelSpec) -> Emitted:
    """Parallel sizes, layers of each stage and recomputed layers, by the names of Megatron Core's fields."""
    llm = plan.grid("llm")
    emitted = Emitted(flags={"tensor_model_parallel_size": llm.tp, "pipeline_model_parallel_size": llm.pp})
    flags, beyond = emitted.flags, emitted.beyond
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
    _recompute_in_flags(emitted, plan.recomputed_of("llm", spec.module("llm").num_layers), layers)
    return emitted


def _layout(layers: list[int], pp: int) -> str:
    """The value of `pipeline_model_parallel_layout`: the first chunks of all ranks, then their second ones, …"""
    stages = ["t" * count if count < 4 else f"t*{count}" for count in layers]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    assert len(stages) % pp == 0
    return "|".join(stages)


def _recompute_in_flags(emitted: Emitted, recomputed: Sequence[int], layers: Sequence[int]) -> None:
    """Flags for recomputing all layers, or an equal number of first layers in every stage, also in virtual ones."""
    if not any(recomputed):
        return
    emitted.flags["recompute_granularity"] = "full"
    if list(recomputed) == list(layers):
        emitted.flags |= {"recompute_method": "uniform", "recompute_num_layers": 1}
        return
    most = max(recomputed)
    emitted.flags |= {"recompute_method": "block", "recompute_num_layers": most}
    emitted.beyond += recomputed_otherwise("stage", recomputed, [min(most, count) for count in layers])
