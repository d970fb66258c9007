"""What every rank of an emulated run does."""

import gc
import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dflop.base.rendezvous import leave_ranks
from dflop.checks.emulation.work import EmulatedWork, Network
from dflop.config import Config, load_config
from dflop.plan import load_plan
from dflop.schedule import StepSchedule
from dflop.step import Op, StepInstructions, make_program
from dflop.step.run import Waits, run_instructions
from dflop.train.feed import ScheduleFeed, SchedulePublisher
from dflop.train.first_messages import meet_peers
from dflop.train.observations import NUM_WARMUP_STEPS, Observations
from dflop.train.peers import PeerWatch, longest_wait_s
from dflop.train.rank_clock import RankClock
from dflop.train.step_seconds import StepSeconds, split_line
from dflop.train.step_sums import sum_over_ranks
from dflop.train.topology import join_world

__all__ = ["EmulatedRank"]

# Steps between two runs of the garbage collector, as in the trainer.
_COLLECT_EVERY = 20


class EmulatedRank:
    """One rank. Construct it on every rank, then call `run()` on every rank. Its steps are those of `Trainer`, without
    a model.

    All predicted seconds are multiplied by `scale`, also those of each node's gradient sync and of its early and late
    parts, `sync_s`, `early_sync_s` and `late_sync_s` [num_nodes].
    """

    def __init__(
        self,
        config: Config,
        artifacts: dict[str, Path],
        out: Path,
        *,
        scale: float,
        sync_s: list[float],
        early_sync_s: list[float],
        late_sync_s: list[float],
    ) -> None:
        self.config, self.out, self.scale = config, out, scale
        plan = load_plan(artifacts["plan"])
        program = make_program(plan, config.model.trained, rank=int(os.environ["RANK"]))
        self.topology = join_world(plan, program, "cpu", torch.float32)
        world = self.topology
        self.watch = PeerWatch(world.store, world.rank, world.carried, world.world_size, config.train.peer_timeout_s)
        self.observations = Observations(out / "observations", self.topology.rank, program.nodes)
        self.clock, self.seconds = RankClock(), StepSeconds(program, self.topology.world_size)
        self.feed = ScheduleFeed(self.topology.store)
        self.publisher = None
        if self.topology.is_main:
            corrections = self.observations.corrections_path
            self.publisher = SchedulePublisher(
                self.topology.store.clone(), config, **artifacts, corrections=corrections, first_step=0
            )
            self.publisher.start()
        self.instructions = StepInstructions(plan, program, config.model.trained, self.topology.rank)
        last_stage, network = plan.num_stages("llm") - 1, Network()
        self.works = {
            index: EmulatedWork(
                program=program,
                index=index,
                sync_s=sync_s[index] * scale,
                early_sync_s=early_sync_s[index] * scale,
                late_sync_s=late_sync_s[index] * scale,
                network=network,
                replicas=self.topology.replicas[index],
                meets=self.topology.samples.get(index),
                counts=program.nodes[index].module == "llm"
                and program.nodes[index].pp_stage == last_stage
                and self.topology.tensor[index].is_first,
            )
            for index in self.topology.nodes
        }
        self.longest_step_s = 0.0
        self.feed.get(0)  # waiting for the first schedule is part of starting up
        dist.barrier()
        meet_peers(self.topology.links)
        self.feed.waited_s.clear()

    def run(self) -> None:
        """Run all steps, then write the observations."""
        self.watch.start()
        try:
            gc.collect()
            gc.disable()
            self.clock.restart()
            for step in range(self.config.train.steps):
                self._step(step)
                if step % _COLLECT_EVERY == 0:
                    gc.collect(1)
            self.observations.write(self.observations.take(), self.config.train.steps)
        finally:
            self.watch.close()
            gc.enable()
            if self.publisher:
                self.publisher.close()
        leave_ranks()

    def _step(self, step: int) -> None:
        if self.publisher:
            self.publisher.step_started(step, None)
        timeout_s = self.config.train.peer_timeout_s
        self.watch.begin(f"step {step + 1}, its schedule,", timeout_s, alive_s=math.inf)
        with self.clock.part("schedule"):
            schedule = _slowed(self.feed.get(step), self.scale)
        longest_s = longest_wait_s(timeout_s, schedule.step_s, self.longest_step_s)
        self.watch.begin(f"step {step + 1}", longest_s, alive_s=math.inf if step < NUM_WARMUP_STEPS else 0.0)
        for work in self.works.values():
            work.begin_step(schedule)
        zero_s, waits = time.monotonic(), Waits()
        spans = run_instructions(self.instructions.of(schedule.slots), self.works, self.topology.links, waits)
        ended_s = time.monotonic()
        self.clock.add_pipeline(spans, waits, zero_s, ended_s)
        totals, known = sum_over_ranks(
            {
                "num_samples": sum(work.num_samples for work in self.works.values()),
                "busy_s": sum(span.seconds for span in spans if span.op is not Op.SYNC_GRADIENTS),
                "wait_s": self.feed.waited_s.get(step, 0.0),
            },
            [*self.clock.row(), ended_s - zero_s],
            self.topology.device,
        )
        step_s = self.clock.end()
        self.longest_step_s = max(self.longest_step_s, step_s)
        self.observations.add(step, schedule, spans, zero_s)
        if self.topology.is_main:
            parts = self.seconds.of_step(known[:, :-1], step_s, schedule.idle_of_worker)
            self.observations.add_seconds(step, parts, step_s)
            # `pipeline_s` is that of the slowest rank.
            self._log(step, schedule, totals, step_s, float(known[:, -1].max()), split_line(parts))
        self.feed.forget(step)

    def _log(
        self,
        step: int,
        schedule: StepSchedule,
        totals: dict[str, float],
        step_s: float,
        pipeline_s: float,
        parts: dict[str, Any],
    ) -> None:
        """Write a line of `metrics.jsonl`, with the names of training's fields, and a line on the screen."""
        world_size = self.topology.world_size
        line = {
            "step": step,
            "emulated": True,
            "num_samples": round(totals["num_samples"]),
            "num_tokens": int(schedule.llm_tokens.sum()),
            "step_s": step_s,
            "pipeline_s": pipeline_s,
            "predicted_step_s": schedule.step_s,
            "idle": 1 - totals["busy_s"] / (world_size * step_s),
            "predicted_idle": schedule.idle,
            "wait_s": totals["wait_s"] / world_size,
            "seconds": parts,
            "policy": schedule.policy,
            "policy_status": schedule.status,
            "deciding_s": schedule.deciding_s,
        }
        with (self.out / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{time.strftime('%H:%M:%S')}  emulated step {step + 1}/{self.config.train.steps}  {step_s:.3f} s, "
            f"predicted {schedule.step_s:.3f} s  idle {line['idle']:.0%}  schedule wait {line['wait_s'] * 1e3:.1f} ms",
            flush=True,
        )


def _slowed(schedule: StepSchedule, scale: float) -> StepSchedule:
    """The schedule with all of its predicted seconds multiplied by `scale`."""
    names = ("forward_s", "backward_s", "step_s", "lower_bound_s")
    return replace(schedule, **{name: getattr(schedule, name) * scale for name in names})


def main(request: dict) -> None:
    torch.set_num_threads(1)
    artifacts = {name: Path(request[name]) for name in ("shapes", "costs", "plan")}
    config = load_config(request["config"])
    seconds = {name: request[name] for name in ("scale", "sync_s", "early_sync_s", "late_sync_s")}
    EmulatedRank(config, artifacts, Path(request["out"]), **seconds).run()
