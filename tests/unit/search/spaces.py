"""Small search spaces for the planner's tests: configs, costs that bend, and the price of every row by the slow way."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from dflop.balance import LPT, Policy
from dflop.config import Config, load_config
from dflop.costs import PARTS, CostModel, Link, LinkModel
from dflop.models import ModelSpec
from dflop.models.loads import Coefficients, Hinge
from dflop.plan.layout_key import LayoutKey
from dflop.search import PlanPricer, enumerate_space, plan_of
from dflop.search.grouped_batches import GroupedBatches
from dflop.search.recompute import JustEnough
from dflop.search.splits import balanced_splits
from dflop.shapes import SampleShapes

ALL_PLACEMENTS = ["disjoint", "colocated", "bubble_filled", "monolithic"]
# So much a device that, with `with_quick_tp_2`, tensor-parallel ranks with sharded parameters are the fastest that fit.
LITTLE_GIB = 0.009
ALL_SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b"]
# What may be frozen: modules, encoders without their projectors, and some layers, below and between trained ones.
FROZEN = [
    (),
    ("vision",),
    ("llm",),
    ("vision.encoder",),
    ("vision.encoder", "llm"),
    ("vision", "llm.embeddings", "llm.layers.[0-1]"),
    ("vision.encoder.embeddings", "vision.encoder.layers.0", "llm.layers.[1-2]"),
]
ALL_SHARDINGS = ["optimizer", "parameters", "hybrid"]


def make_config(
    devices: int = 4,
    batch_size: int = 8,
    *,
    num_nodes: int = 1,
    placements: Sequence[str] = ALL_PLACEMENTS,
    schedules: Sequence[str] = ALL_SCHEDULES,
    shardings: Sequence[str] = ALL_SHARDINGS,
    cp_sizes: Sequence[int] = (1,),
    fixed: dict | None = None,
    today: dict | None = None,
    search_batches: int = 3,
    freeze: Sequence[str] = (),
    memory_gib: float = 64.0,
    **cluster: float | str,
) -> Config:
    """`devices` is the number on all nodes together; everything is searched unless said otherwise, but that no sample
    is shared: batches are so small that most samples are long."""
    return load_config(
        {
            "model": {"freeze": list(freeze)},
            "cluster": {
                "num_nodes": num_nodes,
                "devices_per_node": devices // num_nodes,
                "memory_gib": memory_gib,
                **cluster,
            },
            "train": {"global_batch_size": batch_size},
            "plan": {
                "placements": list(placements),
                "schedules": list(schedules),
                "shardings": list(shardings),
                "cp_sizes": list(cp_sizes),
                "search_batches": search_batches,
                "fixed": fixed,
                "today": today,
            },
        }
    )


def with_quick_tp_2(costs: CostModel) -> CostModel:
    """The costs, and those of two ranks that share a module and take a third of the time: so shared it is fastest."""
    times, parameter_bytes = dict(costs.times), dict(costs.parameter_bytes)
    activations, transients = dict(costs.activations), dict(costs.transients)
    for own, factor in ((times, 1 / 3), (activations, 0.5), (transients, 0.5), (parameter_bytes, 0.5)):
        own.update({(key[0], LayoutKey(2), *key[2:]): factor * value for key, value in list(own.items())})
    return dataclasses.replace(
        costs, times=times, activations=activations, transients=transients, parameter_bytes=parameter_bytes
    )


def with_memory(config: Config, memory_gib: float) -> Config:
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, memory_gib=memory_gib))


class Space(NamedTuple):
    """What `search_plans` builds of its arguments."""

    batches: GroupedBatches
    splits: dict[tuple[LayoutKey, int], tuple[int, ...]]
    rows: pl.DataFrame


def space_of(config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes, cp: int = 1) -> Space:
    batches = GroupedBatches(config, spec, costs, samples, cp)
    splits = balanced_splits(config, spec, costs, batches)
    return Space(batches, splits, enumerate_space(config, spec, costs.layouts, splits, cp=cp))


def price_all(
    config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes, policy: Policy = LPT
) -> pl.DataFrame:
    """Every row of the space with its plan's mean step and its highest memory. The plan recomputes just enough layers,
    or all of them where even that does not fit."""
    batches, splits, rows = space_of(config, spec, costs, samples)
    priced = []
    for row in rows.iter_rows(named=True):
        pricer = PlanPricer(plan_of(row, splits), config, spec, costs, batches, policy)
        pricer = just_enough(pricer, config, spec)
        priced.append(
            {
                "plan": str(pricer.plan),
                "step_s": float(np.mean([pricer.step_s(batch) for batch in range(len(batches))])),
                "memory_bytes": pricer.needed_bytes(),
            }
        )
    return pl.DataFrame(priced)


def some_needs(
    config: Config, spec: ModelSpec, costs: CostModel, samples: SampleShapes, policy: Policy = LPT
) -> np.ndarray:
    """What plans of rows all over the space need, with everything recomputed and with nothing."""
    batches, splits, rows = space_of(config, spec, costs, samples)
    pinned = config.plan.fixed.checkpointing if config.plan.fixed else None
    needs = []
    for row in rows.gather_every(1 + len(rows) // 200).iter_rows(named=True):
        for recomputes in (False, True):
            if pinned in (None, recomputes):
                plan = plan_of(row, splits, checkpointing=recomputes)
                needs.append(PlanPricer(plan, config, spec, costs, batches, policy).needed_bytes())
    return np.array(needs)


def just_enough(nothing: PlanPricer, config: Config, spec: ModelSpec) -> PlanPricer:
    """A plan that recomputes nothing, with just enough layers recomputed, or all where even that does not fit."""
    limit = config.cluster.memory_gib * 2**30
    pinned = config.plan.fixed.checkpointing if config.plan.fixed else None
    if pinned is False or (pinned is None and nothing.needed_bytes() <= limit):
        return nothing
    found = None if pinned else JustEnough(spec, config.model.trained, limit).of(nothing)
    return found or nothing.recomputing(dataclasses.replace(nothing.plan, checkpointing=True))


def bent_costs(seed: int, tp_sizes: tuple[int, ...] = (1, 2), modules: Sequence[str] = ("vision", "llm")) -> CostModel:
    """Drawn costs of the modules; two seeds of three have those of layers recomputed but for attention. Of half of the
    seeds each part's time and passing memory is a convex broken line of its main load, of others a straight one; links
    are measured or not."""
    rng = np.random.default_rng(seed)
    is_bent, has_links = rng.random(2) < 0.5
    times, activations, transients, parameter_bytes = {}, {}, {}, {}
    own = np.random.default_rng([seed, 1])
    attention_bytes = {("llm", LayoutKey(tp)): own.uniform(0.0, 0.3) for tp in tp_sizes if seed % 3}
    for module in modules:
        along = dict.fromkeys(PARTS, 1) | {"last": 3} if module == "llm" else dict.fromkeys(PARTS, 0)
        unit_s = 10.0 ** rng.uniform(-5, -3.5) / (20 if module == "llm" else 1)
        unit_bytes = 10.0 ** rng.uniform(3, 5) / (20 if module == "llm" else 1)
        for part in PARTS:
            share = rng.uniform(0, 3) if part in ("first", "last") else 1.0
            for tp in tp_sizes:
                scale = share / tp ** rng.uniform(0.5, 1)
                again_s, kept_share = rng.uniform(1.5, 2.5), rng.uniform(0.05, 0.4)
                forward = _bent(rng, along[part], scale * unit_s, module == "llm" and part == "layer", is_bent)
                kept = _bent(rng, along[part], scale * unit_bytes, False, False)
                on_top = _bent(rng, along[part], scale * unit_bytes, False, is_bent)
                for checkpointing in (False, True) if part in ("stage", "layer") else (False,):
                    key = (module, LayoutKey(tp), part, checkpointing)
                    again = float(checkpointing and part == "layer")
                    times[*key, "forward"] = forward
                    times[*key, "backward"] = (again_s + again) * forward
                    activations[key] = kept_share * kept if again else kept
                    if again and (module, LayoutKey(tp)) in attention_bytes:
                        attention_bytes[module, LayoutKey(tp)] *= (1 - kept_share) * kept.per_load[1]
                    transients[key] = kept if again else on_top
                parameter_bytes[module, LayoutKey(tp), part] = (
                    rng.uniform(0, 1e6) * share / tp if part != "stage" else 0.0
                )
    return CostModel(
        times=times,
        activations=activations,
        transients=transients,
        parameter_bytes=parameter_bytes,
        attention_bytes=attention_bytes,
        overhead_bytes=rng.uniform(0, 1e6),
        allocator_share=rng.uniform(0, 0.2),
        links=_links(rng) if has_links else LinkModel(),
    )


def _bent(rng: np.random.Generator, along: int, unit: float, is_square: bool, is_bent: bool) -> Coefficients:
    per_load = [0.0, 0.0, 0.0, 0.0]
    per_load[along] = unit * rng.uniform(0.3, 1)
    if is_square:
        per_load[2] = unit * rng.uniform(0, 1e-3)
    ends = np.sort(rng.uniform(1, 40, 2)) * (1 if along == 0 else 20)
    hinges = tuple(Hinge(along, float(at), float(unit * rng.uniform(0, 1))) for at in ends) if is_bent else ()
    return Coefficients(unit * rng.uniform(0, 10), tuple(per_load), hinges)


def _links(rng: np.random.Generator) -> LinkModel:
    """Latencies and bandwidths that need not agree on which scope is the faster."""
    kinds = [("p2p", 2), ("exchange", 4), *(("gradient_sync", size) for size in (2, 4))]
    return LinkModel(
        {
            (kind, scope, size): Link(10.0 ** rng.uniform(-6, -3), 10.0 ** rng.uniform(7, 10))
            for kind, size in kinds
            for scope in ("intra", "inter")
        }
    )


def uneven_samples(num_samples: int, seed: int, encoders: Sequence[str] = ("vision",)) -> SampleShapes:
    """Samples of which a few are many times the others: text alone, a clip with hardly a word, or both."""
    rng = np.random.default_rng(seed)
    num_items = np.zeros((num_samples, len(encoders)), dtype=np.int64)
    for own in num_items.T:
        own[:] = rng.geometric(rng.uniform(0.05, 0.7), num_samples) * (rng.random(num_samples) < 0.7)
    text_tokens = rng.integers(5, 100, num_samples)
    is_huge = rng.random((2, num_samples)) < rng.uniform(0, 0.3)
    num_items[is_huge[0]] *= rng.integers(2, 30)
    text_tokens[is_huge[1]] *= rng.integers(2, 30)
    kept_tokens = num_items * rng.integers(1, 40)
    return SampleShapes(
        encoders=tuple(encoders),
        sample_id=np.array([f"s{index}" for index in range(num_samples)], dtype=object),
        source=np.full(num_samples, "drawn", dtype=object),
        row=np.arange(num_samples),
        num_items=num_items,
        kept_tokens=kept_tokens,
        llm_tokens=kept_tokens.sum(axis=1) + text_tokens,
        target_tokens=text_tokens // 3,
    )
