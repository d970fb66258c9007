"""Gradients of real stages in every kind of layout, over gloo, against transformers' own model in one process.

Everything is in float64. The oracle runs one sample after the other, unpacked, and steps with `torch.optim.AdamW`.
"""

import dataclasses
import functools
import json
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import spawn
from torch.distributed.tensor import DTensor
from whole_model import build_whole_model, loss_of_batch, optimizer_of, part_of

from dflop.config import ClusterConfig, Config, ScheduleConfig, load_config
from dflop.costs import CostModel
from dflop.models import load_model_spec
from dflop.plan import Grid, Plan
from dflop.plan.trained import TrainedSet
from dflop.schedule import BatchScheduler, GlobalBatches, Pricer, StepSchedule
from dflop.shapes import SampleShapes, load_samples
from dflop.shapes.text import BUNDLED_TOKENIZER
from dflop.step import StepInstructions, check_program, make_program
from dflop.step.run import run_instructions
from dflop.store import read_table
from dflop.train.adamw import Piece
from dflop.train.data_loader import start_loading
from dflop.train.feed import JobStream
from dflop.train.node_work import make_works
from dflop.train.rank_model import build_rank_model, forwards_that_read
from dflop.train.topology import place_in_world

pytestmark = pytest.mark.serial

# Steps of the whole model. Layouts of each kind take two of them (`TWICE`), which shows that what the first changed is
# what the second computes with, and the others the first.
_NUM_STEPS = {
    "plain": 2,
    "tied": 2,
    "frozen vision": 1,
    "frozen llm": 1,
    "internvl": 1,
    "qwen": 1,
    "qwen3": 1,
    "omni": 2,
    "damaged": 1,
}
_LR = 1e-3


def disjoint(vision: dict, llm: dict, num_microbatches: int = 3, **more) -> Plan:
    vision_grid = Grid(module="vision", **vision)
    grids = (vision_grid, Grid(module="llm", rank_offset=vision_grid.num_ranks, **llm))
    return Plan(placement="disjoint", grids=grids, num_microbatches=num_microbatches, **more)


def shared(placement: str, llm: dict, num_microbatches: int = 3, encoder_tp: int = 1, **more) -> Plan:
    num_ranks = llm["num_ranks"] // (llm.get("pp", 1) if placement == "monolithic" else 1)
    grids = (Grid(module="vision", num_ranks=num_ranks, tp=encoder_tp), Grid(module="llm", **llm))
    return Plan(placement=placement, grids=grids, num_microbatches=num_microbatches, **more)


def sharding(plan: Plan, *shardings: str) -> Plan:
    """The plan, with such a sharding of each module."""
    grids = (
        dataclasses.replace(grid, sharding=own, shards=2 if own == "hybrid" else None)
        for grid, own in zip(plan.grids, shardings, strict=True)
    )
    return dataclasses.replace(plan, grids=tuple(grids))


ONE, TWO, PIPELINE = {"num_ranks": 1}, {"num_ranks": 2}, {"num_ranks": 2, "pp": 2}
SHARED, SHARED_TWICE, SHARED_PIPELINE = (
    {"num_ranks": 2, "tp": 2},
    {"num_ranks": 4, "tp": 2},
    {"num_ranks": 4, "tp": 2, "pp": 2},
)
SPLIT_UNEVENLY = {"num_ranks": 2, "pp": 2, "layers": (3, 1)}
PLANS = {
    "disjoint 1+1": disjoint(ONE, ONE),
    "disjoint 2+1": disjoint(TWO, ONE),
    "disjoint 1+2, LLM pp 2": disjoint(ONE, SPLIT_UNEVENLY, schedule="gpipe"),
    "disjoint 1+2, LLM dp 2": disjoint(ONE, TWO, num_microbatches=2),
    "disjoint 3+2": disjoint({"num_ranks": 3}, TWO, num_microbatches=2),
    "disjoint 1+4": disjoint(ONE, {"num_ranks": 4, "pp": 1}, num_microbatches=2),
    "disjoint 4+1": disjoint({"num_ranks": 4}, ONE),
    "encoder pp 2": disjoint(PIPELINE, ONE, num_microbatches=4),
    "encoder pp 2 dp 2": disjoint({"num_ranks": 4, "pp": 2}, ONE, checkpointing=True),
    "encoder pp 2, LLM pp 3": disjoint(PIPELINE, {"num_ranks": 3, "pp": 3}, num_microbatches=4),
    "interleaved": disjoint(
        {"num_ranks": 1, "recomputed": (0,)},
        PIPELINE | {"recomputed": (1, 1, 0, 1)},
        num_microbatches=4,
        schedule="interleaved_1f1b",
        num_chunks=2,
        checkpointing=True,
    ),
    "colocated 1": shared("colocated", ONE),
    "colocated 2": shared("colocated", TWO),
    "colocated pp 2": shared("colocated", PIPELINE | {"recomputed": (2, 1)}, checkpointing=True),
    "colocated pp 2 dp 2": shared("colocated", {"num_ranks": 4, "pp": 2}, num_microbatches=2),
    "colocated interleaved": shared(
        "colocated", PIPELINE, num_microbatches=4, schedule="interleaved_1f1b", num_chunks=2
    ),
    "bubble-filled pp 2": shared("bubble_filled", PIPELINE, num_microbatches=4),
    "bubble-filled pp 2 dp 2": shared("bubble_filled", {"num_ranks": 4, "pp": 2}, checkpointing=True),
    "bubble-filled interleaved": shared(
        "bubble_filled", PIPELINE, num_microbatches=4, schedule="interleaved_1f1b", num_chunks=2
    ),
    "monolithic 2": shared("monolithic", TWO),
    "monolithic pp 2": shared("monolithic", PIPELINE),
    "monolithic pp 2 dp 2": shared("monolithic", {"num_ranks": 4, "pp": 2}, num_microbatches=2),
    "disjoint 1+2, LLM tp 2": disjoint(ONE, SHARED),
    "disjoint 2+1, encoder tp 2": disjoint(SHARED, ONE),
    "disjoint 2+2, both tp 2, checkpointing": disjoint(SHARED, SHARED, checkpointing=True),
    "disjoint 1+4, LLM tp 2 pp 2": disjoint(ONE, SHARED_PIPELINE, num_microbatches=4),
    "colocated LLM tp 2": shared("colocated", SHARED),
    "colocated encoder tp 2": shared("colocated", TWO, encoder_tp=2),
    "colocated encoder dp 4, LLM tp 2 pp 2": shared("colocated", SHARED_PIPELINE, num_microbatches=2),
    "colocated encoder tp 4, LLM tp 2 dp 2": shared("colocated", SHARED_TWICE, num_microbatches=2, encoder_tp=4),
    "bubble-filled encoder dp 4, LLM tp 2 pp 2": shared("bubble_filled", SHARED_PIPELINE),
    "bubble-filled encoder tp 2, LLM dp 2 pp 2": shared(
        "bubble_filled", {"num_ranks": 4, "pp": 2}, num_microbatches=2, encoder_tp=2
    ),
    "monolithic tp 2 pp 2": shared("monolithic", SHARED_PIPELINE, num_microbatches=2, encoder_tp=2),
    "monolithic tp 2 dp 2": shared("monolithic", SHARED_TWICE, num_microbatches=2, encoder_tp=2),
}
PLANS |= {
    "parameters 2": sharding(shared("monolithic", TWO), "parameters", "parameters"),
    "parameters 4, colocated": sharding(shared("colocated", {"num_ranks": 4}, 2), "parameters", "parameters"),
    "parameters of the encoder": sharding(shared("colocated", {"num_ranks": 4, "pp": 2}, 2), "parameters", "optimizer"),
    "parameters of the first stage's encoder": sharding(
        shared("monolithic", {"num_ranks": 4, "pp": 2}, 2), "parameters", "optimizer"
    ),
    "parameters of the LLM": sharding(
        disjoint(ONE, TWO | {"recomputed": (3,)}, checkpointing=True), "optimizer", "parameters"
    ),
    "parameters 2x2": sharding(shared("monolithic", {"num_ranks": 4}, 2), "parameters", "hybrid"),
    "parameters 2x2 of both": sharding(shared("colocated", {"num_ranks": 4}, 2), "hybrid", "hybrid"),
    "parameters 2, tp 2": sharding(shared("monolithic", SHARED_TWICE, 2, encoder_tp=2), "parameters", "parameters"),
    "parameters 2 of the LLM, tp 2": sharding(shared("colocated", SHARED_TWICE, 2), "parameters", "parameters"),
    "parameters 2+2": sharding(disjoint(TWO, TWO, num_microbatches=2), "parameters", "parameters"),
}


def three(placement: str, vision: dict, audio: dict, llm: dict, num_microbatches: int = 3, **more) -> Plan:
    """Two encoders and the LLM, on ranks of their own where the placement is disjoint."""
    grids, offset = [], 0
    for module, grid in (("vision", vision), ("audio", audio), ("llm", llm)):
        grids.append(Grid(module=module, rank_offset=offset, **grid))
        offset += grids[-1].num_ranks if placement == "disjoint" else 0
    return Plan(placement=placement, grids=tuple(grids), num_microbatches=num_microbatches, **more)


OMNI_PLANS = {
    "three modules 1+1+1": three("disjoint", ONE, ONE, ONE),
    "three modules 1+2+1, audio pp 2": three("disjoint", ONE, PIPELINE, ONE, num_microbatches=4),
    "three modules 1+1+2, LLM pp 2": three("disjoint", ONE, ONE, PIPELINE),
    "three modules 1+1+2, LLM dp 2": three("disjoint", ONE, ONE, TWO, num_microbatches=2, checkpointing=True),
    "three modules colocated 2": three("colocated", TWO, TWO, TWO, num_microbatches=2),
    "three modules colocated pp 2": three("colocated", TWO, TWO, PIPELINE),
    "three modules bubble-filled pp 2": three("bubble_filled", TWO, TWO, PIPELINE),
    "three modules monolithic 2": three("monolithic", TWO, TWO, TWO),
    "three modules 1+2+1, audio tp 2": three("disjoint", ONE, SHARED, ONE),
    "three modules colocated, encoders tp 2, LLM tp 2": three("colocated", SHARED, SHARED, SHARED),
}
parameters = three("monolithic", TWO, TWO, TWO)
OMNI_PLANS["three modules, parameters 2"] = sharding(parameters, "parameters", "parameters", "parameters")
PLANS |= OMNI_PLANS
OMNI_KINDS = {"text", "image", "multi_image", "video", "audio", "mixed"}
FROZEN = (
    "parameters 2",
    "parameters 2 of the LLM, tp 2",
    "parameters 2+2",
    "disjoint 1+1",
    "encoder pp 2",
    "colocated pp 2 dp 2",
    "bubble-filled pp 2 dp 2",
    "monolithic 2",
    "colocated LLM tp 2",
)
TIED = (
    "parameters 2",
    "parameters 2, tp 2",
    "parameters of the LLM",
    "disjoint 1+1",
    "disjoint 1+2, LLM pp 2",
    "colocated pp 2 dp 2",
    "interleaved",
    "disjoint 1+2, LLM tp 2",
    "disjoint 1+4, LLM tp 2 pp 2",
)
INTERNVL = (
    "disjoint 2+1",
    "disjoint 1+2, LLM pp 2",
    "encoder pp 2",
    "colocated pp 2",
    "colocated encoder tp 2",
    "disjoint 1+2, LLM tp 2",
    "parameters 2, tp 2",  # of InternVL's class token, one row, the second replica has nothing
)
QWEN = (
    *INTERNVL,
    "encoder pp 2, LLM pp 3",  # an LLM's stage between others
    "colocated pp 2 dp 2",
    "bubble-filled pp 2",
)
QWEN3 = (
    "disjoint 2+1",
    "encoder pp 2, LLM pp 3",  # features go along between stages of the encoder, and between stages of the LLM
    "colocated pp 2 dp 2",
    "colocated encoder tp 2",
    "disjoint 1+2, LLM tp 2",
    "parameters 2, tp 2",
)
DAMAGED = (
    "disjoint 3+2",
    "disjoint 1+2, LLM pp 2",
    "encoder pp 2",
    "bubble-filled pp 2 dp 2",
    "monolithic tp 2 dp 2",
    "parameters 2",
)
TWICE = (
    "disjoint 1+2, LLM pp 2",
    "disjoint 3+2",
    "disjoint 1+2, LLM tp 2",
    "interleaved",
    "colocated encoder dp 4, LLM tp 2 pp 2",
    "bubble-filled pp 2 dp 2",
    "monolithic pp 2 dp 2",
    "parameters 2",
    "parameters 2, tp 2",
    "parameters 2x2 of both",
    "parameters of the LLM",
    "three modules 1+1+2, LLM dp 2",
    "three modules, parameters 2",
)
# Each layout once, and each variant with layouts of every kind: pipelines, tensor parallelism, shared parameters.
VARIED = {
    "disjoint 1+2, LLM pp 2": "tied",
    "interleaved": "tied",
    "disjoint 1+4, LLM tp 2 pp 2": "tied",
    "parameters of the LLM": "tied",
    "monolithic 2": "frozen vision",
    "colocated pp 2 dp 2": "frozen vision",
    "parameters of the first stage's encoder": "frozen vision",
    "disjoint 1+1": "frozen llm",
    "bubble-filled pp 2": "frozen llm",
    "parameters 2 of the LLM, tp 2": "frozen llm",
    "encoder pp 2": "internvl",
    "monolithic pp 2": "internvl",
    "colocated encoder tp 2": "internvl",
    "parameters 2+2": "internvl",  # of the class token, one row, the second replica has nothing
    "encoder pp 2 dp 2": "qwen",
    "disjoint 2+1, encoder tp 2": "qwen",
    "colocated LLM tp 2": "qwen",
    "parameters 4, colocated": "qwen",
    "encoder pp 2, LLM pp 3": "qwen3",  # features go along between stages of the encoder, and of the LLM
    "colocated pp 2": "qwen3",
    "disjoint 2+2, both tp 2, checkpointing": "qwen3",
    "parameters 2x2": "qwen3",
    "disjoint 2+1": "damaged",
    "disjoint 4+1": "damaged",
    "monolithic tp 2 dp 2": "damaged",
    "parameters of the encoder": "damaged",
}
# Layouts that are a part of a larger one of their kind, which CI runs.
SMALLER = (
    "disjoint 1+4",
    "colocated 2",
    "monolithic pp 2",
    "three modules 1+1+1",
    "three modules colocated 2",
)
ALL_ONCE = [(name, VARIED.get(name, "omni" if name in OMNI_PLANS else "plain")) for name in PLANS]
IN_CI = [case for case in ALL_ONCE if case[0] not in SMALLER]
OTHERS = [case for case in ALL_ONCE if case[0] in SMALLER]
OTHERS += [
    (name, variant)
    for variant, names in (
        ("plain", [name for name in PLANS if name not in OMNI_PLANS]),
        *(("tied", TIED), ("internvl", INTERNVL), ("qwen", QWEN), ("qwen3", QWEN3), ("damaged", DAMAGED)),
        *(("frozen vision", FROZEN), ("frozen llm", FROZEN)),
    )
    for name in names
    if (name, variant) not in ALL_ONCE
]


@pytest.fixture(scope="module")
def prepare(dataset, run, internvl_run, qwen_run, qwen3_run, omni_run, tmp_path_factory) -> Callable[[list], Path]:
    """`prepare(cases)`: a folder with what the ranks read: of each variant its config, and of each case the schedules;
    and with what they must find: the losses and gradients of the whole model."""
    made, config = run
    made_of = {"internvl": internvl_run[0], "qwen": qwen_run[0], "qwen3": qwen3_run[0], "omni": omni_run[0]}
    folder = tmp_path_factory.mktemp("layouts")
    configs = {
        "plain": config,
        "tied": config | {"model": config["model"] | {"path": str(_tied_checkpoint(folder / "tied", config))}},
        **{f"frozen {name}": config | {"model": config["model"] | {"freeze": [name]}} for name in ("vision", "llm")},
        "internvl": internvl_run[1],
        "qwen": qwen_run[1],
        "qwen3": qwen3_run[1],
        "omni": omni_run[1],
        "damaged": config | {"data": config["data"] | {"sources": [{"path": str(folder / "damaged" / "train.json")}]}},
    }
    configs["tied"]["model"].pop("preset")
    costs, samples, batches, specs = CostModel.load(made / "costs.duckdb"), {}, {}, {}
    for variant, values in configs.items():
        (folder / f"{variant}.json").write_text(json.dumps(values))
        loaded = load_config(values)
        specs[variant] = load_model_spec(loaded.model)
        samples[variant], _ = load_samples(made_of.get(variant, made) / "shapes.duckdb", specs[variant].encoders)
        batches[variant] = GlobalBatches(len(samples[variant]), 8, 0)
        if variant == "omni":
            batches[variant] = _batches_of_all_kinds(made_of[variant], samples[variant])
        chosen = [samples[variant].take(batches[variant][step]) for step in range(_NUM_STEPS[variant])]
        if variant == "damaged":
            chosen = [_without_one_damaged(chosen[0], dataset.parent, folder / "damaged")]
        expected = _expected(loaded, chosen)
        torch.save(expected, folder / f"{variant}.pt")
    cluster = ClusterConfig(devices_per_node=8, memory_gib=64.0, intra_node_gbps=100.0, inter_node_gbps=50.0)
    costs_of = {"omni": CostModel.load(omni_run[0] / "costs.duckdb")}

    def with_schedules(cases: list[tuple[str, str]]) -> Path:
        for name, variant in cases:
            freeze = configs[variant]["model"].get("freeze", ())
            pricer = Pricer(
                PLANS[name], costs_of.get(variant, costs), specs[variant], cluster, trained=TrainedSet(tuple(freeze))
            )
            # Random assignments: replicas without media, and splits of every kind.
            scheduler = BatchScheduler(samples[variant], pricer, batches[variant], ScheduleConfig(policy="random"), 3)
            path = folder / f"{name} {variant}"
            path.mkdir()
            for step in range(_num_steps(name, variant)):
                (path / str(step)).write_bytes(scheduler.schedule(step).to_bytes())
        return folder

    return with_schedules


def _num_steps(name: str, variant: str) -> int:
    return _NUM_STEPS[variant] if name in TWICE else 1


def _batches_of_all_kinds(run: Path, samples: SampleShapes) -> GlobalBatches:
    """Batches of which the first has samples of every kind, and the second media for both encoders.

    An encoder for which a batch has no media gets gradients of zero here. In the whole model it gets none, and its
    weights stay as they are.
    """
    table = read_table(run / "shapes.duckdb", "samples", made_by="merge-shapes")
    kind_of = dict(table.select("sample_id", "modality").iter_rows())
    for seed in range(1000):
        batches = GlobalBatches(len(samples), 8, seed)
        first, second = ({kind_of[name] for name in samples.sample_id[batches[step]]} for step in range(2))
        if first == OMNI_KINDS and {"image", "audio"} <= second:
            return batches
    raise AssertionError("no batch has samples of every kind")


def _tied_checkpoint(path: Path, config: dict) -> Path:
    """A checkpoint whose head is its embedding, and its tokenizer."""
    model = build_whole_model(load_config(config)).float()
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = True
    model.lm_head.weight = model.model.language_model.embed_tokens.weight
    model.save_pretrained(path)
    for file in BUNDLED_TOKENIZER.iterdir():
        if not (path / file.name).exists():
            shutil.copy(file, path / file.name)
    return path


def _without_one_damaged(batch: SampleShapes, dataset: Path, copy: Path) -> SampleShapes:
    """The batch without a sample whose picture is damaged, in this copy of the dataset."""
    shutil.copytree(dataset, copy)
    records = json.loads((copy / "train.json").read_text())
    place = next(place for place, row in enumerate(batch.row) if isinstance(records[row].get("image"), str))
    picture = copy / records[batch.row[place]]["image"]
    picture.write_bytes(picture.read_bytes()[: picture.stat().st_size // 2])
    return batch.take(np.delete(np.arange(len(batch)), place))


def _expected(config, batches: list[SampleShapes]) -> dict:
    """Losses and gradients of the steps, and the weights after each."""
    model = build_whole_model(config)
    for name in config.model.freeze:
        for part, parameter in model.named_parameters():
            if ("language_model" in part or "lm_head" in part) == (name == "llm"):
                parameter.requires_grad_(False)
    optimizer = optimizer_of(model, _LR)
    losses, gradients, weights = [], [], []
    for batch in batches:
        optimizer.zero_grad()
        losses.append(loss_of_batch(model, config, batch))
        gradients.append({name: own.grad.clone() for name, own in model.named_parameters() if own.grad is not None})
        optimizer.step()
        weights.append({name: own.detach().clone() for name, own in model.named_parameters()})
    return {"losses": losses, "gradients": gradients, "weights": weights}


def _run_rank(rank: int, folder: Path, cases: list[tuple[str, str]]) -> None:
    torch.set_num_threads(1)
    for name, variant in cases:
        plan = PLANS[name]
        if rank < plan.world_size:
            store = dist.FileStore(str(folder / f"{name} {variant}" / "store"), plan.world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.world_size)
            try:
                _check(folder, name, variant, plan)
            except Exception:  # the first process that `spawn` speaks of may only have lost its peer
                print(f"rank {rank}, {name}, {variant}: {traceback.format_exc()}", file=sys.stderr, flush=True)
                raise
            dist.destroy_process_group()


@functools.cache
def _config_and_expected(folder: Path, variant: str) -> tuple[Config, dict]:
    """A variant's config, and what `_expected` found for it."""
    return load_config(json.loads((folder / f"{variant}.json").read_text())), torch.load(folder / f"{variant}.pt")


def _check(folder: Path, name: str, variant: str, plan: Plan) -> None:
    config, expected = _config_and_expected(folder, variant)
    program = make_program(plan, config.model.trained)
    check_program(plan, program, config.model.trained)
    topology = place_in_world(program, torch.device("cpu"), torch.float64, _make_store())
    model = build_rank_model(config, plan, topology, torch.float64, overlaps=True)
    assert all((own.shared is not None) == plan.grid(own.node.module).gathers for own in model.nodes)
    num_steps = _num_steps(name, variant)
    schedules = [
        StepSchedule.from_bytes((folder / f"{name} {variant}" / str(step)).read_bytes()) for step in range(num_steps)
    ]
    instructions = StepInstructions(plan, program, config.model.trained, topology.rank)
    stream = JobStream(
        SimpleNamespace(get=schedules.__getitem__),
        lambda slots: forwards_that_read(instructions.of(slots), topology, model),
        range(num_steps),
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
        assert loss / num_targets == pytest.approx(expected["losses"][step], rel=1e-10), where
        for own in model.nodes:
            _compare_gradients(own, expected["gradients"][step], num_targets, 1e-10 if step == 0 else 1e-6, where)
        model.update(1.0, 1 / num_targets)
    model.wait_for_parameters()
    for own in model.nodes:
        for parameter_name, parameter in own.parameters.items():
            theirs = part_of(
                expected["weights"][num_steps - 1][parameter_name], own.shards.get(parameter_name), parameter.shape
            )
            ours = parameter.detach()
            if isinstance(ours, DTensor):  # of which each replica has some rows
                ours, theirs = ours.to_local().flatten(), _held_of(theirs.flatten(), own.optimizer.pieces(parameter))
            apart = max((ours - theirs).abs().flatten().tolist(), default=0.0)
            assert apart < 1e-8, f"{name}, {variant}: {parameter_name} is off by {apart:.1e}"


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
        apart = max((ours / num_targets - theirs).abs().tolist(), default=0.0)
        assert apart <= tolerance * scale, f"{where}: {name} is off by {apart / scale:.1e}"


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(IN_CI, id="each kind of layout"),
        pytest.param(OTHERS, id="with other models", marks=pytest.mark.exhaustive),
    ],
)
def test_every_layout_has_the_gradients_of_the_unpacked_model_in_one_process(prepare, cases):
    spawn(_run_rank, (prepare(cases), cases), nprocs=max(plan.world_size for plan in PLANS.values()))
