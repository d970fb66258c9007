"""What a replica of the LLM exchanges with those that it shares samples with, for one microbatch.

All follow from the lengths of the samples that a group of replicas shares in this microbatch (`SampleGroup`), and the
features' exchange also from where the samples' media stand in their texts. Each replica works out its own part.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dflop.models.microbatch import Exchange, SegmentEnds, SharedFeatures, SharedKeys
from dflop.shapes.shares import runs_of

__all__ = ["SampleGroup", "SharedSample", "row_runs", "shared_features", "shared_keys"]


@dataclass(frozen=True, slots=True)
class SharedSample:
    """A sample that the replicas from `first` of a group on compute together, each a share. `kept_tokens` has a tuple a
    share: how many tokens of each encoder's media that share encodes. `row` is the share's among the microbatch's
    samples of the replica that this is told, and None if it has none."""

    first: int
    num_tokens: int
    kept_tokens: tuple[tuple[int, ...], ...]
    row: int | None

    @property
    def degree(self) -> int:
        return len(self.kept_tokens)

    def runs(self, place: int) -> tuple[range, range]:
        """The positions in the sample of the share of the replica at this place of the group."""
        return runs_of(self.num_tokens, self.degree, place - self.first)

    def is_of(self, place: int) -> bool:
        return self.first <= place < self.first + self.degree


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """The replicas that may share samples: how many there are, the place of this one among them, and the samples that
    they share in a microbatch, in an order on which all agree."""

    size: int
    place: int
    samples: tuple[SharedSample, ...]

    @property
    def own(self) -> list[SharedSample]:
        """Those of which this replica has a share."""
        return [sample for sample in self.samples if sample.is_of(self.place)]

    def others(self, sample: SharedSample) -> list[int]:
        """The places of the other replicas that have a share of a sample of this one."""
        return [place for place in range(sample.first, sample.first + sample.degree) if place != self.place]


def row_runs(llm_tokens: Sequence[int], group: SampleGroup | None) -> list[tuple[range, ...]]:
    """For each row of a microbatch the positions in its sample that the replica has, given all samples' lengths."""
    runs: list[tuple[range, ...]] = [(range(num_tokens),) for num_tokens in llm_tokens]
    for sample in group.own if group else ():
        runs[sample.row] = sample.runs(group.place)
    return runs


def shared_keys(runs: Sequence[Sequence[range]], group: SampleGroup) -> SharedKeys:
    """What the rows of a microbatch, which have these runs, attend to."""
    starts = _starts(runs)
    num_rows = starts[-1]
    sent: list[list[np.ndarray]] = [[] for _ in range(group.size)]
    received: list[list[tuple[SharedSample, int]]] = [[] for _ in range(group.size)]
    for sample in group.own:
        for place in group.others(sample):
            sent[place].append(np.arange(starts[sample.row], starts[sample.row + 1]))
            received[place].append((sample, sum(map(len, sample.runs(place)))))
    at: dict[tuple[int | None, int], int] = {}
    for place, samples in enumerate(received):
        for sample, length in samples:
            at[sample.row, place] = num_rows
            num_rows += length
    of_rows = {sample.row: sample for sample in group.own}
    queries, keys, rows = [], [], []
    for row, own_runs in enumerate(runs):
        if (sample := of_rows.get(row)) is None:
            found = np.arange(starts[row], starts[row + 1])
        else:
            found = _rows_of_tokens(sample, at | {(row, group.place): starts[row]})
        for own in own_runs:
            queries.append(len(own))
            keys.append(own.stop)
            rows.append(found[: own.stop])
    return SharedKeys(
        queries=SegmentEnds(list(itertools.accumulate(queries))),
        keys=SegmentEnds(list(itertools.accumulate(keys))),
        rows=torch.from_numpy(np.concatenate(rows)),
        exchange=_exchange(sent, [sum(length for _, length in samples) for samples in received]),
    )


def shared_features(
    runs: Sequence[Sequence[range]],
    slots: Sequence[Sequence[np.ndarray]],
    kept_tokens: Sequence[Sequence[int]],
    encoder_rank: Sequence[Sequence[int]],
    group: SampleGroup,
) -> SharedFeatures:
    """Where features go in a microbatch with these runs.

    `slots` are, by row and encoder, the positions in the whole sample of the encoder's media tokens; `kept_tokens` and
    `encoder_rank` by row and encoder how many features come for the row, and from which replica.
    """
    starts, of_rows = _starts(runs), {sample.row: sample for sample in group.own}
    # Features come by encoder, by its replica, and by row.
    order = sorted((encoder, ranks[encoder], row) for row, ranks in enumerate(encoder_rank) for encoder in _of(ranks))
    came: dict[tuple[int, int], int] = {}
    num_features = 0
    for encoder, _, row in order:
        came[row, encoder] = num_features
        num_features += kept_tokens[row][encoder]
    sent: list[list[np.ndarray]] = [[] for _ in range(group.size)]
    received: list[list[np.ndarray]] = [[] for _ in range(group.size)]  # the positions in the packed text
    rows, positions = [], []
    for row, of_row in enumerate(slots):
        sample = of_rows.get(row)
        for encoder, places in enumerate(of_row):
            if sample is None:
                rows.append(came[row, encoder] + np.arange(len(places)))
                positions.append(starts[row] + places)
                continue
            shares = [sample.runs(place) for place in range(sample.first, sample.first + sample.degree)]
            ends = np.cumsum([0, *(kept[encoder] for kept in sample.kept_tokens)])
            own = group.place - sample.first
            encoded, packed = places[ends[own] : ends[own + 1]], _packed(places, runs[row], starts[row])
            rows.append(came[row, encoder] + np.flatnonzero(_is_in(encoded, shares[own])))
            positions.append(packed[ends[own] : ends[own + 1]][_is_in(encoded, shares[own])])
            for place in group.others(sample):
                theirs = slice(ends[place - sample.first], ends[place - sample.first + 1])
                sent[place].append(came[row, encoder] + np.flatnonzero(_is_in(encoded, shares[place - sample.first])))
                received[place].append(packed[theirs][_is_in(places[theirs], shares[own])])
    num_received = [sum(map(len, of_place)) for of_place in received]
    rows.append(num_features + np.arange(sum(num_received)))
    positions += [own for of_place in received for own in of_place]
    return SharedFeatures(
        exchange=_exchange(sent, num_received),
        rows=torch.from_numpy(np.concatenate(rows)),
        positions=torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *positions])),
    )


def _of(values: Sequence[int]) -> range:
    return range(len(values))


def _starts(runs: Sequence[Sequence[range]]) -> list[int]:
    """Where each row begins in the packed text, and where the last one ends."""
    return list(itertools.accumulate((sum(map(len, own)) for own in runs), initial=0))


def _rows_of_tokens(sample: SharedSample, at: dict[tuple[int | None, int], int]) -> np.ndarray:
    """Where each of a sample's tokens is, given where each replica's share begins."""
    found = np.empty(sample.num_tokens, dtype=np.int64)
    for place in range(sample.first, sample.first + sample.degree):
        begin = at[sample.row, place]
        for own in sample.runs(place):
            found[own.start : own.stop] = np.arange(begin, begin + len(own))
            begin += len(own)
    return found


def _packed(places: np.ndarray, runs: Sequence[range], start: int) -> np.ndarray:
    """The positions in the packed text of places in a row's sample; any number for those outside its runs."""
    first, second = runs
    return start + np.where(places < first.stop, places - first.start, places - second.start + len(first))


def _is_in(places: np.ndarray, runs: Sequence[range]) -> np.ndarray:
    return np.any([(places >= own.start) & (places < own.stop) for own in runs], axis=0)


def _exchange(sent: Sequence[Sequence[np.ndarray]], num_received: Sequence[int]) -> Exchange:
    flat = [np.zeros(0, np.int64), *(own for of_place in sent for own in of_place)]
    return Exchange(
        rows=torch.from_numpy(np.concatenate(flat)),
        num_sent=tuple(sum(map(len, of_place)) for of_place in sent),
        num_received=tuple(num_received),
    )
