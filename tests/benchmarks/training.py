"""Training against what a user would write herself, on the clock: sides take turns, step by step, in one run.

    python tests/benchmarks/training.py --run results/demo [--steps 30] [--on-the-fly]

RUN is a finished run of the workflow whose costs were measured on this machine. As many processes as its plan has ranks
train the same global batches in each of these ways, all with the same stages, packed attention, loaders and AdamW:

- `ours`: the plan and the scheduler of the run;
- `random groups`: the same plan with policy `random`;
- `DDP`: torch's DistributedDataParallel and DistributedSampler, packed, in one forward a rank and step; it looks for
  unused parameters, as it must where a rank may have texts alone;
- `DDP, accumulated`: the same in as many microbatches as the plan has;
- `DDP, padded`: as `DDP`, with each sample as long as the longest of its rank;
- `FSDP2`: as `DDP, accumulated`, with torch's `fully_shard` on each layer and on the whole; a rank that has texts alone
  encodes a blank picture, since all have to gather the same. Compare it with a plan of `sharding: parameters`.

Batches are loaded before a step's clock starts, or, with `--on-the-fly`, by one loader process a rank, as in training:
then sides take turns in runs of six steps. The loaders of a side stand still (SIGSTOP) while others have their turn, so
that nobody reads ahead in the others' time, and the first twelve steps are not counted: they have what was loaded
beforehand. More steps are loaded than are trained, so that loaders have as much to do in the last ones.
Printed are the median step, the median of the ratios to `ours` step by step, what the busiest rank computed (which
other work on the machine changes less than it changes the clock), and predicted beside measured seconds;
`results/benchmarks/training.json` has every step.
"""

import argparse
import gc
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from dflop.config import Config, load_config
from dflop.data import SampleShapes, list_sources, load_samples
from dflop.data.loading import MicrobatchJob, MicrobatchLoader, SampleRef, TrainingRecords
from dflop.data.shapes import MediumSize
from dflop.models import load_model_spec
from dflop.models.microbatch import EncoderBatch, TextBatch
from dflop.models.tensor_group import ALONE
from dflop.parallelism import Grid, Plan, load_plan
from dflop.pipeline import StepInstructions, make_program
from dflop.pipeline.run import run_instructions
from dflop.scheduling import GlobalBatches, StepSchedule
from dflop.scheduling.service import open_scheduler
from dflop.training.feed import JobStream
from dflop.training.loader import make_loader, start_loading
from dflop.training.rank_model import build_rank_model, forwards_that_read
from dflop.training.topology import place_in_world
from dflop.training.work import make_works

_RUN = 6
# Steps that are not counted; on the fly until what loaders had ready at the start is used up.
_NUM_WARMUP, _NUM_WARMUP_ON_THE_FLY = 3, 12
# The most steps that a side's loaders are ahead.
_NUM_AHEAD = 8


@dataclass
class Side:
    """One way to train: `load(step)` gives what `train` takes."""

    load: Callable[[int], object]
    train: Callable[[object], None]
    loaders: list[psutil.Process] = field(default_factory=list)

    def pause(self) -> None:
        for process in self.loaders:
            process.suspend()

    def go_on(self) -> None:
        for process in self.loaders:
            process.resume()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("results/demo"))
    parser.add_argument("--plan", type=Path, help="another plan than the run's")
    parser.add_argument("--config", action="append", help="as `dflop train` takes it (the demo's two files)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--on-the-fly", action="store_true")
    arguments = parser.parse_args()
    plan_path = arguments.plan or arguments.run / "plan.yaml"
    if not arguments.config and arguments.run.name != "demo":
        parser.error(f"--config is needed: that of {arguments.run}")
    config = load_config(*(arguments.config or ["config/config.yaml", "config/demo.yaml"]))
    num_warmup, num_more = (_NUM_WARMUP_ON_THE_FLY, _NUM_AHEAD) if arguments.on_the_fly else (_NUM_WARMUP, 0)
    num_steps = num_warmup + arguments.steps + num_more
    with tempfile.TemporaryDirectory() as folder:
        request = {
            "plan": plan_path,
            "run": arguments.run,
            "folder": Path(folder),
            "num_steps": num_steps,
            "counted": range(num_warmup, num_warmup + arguments.steps),
        }
        for policy in (config.schedule.policy, "random"):
            decided = replace(config, schedule=replace(config.schedule, policy=policy))
            scheduler = open_scheduler(
                decided, shapes=arguments.run / "shapes.duckdb", costs=arguments.run / "costs.duckdb", plan=plan_path
            )
            for step in range(num_steps):
                (Path(folder) / f"{policy}-{step}").write_bytes(scheduler.schedule(step).to_bytes())
        world_size = load_plan(plan_path).world_size
        mp.spawn(_run_rank, (config, request, arguments.on_the_fly), nprocs=world_size)
        figures = json.loads((Path(folder) / "figures.json").read_text())
    print(f"{platform.machine()}, {psutil.cpu_count()} cores: {' '.join(['python', *sys.argv])}")
    print(f"{load_plan(plan_path)}\n")
    _print(figures)
    out = Path("results/benchmarks/training.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(figures | {"command": " ".join(sys.argv)}, indent=2) + "\n")


def _print(figures: dict) -> None:
    seconds = figures["seconds"]
    for name, own in seconds.items():
        ratios = [theirs / ours for theirs, ours in zip(own, seconds["ours"], strict=True)]
        print(
            f"{name:<18} {statistics.median(own):7.3f} s a step   {statistics.median(ratios):5.3f} of ours"
            f"   {figures['global_batch_size'] / statistics.median(own):6.1f} samples/s"
            f"   {statistics.median(figures['cpu_seconds'][name]):6.3f} s of the busiest rank's core"
        )
    for name, predicted in figures["predicted_s"].items():
        ratios = [real / said for real, said in zip(seconds[name], predicted, strict=True)]
        print(f"{name:<18} measured over predicted step: median {statistics.median(ratios):.3f}")


def _run_rank(rank: int, config: Config, request: dict, on_the_fly: bool) -> None:
    world_size = load_plan(request["plan"]).world_size
    threads = max(1, (os.cpu_count() or 1) // world_size)
    torch.set_num_threads(threads)
    store = dist.FileStore(str(request["folder"] / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    num_steps, policy = request["num_steps"], config.schedule.policy
    config = replace(config, train=replace(config.train, steps=num_steps))
    if not on_the_fly:
        config = replace(config, train=replace(config.train, loader_workers=0))
    schedules = {
        name: [StepSchedule.from_bytes((request["folder"] / f"{own}-{step}").read_bytes()) for step in range(num_steps)]
        for name, own in (("ours", policy), ("random groups", "random"))
    }
    sides = {name: _paused(make) for name, make in _sides(config, request, schedules, on_the_fly).items()}
    try:
        seconds, cpu_seconds = _timed(sides, request["counted"].stop, on_the_fly)
    finally:
        for side in sides.values():
            side.go_on()
    if rank == 0:
        counted = request["counted"]
        figures = {
            "global_batch_size": config.train.global_batch_size,
            "seconds": {name: [own[step] for step in counted] for name, own in seconds.items()},
            "cpu_seconds": {name: [own[step] for step in counted] for name, own in cpu_seconds.items()},
            "predicted_s": {name: [plans[step].step_s for step in counted] for name, plans in schedules.items()},
        }
        (request["folder"] / "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def _sides(
    config: Config, request: dict, schedules: dict[str, list[StepSchedule]], on_the_fly: bool
) -> dict[str, Callable[[], Side]]:
    plan = request["plan"]
    num_accumulated = load_plan(plan).num_microbatches
    samples, _ = load_samples(request["run"] / "shapes.duckdb", load_model_spec(config.model).encoders)
    sides = {name: partial(_planned, config, plan, own) for name, own in schedules.items()}
    return sides | {
        "DDP": partial(_ddp, config, samples, on_the_fly, 1),
        "DDP, accumulated": partial(_ddp, config, samples, on_the_fly, num_accumulated),
        "DDP, padded": partial(_ddp, config, samples, on_the_fly, 1, padded=True),
        "FSDP2": partial(_ddp, config, samples, on_the_fly, num_accumulated, shards=True),
    }


def _paused(make: Callable[[], Side]) -> Side:
    """A side whose loaders, which are the processes that it starts, stand still."""
    me = psutil.Process()
    before = set(me.children())
    side = make()
    started = [child for child in me.children() if child not in before]
    side.loaders = [child for child in started if not any("resource_tracker" in word for word in child.cmdline())]
    side.pause()
    return side


def _timed(sides: dict[str, Side], num_steps: int, on_the_fly: bool) -> tuple[dict, dict]:
    """Of each side, each step's seconds, and those that the busiest rank's core was busy."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in sides}
    gc.collect()
    gc.disable()  # as the trainer has it, for all sides
    length = _RUN if on_the_fly else 1
    for name, step in _turns(list(sides), num_steps, length):
        side = sides[name]
        loaded = None if on_the_fly else side.load(step)
        dist.barrier()
        if step % length == 0:
            side.go_on()
        started, cpu_started = time.monotonic(), time.process_time()
        side.train(side.load(step) if on_the_fly else loaded)
        cpu = torch.tensor(time.process_time() - cpu_started)
        dist.barrier()
        seconds[name].append(time.monotonic() - started)
        if step % length == length - 1:
            side.pause()
        dist.all_reduce(cpu, dist.ReduceOp.MAX)
        cpu_seconds[name].append(float(cpu))
    return seconds, cpu_seconds


def _turns(names: list[str], num_steps: int, length: int) -> Iterator[tuple[str, int]]:
    """Each side's steps in runs of so many, the sides in turns."""
    for first in range(0, num_steps, length):
        for name in names:
            for step in range(first, min(first + length, num_steps)):
                yield name, step


def _planned(config: Config, plan_path: Path, schedules: list[StepSchedule]) -> Side:
    """Training as the trainer has it, from schedules that are known."""
    plan = load_plan(plan_path)
    program = make_program(plan, config.model.freeze)
    topology = place_in_world(program, torch.device("cpu"), torch.float32, dist.HashStore())
    model = build_rank_model(config, plan, topology, torch.float32)
    instructions = StepInstructions(plan, program, config.model.freeze, topology.rank)
    stream = JobStream(
        SimpleNamespace(get=schedules.__getitem__),
        lambda slots: forwards_that_read(instructions.of(slots), topology, model),
        range(len(schedules)),
    )
    loader = start_loading(config, plan, model, stream)
    given: list[object] = []
    is_preloaded = config.train.loader_workers == 0
    inputs = iter(lambda: given.pop(0), None) if is_preloaded else loader
    works = make_works(config, plan, model, program, inputs, topology.store)

    def load(step: int) -> int:
        if is_preloaded:
            given[:] = [next(loader) for _ in range(stream.num_forwards)]
        return step

    def train(step: int) -> None:
        schedule = schedules[step]
        for work in works.values():
            work.begin_step(schedule)
        run_instructions(instructions.of(schedule.slots), works, topology.links)
        num_targets = int(schedule.target_tokens.sum())
        totals = torch.tensor([sum(float(work.loss) for work in works.values()), model.norm_squared() / num_targets**2])
        dist.all_reduce(totals)
        scale = min(1.0, config.train.grad_clip / (float(totals[1]) ** 0.5 + 1e-12))
        model.update(1.0, scale / num_targets)

    return Side(load, train)


class Whole(nn.Module):
    """The encoder's and the LLM's one stage, as a user would call them: one loss of a rank's packed samples. Where it
    `encodes_always`, texts alone come with a blank picture, which nothing is made of."""

    def __init__(
        self, encoder: nn.Module, llm: nn.Module, item_shape: tuple[int, ...], *, encodes_always: bool
    ) -> None:
        super().__init__()
        self.encoder, self.llm, self.encodes_always = encoder, llm, encodes_always
        self.item_shape = item_shape

    def forward(self, media: EncoderBatch, text: TextBatch) -> torch.Tensor:
        features, unused = [], 0.0
        if len(media.items):
            features = self.encoder(media)
        elif self.encodes_always:
            blank = replace(media, items=torch.zeros((1, *self.item_shape)))
            unused = 0.0 * self.encoder.encode(self.encoder.embed(blank), blank)[-1].sum()
        nothing = torch.zeros(0, self.llm.hf.config.text_config.hidden_size)
        return self.llm(self.llm.embed(text, [torch.cat([nothing, *features])]), text) + unused


def _in_shards(whole: Whole) -> nn.Module:
    """Each layer, the embedding and the head, and the rest, as FSDP2's tutorials have it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = [module for name, module in whole.named_modules() if re.search(r"layers?\.\d+$", name)]
    for unit in (*layers, whole.llm.hf.get_input_embeddings(), whole.llm.hf.lm_head):
        fully_shard(unit, mesh=mesh)
    fully_shard(whole, mesh=mesh).set_reduce_scatter_unused_params(True)
    return whole


def _ddp(
    config: Config,
    samples: SampleShapes,
    on_the_fly: bool,
    num_microbatches: int,
    *,
    padded: bool = False,
    shards: bool = False,
) -> Side:
    """Plain data parallelism over the same global batches, dealt out by torch's DistributedSampler."""
    plan = Plan(
        placement="monolithic",
        grids=(Grid(module="vision", num_ranks=1), Grid(module="llm", num_ranks=1)),
        num_microbatches=1,
    )
    program, alone = make_program(plan), dist.new_subgroups(group_size=1)[0]
    own_place = SimpleNamespace(
        nodes=(0, 1),
        program=program,
        device=torch.device("cpu"),
        tensor={0: ALONE, 1: ALONE},
        replicas={0: alone, 1: alone},
        tied={},
    )
    model = build_rank_model(config, plan, own_place, torch.float32)
    for own in model.nodes:  # its parameters are views into the flat buckets of an optimiser that is not used here
        for parameter in own.stage.parameters():
            parameter.data, parameter.grad = parameter.data.clone(), None
    stages = (own.stage for own in model.nodes)
    whole = Whole(*stages, model.processors["vision"].item_shape, encodes_always=shards)
    ddp = _in_shards(whole) if shards else DistributedDataParallel(whole, find_unused_parameters=True)
    decayed, others = ([own for own in ddp.parameters() if (own.ndim > 1) == decays] for decays in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.train.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=config.train.lr,
        fused=True,
    )
    jobs = _Jobs(samples, config, num_microbatches)
    records = TrainingRecords(list_sources(config.data), config.seed)
    dataset = _MediaAndText(*(make_loader(config, model, plan, own, records) for own in model.nodes), padded)
    loader = iter(_data_loader(dataset, jobs, config)) if on_the_fly else map(dataset.__getitem__, jobs)

    def load(step: int) -> Iterator:
        return loader if on_the_fly else iter([next(loader) for _ in range(num_microbatches)])

    def train(loaded: Iterator) -> None:
        optimizer.zero_grad()
        num_targets = torch.zeros(())
        for number in range(num_microbatches):
            media, text = next(loaded)
            num_targets += len(text.target_ids)
            with nullcontext() if shards or number + 1 == num_microbatches else ddp.no_sync():
                ddp(media, text).backward()
        dist.all_reduce(num_targets)
        for own in ddp.parameters():
            if own.grad is not None:
                own.grad.mul_(dist.get_world_size() / num_targets)
        nn.utils.clip_grad_norm_(ddp.parameters(), config.train.grad_clip)
        optimizer.step()

    return Side(load, train)


@dataclass
class _Jobs:
    """This rank's microbatches, step after step: what media and what text they are made of."""

    samples: SampleShapes
    config: Config
    num_microbatches: int

    def __iter__(self) -> Iterator[MicrobatchJob]:
        batches = GlobalBatches(len(self.samples), self.config.train.global_batch_size, self.config.seed)
        for step in range(self.config.train.steps):
            batch = self.samples.take(batches[step])
            own = np.array(list(DistributedSampler(range(len(batch)), shuffle=True, seed=step)))
            for part in np.array_split(own, self.num_microbatches):
                yield _job_of(batch.take(part))


def _job_of(batch: SampleShapes) -> MicrobatchJob:
    return MicrobatchJob(
        samples=tuple(SampleRef(str(source), int(row)) for source, row in zip(batch.source, batch.row, strict=True)),
        media=tuple(tuple(MediumSize(*size) for size in sizes.tolist()) for sizes in batch.media.of_each()),
        kept_tokens=tuple(map(tuple, batch.kept_tokens.tolist())),
        llm_tokens=tuple(batch.llm_tokens.tolist()),
        encoder_rank=((0,),) * len(batch),
    )


@dataclass
class _MediaAndText(Dataset):
    """A rank's media and text of one microbatch."""

    media: MicrobatchLoader
    text: MicrobatchLoader
    padded: bool

    def __getitem__(self, job: MicrobatchJob) -> tuple[EncoderBatch, TextBatch]:
        with_media = [place for place, sizes in enumerate(job.media) if sizes]
        loaded = self.media[_only(job, with_media)].batch
        # Nothing but its samples' order is known of a microbatch of media: samples without any have no features.
        text = self.text[job]
        return loaded, _padded(text) if self.padded else text


def _only(job: MicrobatchJob, places: list[int]) -> MicrobatchJob:
    return MicrobatchJob(
        **{field.name: tuple(getattr(job, field.name)[place] for place in places) for field in fields(MicrobatchJob)}
    )


def _padded(text: TextBatch) -> TextBatch:
    """Each sample as long as the longest; nothing is learned of the padding."""
    starts = [0, *text.segment_ends[:-1]]
    lengths = [end - start for start, end in zip(starts, text.segment_ends, strict=True)]
    longest = max(lengths)
    place = torch.cat([number * longest + torch.arange(length) for number, length in enumerate(lengths)])
    token_ids = torch.zeros(longest * len(lengths), dtype=torch.int64)
    token_ids[place] = text.token_ids
    return replace(
        text,
        token_ids=token_ids,
        position_ids=torch.arange(longest).repeat(len(lengths)),
        segment_ends=[longest * (number + 1) for number in range(len(lengths))],
        feature_positions=tuple(place[own] for own in text.feature_positions),
        target_positions=place[text.target_positions],
    )


def _data_loader(dataset: Dataset, jobs: _Jobs, config: Config) -> DataLoader:
    """As training has it: one process a rank that reads ahead and gives way."""
    return DataLoader(
        dataset,
        sampler=jobs,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=max(1, config.train.loader_workers or 1),
        multiprocessing_context="spawn",
        prefetch_factor=8,
        worker_init_fn=_give_way,
    )


def _give_way(_: int) -> None:
    os.nice(19)


def _as_it_is(batch: object) -> object:
    return batch


if __name__ == "__main__":
    main()
