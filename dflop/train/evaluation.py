"""The loss on samples that are held out, forward only, by the plan that trains.

The set is cut into the same batches each time, and scheduled once. Every rank carries out the forwards of its
instructions in order. Training is not affected: weights, optimiser state, random numbers and the position in the data
stay as they are, and a second set of loaders reads the samples.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

from dflop.config import Config
from dflop.plan import Plan
from dflop.schedule import StepSchedule
from dflop.schedule.service import open_evaluation
from dflop.step.run import run_instructions
from dflop.train.data_loader import load_again_and_again
from dflop.train.feed import JobStream
from dflop.train.node_work import EncoderWork, LlmWork
from dflop.train.rank_model import RankModel, forwards_that_read
from dflop.train.run_folder import RunFiles
from dflop.train.topology import Topology

__all__ = ["Evaluation"]


class Evaluation:
    """Evaluates the held-out set. Every rank must construct it, and call `run`, together with the others."""

    def __init__(
        self,
        config: Config,
        files: RunFiles,
        plan: Plan,
        topology: Topology,
        model: RankModel,
        works: Mapping[int, EncoderWork | LlmWork],
    ) -> None:
        self._topology, self._model, self._works = topology, model, works
        if topology.is_main:
            _publish(config, files, topology.store)
        num_batches = int(topology.store.get("evaluation/num_batches"))
        self._schedules = [
            StepSchedule.from_bytes(topology.store.get(f"evaluation/{number}")) for number in range(num_batches)
        ]
        self._instructions = [item for item in topology.instructions if item.op.is_forward]
        forwards = forwards_that_read(topology.instructions, topology, model)
        stream = JobStream(self, lambda slots: forwards, range(num_batches), topology.program.cp["llm"])
        self._loader = load_again_and_again(config, plan, model, stream)

    def get(self, number: int) -> StepSchedule:
        """The schedule of a batch of the set."""
        return self._schedules[number]

    @torch.no_grad()
    def run(self) -> tuple[float, float]:
        """The mean loss of the set's target tokens, in nats, and the seconds that evaluating took."""
        started, device = time.monotonic(), self._topology.device
        sums = torch.zeros(2, dtype=torch.float64, device=device)  # of losses, and of targets that were dropped
        modes = [node.stage.training for node in self._model.nodes]
        batches = iter(self._loader)
        with torch.random.fork_rng([device] if device.type == "cuda" else []), _all_reading(self._works, batches):
            for node in self._model.nodes:
                node.stage.eval()
            for schedule in self._schedules:
                for work in self._works.values():
                    work.begin_step(schedule, "evaluation")
                run_instructions(self._instructions, self._works, self._topology.links)
                for work in self._works.values():
                    sums += torch.tensor([float(work.loss), work.num_dropped_targets], dtype=sums.dtype, device=device)
                    work.unreadable.clear()
            for node, mode in zip(self._model.nodes, modes, strict=True):
                node.stage.train(mode)
        dist.all_reduce(sums)
        loss, num_dropped = sums.tolist()
        num_targets = sum(int(schedule.target_tokens.sum()) for schedule in self._schedules)
        return loss / max(1.0, num_targets - num_dropped), time.monotonic() - started


@contextmanager
def _all_reading(works: Mapping[int, EncoderWork | LlmWork], batches: Iterator) -> Iterator[None]:
    """Have the works read these batches in the context, and afterwards their former ones again."""
    before = {index: work.read_from(batches) for index, work in works.items()}
    try:
        yield
    finally:
        for index, loader in before.items():
            works[index].read_from(loader)


def _publish(config: Config, files: RunFiles, store: dist.Store) -> None:
    scheduler = open_evaluation(config, shapes=files.shapes, costs=files.costs, plan=files.plan)
    with scheduler.open():
        for number in range(len(scheduler.batches)):
            store.set(f"evaluation/{number}", scheduler.schedule(number, "lpt").to_bytes())
    store.set("evaluation/num_batches", str(len(scheduler.batches)))
