"""The systems of a comparison, one in each file. Ours is added last, and `plan.today` of a config adds one more.

Each is written from its paper or documentation alone. What a description leaves open is decided in the system's favour,
and its file says so.
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
    today,
)
from dflop.config import Config

__all__ = ["SYSTEMS", "TODAYS", "baseline_systems", "systems_of"]

SYSTEMS: tuple[System, ...] = tuple(
    module.SYSTEM
    for module in (
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

TODAYS: str = today.SYSTEM.name


def systems_of(config: Config) -> tuple[System, ...]:
    """All systems, with the layout of `plan.today` first where the config has one."""
    return (*([today.SYSTEM] if config.plan.today else []), *SYSTEMS)


def baseline_systems(config: Config) -> tuple[System, ...]:
    """The systems that `dflop plan` prices beside the chosen plan, in the order of `plan.yaml`."""
    usual = (published, megatron, fsdp_random, fsdp_by_length, fsdp_balanced)
    return (*([today.SYSTEM] if config.plan.today else []), *(module.SYSTEM for module in usual))
