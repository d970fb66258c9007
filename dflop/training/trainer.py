"""The training loop of one rank.

A step: take the schedule, carry out the instructions, divide the summed gradients by the global number of
target tokens, clip by the global norm, update what this rank owns. One small all-reduce a step tells everybody the
loss, the norm and how busy the ranks were.
"""

import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from dflop.config import Config
from dflop.costs import BEYOND_MEASURED
from dflop.data import ShapeReader, list_sources
from dflop.data.loading import MicrobatchLoader, TrainingRecords
from dflop.data.text import ChatTokenizer, tokenizer_folder
from dflop.models import load_model_spec
from dflop.models.llava_onevision.processing import LlavaOnevisionPixels
from dflop.models.llava_onevision.stages import build_stage, make_hf_config
from dflop.pipeline import Op, Span, check_program, load_plan, make_program
from dflop.pipeline.run import run_instructions
from dflop.runtime import UserError
from dflop.runtime.local_device import device_name
from dflop.runtime.memory import process_bytes
from dflop.scheduling import StepSchedule
from dflop.training.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint, set_aside
from dflop.training.export import export_model
from dflop.training.feed import JobStream, ScheduleFeed, SchedulePublisher
from dflop.training.observations import NUM_WARMUP_STEPS, Observations
from dflop.training.sharded_optimizer import ShardedAdamW
from dflop.training.step_times import StepReports
from dflop.training.topology import join_world
from dflop.training.work import make_work

__all__ = ["RunFiles", "Trainer"]

# Microbatches that each loader process holds ready.
_PREFETCH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFiles:
    """What training reads, and the folder it writes to.

    `run_digest` tells whose checkpoints it may resume, `measured_on` the name of the device that the costs were
    measured on (None for analytic ones).
    """

    shapes: Path
    costs: Path
    plan: Path
    out: Path
    run_digest: str
    measured_on: str | None


class Trainer:
    """One rank. Build it on every rank, then `train()`."""

    def __init__(self, config: Config, files: RunFiles) -> None:
        self.config, self.files = config, files
        self.plan = load_plan(files.plan)
        self.program = make_program(self.plan, config.model.freeze)
        check_program(self.plan, self.program, config.model.freeze)
        dtype = torch.float64 if config.train.precision == "fp64" else torch.float32
        travels_as = torch.bfloat16 if config.train.precision == "bf16" else dtype
        self.topology = join_world(self.plan, self.program, config.cluster.device, travels_as)
        node = self.topology.node
        spec = load_model_spec(config.model)
        checkpoint = Path(config.model.path) if config.model.path else None
        self.tokenizer_folder = tokenizer_folder(config.model)
        tokenizer = ChatTokenizer(self.tokenizer_folder)
        self.hf_config = make_hf_config(spec.hf_config, tokenizer.placeholder_ids, tokenizer.vocab_size)
        layers = self.plan.layers_of(node.module, spec.module(node.module).num_layers)
        self.stage = build_stage(
            self.hf_config,
            node.module,
            layers=layers[node.pp_stage],
            seed=config.seed,
            checkpoint=checkpoint,
            dtype=dtype,
            device=self.topology.device,
            checkpointing=self.plan.checkpointing,
        )
        self.stage.requires_grad_(node.module not in config.model.freeze)
        self.pixels = LlavaOnevisionPixels(spec.hf_config, spec.rules.image_size, checkpoint)
        self.optimizer = ShardedAdamW(
            list(self.stage.parameters()),
            self.topology.replicas,
            lr=config.train.lr,
            weight_decay=config.train.weight_decay,
            fused=config.cluster.device == "cuda",
        )
        self.parameters = self.stage.named_hf_parameters()
        if self.topology.is_main:
            self._say_if_costs_are_of_another(device_name(self.topology.device))
        self.said_extrapolated = False
        self.observations = Observations(files.out / "observations", self.topology.rank, node)
        self.first_step, self.restarts = self._resume()
        self.feed = ScheduleFeed(self.topology.store)
        self.reports = StepReports(
            self.topology.store, num_nodes=len(self.program.nodes), num_microbatches=self.plan.num_microbatches
        )
        self.publisher = self._start_publisher() if self.topology.is_main else None
        dataset = MicrobatchLoader(
            records=TrainingRecords(list_sources(config.data), config.seed),
            reader=ShapeReader(
                rules=spec.rules,
                video=config.data.video,
                audio=config.data.audio,
                max_image_pixels=config.data.max_image_pixels,
                max_text_bytes=config.data.max_text_bytes,
            ),
            tokenizer_folder=self.tokenizer_folder,
            max_llm_tokens=config.data.max_llm_tokens,
            num_encoder_ranks=self.plan.grids[0].dp,
            pixels=None if node.module == "llm" else self.pixels,
        )
        stream = JobStream(self.feed, node, self.plan.num_microbatches, range(self.first_step, config.train.steps))
        self.work = make_work(
            self.stage,
            program=self.program,
            node_index=self.topology.node_index,
            loader=_started(_data_loader(dataset, stream, config, self.plan.num_microbatches)),
            autocast=torch.autocast(
                self.topology.device.type, torch.bfloat16, enabled=config.train.precision == "bf16"
            ),
            optimizer=self.optimizer,
            hidden_size=spec.module("llm").hidden_size,
        )
        dist.barrier()
        # Until here everybody started up; from here on a wait is a wait.
        self.feed.waited_s.clear()

    def train(self) -> None:
        """Run the remaining steps, then write the model."""
        config = self.config.train
        try:
            for step in range(self.first_step, config.steps):
                self._step(step)
                if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
                    self._save(step + 1)
            export_model(
                self.files.out / "model",
                self.stage,
                self.topology.node,
                self.plan,
                self.hf_config,
                self.pixels,
                self.tokenizer_folder,
            )
        finally:
            if self.publisher:
                self.publisher.close()
        dist.destroy_process_group()

    def _say_if_costs_are_of_another(self, running_on: str) -> None:
        measured_on = self.files.measured_on
        if measured_on not in (None, running_on):
            print(
                f"dflop: warning: the costs were measured on {measured_on!r} and this is {running_on!r}: the plan and "
                "the schedules follow another device; measure again with `dflop profile-costs` (`snakemake --forcerun "
                "profile_costs`) and give each device a `cluster.device_model` of its own",
                file=sys.stderr,
                flush=True,
            )

    def _step(self, step: int) -> None:
        started = time.monotonic()
        if self.publisher:
            self.publisher.step_started(step, self.reports.take(step))
        schedule = self.feed.get(step)
        self.work.begin_step(schedule)
        zero_s = time.monotonic()
        spans = run_instructions(self.program.instructions[self.topology.node_index], self.work, self.topology.links)
        pipeline_s = time.monotonic() - zero_s
        totals = self._update(step, schedule, spans)
        step_s = time.monotonic() - started
        self.observations.add(step, schedule, self.topology.node_index, spans, zero_s)
        if schedule.measures and step >= self.first_step + NUM_WARMUP_STEPS:
            self.reports.send(step, self.topology.node_index, spans, step_s)
        if self.topology.is_main:
            self._log(step, schedule, totals, step_s, pipeline_s)
        self.feed.forget(step)

    def _update(self, step: int, schedule: StepSchedule, spans: list[Span]) -> dict[str, float]:
        """Normalise, clip and apply the gradients; returns sums over all ranks, and the mean rank's waits."""
        num_targets = int(schedule.target_tokens.sum())
        totals = _sum_over_ranks(
            {
                "loss": float(self.work.loss) / num_targets,
                "grad_sq": self.optimizer.norm_squared() / num_targets**2,
                # The gradient sync is left out: it is mostly a wait for the slower replicas.
                "busy_s": sum(span.seconds for span in spans if span.op is not Op.SYNC_GRADIENTS),
                "wait_s": self.feed.waited_s.get(step, 0.0),
                "data_wait_s": self.work.data_wait_s,
                "unreadable": len(self.work.unreadable),
            },
            self.topology.device,
        )
        totals["grad_norm"] = totals.pop("grad_sq") ** 0.5
        for wait in ("wait_s", "data_wait_s"):
            totals[wait] /= self.topology.world_size
        if not (math.isfinite(totals["loss"]) and math.isfinite(totals["grad_norm"])):
            raise UserError(
                f"step {step}: loss {totals['loss']} with gradient norm {totals['grad_norm']}; lower `train.lr` "
                f"(now {self.config.train.lr}) or raise `train.warmup_steps`; the last checkpoint is intact"
            )
        scale = min(1.0, self.config.train.grad_clip / (totals["grad_norm"] + 1e-12))
        totals["lr"] = self.config.train.lr * min(1.0, (step + 1) / max(1, self.config.train.warmup_steps))
        self.optimizer.step(totals["lr"], scale / num_targets)
        for line in self.work.unreadable:
            print(f"dflop: trained on a blank in place of {line}", flush=True)
        self.work.unreadable.clear()
        return totals

    def _log(
        self, step: int, schedule: StepSchedule, totals: dict[str, float], step_s: float, pipeline_s: float
    ) -> None:
        extrapolated = float(schedule.extrapolated.mean())
        if extrapolated and not self.said_extrapolated:
            self.said_extrapolated = True
            print(
                f"dflop: warning: step {step}: {extrapolated:.1%} of the ranks' microbatches {BEYOND_MEASURED}; said "
                "once, metrics.jsonl has the share of every step (`extrapolated`)",
                file=sys.stderr,
                flush=True,
            )
        # A rank's step is its computations plus its waits; ranks end the step together, at the all-reduce.
        idle = 1 - totals["busy_s"] / (self.topology.world_size * step_s)
        line: dict[str, Any] = {
            "step": step,
            "loss": totals["loss"],
            "num_samples": len(schedule.sample_id),
            "num_tokens": int(schedule.llm_tokens.sum()),
            "num_items": int(schedule.num_items.sum()),
            "step_s": step_s,
            "pipeline_s": pipeline_s,
            "predicted_step_s": schedule.step_s,
            "idle": idle,
            "predicted_idle": schedule.idle,
            "wait_s": totals["wait_s"],
            "data_wait_s": totals["data_wait_s"],
            "grad_norm": totals["grad_norm"],
            "lr": totals["lr"],
            "policy": schedule.policy,
            "policy_status": schedule.status,
            "num_beyond_memory": schedule.num_beyond_memory,
            "deciding_s": schedule.deciding_s,
            "num_unreadable": int(totals["unreadable"]),
            "extrapolated": extrapolated,
            "corrections_version": schedule.corrections_version,
            "measures": schedule.measures,
        }
        with (self.files.out / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"step {step + 1}/{self.config.train.steps}  loss {totals['loss']:.3f}  {step_s:.2f} s  "
            f"{line['num_tokens'] / step_s:,.0f} tokens/s  idle {idle:.0%}  "
            f"schedule wait {totals['wait_s'] * 1e3:.1f} ms",
            flush=True,
        )

    def _save(self, num_steps: int) -> None:
        self.observations.flush(num_steps)
        peak_bytes = self._peak_bytes()
        save_checkpoint(
            self.files.out / "checkpoints",
            num_steps,
            self.parameters,
            self.optimizer,
            {"run_digest": self.files.run_digest, "restarts": self.restarts, "peak_memory_bytes": peak_bytes},
        )

    def _peak_bytes(self) -> dict[str, int]:
        """The most that a rank of each module has held so far: its process on CPUs, its share of the device on GPUs."""
        device = self.topology.device
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            outside = total - free - torch.cuda.memory_reserved(device)
            own = outside + torch.cuda.max_memory_reserved(device)
        else:
            own = process_bytes("VmHWM")
        modules = [grid.module for grid in self.plan.grids]
        peaks = torch.zeros(len(modules), dtype=torch.float64, device=device)
        peaks[modules.index(self.topology.node.module)] = own
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
        return {module: int(peak) for module, peak in zip(modules, peaks.tolist(), strict=True)}

    def _resume(self) -> tuple[int, int]:
        """The step to go on with, and how often the run was taken up again."""
        folder, metrics = self.files.out / "checkpoints", self.files.out / "metrics.jsonl"
        found = find_checkpoint(folder) if self.config.train.resume == "auto" else None
        usable = found is not None and found[1]["run_digest"] == self.files.run_digest
        usable = usable and found[1]["step"] <= self.config.train.steps
        dist.barrier()
        if not usable:
            if self.topology.is_main:
                if folder.exists():
                    aside = set_aside(folder)
                    print(f"dflop: checkpoints of another run or of a longer one were moved to {aside}", flush=True)
                metrics.unlink(missing_ok=True)
                self.observations.clear()
            dist.barrier()
            return 0, 0
        path, run = found
        load_checkpoint(path, self.parameters, self.optimizer)
        if self.topology.is_main:
            lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
            kept = [line for line in lines if json.loads(line)["step"] < run["step"]]
            metrics.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            self.observations.forget_from(run["step"])
            print(f"dflop: going on from {path}", flush=True)
        dist.barrier()
        return run["step"], run["restarts"] + 1

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


def _data_loader(dataset: MicrobatchLoader, stream: JobStream, config: Config, num_microbatches: int) -> DataLoader:
    """torch's DataLoader over microbatches. It must not read further ahead than the scheduler works, or they would
    wait for each other: the loader for a schedule, the scheduler for the first step to begin.
    """
    most_ahead = config.schedule.lookahead_steps * num_microbatches
    num_workers = min(config.train.loader_workers, most_ahead)
    return DataLoader(
        dataset,
        sampler=stream,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=num_workers,
        multiprocessing_context="spawn" if num_workers else None,  # so that they notice when their rank dies
        prefetch_factor=max(1, min(_PREFETCH, most_ahead // num_workers)) if num_workers else None,
        pin_memory=config.cluster.device == "cuda",
        worker_init_fn=_give_way if config.cluster.device == "cpu" else None,
    )


def _give_way(_: int) -> None:
    """Loaders read ahead, ranks are waited for: where they share cores, ranks go first."""
    os.nice(19)


def _started(loader: DataLoader) -> Iterator:
    """The loader's batches, the first one loaded already: starting its processes takes seconds."""
    batches = iter(loader)
    first = next(batches, None)
    return iter(()) if first is None else itertools.chain([first], batches)


def _as_it_is(batch: object) -> object:
    return batch


def _sum_over_ranks(values: dict[str, float], device: torch.device) -> dict[str, float]:
    summed = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    dist.all_reduce(summed)
    return dict(zip(values, summed.tolist(), strict=True))
