"""A whole step of each kind of layout on a stand-in for GPUs: no tensor is left on the CPU, and ranks agree on sizes.

Each rank of a plan runs by itself, one after the other: its stages, its optimisers and its instructions, on tensors
without values. What it sends must be what the others receive, and all ranks of a group must share the same.
"""

import itertools
import json
import shutil
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from fake_cuda import Recorder, build_hooks, load_hooks
from layout_plans import PLANS
from layouts import with_shared_samples
from processes import spawn
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensorMode
from whole_model import build_whole_model

from dflop.config import ClusterConfig, ScheduleConfig, load_config
from dflop.costs import CostModel
from dflop.models import load_model_spec, runtime
from dflop.plan import Plan
from dflop.schedule import BatchScheduler, GlobalBatches, Pricer, StepSchedule
from dflop.shapes import SampleShapes, load_samples
from dflop.shapes.text import BUNDLED_TOKENIZER
from dflop.step import StepInstructions, make_program
from dflop.step.run import run_instructions
from dflop.train.data_loader import start_loading
from dflop.train.feed import JobStream
from dflop.train.node_work import make_works
from dflop.train.rank_model import build_rank_model, forwards_that_read
from dflop.train.topology import place_in_world
from dflop.train.warm_up import warm_up

pytestmark = pytest.mark.serial

GPU, DTYPE = torch.device("cuda", 0), torch.bfloat16
# Both ways of dividing a stage, and every family but InternVL, once, with two ranks or three.
IN_CI = {
    "interleaved": "plain",
    "parameters 2": "qwen3",
    "samples over 2": "qwen",
    "three modules colocated, encoders tp 2, LLM tp 2": "omni",
}
# Layouts that take a second step, with what the first one has changed. The others take one.
TWICE = ("interleaved", "parameters 2", "parameters 2x2 of both")
OTHERS = {
    "encoder pp 2, LLM pp 3": "plain",
    "bubble-filled pp 2": "internvl",
    "colocated pp 2": "qwen",
    "colocated pp 2 dp 2": "qwen",
    "bubble-filled encoder tp 2, LLM dp 2 pp 2": "internvl",
    "parameters 2x2": "qwen3",
    "disjoint 3+2": "internvl",
    "disjoint 2+2, both tp 2, checkpointing": "qwen3",
    "disjoint 1+4, LLM tp 2 pp 2": "plain",
    "colocated encoder dp 4, LLM tp 2 pp 2": "qwen",
    "monolithic tp 2 pp 2": "plain",
    "parameters 2, tp 2": "qwen",
    "parameters 2x2 of both": "plain",
    "parameters 2+2": "internvl",
    "three modules 1+1+2, LLM pp 2": "omni",
    "three modules, parameters 2": "omni",
}


@pytest.fixture
def prepare(request, tmp_path):
    """`prepare(cases)`: a folder with each case's config and schedules."""
    cluster = ClusterConfig(devices_per_node=8, memory_gib=64.0, intra_node_gbps=100.0, inter_node_gbps=50.0)

    def with_schedules(cases: dict[str, str]) -> Path:
        for name, family in cases.items():
            made, config = request.getfixturevalue("run" if family == "plain" else f"{family}_run")
            spec = load_model_spec(load_config(config).model)
            samples, _ = load_samples(made / "shapes.duckdb", spec.encoders)
            pricer = Pricer(PLANS[name], CostModel.load(made / "costs.duckdb"), spec, cluster)
            batches = _with_media_for_each_encoder(samples, _num_steps(name))
            scheduler = BatchScheduler(samples, pricer, batches, ScheduleConfig(policy="random"), 3)
            model = {"family": config["model"]["family"], "path": str(_checkpoint(tmp_path / family, config))}
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(json.dumps(config | {"model": model}))
            for step in range(_num_steps(name)):
                schedule = scheduler.schedule(step)
                if PLANS[name].grid("llm").cp > 1:
                    schedule = with_shared_samples(pricer, load_config(config), samples.take(batches[step]), step)
                (tmp_path / name / str(step)).write_bytes(schedule.to_bytes())
        return tmp_path

    return with_schedules


def _num_steps(name: str) -> int:
    return 2 if name in TWICE else 1


def _with_media_for_each_encoder(samples: SampleShapes, num_steps: int) -> GlobalBatches:
    batches = (GlobalBatches(len(samples), 8, seed) for seed in itertools.count())
    return next(
        own for own in batches if all(samples.num_items[own[step]].any(axis=0).all() for step in range(num_steps))
    )


def _checkpoint(path: Path, config: dict) -> Path:
    """A checkpoint of the config's model, with its tokenizer."""
    if not path.exists():
        build_whole_model(load_config(config)).float().save_pretrained(path)
        for file in BUNDLED_TOKENIZER.iterdir():
            if file.is_file() and not (path / file.name).exists():
                shutil.copy(file, path / file.name)
    return path


class AllDecodable:
    """The store through which ranks report undecodable samples: each has reported that there are none."""

    def set(self, key, value): ...

    def wait(self, keys, timeout): ...

    def delete_key(self, key): ...

    def multi_get(self, keys):
        return [b"[]"] * len(keys)


def _split(split_ranks, timeout):
    """This rank's group of some that share no rank, as NCCL would split it off."""
    own = [ranks for ranks in split_ranks if dist.get_rank() in ranks]
    return dist.new_group(own[0]) if own else None


class _Generator:
    """In the place of `torch.Generator`, of which torch's CPU build has none of a GPU: the default one."""

    def __init__(self, device): ...

    def manual_seed(self, seed):
        return None


class _Options(FakeProcessGroup.Options):
    """In the place of `ProcessGroupNCCL.Options`, which torch's CPU build lacks."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace()


def _run(_: int, folder: Path, cases: list[str], library: Path) -> None:
    load_hooks(library)
    runtime.load_weights = lambda *_: None  # tensors have no values
    dist.split_group, torch.nn.Module._apply = _split, _apply
    dist.ProcessGroupNCCL = SimpleNamespace(Options=_Options)
    torch.Generator, torch.random.fork_rng = _Generator, lambda *_, **__: nullcontext()
    for name in cases:
        try:
            recorders = [_steps_of_rank(folder / name, PLANS[name], rank) for rank in range(PLANS[name].world_size)]
            _check(recorders)
        except Exception:
            print(f"{name}: {traceback.format_exc()}", file=sys.stderr, flush=True)
            raise


def _apply(module, change, recurse=True):
    """`nn.Module._apply`, which cannot replace fake parameters. They need not be: they are made where they belong."""
    for child in module.children():
        _apply(child, change)
    assert all(change(own) is own for own in module._parameters.values() if own is not None)
    module._buffers |= {name: change(own) for name, own in module._buffers.items() if own is not None}
    return module


def _steps_of_rank(folder: Path, plan: Plan, rank: int) -> Recorder:
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=plan.world_size)
    config = load_config(json.loads((folder / "config.json").read_text()))
    program = make_program(plan, config.model.trained, rank=rank)
    topology = place_in_world(program, GPU, DTYPE, AllDecodable())
    schedules = [StepSchedule.from_bytes((folder / str(step)).read_bytes()) for step in range(_num_steps(folder.name))]
    instructions = StepInstructions(plan, program, config.model.trained, rank)
    fake, recorder = FakeTensorMode(allow_non_fake_inputs=True), Recorder()
    with fake, recorder:
        model = build_rank_model(config, plan, topology, DTYPE)
        warm_up(model, evaluates=True)
    assert (recorder.sent, recorder.received) == ({}, {})
    assert {own.device for node in model.nodes for own in node.parameters.values()} == {GPU}
    stream = JobStream(
        SimpleNamespace(get=schedules.__getitem__),
        lambda slots: forwards_that_read(instructions.of(slots), topology, model),
        range(len(schedules)),
        program.cp["llm"],
    )
    loaded = list(start_loading(config, plan, model, stream))
    with fake, recorder:
        loader = iter([own.with_each(fake.from_tensor).pin_memory() for own in loaded])
        works = make_works(config, plan, model, program, loader, topology.store)
        for schedule in schedules:
            recorder.waits.clear()
            for work in works.values():
                work.begin_step(schedule)
            run_instructions(instructions.of(schedule.slots), works, topology.links)
            assert recorder.waits == [], "\n".join(recorder.waits[:9])
            model.norm_squared()
            model.update(1.0, 1.0)
            assert len(recorder.waits) <= len(model.nodes), "once the norm of the gradients is read"
        model.wait_for_parameters()
    dist.destroy_process_group()
    return recorder


def _check(recorders: list[Recorder]) -> None:
    assert any(recorder.sent or recorder.shared for recorder in recorders)
    for rank, recorder in enumerate(recorders):
        for (channel, peer), messages in recorder.sent.items():
            assert recorders[peer].received[channel, rank] == messages
        for (channel, peer), messages in recorder.received.items():
            assert recorders[peer].sent[channel, rank] == messages
        for ranks, collectives in recorder.shared.items():
            assert recorders[ranks[0]].shared[ranks] == collectives


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(IN_CI, id="each kind of layout"),
        pytest.param(OTHERS, id="others", marks=pytest.mark.exhaustive),
    ],
)
def test_steps_on_gpus_leave_no_tensor_behind_and_ranks_agree_on_what_they_exchange(prepare, cases, tmp_path):
    if (library := build_hooks(tmp_path)) is None:
        pytest.skip("no C++ compiler, which the stand-in for a GPU needs")
    spawn(_run, (prepare(cases), list(cases), library), nprocs=1)
