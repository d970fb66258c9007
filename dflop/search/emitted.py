"""What a plan becomes in the flags or the config file of a framework, and sentences that several frameworks need."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import yaml

from dflop.models import ModelSpec
from dflop.plan import MONOLITHIC, Grid, Plan
from dflop.plan.shardings.parameters import SHARDING as PARAMETERS

__all__ = [
    "SHARED_BY_ALL",
    "TORCH_SCHEDULES",
    "Emitted",
    "Framework",
    "as_fsdp2",
    "copies_and_shards",
    "encoders_beside",
    "joined",
    "on_one_mesh",
    "recomputed_all_or_none",
    "recomputed_by_module",
    "shared_beyond_cp",
    "split_or_apart",
]

# The names of schedules in torch.distributed.pipelining.
TORCH_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B"}
# Fields of a grid whose replicas all share its parameters.
SHARED_BY_ALL = MappingProxyType({"sharding": PARAMETERS.name, "shards": None})


@dataclass(kw_only=True, slots=True)
class Emitted:
    """Flags of a framework's launch command, or keys of its config file, and sentences on what they do not express.

    A flag has one value, a list of values or, as a switch, None. A key of a config file is dotted, such as
    `train.micro_batch_size`, and has any value that YAML knows. `plan` is what the framework makes of them.
    """

    plan: Plan
    flags: dict[str, Any] = field(default_factory=dict)
    beyond: list[str] = field(default_factory=list)

    def to_text(
        self, framework: "Framework", plan: Plan, remarks: Sequence[str] = (), prices: Sequence[str] = ()
    ) -> str:
        """The flags, one a line and ready to be pasted, or a YAML file, with `remarks` as comments before them, and
        `prices` and the sentences behind them."""
        lines = [f"# {plan}", f"# as {framework.form} of {framework.release}:", *(f"# {line}" for line in remarks)]
        lines.append(self._as_yaml() if framework.is_config else self._as_flags())
        if prices:
            lines += ["", *(f"# {line}" for line in prices)]
        if self.beyond:
            lines += ["", f"# What these {framework.form} cannot express, or express differently:"]
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
    them. `cp_key` is that of its context parallelism, which gives a device `cp_runs` equal runs of each sample.
    `refusal(plan)` says why it cannot run a plan, or None."""

    release: str
    flags_of: Callable[[Plan, ModelSpec, int], Emitted]
    cp_key: str
    is_config: bool = False
    cp_runs: int = 2
    refusal: Callable[[Plan], str | None] = lambda plan: None

    @property
    def form(self) -> str:
        return "keys" if self.is_config else "flags"


def on_one_mesh(
    plan: Plan,
    spec: ModelSpec,
    recomputed: Mapping[str, Sequence[int]],
    sharing: Mapping[str, object] = MappingProxyType({}),
) -> Plan:
    """The plan of a framework that knows the LLM's grid alone: encoders in its first stage, shared as the LLM is,
    whole samples on each replica, and nothing in host memory.

    `recomputed` has the number of recomputed layers of each stage; a module that is not named recomputes none.
    `sharing` are fields of the LLM's grid, where the framework has replicas share something else.
    """
    llm = replace(plan.grid("llm"), rank_offset=0, recomputed=(), attention_kept=(), offloaded=(), cp=1, **sharing)
    encoder = replace(llm, num_ranks=llm.dp * llm.tp, pp=1, layers=())
    encoders = [replace(encoder, module=grid.module) for grid in plan.grids[:-1]]
    made = replace(
        plan,
        placement=MONOLITHIC.name if encoders else plan.placement,
        grids=(*encoders, llm),
        checkpointing=any(map(any, recomputed.values())),
        offloads_optimizer=False,
    )
    layers = {grid.module: made.recomputed_of(grid.module, spec.module(grid.module).num_layers) for grid in made.grids}
    counts = {module: tuple(recomputed.get(module, (0,) * len(own))) for module, own in layers.items()}
    if counts == layers or not made.checkpointing:
        return made
    return replace(made, grids=tuple(replace(grid, recomputed=counts[grid.module]) for grid in made.grids))


def copies_and_shards(llm: Grid) -> tuple[int, int]:
    """How many copies of its parameters the LLM has and among how many replicas each is divided, where a framework has
    FSDP share them and counts the `cp` devices that divide a sample as one replica."""
    shards = llm.num_shards if llm.gathers else llm.dp
    most = max(1, shards // llm.cp)
    return llm.dp // llm.cp // most, most


def shared_beyond_cp(plan: Plan) -> Plan:
    """The plan of a framework that refuses copies of one replica each where several devices divide a sample: the LLM's
    parameters are shared by all replicas then."""
    llm = plan.grid("llm")
    copies, shards = copies_and_shards(llm)
    if llm.cp == 1 or shards > 1 or copies == 1:
        return plan
    return replace(plan, grids=(*plan.grids[:-1], replace(llm, **SHARED_BY_ALL)))


def as_fsdp2(llm: Grid) -> Mapping[str, object]:
    """What replicas share under torch's FSDP2, which has no ZeRO-1, as fields of the LLM's grid.

    In pipelines it keeps gathered parameters and whole gradients to the last microbatch: there it is the same.
    """
    return {} if llm.gathers or llm.dp == 1 or llm.pp > 1 else SHARED_BY_ALL


def split_or_apart(plan: Plan) -> str | None:
    """The refusal of frameworks that have the whole model on every device."""
    if any(grid.num_ranks != plan.world_size for grid in plan.grids):
        return "it has the whole model on every device, and the plan has modules on devices of their own"
    if split := [grid.module for grid in plan.grids if grid.tp * grid.pp > 1]:
        return f"it has the whole model on every device, and the plan splits {' and '.join(split)} over several"
    return None


def recomputed_by_module(plan: Plan, spec: ModelSpec) -> tuple[dict[str, int], dict[str, int]]:
    """How many layers of each module the plan recomputes, and how many there are."""
    layers = {grid.module: spec.module(grid.module).num_layers for grid in plan.grids}
    return {module: sum(plan.recomputed_of(module, number)) for module, number in layers.items()}, layers


def recomputed_all_or_none(plan: Plan, spec: ModelSpec) -> dict[str, Sequence[int]]:
    """The recomputed layers of each module in frameworks with one switch for the whole model; empty for none."""
    planned, layers = recomputed_by_module(plan, spec)
    return {module: (count,) for module, count in layers.items()} if any(planned.values()) else {}


def encoders_beside(plan: Plan, spec: ModelSpec, why: str) -> list[str]:
    sentences = []
    for grid in plan.grids[:-1]:
        num_layers = spec.module(grid.module).num_layers
        layers = joined([len(part) for part in plan.layers_of(grid.module, num_layers)])
        stages = f"{grid.pp} stage{'s' if grid.pp > 1 else ''} ({layers} layers)"
        layout = f"{grid.module}: tp {grid.tp}, {stages}, {grid.dp} replicas"
        llm = plan.grid("llm")
        if plan.placement == "monolithic":
            where = "inside the LLM's first stage on the LLM's grid: put it into your model there"
            sentences.append(f"{layout}, {where}")
            continue
        if plan.placement == "colocated" and (grid.layout, grid.pp, grid.dp) == (llm.layout, llm.pp, llm.dp):
            where = "on the LLM's own mesh, so it fits; the plan encodes all media of a step before the LLM begins"
            sentences.append(f"{layout}, {where}")
            continue
        sentences.append(f"{layout} ({plan.placement}): {why}; it takes a grid and a loop of your own")
    if (num_ranks := plan.grid("llm").num_ranks) < plan.world_size:
        sentences.append(
            f"devices: the sizes above are for {num_ranks} of the plan's {plan.world_size}, and so are all figures; on "
            "all of them there is another number of replicas"
        )
    return sentences


def joined(counts: Sequence[int]) -> str:
    """Numbers as one word, e.g. `8+8+9+3`."""
    return "+".join(map(str, counts))
