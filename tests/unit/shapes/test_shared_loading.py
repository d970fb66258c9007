"""Replicas that share samples load together what one that has them whole loads, and expect what the others send."""

import dataclasses
import itertools
import json
import shutil
from typing import NamedTuple

import numpy as np
import polars as pl
import pytest
import torch
from encoders import costs_with

from dflop.config import ClusterConfig, DataConfig, ModelConfig, SourceConfig, VideoConfig
from dflop.loading.dataset import MicrobatchJob, TrainingRecords, microbatch_loader, segments_of
from dflop.loading.shared_samples import row_runs
from dflop.models import ModelSpec, family_names, load_model_spec, load_runtime
from dflop.models.microbatch import Exchange, TextBatch
from dflop.plan import Grid, Plan
from dflop.schedule import Pricer, StepSchedule, schedule_of
from dflop.shapes import ChatTokenizer, SampleShapes, ShapeProfiler, ShapeReader, list_sources
from dflop.shapes.samples import MEDIA_COLUMNS, MediaSizes
from dflop.shapes.shares import SampleDivider
from dflop.shapes.text import BUNDLED_TOKENIZER
from dflop.step import Node
from dflop.train.feed import job_of

NUM_REPLICAS = 4
# Over how many replicas each sample is computed, and the first of them.
DEGREE, FIRST = np.array([4, 2, 1, 2, 2]), np.array([0, 2, 1, 2, 0])
_COLUMNS = {"vision": ("num_items", "kept_vision_tokens"), "audio": ("num_audio_windows", "kept_audio_tokens")}


class Case(NamedTuple):
    spec: ModelSpec
    data: DataConfig
    shared: StepSchedule
    whole: StepSchedule  # one replica has all samples

    def load(self, schedule: StepSchedule, node: Node, num_replicas: int = NUM_REPLICAS):
        """What a node loads in the step's only microbatch, and the job."""
        make = load_runtime(self.spec.family).processors.get(node.module)
        loader = microbatch_loader(
            self.data,
            self.spec,
            TrainingRecords(list_sources(self.data), 0),
            tokenizer_folder=BUNDLED_TOKENIZER,
            module=node.module,
            num_replicas=[num_replicas] * len(self.spec.encoders),
            processor=make and make(self.spec, None),
        )
        job = job_of(schedule, node, 0, num_replicas)
        return loader[job], job

    def texts(self) -> list[tuple[TextBatch, MicrobatchJob]]:
        """What each of the replicas that share samples loads."""
        return [self.load(self.shared, Node("llm", 0, place)) for place in range(NUM_REPLICAS)]


@pytest.fixture(scope="module", params=itertools.product(family_names(), (False, True)), ids=str)
def case(request, media, write_clip, costs, tmp_path_factory) -> Case:
    """In half of the cases, the first sample is cut off within its media."""
    family, is_truncated = request.param
    folder = tmp_path_factory.mktemp("shared")
    spec = load_model_spec(ModelConfig(family=family, preset="tiny"))
    shutil.copytree(media, folder / "media")
    write_clip(folder / "small.mp4", size=(128, 128))
    if hasattr(spec.rules, "clip"):  # a limit for all frames together, which makes those of this clip smaller
        rules = dataclasses.replace(spec.rules, clip=dataclasses.replace(spec.rules.clip, most=120_000))
        spec = dataclasses.replace(spec, rules=rules)
    (folder / "train.json").write_text(json.dumps(records_of(spec)))
    data = DataConfig(
        sources=[SourceConfig(path=str(folder / "train.json"), name="it")],
        video=VideoConfig(fps=5.0, max_frames=13),
        max_llm_tokens=100_000,
    )
    samples = profiled(spec, data)
    if is_truncated:
        num_media_tokens = samples.kept_tokens[0].sum()
        end_of_media = samples.llm_tokens[0] - samples.target_tokens[0]
        data = dataclasses.replace(data, max_llm_tokens=int(end_of_media - num_media_tokens // 3))
        samples = profiled(spec, data)
        assert 0 < samples.kept_tokens[0].sum() < num_media_tokens
    divided = SampleDivider(spec, data.audio).divided(samples, DEGREE)
    place = np.repeat(FIRST, DEGREE) + divided.share
    costs = costs_with(costs, divided.encoders)
    return Case(
        spec,
        data,
        scheduled(spec, costs, data, divided, place, NUM_REPLICAS),
        scheduled(spec, costs, data, samples, 0 * FIRST, 1),
    )


def records_of(spec: ModelSpec) -> list[dict]:
    hears = any("audio" in encoder.media for encoder in spec.encoders)
    words = "a long answer of many words " * 20

    def record(*turns: str, **media: str) -> dict:
        said = [{"from": ("human", "gpt")[number % 2], "value": turn} for number, turn in enumerate(turns)]
        return media | {"conversations": said}

    sound = {"audio": "media/tone.wav"} if hears else {}
    what = f"<image> {'<audio>' * hears} <video> What?"
    return [
        record("Hi.", "Yes?", what, words, image="media/wide.png", video="small.mp4", **sound),
        record("Hi.", "Yes?", "<video>\n<image>", words, video="small.mp4", image="media/tall.jpg"),
        record("<image> What?", "It is small.", image="media/small.webp"),
        record("Hi.", "Yes?", "<video> Tell me all.", words, "And then?", "Nothing more.", video="small.mp4"),
        record("Hello", "Hello to you. " * 20),
    ]


def profiled(spec: ModelSpec, data: DataConfig) -> SampleShapes:
    (source,), tokenizer = list_sources(data), ChatTokenizer(BUNDLED_TOKENIZER, spec.rules)
    profiler = ShapeProfiler(
        source=source,
        reader=ShapeReader(spec.rules, data),
        tokenizer=tokenizer,
        max_llm_tokens=data.max_llm_tokens,
    )
    frame = profiler.profile(json.loads(source.path.read_text()))
    assert frame["reason"].null_count() == len(frame)
    sizes = frame.select(pl.col(name).fill_null([]) for name in MEDIA_COLUMNS)
    counts = sizes[MEDIA_COLUMNS[0]].list.len().to_numpy().astype(np.int64)
    items, kept = (
        np.column_stack([frame[_COLUMNS[encoder.name][number]].to_numpy() for encoder in spec.encoders])
        for number in range(2)
    )
    return SampleShapes(
        encoders=tuple(encoder.name for encoder in spec.encoders),
        sample_id=frame["sample_id"].to_numpy(),
        source=np.full(len(frame), "it", dtype=object),
        row=frame["row"].to_numpy(),
        num_items=items.astype(np.int64),
        kept_tokens=kept.astype(np.int64),
        llm_tokens=frame["llm_tokens"].to_numpy(),
        target_tokens=frame["target_tokens"].to_numpy(),
        media=MediaSizes(sizes.filter(counts > 0).explode(MEDIA_COLUMNS).to_numpy().astype(np.int32), counts),
    )


def scheduled(spec, costs, data, shapes, place, num_replicas) -> StepSchedule:
    """A step of one microbatch with each row on this replica, and its media there too."""
    encoders = [Grid(module=encoder.name, num_ranks=num_replicas) for encoder in spec.encoders]
    llm = Grid(module="llm", num_ranks=num_replicas, cp=num_replicas)
    plan = Plan(placement="colocated", grids=(*encoders, llm), num_microbatches=1)
    cluster = ClusterConfig(devices_per_node=num_replicas, memory_gib=4.0, intra_node_gbps=100.0, inter_node_gbps=50.0)
    pricer = Pricer(plan, costs, spec, cluster, audio=data.audio)
    assignment = pricer.assign(shapes, place, np.zeros_like(place))
    return schedule_of(pricer, shapes, assignment, step=0, policy="", status="", deciding_s=0.0)


def token_names(job: MicrobatchJob, place: int, starts: dict[int, int]) -> np.ndarray:
    """A number for each token of a replica, by its sample and its position there."""
    runs = row_runs(job.llm_tokens, job.group)
    rows = [starts[ref.row] + np.array(run) for ref, own in zip(job.samples, runs, strict=True) for run in own]
    return np.concatenate(rows)


def received(exchanges: list[Exchange], values: list[np.ndarray]) -> list[np.ndarray]:
    """What each replica gets, by sender, when all send rows of their values."""
    sent = []
    for own, exchange in zip(values, exchanges, strict=True):
        ends = np.cumsum([0, *exchange.num_sent])
        assert len(exchange.rows) == ends[-1]
        sent.append([own[exchange.rows.numpy()[start:end]] for start, end in itertools.pairwise(ends)])
    for receiver, exchange in enumerate(exchanges):
        assert exchange.num_received == tuple(len(of_sender[receiver]) for of_sender in sent)
    return [np.concatenate([of_sender[place] for of_sender in sent]) for place in range(len(values))]


def starts_of(schedule: StepSchedule) -> dict[int, int]:
    """Where each sample begins if all are packed in the order of their rows."""
    by_row = dict(zip(schedule.row.tolist(), schedule.llm_tokens.tolist(), strict=True))
    return dict(zip(sorted(by_row), np.cumsum([0, *(by_row[row] for row in sorted(by_row))]).tolist(), strict=False))


def test_tokens_positions_and_targets_of_all_shares_are_those_of_whole_samples(case):
    whole, _ = case.load(case.whole, Node("llm", 0, 0), 1)
    texts, starts = case.texts(), starts_of(case.whole)
    names = np.concatenate([token_names(job, place, starts) for place, (_, job) in enumerate(texts)])
    assert sorted(names) == list(range(len(whole.token_ids)))
    for name in ("token_ids", "position_ids"):
        found = torch.cat([getattr(batch, name) for batch, _ in texts], dim=-1)
        assert torch.equal(found, getattr(whole, name)[..., torch.from_numpy(names)]), name
    targets = []
    for place, (batch, job) in enumerate(texts):
        at = token_names(job, place, starts)[batch.target_positions.numpy()]
        targets += zip(at.tolist(), batch.target_ids.tolist(), strict=True)
    assert sorted(targets) == list(zip(whole.target_positions.tolist(), whole.target_ids.tolist(), strict=True))


def test_each_run_of_a_share_attends_to_all_tokens_of_its_sample_up_to_its_end(case):
    texts, starts = case.texts(), starts_of(case.whole)
    names = [token_names(job, place, starts) for place, (_, job) in enumerate(texts)]
    keys = [batch.segment_ends.keys for batch, _ in texts]
    came = received([own.exchange for own in keys], names)
    for own, others, shared, (batch, job) in zip(names, came, keys, texts, strict=True):
        attended = np.concatenate([own, others])[shared.rows.numpy()]
        runs = [
            (starts[ref.row], run)
            for ref, of_row in zip(job.samples, row_runs(job.llm_tokens, job.group), strict=True)
            for run in of_row
        ]
        assert shared.queries.ends == np.cumsum([len(run) for _, run in runs]).tolist()
        assert shared.keys.ends == np.cumsum([run.stop for _, run in runs]).tolist()
        np.testing.assert_array_equal(
            attended, np.concatenate([np.arange(start, start + run.stop) for start, run in runs])
        )
        # A stage that reads no records knows the same.
        _, of_middle = segments_of(job.llm_tokens, job.group)
        assert torch.equal(of_middle.keys.rows, shared.rows)
        assert of_middle.ends == batch.segment_ends.ends


def test_features_reach_the_tokens_of_their_media_wherever_they_were_encoded(case):
    """A feature's name is the token of the whole samples that it belongs to."""
    whole, _ = case.load(case.whole, Node("llm", 0, 0), 1)
    starts, texts = starts_of(case.whole), case.texts()
    of_whole = [positions.numpy() for positions in whole.feature_positions]  # by encoder, as there is one replica
    given = {}  # the tokens of each row of the schedule, by encoder
    for encoder, positions in enumerate(of_whole):
        for row, start in starts.items():
            places = positions[(positions >= start) & (positions < dict(ends_of(case.whole))[row])]
            mine = np.flatnonzero(case.shared.row == row)
            mine = mine[np.argsort(case.shared.share[mine])]
            ends = np.cumsum(case.shared.kept_tokens[mine, encoder])
            assert ends[-1] == len(places)
            for own, part in zip(mine.tolist(), np.split(places, ends[:-1]), strict=True):
                given[own, encoder] = part
    values = []
    for place in range(NUM_REPLICAS):
        rows = np.flatnonzero(case.shared.llm_dp_rank == place).tolist()
        order = sorted(
            (encoder, int(case.shared.encoder_rank[row, encoder]), row)
            for row in rows
            for encoder in range(len(of_whole))
        )
        values.append(np.concatenate([given[row, encoder] for encoder, _, row in order]))
    features = [batch.shared_features for batch, _ in texts]
    came = received([own.exchange for own in features], values)
    placed = []
    for place, (own, others, shared) in enumerate(zip(values, came, features, strict=True)):
        names = token_names(texts[place][1], place, starts)
        found = np.concatenate([own, others])[shared.rows.numpy()]
        np.testing.assert_array_equal(found, names[shared.positions.numpy()])
        placed += found.tolist()
    assert sorted(placed) == sorted(np.concatenate(of_whole).tolist())


def ends_of(schedule: StepSchedule) -> list[tuple[int, int]]:
    starts = starts_of(schedule)
    return [
        (int(row), starts[int(row)] + int(tokens))
        for row, tokens in zip(schedule.row, schedule.llm_tokens, strict=True)
    ]


def test_items_that_shares_decode_are_those_of_the_whole_media(case):
    for encoder in case.spec.encoders:
        whole, of_whole = case.load(case.whole, Node(encoder.name, 0, 0), 1)
        counts = [sum(medium.num_items for medium in media) for media in whole.batch.media]
        expected = {
            ref.row: part for ref, part in zip(of_whole.samples, torch.split(whole.batch.items, counts), strict=True)
        }
        found: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for place in range(NUM_REPLICAS):
            loaded, job = case.load(case.shared, Node(encoder.name, 0, place))
            counts = [sum(medium.num_items for medium in media) for media in loaded.batch.media]
            for ref, (share, _), part in zip(
                job.samples, job.shares, torch.split(loaded.batch.items, counts), strict=True
            ):
                found.setdefault(ref.row, []).append((share, part))
            assert not loaded.unreadable
        assert found.keys() == expected.keys()
        for row, shares in found.items():
            parts = [part for _, part in sorted(shares, key=lambda own: own[0])]
            assert torch.equal(torch.cat(parts), expected[row])
        assert max(map(len, found.values())) > 1 or "video" not in encoder.media
