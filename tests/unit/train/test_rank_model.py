"""What a rank builds: hardly more on the way than it holds in the end, and layers that are compiled where that is asked
for."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface

from dflop.config import load_config
from dflop.costs.live_bytes import LiveBytes
from dflop.models.attention import PACKED, packed_attention
from dflop.plan import Grid, Plan
from dflop.step import make_program
from dflop.train.rank_model import build_rank_model
from dflop.train.topology import place_in_world


@pytest.mark.parametrize("tp", [1, 2])
def test_a_stage_that_replicas_share_is_never_whole_on_a_rank(tp):
    how = {"num_ranks": 8 * tp, "tp": tp, "sharding": "parameters"}
    grids = (Grid(module="vision", **how), Grid(module="llm", **how))
    plan = Plan(placement="monolithic", grids=grids, num_microbatches=1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.world_size)
    try:
        topology = place_in_world(make_program(plan), torch.device("cpu"), torch.float32, dist.HashStore())
        with LiveBytes() as live:
            model = build_rank_model(load_config({}), plan, topology, torch.float32)
        num_values = sum(parameter.numel() for own in model.nodes for parameter in own.parameters.values())
        # With moments it ends up with 3/8 of what its replicas share. A unit is whole while it is drawn.
        assert live.peak < 4 * num_values * (0.5 if tp == 1 else 0.8)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("wanted", ["on", "off"])
def test_the_layers_of_every_stage_are_compiled_where_the_config_asks_for_it(wanted, monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, PACKED, packed_attention)
    grids = (Grid(module="vision", num_ranks=1), Grid(module="llm", num_ranks=1))
    plan = Plan(placement="colocated", grids=grids, num_microbatches=1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        topology = place_in_world(make_program(plan), torch.device("cpu"), torch.float32, dist.HashStore())
        with torch._dynamo.config.patch(suppress_errors=False):
            model = build_rank_model(load_config({"train": {"compile": wanted}}), plan, topology, torch.float32)
        layers = [own.stage.hf.get_submodule(name) for own in model.nodes for name in own.stage.layer_names]
        assert len(layers) > 2
        assert {"forward" in vars(layer) for layer in layers} == {wanted == "on"}
    finally:
        dist.destroy_process_group()


def test_training_begins_with_the_weights_that_the_config_names(tmp_path):
    grids = (Grid(module="vision", num_ranks=1), Grid(module="llm", num_ranks=1))
    plan = Plan(placement="monolithic", grids=grids, num_microbatches=1)

    def parameters_of(config: dict) -> dict[str, torch.Tensor]:
        topology = place_in_world(make_program(plan), torch.device("cpu"), torch.float32, dist.HashStore())
        model = build_rank_model(load_config(config), plan, topology, torch.float32)
        return {name: value.detach() for own in model.nodes for name, value in own.parameters.items()}

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        others = parameters_of({"seed": 5})
        save_file(others, tmp_path / "model.safetensors")
        found = parameters_of({"model": {"weights": str(tmp_path)}})
    finally:
        dist.destroy_process_group()
    assert others.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in others.items())
