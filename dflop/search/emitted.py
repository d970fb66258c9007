"""What a plan becomes in the flags or the config file of a framework, and sentences that several frameworks need."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from dflop.models import ModelSpec
from dflop.plan import Grid, Plan

__all__ = [
    "Emitted",
    "Framework",
    "encoders_beside",
    "joined",
    "recomputed_by_module",
    "recomputed_otherwise",
    "split_or_apart",
]


@dataclass(kw_only=True, slots=True)
class Emitted:
    """Flags of a framework's launch command, or keys of its config file, and sentences on what they do not express.

    A flag has one value, a list of values or, as a switch, None. A key of a config file is dotted, such as
    `train.micro_batch_size`, and has any value that YAML knows.
    """

    flags: dict[str, Any] = field(default_factory=dict)
    beyond: list[str] = field(default_factory=list)

    def to_text(self, framework: "Framework", plan: Plan) -> str:
        """The flags, one a line and ready to be pasted, or a YAML file, with the sentences as comments."""
        form = "keys" if framework.is_config else "flags"
        lines = [f"# {plan}", f"# as {form} of {framework.release}:"]
        lines.append(self._as_yaml() if framework.is_config else self._as_flags())
        if self.beyond:
            lines += ["", f"# What these {form} cannot express, or express differently:"]
            lines += [f"# - {sentence}" for sentence in self.beyond]
        return "\n".join(lines)

    def _as_flags(self) -> str:
        values = {name: [value] if isinstance(value, str) else value or [] for name, value in self.flags.items()}
        return " \\\n".join(shlex.join([name, *words]) for name, words in values.items())

    def _as_yaml(self) -> str:
        nested: dict[str, Any] = {}
        for name, value in self.flags.items():
            *sections, key = name.split(".")
            place = nested
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = value
        return yaml.safe_dump(nested, sort_keys=False).rstrip()


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework: the release whose flags or keys are emitted, and `flags_of(plan, spec, micro_batch)`, which makes
    them. `refusal(plan)` says why it cannot run a plan, or None."""

    release: str
    flags_of: Callable[[Plan, ModelSpec, int], Emitted]
    is_config: bool = False
    refusal: Callable[[Plan], str | None] = lambda plan: None


def split_or_apart(plan: Plan) -> str | None:
    """The refusal of frameworks that have the whole model on every device."""
    if any(grid.num_ranks != plan.world_size for grid in plan.grids):
        return "it has the whole model on every device, and the plan has modules on devices of their own"
    if split := [grid.module for grid in plan.grids if grid.tp * grid.pp > 1]:
        return f"it has the whole model on every device, and the plan splits {' and '.join(split)} over several"
    return None


def recomputed_otherwise(place: str, planned: Sequence[int], flagged: Sequence[int]) -> list[str]:
    """A sentence on how many layers the plan and the flags recompute in each place, if these numbers differ."""
    if list(planned) == list(flagged):
        return []
    return [
        f"recomputed layers of each {place}: {joined(planned)}; the flags are the same for all and recompute "
        f"{joined(flagged)}, which takes longer"
    ]


def recomputed_by_module(plan: Plan, spec: ModelSpec) -> tuple[dict[str, int], dict[str, int]]:
    """How many layers of each module the plan recomputes, and how many there are."""
    layers = {grid.module: spec.module(grid.module).num_layers for grid in plan.grids}
    return {module: sum(plan.recomputed_of(module, number)) for module, number in layers.items()}, layers


def encoders_beside(plan: Plan, spec: ModelSpec, why: str, *, recomputing_is_said: bool = False) -> list[str]:
    sentences = []
    for grid in plan.grids[:-1]:
        num_layers = spec.module(grid.module).num_layers
        layers = joined([len(part) for part in plan.layers_of(grid.module, num_layers)])
        recomputed = plan.recomputed_of(grid.module, num_layers)
        stages = f"{grid.pp} stage{'s' if grid.pp > 1 else ''} ({layers} layers)"
        layout = f"{grid.module}: tp {grid.tp}, {stages}, {grid.dp} replicas"
        recomputing = f", recomputing {joined(recomputed)} of its {layers} layers, which no flag says"
        recomputing = recomputing if any(recomputed) and not recomputing_is_said else ""
        llm = plan.grid("llm")
        if (grid.sharding, grid.num_shards) != (llm.sharding, llm.num_shards):
            sentences.append(
                f"{grid.module}'s replicas share {_shared(grid)}, the LLM's {_shared(llm)}; what stands above gives "
                "both the LLM's sharding, which takes other memory and time than predicted"
            )
        if plan.placement == "monolithic":
            where = "inside the LLM's first stage on the LLM's grid: put it into your model there"
            sentences.append(f"{layout}, {where}{recomputing}")
            continue
        if plan.placement == "colocated" and (grid.layout, grid.pp, grid.dp) == (llm.layout, llm.pp, llm.dp):
            where = "on the LLM's own mesh, so it fits; the plan encodes all media of a step before the LLM begins"
            sentences.append(f"{layout}, {where}{recomputing}")
            continue
        sentences.append(f"{layout} ({plan.placement}): {why}; it takes a grid and a loop of your own{recomputing}")
    if (num_ranks := plan.grid("llm").num_ranks) < plan.world_size:
        sentences.append(
            f"devices: the sizes above are for {num_ranks} of the plan's {plan.world_size}. On all of them there is "
            "another number of replicas, which also compute the encoders; the plan did not price that"
        )
    return sentences


def _shared(grid: Grid) -> str:
    """What the replicas of a module share, in words."""
    what = "parameters" if grid.gathers else "the optimiser's state"
    return f"{what} among {grid.num_shards if grid.gathers else grid.dp}"


def joined(counts: Sequence[int]) -> str:
    """Numbers as one word, e.g. `8+8+9+3`."""
    return "+".join(map(str, counts))
