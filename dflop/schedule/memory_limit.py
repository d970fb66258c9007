"""Memory as a limit: which samples a plan can hold at all, and how a batch's assignment is changed until it fits.

A sample that a device cannot hold even alone in its microbatch is left out, and reported by name with its bytes. Every
command calls this module with the same shapes, costs and plan, so that all commands use the same samples. Whether
samples fit together is checked for a whole assignment (`Pricer.memory_bytes`).
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import polars as pl

from dflop.balance import BatchProblem, dealt_at_random, lpt_buckets
from dflop.base import UserError
from dflop.schedule.assignment import Assignment, samples_alone
from dflop.schedule.plan_memory import MicrobatchBytes
from dflop.schedule.pricer import Pricer
from dflop.schedule.sharing import most_shares
from dflop.shapes import SampleShapes
from dflop.step import StageReplicas
from dflop.store import LEFT_OUT_SCHEMA

__all__ = [
    "MOST_LEFT_OUT",
    "alone_bytes",
    "describe_left_out",
    "fits",
    "fitted",
    "leave_out_too_large",
    "require_each_fits",
    "shared_bytes",
    "without",
]

# The largest share of samples that may be left out. Beyond it the devices are too small, and a run would train on
# noticeably different data.
MOST_LEFT_OUT = 0.1
# How many changes of an assignment are tried to make it fit, a fraction of a millisecond each.
MOST_TRIALS = 400
_NUM_DRAWN = 3
# By how much the fullest device may be fuller than it was at best, as a share, where nothing else helps.
_FULLER = 0.05
_SHOWN = 3


def alone_bytes(pricer: Pricer, shapes: SampleShapes) -> np.ndarray:
    """Bytes of the fullest device when a sample is alone in its microbatch and all others are empty, [num_samples].

    No assignment needs less. Where modules share ranks, the sample's media and its text may be computed on different
    ranks; the choice that needs least counts.
    """
    alone = samples_alone(pricer.plan, shapes)
    of_stages = list(zip(pricer.stages, pricer.memory.of_stages(alone), strict=True))
    least = np.full(len(shapes), np.inf)
    for replicas in _replicas_that_differ(pricer):
        least = np.minimum(least, _peaks(pricer, of_stages, replicas, len(shapes)))
    return pricer.memory.held_bytes(least)


def shared_bytes(pricer: Pricer, samples: SampleShapes) -> np.ndarray:
    """As `alone_bytes`, but where that is more than a device has, and the plan's replicas share samples, of the fullest
    device that computes a share of the sample."""
    needed_bytes, limit_bytes = alone_bytes(pricer, samples), pricer.memory.limit_bytes
    if pricer.divider and len(long := np.flatnonzero(needed_bytes > limit_bytes)):
        whole = samples.take(long)
        degree = np.minimum(most_shares(whole), pricer.plan.grid("llm").cp)
        of_shares = alone_bytes(pricer, pricer.divider.divided(whole, degree))
        needed_bytes[long] = np.maximum.reduceat(of_shares, np.cumsum(degree) - degree)
    return needed_bytes


def leave_out_too_large(
    pricer: Pricer, samples: SampleShapes, *, shares: bool = True
) -> tuple[SampleShapes, pl.DataFrame]:
    """The samples that the plan's devices can hold, and a row for each of the others (`LEFT_OUT_SCHEMA`). Replicas that
    share samples hold longer ones together, unless the policy shares none (`shares`).

    Raises:
        UserError: a device cannot hold the model, or more than a tenth of the samples.
    """
    pricer.memory.require_room()
    needed_bytes = (shared_bytes if shares else alone_bytes)(pricer, samples)
    return without(samples, needed_bytes, pricer.memory.limit_bytes)


def without(samples: SampleShapes, needed_bytes: np.ndarray, limit_bytes: float) -> tuple[SampleShapes, pl.DataFrame]:
    """The samples that need no more than the limit, and a row for each of the others (`LEFT_OUT_SCHEMA`).

    `needed_bytes` is [num_samples].

    Raises:
        UserError: more than a tenth of the samples need more.
    """
    too_large = needed_bytes > limit_bytes
    out, needed_bytes = samples.take(np.flatnonzero(too_large)), needed_bytes[too_large]
    if len(out) > MOST_LEFT_OUT * len(samples):
        raise UserError(
            f"{len(out)} of {len(samples)} samples do not fit into `cluster.memory_gib` = {_gib(limit_bytes)} even "
            f"alone in a microbatch (the largest, {_named(out, int(needed_bytes.argmax()))}, takes "
            f"{_gib(needed_bytes.max())} GiB), and no more than {MOST_LEFT_OUT:.0%} are left out; use devices with "
            "more memory, a plan with more pipeline stages, tensor parallelism or checkpointing, or lower "
            "`data.max_llm_tokens`"
        )
    frame = pl.DataFrame(
        {
            "source": out.source.tolist(),
            "row": out.row.tolist(),
            "sample_id": out.sample_id.tolist(),
            "reason": ["too_large"] * len(out),
            "detail": [_detail(out, index, needed_bytes[index], limit_bytes) for index in range(len(out))],
            "llm_tokens": out.llm_tokens.tolist(),
            "num_items": out.num_items.sum(axis=1).tolist(),
            "predicted_bytes": needed_bytes.tolist(),
            "limit_bytes": [limit_bytes] * len(out),
        },
        schema=LEFT_OUT_SCHEMA,
    )
    return (samples.without(too_large) if len(out) else samples), frame


def describe_left_out(left_out: pl.DataFrame) -> list[str]:
    """Lines to print: the largest left-out samples by name, and how many more there are; none if none are left out."""
    if left_out.is_empty():
        return []
    shown = left_out.sort("predicted_bytes", descending=True).head(_SHOWN)
    lines = [
        f"left out: {source} row {row}: {detail}" for source, row, detail in shown["source", "row", "detail"].rows()
    ]
    if len(left_out) > _SHOWN:
        lines.append(f"left out: {len(left_out) - _SHOWN} more samples that take too much memory")
    return lines


def fits(pricer: Pricer, shapes: SampleShapes, assignment: Assignment) -> bool:
    """Whether every device has room for the assignment, by its predicted bytes."""
    return max(pricer.memory_bytes(shapes, assignment).values()) <= pricer.memory.limit_bytes


def fitted(pricer: Pricer, shapes: SampleShapes, starts: Sequence[Assignment], rng: np.random.Generator) -> Assignment:
    """An assignment that fits into memory.

    A start is changed at random, a little at a time, until it fits. The given starts are tried first, then one that
    balances bytes alone, then a few that are drawn at random. A descent may end where every single change makes the
    fullest device fuller; so at last the one that balances bytes is tried with changes that do so, too.

    Raises:
        UserError: no assignment that fits was found.
    """
    require_each_fits(pricer, shapes)
    num_buckets, num_microbatches = pricer.plan.num_buckets, pricer.plan.num_microbatches
    drawn = (dealt_at_random(len(shapes), num_buckets, rng) for _ in range(_NUM_DRAWN))
    others = (pricer.assign(shapes, *np.divmod(cell, num_microbatches)) for cell in drawn)
    even = _even_in_bytes(pricer, shapes)
    tries = ((start, 0.0) for start in itertools.chain(starts, [even], others))
    found_bytes = []
    for start, fuller in itertools.chain(tries, [(even, _FULLER)] * _NUM_DRAWN):
        assignment, own_bytes = _descend_on_bytes(pricer, shapes, start, fuller, rng)
        if own_bytes <= pricer.memory.limit_bytes:
            return assignment
        found_bytes.append(own_bytes)
    raise _none_fits(pricer, min(found_bytes))


def require_each_fits(pricer: Pricer, shapes: SampleShapes) -> None:
    """Raise `UserError` where a device cannot hold a sample of the batch whole: then no assignment fits."""
    alone = alone_bytes(pricer, shapes).max()
    if alone > pricer.memory.limit_bytes:
        raise _none_fits(pricer, alone)


def _none_fits(pricer: Pricer, best_bytes: float) -> UserError:
    return UserError(
        f"no assignment of the batch was found that fits into `cluster.memory_gib` = "
        f"{_gib(pricer.memory.limit_bytes)} with {pricer.plan}; the best takes {_gib(best_bytes)} GiB of a device: "
        "use a plan with more microbatches, pipeline stages or recomputed layers (`plan.fixed.checkpointing: true` "
        "recomputes all), or lower `train.global_batch_size`"
    )


def _descend_on_bytes(
    pricer: Pricer, shapes: SampleShapes, start: Assignment, fuller: float, rng: np.random.Generator
) -> tuple[Assignment, float]:
    """Move or swap samples or swap microbatches at random, keeping changes that make the fullest device no fuller.

    A change may make it fuller than in the best assignment so far by the share `fuller` at first, and by nothing in the
    end. Returns the best assignment and the bytes of its fullest device.
    """
    now, now_bytes = start, max(pricer.memory_bytes(shapes, start).values())
    best, needed_bytes = now, now_bytes
    num_microbatches = pricer.plan.num_microbatches
    for trial in range(MOST_TRIALS):
        if needed_bytes <= pricer.memory.limit_bytes:
            break
        cell = now.llm_dp_rank * num_microbatches + now.microbatch
        one, other = rng.integers(len(shapes), size=2)
        if cell[one] == cell[other]:
            continue
        changed = cell.copy()
        kind = rng.integers(3)
        if kind == 0:
            changed[one], changed[other] = cell[other], cell[one]
        elif kind == 1:
            changed[one] = cell[other]
        else:
            changed[cell == cell[one]], changed[cell == cell[other]] = cell[other], cell[one]
        if (np.bincount(changed, minlength=cell.max() + 1) == 0).any():
            continue
        assignment = pricer.assign(shapes, *np.divmod(changed, num_microbatches))
        its_bytes = max(pricer.memory_bytes(shapes, assignment).values())
        if its_bytes <= max(now_bytes, needed_bytes * (1 + fuller * (1 - trial / MOST_TRIALS))):
            now, now_bytes = assignment, its_bytes
        if its_bytes < needed_bytes:
            best, needed_bytes = assignment, its_bytes
    return best, needed_bytes


def _even_in_bytes(pricer: Pricer, shapes: SampleShapes) -> Assignment:
    """An assignment that balances the bytes that samples take in each module's fullest stage."""
    kept = {grid.module: np.zeros(len(shapes)) for grid in pricer.plan.grids}
    of_stages = pricer.memory.of_stages(samples_alone(pricer.plan, shapes))
    for stage, sizes in zip(pricer.stages, of_stages, strict=True):
        kept[stage.module] = np.maximum(kept[stage.module], sizes.kept + sizes.passing)
    llm = pricer.plan.grid("llm")
    problem = BatchProblem(
        loads_s=np.column_stack([kept[grid.module] * (llm.dp / grid.dp) for grid in pricer.plan.grids]),
        llm_tokens=shapes.llm_tokens,
        num_dp_ranks=llm.dp,
        num_microbatches=pricer.plan.num_microbatches,
    )
    return pricer.assign(shapes, *np.divmod(lpt_buckets(problem), problem.num_microbatches))


def _peaks(
    pricer: Pricer,
    of_stages: Sequence[tuple[StageReplicas, MicrobatchBytes]],
    replicas: Mapping[str, int],
    num_samples: int,
) -> np.ndarray:
    """Bytes of tensors on the fullest rank when these replicas of the modules compute the sample, [num_samples]."""
    held: dict[int, np.ndarray] = {}
    under_way: dict[int, np.ndarray] = {}
    encoders_held: dict[int, np.ndarray] = {}
    fullest = np.zeros(num_samples)
    for (stage, sizes), size in zip(of_stages, pricer.memory.slot_bytes(pricer.compiled), strict=True):
        for worker in stage.workers(replicas[stage.module]):
            under_way[worker] = under_way.get(worker, 0.0) + size * sizes.edge_tokens
    for stage, sizes in of_stages:
        for worker in stage.workers(replicas[stage.module]):
            now = held.get(worker, pricer.memory.resident_bytes[worker] + under_way[worker]) + sizes.kept
            fullest = np.maximum(fullest, now + sizes.passing)
            if pricer.stage_costs.trained.has_backward(stage):
                held[worker] = now
        if stage.module != "llm":
            encoders_held = dict(held)
    # The first encoder backward runs while the activations of all encoders are still held.
    for stage, sizes in of_stages:
        if stage.module != "llm" and pricer.stage_costs.trained.has_backward(stage):
            for worker in stage.workers(replicas[stage.module]):
                fullest = np.maximum(fullest, encoders_held[worker] + sizes.passing)
    return fullest


def _replicas_that_differ(pricer: Pricer) -> Iterator[dict[str, int]]:
    """The choices of replicas, by module, for which a sample may need different bytes.

    The LLM's replicas are alike, so its first one computes the sample. For a colocated encoder's replica it matters
    whether it shares workers with that LLM replica. Replicas that share none need least, and where there are such, as
    many are tried as are needed to keep several encoders apart from each other. Otherwise all replicas are tried.
    """
    plan, stages = pricer.plan, pricer.stages
    if not (pricer.placement.shares_ranks and pricer.placement.has_bridges):
        yield {grid.module: 0 for grid in plan.grids}
        return
    of_llm = {worker for stage in stages if stage.module == "llm" for worker in stage.workers(0)}
    encoders = [stage for stage in stages if stage.module != "llm"]
    choices = []
    for encoder in encoders:
        apart = [replica for replica in range(encoder.dp) if of_llm.isdisjoint(encoder.workers(replica))]
        spread = np.linspace(0, len(apart) - 1, min(len(apart), len(encoders))).astype(int)
        choices.append([apart[place] for place in spread] or range(encoder.dp))
    for replicas in itertools.product(*choices):
        yield {"llm": 0, **{encoder.module: replica for encoder, replica in zip(encoders, replicas, strict=True)}}


def _detail(shapes: SampleShapes, index: int, needed_bytes: float, limit_bytes: float) -> str:
    return (
        f"{_named(shapes, index)}, takes {_gib(needed_bytes)} GiB of a device even alone in a microbatch, and "
        f"`cluster.memory_gib` is {_gib(limit_bytes)}; use devices with as much, "
        "more replicas a sample (`plan.cp_sizes`), pipeline stages, tensor parallelism or checkpointing, or lower "
        "`data.max_llm_tokens`"
    )


def _named(shapes: SampleShapes, index: int) -> str:
    return (
        f"sample {shapes.sample_id[index]!r} with {shapes.llm_tokens[index]} LLM tokens and "
        f"{shapes.num_items[index].sum()} items"
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.4g}"
