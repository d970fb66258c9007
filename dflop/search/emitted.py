"""What a plan becomes in the flags of a framework, and sentences that several frameworks need."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dflop.models import ModelSpec
from dflop.plan import Plan

__all__ = ["Emitted", "Framework", "encoders_beside", "joined", "recomputed_otherwise"]


@dataclass(kw_only=True, slots=True)
class Emitted:
    """Flags of a framework's launch command, and sentences on what they do not express.

    A flag has one value, a list of values or, as a switch, None.
    """

    flags: dict[str, str | list[str] | None] = field(default_factory=dict)
    beyond: list[str] = field(default_factory=list)

    def to_text(self, framework: "Framework", plan: Plan) -> str:
        """The flags, one a line and ready to be pasted, and the sentences as comments of the shell."""
        lines = [f"# {plan}", f"# as flags of {framework.release}:"]
        values = {name: [value] if isinstance(value, str) else value or [] for name, value in self.flags.items()}
        lines.append(" \\\n".join(shlex.join([name, *words]) for name, words in values.items()))
        if self.beyond:
            lines += ["", "# What these flags cannot express, or express differently:"]
            lines += [f"# - {sentence}" for sentence in self.beyond]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework: the release whose flags are emitted, and `flags_of(plan, spec, micro_batch)`, which makes them."""

    release: str
    flags_of: Callable[[Plan, ModelSpec, int], Emitted]


def recomputed_otherwise(place: str, planned: Sequence[int], flagged: Sequence[int]) -> list[str]:
    """A sentence on how many layers the plan and the flags recompute in each place, if these numbers differ."""
    if list(planned) == list(flagged):
        return []
    return [
        f"recomputed layers of each {place}: {joined(planned)}; the flags are the same for all and recompute "
        f"{joined(flagged)}, which takes longer"
    ]


def encoders_beside(plan: Plan, spec: ModelSpec, why: str) -> list[str]:
    sentences = []
    for grid in plan.grids[:-1]:
        num_layers = spec.module(grid.module).num_layers
        layers = joined([len(part) for part in plan.layers_of(grid.module, num_layers)])
        recomputed = plan.recomputed_of(grid.module, num_layers)
        stages = f"{grid.pp} stage{'s' if grid.pp > 1 else ''} ({layers} layers)"
        layout = f"{grid.module}: tp {grid.tp}, {stages}, {grid.dp} replicas"
        recomputing = f", recomputing {joined(recomputed)} of its {layers} layers, which no flag says"
        recomputing = recomputing if any(recomputed) else ""
        if plan.placement == "monolithic":
            where = "inside the LLM's first stage on the LLM's grid: put it into your model there"
            sentences.append(f"{layout}, {where}{recomputing}")
            continue
        sentences.append(f"{layout} ({plan.placement}): {why}; it takes a grid and a loop of your own{recomputing}")
    return sentences


def joined(counts: Sequence[int]) -> str:
    """Numbers as one word, e.g. `8+8+9+3`."""
    return "+".join(map(str, counts))
