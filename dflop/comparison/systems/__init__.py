"""The systems of a comparison, one in each file, in the order in which they are printed; ours is added to them last.

Each is written from its paper or documentation alone. What a description leaves open is decided in its favour, and said
in its file.
"""

from dflop.comparison.system import System
from dflop.comparison.systems import (
    disttrain,
    dynapipe,
    entrain,
    fsdp_balanced,
    fsdp_by_length,
    fsdp_random,
    karmarkar_karp,
    loongforge,
    megatron,
    orchmllm,
    published,
)

__all__ = ["SYSTEMS"]

SYSTEMS: tuple[System, ...] = tuple(
    own.SYSTEM
    for own in (
        megatron,
        fsdp_random,
        fsdp_by_length,
        karmarkar_karp,
        dynapipe,
        disttrain,
        entrain,
        orchmllm,
        loongforge,
        published,
        fsdp_balanced,
    )
)
