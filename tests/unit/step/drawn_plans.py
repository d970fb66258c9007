"""Plans of every placement and schedule, for tests that must hold for all of them."""

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from dflop.plan import PLACEMENTS, SCHEDULES, Grid, Plan
from dflop.plan.trained import TrainedSet
from dflop.step import Bridges, BubbleFiller, StageTimes, nodes_of

MOST_BRIDGES = 512
frozen_sets = st.sampled_from([(), ("vision",), ("llm",), ("vision.encoder",), ("vision.encoder", "llm")])


def llm_alone(pp: int, num_microbatches: int, schedule: str = "1f1b", num_chunks: int = 1) -> Plan:
    """A pipeline as in textbooks: no encoder, one replica."""
    return Plan(
        placement="disjoint",
        grids=(Grid(module="llm", num_ranks=pp, pp=pp),),
        num_microbatches=num_microbatches,
        schedule=schedule,
        num_chunks=num_chunks,
    )


@st.composite
def shardings(draw, dp: int) -> dict[str, object]:
    """How a grid of one stage shares parameters, if at all."""
    parts = [size for size in range(2, dp) if dp % size == 0]
    sharding = draw(st.sampled_from(["optimizer", "optimizer", "parameters", *["hybrid"] * bool(parts)]))
    return {"sharding": sharding, "shards": draw(st.sampled_from(parts)) if sharding == "hybrid" else None}


@st.composite
def plans(draw, placements=tuple(PLACEMENTS), schedules=tuple(SCHEDULES), shares=True, most_ranks=None) -> Plan:
    """Any plan: none to two encoders, tp that differs between modules, encoders of several stages, chunks,
    and where `shares` replicas that share parameters. With `most_ranks`, e.g. 1024, plans of many sizes up to that,
    with at most `MOST_BRIDGES` bridges."""
    if most_ranks is not None:
        plan = draw(_large_plans(placements, schedules, shares, most_ranks))
        num_bridged = sum(grid.dp for grid in plan.grids[:-1]) * plan.grid("llm").dp
        assume(plan.world_size <= most_ranks and num_bridged <= MOST_BRIDGES)
        return plan
    return draw(_plans(placements, schedules, shares))


@st.composite
def _large_plans(draw, placements, schedules, shares, most_ranks) -> Plan:
    tp, pp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 3, 4, 8]))
    dps = [size for size in (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512) if tp * pp * size <= most_ranks]
    return draw(_plans(placements, schedules, shares, (pp,), (draw(st.sampled_from(dps)),), (tp,), tuple(dps)))


@st.composite
def _plans(
    draw, placements, schedules, shares, pps=(1, 2, 3, 4), dps=(1, 2, 3, 3, 4), tps=(1, 1, 2), encoder_dps=(1, 2, 3)
) -> Plan:
    placement, schedule = draw(st.sampled_from(placements)), draw(st.sampled_from(schedules))
    is_interleaved = schedule == "interleaved_1f1b"
    pp = draw(st.sampled_from(pps))
    if is_interleaved:
        pp = min(max(pp, 2), 3)
    dp, tp = draw(st.sampled_from(dps)), draw(st.sampled_from(tps))
    llm_ranks = pp * dp * tp
    encoders = []
    for module in draw(st.sampled_from([(), ("vision",), ("vision", "audio")])):
        offset = sum(grid.num_ranks for grid in encoders) if placement == "disjoint" else 0
        if placement == "disjoint":
            encoder_tp, encoder_pp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 1, 2]))
            ranks = encoder_tp * encoder_pp * draw(st.sampled_from(encoder_dps))
        elif placement in ("colocated", "bubble_filled"):
            ranks, encoder_pp = llm_ranks, 1
            shared = llm_ranks if placement == "colocated" else dp * tp
            encoder_tp = draw(st.sampled_from([size for size in (1, 2, 4, 8) if shared % size == 0]))
        else:
            ranks, encoder_tp, encoder_pp = dp * tp, tp, 1
        may_share = encoder_pp == 1 and shares and placement != "bubble_filled"
        how = draw(shardings(ranks // encoder_tp)) if may_share else {}
        encoders.append(Grid(module=module, num_ranks=ranks, tp=encoder_tp, pp=encoder_pp, rank_offset=offset, **how))
    offset = sum(grid.num_ranks for grid in encoders) if placement == "disjoint" else 0
    how = draw(shardings(dp)) if pp == 1 and shares else {}
    parts = how.get("shards") or (dp if how.get("sharding") == "parameters" else 1)
    together = [size for size in (2, 4, 8) if dp % size == 0 and (parts % size == 0 or size % parts == 0)]
    how |= {"cp": draw(st.sampled_from([1, *together])) if shares else 1}
    return Plan(
        placement=placement,
        grids=(*encoders, Grid(module="llm", num_ranks=llm_ranks, tp=tp, pp=pp, rank_offset=offset, **how)),
        num_microbatches=pp * draw(st.integers(1, 3)) if is_interleaved else draw(st.integers(1, 7)),
        schedule=schedule,
        num_chunks=draw(st.integers(2, 3)) if is_interleaved else 1,
    )


@st.composite
def orders(
    draw, placements=tuple(PLACEMENTS), schedules=tuple(SCHEDULES), shares=True, most_ranks=None
) -> tuple[Plan, tuple[str, ...], object]:
    """Any plan, frozen modules, and slots of its encoders in a batch of any times; None where there are none."""
    plan, frozen = draw(plans(placements, schedules, shares, most_ranks)), draw(frozen_sets)
    return plan, frozen, draw(slots_of(plan, frozen))


@st.composite
def slots_of(draw, plan: Plan, frozen: tuple[str, ...] = ()) -> np.ndarray | None:
    if not PLACEMENTS[plan.placement].fills_bubbles or draw(st.integers(0, 4)) == 0:
        return None
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (len(nodes_of(plan)), plan.num_microbatches)
    forward_s, backward_s, chain_s = rng.exponential(1.0, (3, *shape)) * (rng.random((3, *shape)) > 0.2)
    times = StageTimes(
        forward_s=forward_s,
        backward_s=backward_s,
        chain_s=chain_s,
        bridges=Bridges.none(),
        sync_s=np.zeros(len(forward_s)),
    )
    return BubbleFiller(plan, TrainedSet(frozen)).slots(times, draw(st.integers(1, plan.num_microbatches)))
