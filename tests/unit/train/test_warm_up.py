"""Before the first step each rank runs its stages without messages, and training begins as if it had not."""

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dflop.config import load_config
from dflop.plan import Grid, Plan
from dflop.step import make_program
from dflop.train.rank_model import build_rank_model
from dflop.train.topology import place_in_world
from dflop.train.warm_up import warm_up


@pytest.mark.parametrize("family", ["llava_onevision", "qwen3_vl"])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_stage_runs_and_nothing_of_it_changes(family, rank, monkeypatch):
    grids = (Grid(module="vision", num_ranks=2), Grid(module="llm", num_ranks=2, pp=2))
    plan = Plan(placement="colocated", grids=grids, num_microbatches=2)
    lora = {"modules": ["llm"], "rank": 2, "dropout": 0.5}  # dropout draws random numbers
    config = load_config({"model": {"family": family, "preset": "tiny", "lora": lora}})
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        topology = place_in_world(make_program(plan), torch.device("cpu"), torch.float32, dist.HashStore())
        model = build_rank_model(config, plan, topology, torch.float32)
        before = state_of(model)
        for name in ("batch_isend_irecv", "isend", "irecv", "send", "recv"):
            monkeypatch.setattr(dist, name, lambda *_, **__: pytest.fail("a message"))
        ran = passes_of(model)
        warm_up(model, evaluates=True)
    finally:
        dist.destroy_process_group()
    assert len(model.nodes) == 2
    for node in model.nodes:
        assert ran[node.index] == dict.fromkeys(("training", "evaluation", "backward"), len(node.stage.layers))
    after = state_of(model)
    assert before.keys() == after.keys()
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []


def passes_of(model) -> dict[int, dict[str, int]]:
    """By node, how many layers have run in each way; filled while they run."""
    counts = {node.index: {"training": 0, "evaluation": 0, "backward": 0} for node in model.nodes}
    for node in model.nodes:
        for name in node.stage.layer_names:

            def ran(layer, _, output, of_node=counts[node.index]):
                of_node["training" if layer.training else "evaluation"] += 1
                output = output[0] if isinstance(output, tuple) else output
                if output.requires_grad:
                    output.register_hook(lambda _: of_node.__setitem__("backward", of_node["backward"] + 1))

            node.stage.hf.get_submodule(name).register_forward_hook(ran)
    return counts


def state_of(model) -> dict[str, torch.Tensor]:
    """All that the first step begins with."""
    found = {"random numbers": torch.random.get_rng_state()}
    for node in model.nodes:
        found[f"{node.index} is training"] = torch.tensor([own.training for own in node.stage.modules()])
        for name, own in chain(node.stage.named_parameters(), node.stage.named_buffers()):
            found[f"{node.index} {name}"] = own.detach().clone()
            if own.grad is not None:
                found[f"{node.index} {name} gradient"] = own.grad.clone()
    return found
