"""Before the first step each rank runs its stages without messages, and training begins as if it had not."""

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dflop.config import load_config
from dflop.models.compilation import compile_layers
from dflop.plan import Grid, Plan
from dflop.step import make_program
from dflop.train.rank_model import build_rank_model
from dflop.train.topology import place_in_world
from dflop.train.warm_up import _forward, _train, warm_up


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
        # Of several items and of one; behind the frozen embedding with and without a gradient.
        num_loads = 2 if node.node.module == "vision" else 1
        num_trained = 2 if node.stage.is_first else 1
        passes = {"training": num_trained, "evaluation": num_loads, "backward": num_trained}
        assert ran[node.index] == {name: number * len(node.stage.layers) for name, number in passes.items()}
    after = state_of(model)
    assert before.keys() == after.keys()
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []


@pytest.mark.parametrize(
    "lora",
    [pytest.param(None, marks=pytest.mark.exhaustive), {"modules": ["llm"], "rank": 2}],
    ids=["everything", "adapters"],
)
def test_training_compiles_nothing_that_warming_up_has_not(lora):
    grids = (Grid(module="vision", num_ranks=2), Grid(module="llm", num_ranks=2, tp=2))
    plan = Plan(placement="colocated", grids=grids, num_microbatches=2)
    config = load_config({"model": {"family": "llava_onevision", "preset": "tiny", "lora": lora}})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        topology = place_in_world(make_program(plan), torch.device("cpu"), torch.float32, dist.HashStore())
        model = build_rank_model(config, plan, topology, torch.float32)
        for node in model.nodes:
            compile_layers(node.stage, "eager")
        torch._dynamo.utils.counters.clear()
        warm_up(model, evaluates=True)
        num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert num_graphs > 0
        for node in model.nodes:
            for size in LOADS[node.node.module]:
                load = (size,) if node.node.module == "vision" else (0, size, 7)
                for has_gradient in {model.trained.gives_gradients_to(node.node.module, 0), lora is None}:
                    _train(model, node, load, has_gradient)
                with torch.no_grad():
                    node.stage.eval()
                    _forward(model, node, load, has_gradient=False)
                node.stage.train()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


LOADS = {"vision": [1, 2, 5, 17], "llm": [(30, 11), (9, 50, 4), (100, 28), (512,), (1000, 24), (1000, 25), (17,)]}


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
