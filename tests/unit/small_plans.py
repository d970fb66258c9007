"""Plans of the tiny model on a few ranks, for tests of what holds on every placement."""

from dflop.plan import Grid, Plan


def make_plan(placement="disjoint", schedule="1f1b", pp=2, dp=1, num_microbatches=4, num_chunks=1, layers=()) -> Plan:
    """The tiny model has four layers in either module."""
    ranks = {"disjoint": 2, "colocated": pp * dp, "bubble_filled": pp * dp, "monolithic": dp}[placement]
    offset = ranks if placement == "disjoint" else 0
    return Plan(
        placement=placement,
        grids=(
            Grid(module="vision", num_ranks=ranks),
            Grid(module="llm", num_ranks=pp * dp, pp=pp, rank_offset=offset, layers=layers),
        ),
        num_microbatches=num_microbatches,
        schedule=schedule,
        num_chunks=num_chunks,
    )


def disjoint(
    vision_dp: int = 1, llm_pp: int = 1, llm_dp: int = 1, num_microbatches: int = 4, vision_pp: int = 1, **more
) -> Plan:
    vision_ranks = vision_dp * vision_pp
    return Plan(
        placement="disjoint",
        grids=(
            Grid(module="vision", num_ranks=vision_ranks, pp=vision_pp),
            Grid(module="llm", num_ranks=llm_pp * llm_dp, pp=llm_pp, rank_offset=vision_ranks),
        ),
        num_microbatches=num_microbatches,
        **more,
    )
