"""What a node computes in cases that whole runs rarely meet."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dflop.config import ClusterConfig, ScheduleConfig, load_config
from dflop.loading.dataset import LoadedMedia
from dflop.models.llava_onevision.runtime import RUNTIME
from dflop.models.microbatch import EncoderBatch, MediumLayout
from dflop.models.tensor_group import ALONE
from dflop.plan import Grid, Plan
from dflop.schedule import BatchScheduler, GlobalBatches, Pricer
from dflop.step import Node, make_program
from dflop.train.feed import samples_of
from dflop.train.node_work import make_works
from dflop.train.rank_model import NodeModel, RankModel
from dflop.train.sharded_optimizer import ShardedAdamW


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


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
    optimizer = ShardedAdamW(list(stage.parameters()), alone, weight_decay=0.0)
    arguments = {"index": last, "node": program.nodes[last], "stage": stage, "parameters": parameters, "lr": 1e-3}
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
