"""Plans of every kind of layout, for the families' tiny models of four layers a module."""

import dataclasses

from dflop.plan import Grid, Plan

__all__ = ["OMNI_PLANS", "PLANS"]


def disjoint(vision: dict, llm: dict, num_microbatches: int = 3, **more) -> Plan:
    vision_grid = Grid(module="vision", **vision)
    grids = (vision_grid, Grid(module="llm", rank_offset=vision_grid.num_ranks, **llm))
    return Plan(placement="disjoint", grids=grids, num_microbatches=num_microbatches, **more)


def shared(placement: str, llm: dict, num_microbatches: int = 3, encoder_tp: int = 1, **more) -> Plan:
    num_ranks = llm["num_ranks"] // (llm.get("pp", 1) if placement == "monolithic" else 1)
    grids = (Grid(module="vision", num_ranks=num_ranks, tp=encoder_tp), Grid(module="llm", **llm))
    return Plan(placement=placement, grids=grids, num_microbatches=num_microbatches, **more)


def sharding(plan: Plan, *shardings: str) -> Plan:
    """The plan, with such a sharding of each module."""
    grids = (
        dataclasses.replace(grid, sharding=own, shards=2 if own == "hybrid" else None)
        for grid, own in zip(plan.grids, shardings, strict=True)
    )
    return dataclasses.replace(plan, grids=tuple(grids))


ONE, TWO, PIPELINE = {"num_ranks": 1}, {"num_ranks": 2}, {"num_ranks": 2, "pp": 2}
SHARED, SHARED_TWICE, SHARED_PIPELINE = (
    {"num_ranks": 2, "tp": 2},
    {"num_ranks": 4, "tp": 2},
    {"num_ranks": 4, "tp": 2, "pp": 2},
)
TWO_TOGETHER = {"num_ranks": 2, "cp": 2}
BUT_FOR_ATTENTION = {"recomputed": (2, 1), "attention_kept": (1, 1)}
SPLIT_UNEVENLY = {"num_ranks": 2, "pp": 2, "layers": (3, 1)}
PLANS = {
    "disjoint 1+1": disjoint(ONE, ONE),
    "disjoint 2+1": disjoint(TWO, ONE),
    "disjoint 1+2, LLM pp 2": disjoint(ONE, SPLIT_UNEVENLY, schedule="gpipe"),
    "disjoint 1+2, LLM dp 2": disjoint(ONE, TWO, num_microbatches=2),
    "disjoint 3+2": disjoint({"num_ranks": 3}, TWO, num_microbatches=2),
    "disjoint 1+4": disjoint(ONE, {"num_ranks": 4, "pp": 1}, num_microbatches=2),
    "disjoint 4+1": disjoint({"num_ranks": 4}, ONE),
    "encoder pp 2": disjoint(PIPELINE, ONE, num_microbatches=4),
    "encoder pp 2 dp 2": disjoint({"num_ranks": 4, "pp": 2}, ONE, checkpointing=True),
    "encoder pp 2, LLM pp 3": disjoint(PIPELINE, {"num_ranks": 3, "pp": 3}, num_microbatches=4),
    "encoder and LLM pp 2, offloaded": disjoint(
        ONE | {"recomputed": (1,), "offloaded": (1,)},
        PIPELINE | {"recomputed": (0, 1), "offloaded": (1, 1)},
        num_microbatches=4,
        checkpointing=True,
    ),
    "interleaved": disjoint(
        {"num_ranks": 1, "recomputed": (0,)},
        PIPELINE | {"recomputed": (1, 1, 0, 1), "attention_kept": (0, 1, 0, 1)},
        num_microbatches=4,
        schedule="interleaved_1f1b",
        num_chunks=2,
        checkpointing=True,
        offloads_optimizer=True,
    ),
    "colocated 1": shared("colocated", ONE),
    "colocated 2": shared("colocated", TWO),
    "colocated pp 2": shared("colocated", PIPELINE | BUT_FOR_ATTENTION, checkpointing=True),
    "colocated pp 2 dp 2": shared("colocated", {"num_ranks": 4, "pp": 2}, num_microbatches=2),
    "colocated interleaved": shared(
        "colocated", PIPELINE, num_microbatches=4, schedule="interleaved_1f1b", num_chunks=2
    ),
    "bubble-filled pp 2": shared("bubble_filled", PIPELINE, num_microbatches=4),
    "bubble-filled pp 2 dp 2": shared("bubble_filled", {"num_ranks": 4, "pp": 2}, checkpointing=True),
    "bubble-filled interleaved": shared(
        "bubble_filled", PIPELINE, num_microbatches=4, schedule="interleaved_1f1b", num_chunks=2
    ),
    "monolithic 2": shared("monolithic", TWO),
    "monolithic pp 2": shared("monolithic", PIPELINE),
    "monolithic pp 2 dp 2": shared("monolithic", {"num_ranks": 4, "pp": 2}, num_microbatches=2),
    "samples over 2": disjoint(ONE, TWO_TOGETHER, num_microbatches=2),
    "samples over 4": disjoint(
        {"num_ranks": 2, "recomputed": (4,)},
        {"num_ranks": 4, "cp": 4, "recomputed": (4,), "attention_kept": (2,)},
        num_microbatches=2,
        checkpointing=True,
    ),
    "samples over 2, LLM pp 2": disjoint(ONE, {"num_ranks": 4, "pp": 2, "cp": 2}, num_microbatches=2),
    "samples over 2, LLM tp 2": disjoint(
        ONE, {"num_ranks": 4, "tp": 2, "cp": 2, "offloaded": (2,)}, num_microbatches=2
    ),
    "samples over 2, colocated pp 2": shared(
        "colocated",
        {"num_ranks": 4, "pp": 2, "cp": 2} | BUT_FOR_ATTENTION,
        num_microbatches=2,
        checkpointing=True,
    ),
    "samples over 2, monolithic": shared("monolithic", TWO_TOGETHER, num_microbatches=2),
    "samples over 4, parameters": sharding(
        shared("colocated", {"num_ranks": 4, "cp": 4}, num_microbatches=1, checkpointing=True), *["parameters"] * 2
    ),
    "disjoint 1+2, LLM tp 2": disjoint(ONE, SHARED),
    "disjoint 2+1, encoder tp 2": disjoint(SHARED, ONE),
    "disjoint 2+2, both tp 2, checkpointing": disjoint(
        SHARED | {"recomputed": (4,)}, SHARED | {"recomputed": (4,), "attention_kept": (2,)}, checkpointing=True
    ),
    "disjoint 1+4, LLM tp 2 pp 2": disjoint(ONE, SHARED_PIPELINE, num_microbatches=4),
    "colocated LLM tp 2": shared("colocated", SHARED),
    "colocated encoder tp 2": shared("colocated", TWO, encoder_tp=2),
    "colocated encoder dp 4, LLM tp 2 pp 2": shared("colocated", SHARED_PIPELINE, num_microbatches=2),
    "colocated encoder tp 4, LLM tp 2 dp 2": shared("colocated", SHARED_TWICE, num_microbatches=2, encoder_tp=4),
    "bubble-filled encoder dp 4, LLM tp 2 pp 2": shared("bubble_filled", SHARED_PIPELINE),
    "bubble-filled encoder tp 2, LLM dp 2 pp 2": shared(
        "bubble_filled", {"num_ranks": 4, "pp": 2}, num_microbatches=2, encoder_tp=2
    ),
    "monolithic tp 2 pp 2": shared("monolithic", SHARED_PIPELINE, num_microbatches=2, encoder_tp=2),
    "monolithic tp 2 dp 2": shared("monolithic", SHARED_TWICE, num_microbatches=2, encoder_tp=2),
}
PLANS |= {
    "parameters 2": sharding(shared("monolithic", TWO, 2), "parameters", "parameters"),
    "parameters 4, colocated": sharding(shared("colocated", {"num_ranks": 4}, 2), "parameters", "parameters"),
    "parameters of the encoder": sharding(shared("colocated", {"num_ranks": 4, "pp": 2}, 2), "parameters", "optimizer"),
    "parameters of the first stage's encoder": sharding(
        shared("monolithic", {"num_ranks": 4, "pp": 2}, 2), "parameters", "optimizer"
    ),
    "parameters of the LLM": sharding(
        disjoint(ONE, TWO | {"recomputed": (3,), "attention_kept": (2,)}, checkpointing=True), "optimizer", "parameters"
    ),
    "parameters 2x2": sharding(shared("monolithic", {"num_ranks": 4}, 2), "parameters", "hybrid"),
    "parameters 2x2 of both": sharding(
        shared("colocated", {"num_ranks": 4}, 2, offloads_optimizer=True), "hybrid", "hybrid"
    ),
    "parameters 2, tp 2": sharding(shared("monolithic", SHARED_TWICE, 2, encoder_tp=2), "parameters", "parameters"),
    "parameters 2 of the LLM, tp 2": sharding(shared("colocated", SHARED_TWICE, 2), "parameters", "parameters"),
    "parameters 2, offloaded": sharding(shared("monolithic", TWO | {"offloaded": (2,)}, 2), "parameters", "parameters"),
    "parameters 2+2": sharding(disjoint(TWO, TWO, num_microbatches=2), "parameters", "parameters"),
}


def three(placement: str, vision: dict, audio: dict, llm: dict, num_microbatches: int = 3, **more) -> Plan:
    """Two encoders and the LLM, on ranks of their own where the placement is disjoint."""
    grids, offset = [], 0
    for module, grid in (("vision", vision), ("audio", audio), ("llm", llm)):
        grids.append(Grid(module=module, rank_offset=offset, **grid))
        offset += grids[-1].num_ranks if placement == "disjoint" else 0
    return Plan(placement=placement, grids=tuple(grids), num_microbatches=num_microbatches, **more)


OMNI_PLANS = {
    "three modules 1+1+1": three("disjoint", ONE, ONE, ONE),
    "three modules 1+2+1, audio pp 2": three("disjoint", ONE, PIPELINE, ONE, num_microbatches=4),
    "three modules 1+1+2, LLM pp 2": three("disjoint", ONE, ONE, PIPELINE),
    "three modules 1+1+2, LLM dp 2": three("disjoint", ONE, ONE, TWO, num_microbatches=2, checkpointing=True),
    "three modules colocated 2": three("colocated", TWO, TWO, TWO, num_microbatches=2),
    "three modules colocated pp 2": three("colocated", TWO, TWO, PIPELINE),
    "three modules bubble-filled pp 2": three("bubble_filled", TWO, TWO, PIPELINE),
    "three modules monolithic 2": three("monolithic", TWO, TWO, TWO),
    "three modules 1+2+1, audio tp 2": three("disjoint", ONE, SHARED, ONE),
    "three modules colocated, encoders tp 2, LLM tp 2": three("colocated", SHARED, SHARED, SHARED, num_microbatches=2),
}
OMNI_PLANS["three modules, samples over 2"] = three("colocated", TWO, TWO, TWO_TOGETHER, num_microbatches=2)
parameters = three("monolithic", TWO, TWO, TWO)
OMNI_PLANS["three modules, parameters 2"] = sharding(parameters, "parameters", "parameters", "parameters")
PLANS |= OMNI_PLANS
