"""A plan with its schedules, carried out by the runtime of training, as one of the sides that take turns."""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
import torch.distributed as dist

from dflop.checks.side_by_side.sides import Side
from dflop.config import Config
from dflop.models.precision import COMPUTES_IN
from dflop.plan import Plan
from dflop.schedule import StepSchedule
from dflop.step import StepInstructions, make_program
from dflop.step.run import run_instructions
from dflop.train.data_loader import start_loading
from dflop.train.feed import JobStream
from dflop.train.first_messages import meet_peers
from dflop.train.node_work import make_works
from dflop.train.rank_model import build_rank_model, forwards_that_read
from dflop.train.topology import place_in_world

__all__ = ["planned_side"]


def planned_side(
    config: Config, plan: Plan, schedules: Sequence[StepSchedule], device: torch.device, store: dist.Store
) -> Side:
    """A side that trains as the trainer does, with given schedules; every rank must call this. The ranks share `store`,
    which no other side uses.

    Without loader processes (`train.loader_workers: 0`), the side's `load` loads a step's batches.
    """
    dtype = COMPUTES_IN[config.train.precision]
    program = make_program(plan, config.model.trained)
    topology = place_in_world(program, device, dtype, store)
    model = build_rank_model(config, plan, topology, dtype)
    instructions = StepInstructions(plan, program, config.model.trained, topology.rank)
    stream = JobStream(
        SimpleNamespace(get=schedules.__getitem__),
        lambda slots: forwards_that_read(instructions.of(slots), topology, model),
        range(len(schedules)),
        program.cp["llm"],
    )
    loader = start_loading(config, plan, model, stream)
    given: list[object] = []
    is_preloaded = config.train.loader_workers == 0
    inputs = iter(lambda: given.pop(0), None) if is_preloaded else loader
    works = make_works(config, plan, model, program, inputs, topology.store)
    meet_peers(topology.links)

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
        totals = torch.tensor(
            [sum(float(work.loss) for work in works.values()), model.norm_squared() / num_targets**2], device=device
        )
        dist.all_reduce(totals)
        scale = min(1.0, config.train.grad_clip / (float(totals[1]) ** 0.5 + 1e-12))
        model.update(1.0, scale / num_targets)
        model.wait_for_parameters()  # before it is another side's turn

    return Side(load, train)
