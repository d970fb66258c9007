"""Stages whose replicas share parameters: what is gathered when, on one process that has a group of its own."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from dflop.config import ModelConfig
from dflop.costs.design import Point
from dflop.costs.made_up import MadeUpRuns
from dflop.models import load_model_spec, load_runtime
from dflop.plan.trained import EVERYTHING, TrainedSet
from dflop.train.parameter_shards import SharedPasses, Units
from dflop.train.topology import Sharers

LOADS = {"vision": (4,), "llm": (0, (20, 12), 8)}


@pytest.fixture
def sharers() -> Iterator[Sharers]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Sharers(((0,),), init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()


def shared_stage(sharers: Sharers, module: str, trained: TrainedSet = EVERYTHING, num_still: int = 0):
    """The passes of a module of one stage, and a function that runs a made-up microbatch."""
    spec = load_model_spec(ModelConfig(family="llava_onevision", preset="tiny"))
    runtime = load_runtime(spec.family)
    config = runtime.make_config(spec, {"image": 1001, "video": 1002, "audio": 1003}, 1024)
    units, layers = Units(sharers, torch.float32), range(spec.module(module).num_layers)
    stage = runtime.build_stage(
        config, module, layers=layers, seed=0, dtype=torch.float32, share=units.share, trained=trained
    )
    passes = SharedPasses(stage, units, trained, num_still)
    made = MadeUpRuns(spec, module, stage, torch.float32).make(Point("stage", len(layers), False, *LOADS[module]))
    for leaf in made.inputs:
        leaf.requires_grad_(num_still == 0)
    return passes, lambda: sum(own.sum() for own in passes.run(lambda: dict(enumerate(made.forward()))).values())


@pytest.mark.parametrize("module", LOADS)
def test_an_update_behind_a_forward_without_backward_counts(sharers, module):
    """Evaluation runs forwards alone, and a step without media updates an encoder that has not run."""
    passes, run = shared_stage(sharers, module)
    with torch.no_grad():
        assert run() != 0
        for parameter in passes.parameters():
            parameter.to_local().zero_()
        of_zeros = run()
        assert of_zeros == (0 if module == "vision" else pytest.approx(LOADS["llm"][2] * torch.tensor(1024.0).log()))


@pytest.mark.parametrize("module", LOADS)
@pytest.mark.parametrize("order", ["F0 B0 F1 B1", "F0 F1 F2 B0 B1 B2", "F0 F1 B0 F2 B1 B2"])
def test_each_unit_is_gathered_while_the_one_behind_it_computes(sharers, module, order, monkeypatch):
    passes, run = shared_stage(sharers, module)
    gathered = gathers_of(monkeypatch)
    outputs, num_units = {}, len(passes.stage.units)
    for item in order.split():
        if item[0] == "F":
            outputs[item[1]] = run()
        else:
            gathered.clear()
            outputs.pop(item[1]).backward()
            assert gathered.count("ahead") >= num_units - 1
            assert gathered.count("in the open") <= 2  # the last unit, and what is in none


def test_layers_that_have_no_backward_are_not_gathered_for_it(sharers, monkeypatch):
    trained = TrainedSet(named=("llm.layers.[1-99]", "llm.head"))
    passes, run = shared_stage(sharers, "llm", trained, num_still=1)
    gathered, num_layers = gathers_of(monkeypatch), len(passes.stage.layers)
    output = run()
    gathered.clear()
    output.backward()
    assert len(gathered) == num_layers - 1 + 1  # with the head


def gathers_of(monkeypatch) -> list[str]:
    """Whether a unit that was not gathered is gathered ahead of its backward, or in it; filled while these run."""
    gathered, ahead = [], []
    unshard, prefetch = FSDPParamGroup.unshard, FSDPParamGroup._prefetch_unshard

    def noted(group, *how):
        if not group.is_unsharded and group._all_gather_result is None:  # or it is under way
            gathered.append("ahead" if ahead else "in the open")
        return unshard(group, *how)

    def noted_ahead(group, of_pass):
        ahead.append(True)
        try:
            return prefetch(group, of_pass)
        finally:
            ahead.pop()

    monkeypatch.setattr(FSDPParamGroup, "unshard", noted)
    monkeypatch.setattr(FSDPParamGroup, "_prefetch_unshard", staticmethod(noted_ahead))
    return gathered
