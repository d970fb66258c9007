"""Layouts of every kind, and what a rank of them must find: the losses and gradients of the whole model.

A folder has for each variant of the model its config and what is expected, and for each case (a layout, a variant) the
schedules of its steps. `run_rank` carries these out and compares. No test framework is needed.
"""

import dataclasses
import functools
import json
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from layout_plans import PLANS
from stage_cases import part_of
from torch.distributed.tensor import DTensor
from whole_model import build_whole_model, loss_of_batch, name_of, optimizer_of

from dflop.config import ClusterConfig, Config, ScheduleConfig, load_config
from dflop.costs import CostModel
from dflop.models import load_model_spec, offloading
from dflop.plan import Plan
from dflop.schedule import BatchScheduler, GlobalBatches, Pricer, StepSchedule
from dflop.schedule.sharing import deal_shares
from dflop.schedule.step_schedule import schedule_of
from dflop.shapes import SampleShapes
from dflop.shapes.shares import SampleDivider
from dflop.step import StepInstructions, check_program, make_program
from dflop.step.run import run_instructions
from dflop.train.adamw import Piece
from dflop.train.data_loader import start_loading
from dflop.train.feed import JobStream
from dflop.train.node_work import make_works
from dflop.train.rank_model import RankModel, build_rank_model, forwards_that_read
from dflop.train.topology import place_in_world
from dflop.train.warm_up import warm_up

__all__ = ["NUM_STEPS", "Precision", "check", "run_rank", "with_shared_samples", "write_case", "write_expected"]

# Steps of the whole model. Layouts of each kind take two of them (`TWICE`), which shows that what the first changed is
# what the second computes with, and the others the first.
NUM_STEPS = {
    "plain": 2,
    "tied": 2,
    "frozen vision": 1,
    "frozen llm": 1,
    "frozen encoder": 2,
    "projector": 2,
    "qwen3 projector": 1,
    "internvl": 1,
    "qwen": 1,
    "qwen3": 1,
    "omni": 2,
    "damaged": 1,
    "lora of the llm": 2,
    "plain lora": 2,
    "internvl lora": 1,
    "qwen lora": 1,
    "qwen3 lora": 1,
    "last layers": 2,
    "qwen last layers": 1,
    "internvl norms": 1,
    "qwen3 parts": 1,
}
_LR = 1e-3
# The parameters of the whole model that these variants train, in transformers' own names.
TRAINED = {
    "last layers": r"language_model\.(layers\.[23]\.|norm\.)|lm_head",
    "qwen last layers": r"language_model\.layers\.3\.|merger|lm_head",
    "internvl norms": "norm",
    "qwen3 parts": r"visual\.blocks\.[1-9]\.|merger|embed_tokens|language_model\.layers\.[0-9]\.self_attn",
}
# Learning rate and weight decay of parameters that do not have those of all others.
OWN_RATES = {"last layers": {"lm_head.weight": (3e-3, 0.2)}}


TWICE = (
    "disjoint 1+2, LLM pp 2",
    "disjoint 1+2, LLM tp 2",
    "interleaved",
    "colocated encoder dp 4, LLM tp 2 pp 2",
    "bubble-filled pp 2 dp 2",
    "monolithic pp 2 dp 2",
    "parameters 2",
    "parameters 2x2 of both",
    "parameters of the LLM",
    "three modules 1+1+2, LLM dp 2",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Where and in which dtype ranks compute, over which backend, and how far off they may be.

    - `loss`: of a step's loss, relative.
    - `gradients`: of a gradient in the first step, beside the parameter's largest; `later_gradients` behind an update.
    - `weights`: of a weight after the last step.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float64
    backend: str = "gloo"
    loss: float = 1e-10
    gradients: float = 1e-10
    later_gradients: float = 1e-6
    weights: float = 1e-8


_EXACT = Precision()
offloading.LEAST_BYTES = 1 << 10  # tiny models keep small tensors


def write_expected(folder: Path, variant: str, values: dict, batches: Sequence[SampleShapes]) -> None:
    """Write a variant's config, and what the whole model finds on these batches, a step each."""
    (folder / f"{variant}.json").write_text(json.dumps(values))
    torch.save(_expected(load_config(values), variant, batches), folder / f"{variant}.pt")


def write_case(
    folder: Path,
    name: str,
    variant: str,
    values: dict,
    costs: CostModel,
    samples: SampleShapes,
    batches: GlobalBatches,
) -> None:
    """Write the schedules of a layout for a variant of the model. Assignments are random: replicas without media, and
    splits of every kind."""
    cluster = ClusterConfig(devices_per_node=8, memory_gib=64.0, intra_node_gbps=100.0, inter_node_gbps=50.0)
    model = load_config(values).model
    pricer = Pricer(PLANS[name], costs, load_model_spec(model), cluster, trained=model.trained)
    scheduler = BatchScheduler(samples, pricer, batches, ScheduleConfig(policy="random"), 3)
    path = folder / f"{name} {variant}"
    path.mkdir()
    for step in range(_num_steps(name, variant)):
        schedule = scheduler.schedule(step)
        if PLANS[name].grid("llm").cp > 1:
            schedule = with_shared_samples(pricer, load_config(values), samples.take(batches[step]), step)
        (path / str(step)).write_bytes(schedule.to_bytes())


def with_shared_samples(pricer: Pricer, config: Config, shapes: SampleShapes, step: int) -> StepSchedule:
    """A schedule in which random samples are shared over random numbers of replicas."""
    llm, rng = pricer.plan.grid("llm"), np.random.default_rng(step)
    degree = 2 ** rng.integers(0, llm.cp.bit_length(), len(shapes))
    degree = np.where(shapes.llm_tokens >= 4 * llm.cp, degree, 1)
    degree[0] = llm.cp
    divided = SampleDivider(load_model_spec(config.model), config.data.audio).divided(shapes, degree)
    loads_s = pricer.problem(divided).loads_s
    dealt = deal_shares(loads_s, divided.llm_tokens.astype(float), degree, llm, pricer.plan.num_microbatches)
    assignment = pricer.assign(divided, *dealt)
    return schedule_of(pricer, divided, assignment, step=step, policy="random", status="", deciding_s=0.0)


def _num_steps(name: str, variant: str) -> int:
    return NUM_STEPS[variant] if name in TWICE else 1


def _expected(config: Config, variant: str, batches: Sequence[SampleShapes]) -> dict:
    """Losses and gradients of the steps, and the weights after each."""
    model = build_whole_model(config)
    for part, parameter in model.named_parameters():
        module = "llm" if "language_model" in part or "lm_head" in part else "vision"
        is_projector = "projector" in part or "merger" in part or part == "model.image_newline"
        if variant in TRAINED:
            parameter.requires_grad_(re.search(TRAINED[variant], part) is not None)
            continue
        fixed = [*config.model.freeze, *(config.model.lora.modules if config.model.lora else ())]
        is_fixed = module in fixed or (f"{module}.encoder" in fixed and not is_projector)
        parameter.requires_grad_(".lora_" in part or not is_fixed)
    optimizer = optimizer_of(model, _LR, OWN_RATES.get(variant, {}))
    losses, gradients, weights, own_of = [], [], [], {name_of(name): own for name, own in model.named_parameters()}
    start = {name: own.detach().clone() for name, own in own_of.items() if ".lora_B." in name}
    for batch in batches:
        optimizer.zero_grad()
        losses.append(loss_of_batch(model, config, batch))
        gradients.append({name: own.grad.clone() for name, own in own_of.items() if own.grad is not None})
        optimizer.step()
        weights.append({name: own.detach().clone() for name, own in own_of.items()})
    return {"losses": losses, "gradients": gradients, "weights": weights, "start": start}


def run_rank(rank: int, folder: Path, cases: list[tuple[str, str]], precision: Precision = _EXACT) -> None:
    """Carry out the cases on one rank; what differs from what is expected is an error."""
    torch.set_num_threads(1)
    for name, variant in cases:
        plan = PLANS[name]
        if rank < plan.world_size:
            store = dist.FileStore(str(folder / f"{name} {variant}" / "store"), plan.world_size)
            dist.init_process_group(precision.backend, store=store, rank=rank, world_size=plan.world_size)
            try:
                check(folder, name, variant, plan, precision)
            except Exception:  # the first process that `spawn` speaks of may only have lost its peer
                print(f"rank {rank}, {name}, {variant}: {traceback.format_exc()}", file=sys.stderr, flush=True)
                raise
            dist.destroy_process_group()


@functools.cache
def _config_and_expected(folder: Path, variant: str) -> tuple[Config, dict]:
    """A variant's config, and what `_expected` found for it."""
    return load_config(json.loads((folder / f"{variant}.json").read_text())), torch.load(folder / f"{variant}.pt")


def check(folder: Path, name: str, variant: str, plan: Plan, precision: Precision = _EXACT) -> None:
    """As `run_rank`, for a case whose process group is there."""
    device, dtype = torch.device(precision.device), precision.dtype
    config, expected = _config_and_expected(folder, variant)
    program = make_program(plan, config.model.trained)
    check_program(plan, program, config.model.trained)
    topology = place_in_world(program, device, dtype, _make_store())
    model = build_rank_model(config, plan, topology, dtype, overlaps=True)
    assert all((own.shared is not None) == plan.grid(own.node.module).gathers for own in model.nodes)
    _start_from(model, expected["start"])
    num_steps = _num_steps(name, variant)
    if num_steps > 1:
        warm_up(model, evaluates=True)  # must change nothing
    schedules = [
        StepSchedule.from_bytes((folder / f"{name} {variant}" / str(step)).read_bytes()) for step in range(num_steps)
    ]
    instructions = StepInstructions(plan, program, config.model.trained, topology.rank)
    stream = JobStream(
        SimpleNamespace(get=schedules.__getitem__),
        lambda slots: forwards_that_read(instructions.of(slots), topology, model),
        range(num_steps),
        program.cp["llm"],
    )
    works = make_works(config, plan, model, program, start_loading(config, plan, model, stream), topology.store)
    for step, schedule in enumerate(schedules):
        for work in works.values():
            work.begin_step(schedule)
        run_instructions(instructions.of(schedule.slots), works, topology.links)
        sums = [(float(work.loss), work.num_dropped_targets, work.num_undecodable) for work in works.values()]
        summed = torch.tensor(sums, dtype=torch.float64).sum(dim=0)
        dist.all_reduce(summed)
        loss, num_dropped, num_undecodable = summed.tolist()
        num_targets = int(schedule.target_tokens.sum()) - round(num_dropped)
        where = f"{name}, {variant}, step {step}"
        assert num_undecodable == (variant == "damaged"), where
        apart = abs(loss / num_targets / expected["losses"][step] - 1)
        assert apart <= precision.loss, f"{where}: the loss is off by {apart:.1e}"
        for own in model.nodes:
            tolerance = precision.gradients if step == 0 else precision.later_gradients
            _compare_gradients(own, expected["gradients"][step], num_targets, tolerance, where)
        model.update(1.0, 1 / num_targets)
    model.wait_for_parameters()
    for own in model.nodes:
        for parameter_name, parameter in own.parameters.items():
            theirs = part_of(
                expected["weights"][num_steps - 1][parameter_name], own.shards.get(parameter_name), parameter.shape
            )
            ours = parameter.detach().to("cpu")
            if isinstance(ours, DTensor):  # of which each replica has some rows
                ours, theirs = ours.to_local().flatten(), _held_of(theirs.flatten(), own.optimizer.pieces(parameter))
            apart = max((ours.double() - theirs).abs().flatten().tolist(), default=0.0)
            assert apart < precision.weights, f"{name}, {variant}: {parameter_name} is off by {apart:.1e}"


@torch.no_grad()
def _start_from(model: RankModel, start: dict[str, torch.Tensor]) -> None:
    """Give the parameters named in `start` these values, in place of zeros."""
    for own in model.nodes:
        for name in start.keys() & own.parameters.keys():
            parameter = own.parameters[name]
            values = part_of(start[name], own.shards.get(name), parameter.shape).flatten()
            for piece in own.optimizer.pieces(parameter):
                piece.masters.copy_(values[piece.start :][: len(piece.masters)])
        if start:
            own.optimizer.go_on_from(0)


def _held_of(values: torch.Tensor, pieces: list[Piece]) -> torch.Tensor:
    """What of a flattened tensor is in a replica's pieces."""
    return torch.cat([values[:0], *(values[piece.start :][: len(piece.masters)] for piece in pieces)])


def _make_store() -> dist.Store:
    """Of all ranks, as that of torchrun."""
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    ports = [own.port if own else None]
    dist.broadcast_object_list(ports)
    return own or dist.TCPStore("127.0.0.1", ports[0], is_master=False)


def _compare_gradients(own, expected: dict[str, torch.Tensor], num_targets: int, tolerance: float, where: str) -> None:
    """What this rank owns of the summed gradients, beside the parameter's largest, or beside a thousandth of the
    largest of all: those of keys' biases are zero but for rounding."""
    floor = 1e-3 * max(float(gradient.abs().max()) for gradient in expected.values())
    for name, parameter in own.parameters.items():
        # What is not trained here has no moments: a frozen module, or a tied embedding's copy.
        pieces = [piece for piece in own.optimizer.pieces(parameter) if piece.moments]
        ours = torch.zeros(0) if parameter.grad is None else parameter.grad
        ours = ours.to_local().flatten() if isinstance(ours, DTensor) else _held_of(ours.flatten(), pieces)
        if name in expected:
            theirs = _held_of(part_of(expected[name], own.shards.get(name), parameter.shape).flatten(), pieces)
        else:
            theirs = torch.zeros_like(ours)
        scale = max(floor, float(expected[name].abs().max()) if name in expected else 0.0)
        apart = max((ours.double().cpu() / num_targets - theirs).abs().tolist(), default=0.0)
        assert apart <= tolerance * scale, f"{where}: {name} is off by {apart / scale:.1e}"
