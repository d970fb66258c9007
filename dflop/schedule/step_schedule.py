"""A step's schedule: what each rank loads and computes; and its encoding, in which it is sent to the ranks.

The scheduling process encodes a schedule, bytes are passed on, and each rank decodes them once.
"""

import json
import math
import struct
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np

from dflop.schedule.assignment import Assignment
from dflop.schedule.lockstep import lasting_s
from dflop.schedule.pricer import Pricer
from dflop.shapes import HOW_DRAWN, MediaSizes, SampleShapes

__all__ = ["StepSchedule", "schedule_of"]

# The format of a length in bytes: the decompressed stream's, which is needed to decompress it, and its head's.
_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepSchedule:
    """One step. Samples are sorted by (LLM dp rank, microbatch, position); times are predictions.

    `slots` [2, num_pipeline_ranks, num_microbatches] say where encoders compute in plans that fill bubbles with them
    (`placements.bubble_filled`); None for the order that all batches share.
    `encoder_rank`, `num_items`, `sum_sq_items` and `kept_tokens` are [num_samples, num_encoders] in the order of
    `encoders`; the other arrays over samples are [num_samples]. Where samples are shared by replicas, each share is a
    row (`SampleShapes.degree`), and the shares of a sample are on neighbouring replicas in the same microbatch.
    `idle_of_worker` [num_workers] is the share of the step in which each worker waits, and `idle` the mean over ranks.
    `num_beyond_memory` counts faster assignments that were not taken because they do not fit into memory,
    `num_left_out` samples of the batch with which nothing would have fitted.
    `forward_s`, `backward_s` and `extrapolated` (bool: predicted for a load outside the measured range) are
    [num_nodes, num_microbatches] in the order of `nodes_of`. `corrections_version` is that of the corrections that
    priced it (0: the cost table alone). `measures` is whether its ranks report their measured times.
    """

    step: int
    encoders: tuple[str, ...]
    sample_id: np.ndarray
    source: np.ndarray
    row: np.ndarray
    llm_dp_rank: np.ndarray
    microbatch: np.ndarray
    position: np.ndarray
    encoder_rank: np.ndarray
    num_items: np.ndarray
    kept_tokens: np.ndarray
    llm_tokens: np.ndarray
    target_tokens: np.ndarray
    media: MediaSizes | None
    forward_s: np.ndarray
    backward_s: np.ndarray
    extrapolated: np.ndarray
    step_s: float
    idle: float
    idle_of_worker: np.ndarray
    lower_bound_s: float
    policy: str
    status: str
    num_beyond_memory: int
    deciding_s: float
    slots: np.ndarray | None = None
    num_left_out: int = 0
    sum_sq_items: np.ndarray | None = None
    degree: np.ndarray | None = None
    share: np.ndarray | None = None
    whole_tokens: np.ndarray | None = None
    corrections_version: int = 0
    measures: bool = False

    @property
    def shapes(self) -> SampleShapes:
        """The shapes of the step's samples, in the schedule's order."""
        named = [item.name for item in fields(SampleShapes) if item.name not in HOW_DRAWN]
        return SampleShapes(**{name: getattr(self, name) for name in named})

    @property
    def sample_tokens(self) -> np.ndarray:
        """LLM tokens of the whole sample of each row, [num_samples]."""
        return self.llm_tokens if self.whole_tokens is None else self.whole_tokens

    @lru_cache(maxsize=4)  # noqa: B019 - each microbatch of a step asks
    def shared_samples(self) -> list[list[int]]:
        """The rows of each sample that is shared, by share; samples in an order that is the same in each of their
        replicas."""
        if self.degree is None:
            return []
        found: dict[tuple[int, ...], list[int]] = {}
        count: dict[tuple[int, ...], int] = {}
        for row in np.flatnonzero(self.degree > 1).tolist():
            first = int(self.llm_dp_rank[row] - self.share[row])
            own = int(self.microbatch[row]), first, int(self.degree[row]), int(self.share[row])
            count[own] = count.get(own, 0) + 1
            found.setdefault((*own[:3], count[own]), []).append(row)
        return list(found.values())

    def whole_samples(self) -> SampleShapes:
        """`shapes` with one row for each sample, whether it is shared or not."""
        shapes = self.shapes
        if shapes.degree is None:
            return shapes
        per_encoder = ("num_items", "kept_tokens", *(["sum_sq_items"] if shapes.sum_sq_items is not None else []))
        sums = {name: getattr(shapes, name).copy() for name in per_encoder}
        for rows in self.shared_samples():
            for values in sums.values():
                values[rows[0]] = values[rows].sum(axis=0)
        whole = replace(shapes, **sums, llm_tokens=self.sample_tokens).take(shapes.share == 0)
        return replace(whole, degree=None, share=None, whole_tokens=None)

    @property
    def num_samples(self) -> int:
        """The number of samples, each of which may have several rows."""
        return len(self.sample_id) if self.share is None else int((self.share == 0).sum())

    @property
    def assignment(self) -> Assignment:
        """The assignment of the step's samples, in the schedule's order."""
        return Assignment(**{item.name: getattr(self, item.name) for item in fields(Assignment)})

    def to_bytes(self) -> bytes:
        """Compressed: the length of a head, the head (JSON: scalars, texts, and each array's name, type and shape), and
        all bytes of arrays. Wide types come first, and the head fills 8-byte words, so that arrays are aligned."""
        from pyarrow import compress  # imported here: planning makes schedules, too, but does not encode them

        plain, texts, arrays = {}, {}, []
        for name, value in self._values().items():
            if not isinstance(value, np.ndarray):
                plain[name] = value
            elif value.dtype.kind in "UO":
                texts[name] = value.tolist()
            else:
                arrays.append((name, value))
        arrays.sort(key=lambda named: (-named[1].itemsize, named[1].dtype.str))
        head = json.dumps([plain, texts, [(name, value.dtype.str, value.shape) for name, value in arrays]]).encode()
        head += b" " * (-len(head) % _LENGTH.size)
        stream = b"".join([_LENGTH.pack(len(head)), head, *(value.tobytes() for _, value in arrays)])
        return _LENGTH.pack(len(stream)) + compress(stream, "zstd", asbytes=True)

    @classmethod
    def from_bytes(cls, encoded: bytes) -> "StepSchedule":
        """The schedule that `to_bytes` encoded."""
        from pyarrow import decompress

        (length,) = _LENGTH.unpack_from(encoded)
        stream = np.frombuffer(decompress(memoryview(encoded)[_LENGTH.size :], length, "zstd"), np.uint8)
        start = _LENGTH.size + _LENGTH.unpack_from(stream)[0]
        values, texts, arrays = json.loads(stream[_LENGTH.size : start].tobytes())
        values |= {name: np.array(value, dtype=object) for name, value in texts.items()}
        for name, own_type, shape in arrays:
            end = start + math.prod(shape) * np.dtype(own_type).itemsize
            values[name] = stream[start:end].view(own_type).reshape(shape)
            start = end
        values["encoders"] = tuple(values["encoders"])
        if "media_values" in values:
            values["media"] = MediaSizes(values.pop("media_values"), values.pop("media_counts"))
        return cls(**values)

    def _values(self) -> dict[str, object]:
        """The fields, with the media's sizes as two arrays."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        if self.media is not None:
            values |= {"media_values": self.media.values, "media_counts": self.media.counts, "media": None}
        return values


def schedule_of(
    pricer: Pricer,
    shapes: SampleShapes,
    assignment: Assignment,
    *,
    step: int,
    policy: str,
    status: str,
    deciding_s: float,
    num_beyond_memory: int = 0,
    num_left_out: int = 0,
) -> StepSchedule:
    """The schedule of a global batch with this assignment: its samples in order, and the simulated times."""
    times = pricer.stage_times(shapes, assignment)
    timeline = pricer.timeline(times, assignment.slots)
    order = np.lexsort((np.arange(len(shapes)), assignment.microbatch, assignment.llm_dp_rank))
    sorted_shapes = shapes.take(order)
    cell = (assignment.llm_dp_rank * pricer.plan.num_microbatches + assignment.microbatch)[order]
    return StepSchedule(
        step=step,
        encoders=shapes.encoders,
        sample_id=sorted_shapes.sample_id,
        source=sorted_shapes.source,
        row=sorted_shapes.row,
        llm_dp_rank=assignment.llm_dp_rank[order],
        microbatch=assignment.microbatch[order],
        position=np.arange(len(cell)) - np.searchsorted(cell, cell),
        encoder_rank=assignment.encoder_rank[order],
        slots=assignment.slots,
        num_items=sorted_shapes.num_items,
        sum_sq_items=sorted_shapes.sum_sq_items,
        kept_tokens=sorted_shapes.kept_tokens,
        llm_tokens=sorted_shapes.llm_tokens,
        target_tokens=sorted_shapes.target_tokens,
        media=sorted_shapes.media,
        degree=sorted_shapes.degree,
        share=sorted_shapes.share,
        whole_tokens=sorted_shapes.whole_tokens,
        forward_s=lasting_s(pricer.plan, times.forward_s),
        backward_s=lasting_s(pricer.plan, times.backward_s),
        extrapolated=pricer.extrapolated(shapes, assignment),
        step_s=timeline.step_s,
        idle=timeline.idle,
        idle_of_worker=timeline.idle_of_worker,
        lower_bound_s=pricer.lower_bound_s(shapes),
        policy=policy,
        status=status,
        num_beyond_memory=num_beyond_memory,
        num_left_out=num_left_out,
        deciding_s=deciding_s,
        corrections_version=pricer.corrections.version,
    )
