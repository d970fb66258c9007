"""Made-up models with no encoder, or with several, for tests that nothing counts on a single one."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from dflop.costs import CostModel
from dflop.costs.model import Coefficients
from dflop.models import ModelSpec
from dflop.plan import Grid, Plan
from dflop.shapes import SampleShapes

ENCODERS = [(), ("vision",), ("vision", "audio"), ("vision", "audio", "depth")]


def spec_with(spec: ModelSpec, encoders: Sequence[str]) -> ModelSpec:
    """The model with these encoders, each as large as its own."""
    vision, llm = spec.modules
    return replace(spec, modules=(*(replace(vision, name=name, media=(name,)) for name in encoders), llm))


def costs_with(costs: CostModel, encoders: Sequence[str]) -> CostModel:
    """Costs of these encoders: the second takes twice of everything that the first one does."""
    tables = {}
    for name in ("times", "activations", "transients", "parameter_bytes"):
        table = {key: value for key, value in getattr(costs, name).items() if key[0] == "llm"}
        for number, encoder in enumerate(encoders, start=1):
            of_vision = {key: value for key, value in getattr(costs, name).items() if key[0] == "vision"}
            table |= {(encoder, *key[1:]): _times(number, value) for key, value in of_vision.items()}
        tables[name] = table
    return replace(costs, **tables)


def samples_with(draw: Callable[..., SampleShapes], encoders: Sequence[str], num_samples: int, seed: int):
    """Drawn samples whose items for one encoder say nothing of those for the next."""
    first = draw(num_samples, seed)
    media = [draw(num_samples, seed + 1000 * number) for number in range(len(encoders))]
    nothing = np.zeros((num_samples, 0), dtype=np.int64)
    kept = np.concatenate([nothing, *(samples.kept_tokens for samples in media)], axis=1)
    return replace(
        first,
        encoders=tuple(encoders),
        num_items=np.concatenate([nothing, *(samples.num_items for samples in media)], axis=1),
        kept_tokens=kept,
        llm_tokens=first.llm_tokens - first.kept_tokens.sum(axis=1) + kept.sum(axis=1),
    )


def plan_with(encoders: Sequence[str], placement: str, schedule: str, dp: int, num_microbatches: int = 3) -> Plan:
    """An LLM of two stages; on ranks of their own, the encoders have two replicas, three, …"""
    grids, offset = [], 0
    for number, encoder in enumerate(encoders):
        num_ranks = {"disjoint": 2 + number, "colocated": 2 * dp, "bubble_filled": 2 * dp, "monolithic": dp}[placement]
        grids.append(Grid(module=encoder, num_ranks=num_ranks, rank_offset=offset))
        offset += num_ranks if placement == "disjoint" else 0
    grids.append(Grid(module="llm", num_ranks=2 * dp, pp=2, rank_offset=offset))
    return Plan(placement=placement, grids=tuple(grids), num_microbatches=num_microbatches, schedule=schedule)


def with_squares(samples: SampleShapes, seed: int) -> SampleShapes:
    """The samples, with items that attend to each other in runs of up to 64."""
    lengths = np.random.default_rng(seed).integers(1, 65, samples.num_items.shape)
    return replace(samples, sum_sq_items=(samples.num_items * lengths).astype(float))


def costs_of_squares(costs: CostModel) -> CostModel:
    """The costs, with encoders' layers that take as long for ten squares as for an item of the tiny model."""
    times = {
        key: replace(form, per_load=(*form.per_load[:2], 1e-5, *form.per_load[3:]))
        if key[0] != "llm" and key[2] == "layer"
        else form
        for key, form in costs.times.items()
    }
    return replace(costs, times=times)


def _times(factor: float, value: Coefficients | float) -> Coefficients | float:
    if not isinstance(value, Coefficients):
        return factor * value
    per_load = tuple(factor * load for load in value.per_load)
    return replace(value, const=factor * value.const, per_load=per_load)
