"""The training loop of one rank.

A step: take the schedule, carry out the instructions, divide the summed gradients by the global number of target
tokens, clip by the global norm, and update what this rank owns. One small all-reduce a step gives all ranks the loss,
the norm and how busy the ranks were.
"""

import gc
import math
import os
import shutil
import sys
import time
import zlib

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from dflop.base import UserError, printable
from dflop.base.local_device import device_name
from dflop.base.rendezvous import leave_ranks
from dflop.config import Config
from dflop.models import load_model_spec
from dflop.models.attention import kernel_name
from dflop.models.compilation import compiles_layers
from dflop.models.compile_log import compiled_so_far
from dflop.models.precision import COMPUTES_IN
from dflop.plan import load_plan
from dflop.schedule import StepSchedule
from dflop.step import Op, Program, Span, StepInstructions, make_program
from dflop.step.run import Waits, run_instructions
from dflop.train.data_loader import start_loading
from dflop.train.evaluation import Evaluation
from dflop.train.export import export_model
from dflop.train.export_adapter import export_adapter, writes_adapter
from dflop.train.feed import JobStream, ScheduleFeed, SchedulePublisher
from dflop.train.first_messages import meet_groups, meet_peers
from dflop.train.learning_rate import lr_factor
from dflop.train.node_work import make_works
from dflop.train.observations import NUM_WARMUP_STEPS, Observations
from dflop.train.peak_memory import forget_peak, peak_memory
from dflop.train.peers import PeerWatch, longest_wait_s, meeting
from dflop.train.rank_clock import RankClock
from dflop.train.rank_model import build_rank_model, forwards_that_read
from dflop.train.resume import take_up
from dflop.train.run_folder import MeasuredOn, RunFiles
from dflop.train.saver import CheckpointSaver
from dflop.train.step_log import StepLog, say_if_costs_are_of_another
from dflop.train.step_seconds import StepSeconds
from dflop.train.step_sums import sum_over_ranks
from dflop.train.step_times import StepReports
from dflop.train.stopping import StopRequest
from dflop.train.topology import join_world
from dflop.train.trackers import Trackers
from dflop.train.warm_up import warm_up

__all__ = ["Trainer"]

# Steps between two runs of the garbage collector.
_COLLECT_EVERY = 20
# How long a rank may be silent at the start, where it may hold the interpreter while it reads a tensor from a slow
# disk; and how long first messages and first steps may take.
_STARTING_S = 600.0
# torch itself gives up ranks that do not come at all after `_STARTING_S`, with a reason.
_MARGIN_S = 60.0


class Trainer:
    """One rank. Construct it on every rank, then call `train()` on every rank.

    Raises:
        UserError: when the plan, model, checkpoint or data cannot be used, or the plan's program cannot be run.
    """

    def __init__(self, config: Config, files: RunFiles, stop: StopRequest) -> None:
        self.config, self.files, self.stop = config, files, stop
        self.plan = load_plan(files.plan)
        program = make_program(self.plan, config.model.trained, rank=int(os.environ["RANK"]))
        dtype = COMPUTES_IN[config.train.precision]
        is_tied = load_model_spec(config.model).has_tied_head
        with meeting(max(_STARTING_S, config.train.peer_timeout_s) + _MARGIN_S):
            world = self.topology = join_world(self.plan, program, config.cluster.device, dtype, is_tied=is_tied)
        compiled = self.compiled = compiled_so_far()
        self.watch = PeerWatch(
            world.store,
            world.rank,
            world.carried,
            world.world_size,
            config.train.peer_timeout_s,
            lambda: (compiled.num_begun, compiled.num_ended),
            on_gpus=config.cluster.device == "cuda",
        )
        # Every rank has made its groups, and so its watch soon.
        self.watch.begin("starting", max(_STARTING_S, config.train.peer_timeout_s), alive_s=math.inf)
        self.watch.start()
        try:
            self._build(program, dtype)
        except BaseException:
            self.watch.close()
            raise

    def _build(self, program: Program, dtype: torch.dtype) -> None:
        """Build the model, take up a run, and start all that feeds the steps."""
        config, files = self.config, self.files
        self._say(f"{self.topology.world_size} ranks have met; they build the model")
        why_eager = compiles_layers(config.train.compile, self.topology.device)[1]
        if why_eager and os.environ.get("LOCAL_RANK", "0") == "0":  # a node says it once; others may compile
            print(f"dflop: WARNING: {why_eager}", file=sys.stderr, flush=True)
        self.model = build_rank_model(config, self.plan, self.topology, dtype)
        self.kernel = kernel_name(self.topology.device, dtype)
        if self.topology.is_main:
            running_on = MeasuredOn(device_name(self.topology.device), self.kernel)
            say_if_costs_are_of_another(files.measured_on, running_on)
        self.observations = Observations(files.out / "observations", self.topology.rank, program.nodes)
        self.saver = CheckpointSaver(files.checkpoints, self.observations)
        group = self.saver.group
        self.first_step, self.restarts = take_up(config.train, files, self.model, self.observations, group)
        self.longest_step_s = 0.0
        self.clock, self.seconds = RankClock(), StepSeconds(program, self.topology.world_size)
        trackers = Trackers(files.out, self.first_step, config.train.tensorboard) if self.topology.is_main else None
        self.log = StepLog(files, config.train.steps, self.topology.world_size, trackers)
        self.feed = ScheduleFeed(self.topology.store)
        self.reports = StepReports(
            self.topology.store,
            self.topology.rank,
            num_ranks=self.topology.world_size,
            num_nodes=len(program.nodes),
            num_microbatches=self.plan.num_microbatches,
            overlaps=any(node.overlaps for node in self.model.nodes),
        )
        self._say("the model is built; the schedules and the loaders start")
        self.publisher = self._start_publisher() if self.topology.is_main else None
        self.instructions = StepInstructions(self.plan, program, config.model.trained, self.topology.rank)
        stream = JobStream(
            self.feed,
            lambda slots: forwards_that_read(self.instructions.of(slots), self.topology, self.model),
            range(self.first_step, config.train.steps),
            program.cp["llm"],
        )
        loader = start_loading(config, self.plan, self.model, stream)
        self.works = make_works(config, self.plan, self.model, program, loader, self.topology.store.clone())
        self.evaluation = None
        if config.data.has_evaluation:
            self.evaluation = Evaluation(config, files, self.plan, self.topology, self.model, self.works)
        if self.topology.device.type == "cuda":
            warm_up(self.model, evaluates=config.data.has_evaluation)
        dist.barrier(group)
        self.watch.begin("first messages between ranks", max(_STARTING_S, config.train.peer_timeout_s))
        meet_peers(self.topology.links)
        meet_groups(self.topology)
        is_trained = self.first_step >= config.train.steps
        begins = "every step is trained" if is_trained else f"step {self.first_step + 1} of {config.train.steps} begins"
        self._say(f"all is ready; {begins}")
        # Waits until here were part of starting up, and do not count.
        self.feed.waited_s.clear()

    def train(self) -> None:
        """Run the remaining steps, and then write the model; or run until any rank is asked to stop.

        Raises:
            UserError: when the loss is not finite, a step cannot be scheduled, or the last step or the model cannot be
                written.
        """
        try:
            self._train()
            self.watch.begin("leaving the process groups", max(_STARTING_S, self.config.train.peer_timeout_s))
            leave_ranks()
        finally:
            self.watch.close()

    def _train(self) -> None:
        config = self.config.train
        try:
            # The collector would interrupt a rank at any time, while the others wait. It runs between steps instead.
            gc.collect()
            gc.disable()
            self.clock.restart()
            num_steps = self.first_step
            while num_steps < config.steps:
                is_asked = self._step(num_steps)
                if num_steps % _COLLECT_EVERY == 0:
                    gc.collect(1)
                num_steps += 1
                if num_steps % config.checkpoint_every == 0 or num_steps == config.steps or is_asked:
                    self._save(num_steps)
                if is_asked:
                    break
            self.model.wait_for_parameters()
            self.saver.wait()
            if unsaved := self._unsaved(num_steps):
                raise UserError(f"the last step could not be saved: {unsaved}")
            if num_steps >= config.steps:  # more, where samples were left out since, and an epoch has fewer steps
                self._export()
        finally:
            self.watch.begin("ending")
            gc.enable()
            self.saver.close(self.config.train.peer_timeout_s)
            self.log.close()
            if self.publisher:
                self.publisher.close()

    def _say(self, what: str) -> None:
        """Print how far starting has come, on the first rank only; it may take a minute."""
        if self.topology.is_main:
            print(f"{time.strftime('%H:%M:%S')}  {what}", flush=True)

    def _seed_dropout(self, step: int) -> None:
        """Seed the masks of adapters' dropout: ranks that divide a layer draw the same ones, replicas others, and a
        resumed run those of one that was not interrupted."""
        lora = self.model.trained.lora
        if lora and lora.dropout:
            first = self.topology.rank - max(node.ranks.place for node in self.model.nodes)
            torch.manual_seed(zlib.crc32(f"{self.config.seed}/{step}/{first}".encode()))

    def _say_what_is_compiled(self, num_eager: int) -> None:
        if num_eager:
            reason = self.compiled.reason or "other ranks know the reason"
            self._say(f"WARNING: {num_eager} functions of layers run eager on some ranks, not compiled: {reason}")

    def _export(self) -> None:
        self.watch.begin("writing the model", self.config.train.peer_timeout_s, alive_s=math.inf)
        try:
            precision = self.config.train.export_precision or self.config.train.precision
            folder, adapter = self.files.out / "model", self.files.out / "adapter"
            if writes_adapter(self.model):  # before the model, whose folder says that the run is finished
                export_adapter(adapter, self.model, self.config.model, self.saver.group)
            elif self.topology.is_main and adapter.exists():  # of an earlier training in this folder
                shutil.rmtree(adapter)
            export_model(folder, self.plan, self.model, COMPUTES_IN[precision], self.saver.group)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"the model could not be written to {self.files.out / 'model'}: {error}; the last step is saved"
            ) from None

    def _step(self, step: int) -> bool:
        """Carry out a step. Returns, the same on every rank, whether any rank was asked to stop."""
        if self.publisher:
            self.publisher.step_started(step, self.reports.take(step))
        config = self.config.train
        self.watch.begin(f"step {step + 1}, its schedule,", config.peer_timeout_s, alive_s=math.inf)
        self._seed_dropout(step)
        with self.clock.part("schedule"):
            schedule = self.feed.get(step)
        # In its first steps a process compiles and fills caches, so they may take long while all ranks are alive.
        self.watch.begin(
            f"step {step + 1}",
            longest_wait_s(config.peer_timeout_s, schedule.step_s, self.longest_step_s),
            alive_s=_STARTING_S if step < self.first_step + NUM_WARMUP_STEPS else 0.0,
        )
        for work in self.works.values():
            work.begin_step(schedule)
        zero_s = time.monotonic()
        waits = Waits()
        spans = run_instructions(self.instructions.of(schedule.slots), self.works, self.topology.links, waits)
        ended_s = time.monotonic()
        self.clock.add_pipeline(spans, waits, zero_s, ended_s)
        totals, known, step_s = self._update(step, schedule, spans)
        self.longest_step_s = max(self.longest_step_s, step_s)
        self.observations.add(step, schedule, spans, zero_s)
        if schedule.measures and step >= self.first_step + NUM_WARMUP_STEPS:
            self.reports.send(step, spans, step_s)
        evaluated = self._evaluate(step) if self._evaluates_after(step) else None
        if self.topology.is_main:
            self.log.unsaved = self._unsaved(step + 1)
            parts = self.seconds.of_step(known, step_s, schedule.idle_of_worker)
            self.observations.add_seconds(step, parts, step_s)
            if step == max(self.first_step + NUM_WARMUP_STEPS, config.steps // 2):
                self.observations.keep_schedule(schedule)
            self.log.add(step, schedule, totals, step_s, ended_s - zero_s, parts, evaluated)
            if step == self.first_step + 1:
                self._say_what_is_compiled(round(totals["eager"]))
        if step == self.first_step + NUM_WARMUP_STEPS - 1:
            forget_peak(self.topology.device)
        self.feed.forget(step)
        return totals["asked_to_stop"] > 0

    def _evaluates_after(self, step: int) -> bool:
        every = self.config.train.evaluate_every
        is_due = step + 1 == self.config.train.steps or (every is not None and (step + 1) % every == 0)
        return self.evaluation is not None and is_due

    def _evaluate(self, step: int) -> tuple[float, float]:
        """The loss of the evaluation set, and the seconds that evaluating took, which count in no step."""
        self.watch.begin(f"evaluating after step {step + 1}", self.config.train.peer_timeout_s, alive_s=math.inf)
        with self.clock.paused():
            return self.evaluation.run()

    def _update(
        self, step: int, schedule: StepSchedule, spans: list[Span]
    ) -> tuple[dict[str, float], np.ndarray, float]:
        """Normalise, clip and apply the gradients.

        Returns the sums over all ranks (of waits the means), the known parts of each rank's step, [num_ranks,
        len(KNOWN_PARTS)], and the seconds that the step took. The step ends with the all-reduce of the sums.
        """
        config, works = self.config.train, self.works.values()
        with self.clock.part("optimiser"):
            grad_sq = self.model.norm_squared()
        totals, known = sum_over_ranks(
            {
                "loss": sum(float(work.loss) for work in works),
                "grad_sq": grad_sq,
                # The gradient sync is left out: it is mostly a wait for the slower replicas.
                "busy_s": sum(span.seconds for span in spans if span.op is not Op.SYNC_GRADIENTS),
                "wait_s": self.feed.waited_s.get(step, 0.0),
                "data_wait_s": sum(work.data_wait_s for work in works),
                "unreadable": sum(len(work.unreadable) for work in works),
                "undecodable": sum(work.num_undecodable for work in works),
                "eager": self.compiled.num_eager,
                "dropped_targets": sum(work.num_dropped_targets for work in works),
                "asked_to_stop": float(bool(self.stop)),
            },
            self.clock.row(),
            self.topology.device,
        )
        step_s = self.clock.end()
        num_targets = max(1, int(schedule.target_tokens.sum()) - round(totals["dropped_targets"]))
        totals["loss"] /= num_targets
        totals["grad_norm"] = totals.pop("grad_sq") ** 0.5 / num_targets
        for wait in ("wait_s", "data_wait_s"):
            totals[wait] /= self.topology.world_size
        if not (math.isfinite(totals["loss"]) and math.isfinite(totals["grad_norm"])):
            raise UserError(
                f"step {step + 1}: loss {totals['loss']} with gradient norm {totals['grad_norm']}; lower `train.lr` "
                f"(now {config.lr}) or raise `train.warmup_steps`; the last checkpoint is intact"
            )
        scale = min(1.0, config.grad_clip / (totals["grad_norm"] + 1e-12))
        factor = lr_factor(config, step)
        totals["lr"] = config.lr * factor
        with self.clock.part("optimiser"):
            self.model.update(factor, scale / num_targets)
            if self.topology.device.type == "cuda":
                # Otherwise the next step would be charged with the update. Parameters may still be under way.
                torch.cuda.current_stream(self.topology.device).synchronize()
        for work in works:
            for line in work.unreadable:
                print(f"dflop: not as it was profiled: {printable(line)}", flush=True)
            work.unreadable.clear()
        return totals, known, step_s

    def _save(self, num_steps: int) -> None:
        """Begin to write a checkpoint. If any rank cannot write, training goes on, and the reason is shown until a
        checkpoint is written."""
        self.watch.begin(f"saving step {num_steps}", self.config.train.peer_timeout_s, alive_s=math.inf)
        run = {
            "generation": self.files.generation.to_dict(),
            "restarts": self.restarts,
            "attention": self.kernel,
            **self._peaks(),
        }
        self.saver.save(num_steps, self.model.nodes, run)

    def _unsaved(self, num_steps: int) -> str | None:
        """Why the last checkpoint could not be written, and when the next try is, after `num_steps` steps; None if it
        was written."""
        if self.saver.unsaved is None:
            return None
        config, (of_step, trouble) = self.config.train, self.saver.unsaved
        onward = min(-(-num_steps // config.checkpoint_every) * config.checkpoint_every, config.steps)
        again = f"; the next try is after step {onward}" if onward > of_step else ""
        return f"{trouble} (checkpoint of step {of_step} in {self.files.out}{again})"

    def _peaks(self) -> dict[str, dict[str, int]]:
        """For each module, the peak bytes of its fullest rank (`PeakMemory`)."""
        peak, modules = peak_memory(self.topology.device), [grid.module for grid in self.plan.grids]
        peaks = torch.zeros(len(peak), len(modules), dtype=torch.float64, device=self.topology.device)
        for node_model in self.model.nodes:
            peaks[:, modules.index(node_model.node.module)] = torch.tensor(peak, dtype=peaks.dtype)
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
        held, allocated = ({m: int(n) for m, n in zip(modules, row, strict=True) if n} for row in peaks.tolist())
        return {"peak_memory_bytes": held, "peak_allocated_bytes": allocated}

    def _start_publisher(self) -> SchedulePublisher:
        publisher = SchedulePublisher(
            self.topology.store.clone(),
            self.config,
            shapes=self.files.shapes,
            costs=self.files.costs,
            plan=self.files.plan,
            corrections=self.observations.corrections_path,
            first_step=self.first_step,
        )
        publisher.start()
        return publisher
