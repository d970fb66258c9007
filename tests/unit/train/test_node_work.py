"""What a node computes in cases that whole runs rarely meet."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dflop.config import ClusterConfig, ScheduleConfig, load_config
from dflop.loading.dataset import LoadedMedia
from dflop.models.llava_onevision.runtime import RUNTIME
from dflop.models.microbatch import EncoderBatch, MediumLayout, SegmentEnds, TextBatch
from dflop.models.tensor_group import ALONE
from dflop.plan import Grid, Plan
from dflop.schedule import BatchScheduler, GlobalBatches, Pricer
from dflop.step import Node, make_program
from dflop.train.adamw import Rates
from dflop.train.feed import samples_of
from dflop.train.node_work import make_works
from dflop.train.rank_model import NodeModel, RankModel
from dflop.train.sharded_optimizer import ShardedAdamW
from dflop.train.undecodable import Undecodable


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Asked(dist.HashStore):
    """A store that says when somebody has begun to wait for keys."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = threading.Event()

    def wait(self, keys, timeout):
        self.is_asked.set()
        return super().wait(keys, timeout)


def test_a_rank_that_computes_the_loss_before_media_are_decoded_waits_for_what_could_not_be(
    alone, costs, tiny_spec, tokenizer, draw_samples
):
    grids = (Grid(module="vision", num_ranks=2), Grid(module="llm", num_ranks=1, rank_offset=2))
    plan = Plan(placement="disjoint", grids=grids, num_microbatches=1)
    program = make_program(plan)
    index = program.nodes.index(llm := Node("llm", 0, 0))
    config = RUNTIME.make_config(tiny_spec, tokenizer.placeholder_ids, tokenizer.vocab_size())
    stage = RUNTIME.build_stage(config, "llm", layers=range(4), seed=0)
    optimizer = ShardedAdamW(list(stage.parameters()), alone, rates=dict.fromkeys(stage.parameters(), Rates(1e-3, 0.0)))
    arguments = {"index": index, "node": llm, "stage": stage, "parameters": stage.named_hf_parameters()}
    own = NodeModel(**arguments, dtype=torch.float32, ranks=ALONE, optimizer=optimizer, shards={}, overlaps=False)
    model = RankModel(nodes=(own,), spec=tiny_spec, hf_config=None, processors={}, tokenizer=None)

    cluster = ClusterConfig(devices_per_node=4, memory_gib=4.0, intra_node_gbps=100.0, inter_node_gbps=50.0)
    samples = draw_samples(8, seed=1)
    batches = GlobalBatches(8, 8, 0)
    schedule = BatchScheduler(samples, Pricer(plan, costs, tiny_spec, cluster), batches, ScheduleConfig(), 0).schedule(
        0
    )
    decoders = [node for node in program.nodes if node.module == "vision"]
    of_decoder = [np.flatnonzero(samples_of(schedule, node, 0)) for node in decoders]
    assert all(len(own) for own in of_decoder)
    ends = np.cumsum(schedule.llm_tokens)
    nothing = torch.zeros(0, dtype=torch.int64)
    text = TextBatch(
        token_ids=nothing,
        position_ids=nothing,
        segment_ends=SegmentEnds(ends.tolist()),
        feature_positions=(),
        target_positions=torch.arange(int(ends[-1])),
        target_ids=torch.zeros(int(ends[-1]), dtype=torch.int64),
    )
    store = Asked()
    (work,) = make_works(load_config(), plan, model, program, iter(()), store).values()
    work.begin_step(schedule)
    told = Undecodable(store)
    with ThreadPoolExecutor(1) as pool:
        learnable = pool.submit(work._learnable, 0, text)
        assert store.is_asked.wait(60)
        told.tell("training/0", 0, decoders[0], [])
        assert not learnable.done()
        lost = int(of_decoder[1][0])
        told.tell("training/0", 0, decoders[1], [lost])
    assert work.num_undecodable == 1
    assert work.num_dropped_targets == schedule.llm_tokens[lost]
    assert len(learnable.result().target_ids) == ends[-1] - schedule.llm_tokens[lost]
    assert store.num_keys() == 2
    told.forget()
    assert store.num_keys() == 0


def test_a_decoder_that_says_nothing_is_named():
    undecodable = Undecodable(dist.HashStore(), timedelta(milliseconds=1))
    with pytest.raises(RuntimeError, match=r"no word came .* \(undecodable/training/3/1/vision/0\)"):
        undecodable.of("training/3", 1, [Node("vision", 0, 0)])


def test_an_encoder_stage_gets_its_gradient_also_where_truncation_left_nothing_of_its_features(
    alone, costs, tiny_spec, tokenizer, draw_samples
):
    plan = Plan(
        placement="disjoint",
        grids=(Grid(module="vision", num_ranks=2, pp=2), Grid(module="llm", num_ranks=1, rank_offset=2)),
        num_microbatches=1,
    )
    program = make_program(plan)
    last = program.nodes.index(Node("vision", 1, 0))
    stage = RUNTIME.build_stage(
        RUNTIME.make_config(tiny_spec, tokenizer.placeholder_ids, tokenizer.vocab_size()),
        "vision",
        layers=range(2, 4),
        seed=0,
    )
    parameters = stage.named_hf_parameters()
    optimizer = ShardedAdamW(list(stage.parameters()), alone, rates=dict.fromkeys(stage.parameters(), Rates(1e-3, 0.0)))
    arguments = {"index": last, "node": program.nodes[last], "stage": stage, "parameters": parameters}
    arguments["dtype"] = torch.float32
    own = NodeModel(**arguments, ranks=ALONE, optimizer=optimizer, shards={}, overlaps=False)
    model = RankModel(nodes=(own,), spec=tiny_spec, hf_config=None, processors={"vision": None}, tokenizer=None)

    cluster = ClusterConfig(devices_per_node=4, memory_gib=4.0, intra_node_gbps=100.0, inter_node_gbps=50.0)
    pricer = Pricer(plan, costs, tiny_spec, cluster)
    samples = draw_samples(6, seed=1)
    schedule = BatchScheduler(samples, pricer, GlobalBatches(6, 4, 0), ScheduleConfig(policy="lpt"), 0).schedule(0)
    schedule = dataclasses.replace(schedule, kept_tokens=np.zeros_like(schedule.kept_tokens))
    chosen = samples_of(schedule, own.node, 0)
    num_items = schedule.num_items[chosen, 0].tolist()
    media = tuple((MediumLayout("video", count, 1, 1),) for count in num_items)
    batch = EncoderBatch(items=None, media=media, kept_tokens=(0,) * len(media))
    works = make_works(load_config(), plan, model, program, iter([LoadedMedia(batch=batch)]), dist.HashStore())

    work = works[last]
    (incoming,) = (number for number, edge in enumerate(program.edges) if edge.target == last)
    work.begin_step(schedule)
    work.prepare(0)
    hidden = torch.randn(work.edge_shape(0, incoming))
    assert len(hidden) == sum(num_items) > 0
    assert work.forward(0, {incoming: hidden}) == {}
    owed = work.backward(0, {})
    assert set(owed) == {incoming}
    assert owed[incoming].shape == hidden.shape
    assert not owed[incoming].any()
