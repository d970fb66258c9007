"""Grids: which ranks a module owns and how it splits them.

A plan has one grid per module. `num_ranks`, `tp` and `pp` are given; `dp` follows from them and is never
stored, so a grid cannot contradict itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dflop.base import UserError
from dflop.plan.layout_key import LayoutKey
from dflop.plan.shardings import PLAIN_SHARDING, SHARDINGS

__all__ = ["Grid", "tile_world"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Layout of one module over consecutive ranks, ordered (pp, dp, tp), tp fastest.

    Raises:
        UserError: when a number is out of range, the ranks do not divide by tp x pp, or the sharding refuses the grid.
    """

    module: str
    num_ranks: int
    tp: int = 1
    pp: int = 1
    rank_offset: int = 0
    # The number of layers of each pipeline stage (with chunks, of each chunk of each stage); empty for an even split.
    layers: tuple[int, ...] = ()
    # How many of its first layers each pipeline stage keeps in host memory until backward, one number a stage as in
    # `layers`.
    offloaded: tuple[int, ...] = ()
    # With checkpointing: how many of its layers, behind the offloaded ones, each pipeline stage recomputes in backward,
    # one number a stage. A stage recomputes its first layers: when backward reaches them, the memory of the others is
    # free. See `Plan` for what an empty tuple means.
    recomputed: tuple[int, ...] = ()
    # Of these, how many are recomputed but for attention, one number a stage: its last ones. The LLM alone has it.
    attention_kept: tuple[int, ...] = ()
    # What replicas divide among them: a name in the table `SHARDINGS`.
    sharding: str = PLAIN_SHARDING
    # For `hybrid` only: the number of replicas, those of one node, that divide a copy of the parameters among them.
    shards: int | None = None
    # Context parallelism: a long sample may be computed by up to so many neighbouring replicas, a power of two.
    cp: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.pp) < 1:
            raise UserError(f"{self.module}: tp={self.tp} and pp={self.pp} must be at least 1")
        if self.num_ranks < 1 or self.num_ranks % (self.tp * self.pp):
            raise UserError(
                f"{self.module}: {self.num_ranks} ranks cannot be split into tp={self.tp} x pp={self.pp}; "
                f"use a multiple of {self.tp * self.pp}"
            )
        if any(count < 1 for count in self.layers):
            raise UserError(f"{self.module}: layers {list(self.layers)}; every pipeline stage needs at least one")
        if any(count < 0 for count in self.recomputed):
            raise UserError(f"{self.module}: recomputed {list(self.recomputed)}; a stage recomputes 0 layers or more")
        if any(count < 0 for count in self.offloaded):
            raise UserError(f"{self.module}: offloaded {list(self.offloaded)}; a stage offloads 0 layers or more")
        if self.attention_kept:
            self._check_attention_kept()
        if self.sharding not in SHARDINGS:
            raise UserError(f"{self.module}: sharding is {self.sharding!r}; it must be one of {', '.join(SHARDINGS)}")
        SHARDINGS[self.sharding].check(self)
        self._check_cp()

    def _check_attention_kept(self) -> None:
        kept = f"{self.module}: attention_kept is {list(self.attention_kept)}"
        if self.module != "llm":
            raise UserError(f"{kept}; only the LLM's layers are recomputed but for attention: leave it out")
        both = zip(self.attention_kept, self.recomputed, strict=False)
        if len(self.attention_kept) != len(self.recomputed) or any(not 0 <= own <= most for own, most in both):
            raise UserError(
                f"{kept}, and recomputed {list(self.recomputed)}; attention is kept in none to all of the layers that "
                "a stage recomputes: give both, one number a stage"
            )

    def _check_cp(self) -> None:
        if self.cp < 1 or self.cp & (self.cp - 1) or self.dp % self.cp:
            powers = [1 << exponent for exponent in range(self.dp.bit_length()) if self.dp % (1 << exponent) == 0]
            raise UserError(
                f"{self.module}: cp={self.cp}, the most replicas that compute a sample together, must be a power of "
                f"two that divides dp={self.dp}: use {', '.join(map(str, powers))}"
            )
        if self.cp > 1 and self.module != "llm":
            raise UserError(
                f"{self.module}: cp={self.cp}; only the LLM has it: an encoder's replicas share a long sample's frames "
                "wherever the LLM's do"
            )
        if self.gathers and self.num_shards % self.cp and self.cp % self.num_shards:
            raise UserError(
                f"{self.module}: cp={self.cp} and shards={self.num_shards}: replicas meet in groups of both sizes, so "
                "one must divide the other"
            )

    @property
    def layout(self) -> LayoutKey:
        """How a layer is divided over ranks."""
        return LayoutKey(self.tp)

    @property
    def dp(self) -> int:
        return self.num_ranks // (self.tp * self.pp)

    @property
    def num_shards(self) -> int:
        """The number of replicas that divide a copy of the parameters among them."""
        return SHARDINGS[self.sharding].num_shards(self)

    @property
    def gathers(self) -> bool:
        """Whether replicas gather parameters, and so communicate in every layer."""
        return SHARDINGS[self.sharding].gathers and self.num_shards > 1

    @property
    def num_meeting(self) -> int:
        """The number of neighbouring replicas that meet in every layer, because they share parameters or samples."""
        return max(self.num_shards, self.cp)

    def first_rank(self, pp_stage: int, dp_rank: int) -> int:
        """Global rank of tp rank 0 of one replica of a stage."""
        return self.rank_offset + (pp_stage * self.dp + dp_rank) * self.tp


def tile_world(grids: Sequence[Grid], world_size: int) -> None:
    """Check that the grids cover ranks [0, world_size) without gap or overlap.

    Raises:
        UserError: naming the first rank that no module, or more than one, owns, or that does not exist.
    """
    ordered = sorted(grids, key=lambda grid: grid.rank_offset)
    ends = [0, *(grid.rank_offset + grid.num_ranks for grid in ordered)]
    if [*(grid.rank_offset for grid in ordered), world_size] == ends:
        return
    owners: list[list[str]] = [[] for _ in range(world_size)]
    for grid in grids:
        for rank in range(grid.rank_offset, grid.rank_offset + grid.num_ranks):
            if rank >= world_size:
                raise UserError(f"{grid.module} owns rank {rank}, but there are only {world_size} ranks")
            owners[rank].append(grid.module)
    for rank, modules in enumerate(owners):
        if len(modules) != 1:
            who = " and ".join(modules) if modules else "no module"
            raise UserError(f"rank {rank} is owned by {who}; every rank belongs to exactly one module")
