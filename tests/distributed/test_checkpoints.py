"""Checkpoints that are damaged, and disks that take none: two ranks agree on what they load and on what failed."""

import json
import resource
import shutil
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from processes import print_to, spawn
from stage_cases import part_of
from torch import nn
from torch.distributed.tensor import DTensor

from dflop.config import TrainConfig, load_config
from dflop.plan import Grid, Plan
from dflop.step import make_program
from dflop.train.adamw import Rates
from dflop.train.checkpoint import load_checkpoint, save_checkpoint
from dflop.train.generation import Generation
from dflop.train.observations import Observations
from dflop.train.rank_model import RankModel, build_rank_model
from dflop.train.resume import take_up
from dflop.train.run_folder import RunFiles
from dflop.train.saver import CheckpointSaver
from dflop.train.sharded_optimizer import ShardedAdamW
from dflop.train.topology import place_in_world

pytestmark = pytest.mark.serial

GENERATION = Generation({"seed": "0"}, "prices")
RUN = {"generation": GENERATION.to_dict(), "restarts": 0}


def _join(rank: int, store: Path, world_size: int = 2) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)


def _part(value: float) -> SimpleNamespace:
    weight = nn.Parameter(torch.full((1000, 50), value))
    optimizer = ShardedAdamW([weight], dist.group.WORLD, rates={weight: Rates(1e-3, 0.0)})
    return SimpleNamespace(parameters={"weight": weight}, shards={}, optimizer=optimizer, written_elsewhere=())


def _save_both(rank: int, out: Path, store: Path) -> None:
    _join(rank, store)
    for step in (2, 4):
        assert save_checkpoint(out / "checkpoints", step, [_part(float(step))], RUN) is None
    dist.destroy_process_group()


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(value ^ 0xFF for value in content[middle : middle + 64])
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _name_no_generation(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"generation": {"weights": [1], "prices": ""}}))


def _make_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_bytes(b"no folder")


def _empty(folder: Path) -> None:
    _make_a_file(folder)
    folder.unlink()
    folder.mkdir()


DAMAGES = {
    "is not as it was written": lambda newest: _flip(newest / "__1_0.distcp"),
    "bytes": lambda newest: _cut(newest / "__0_0.distcp"),
    ".metadata is missing": lambda newest: (newest / ".metadata").unlink(),
    "its run.json cannot be read": lambda newest: _cut(newest / "run.json"),
    "its run.json names no generation": lambda newest: _name_no_generation(newest / "run.json"),
    "it has no checksums.json": lambda newest: (newest / "checksums.json").unlink(),
    "it has no run.json": _empty,
    "it is no folder": _make_a_file,
    "its run.json is of step 4": lambda newest: newest.rename(newest.with_name("step-000099")),
}


def _check_fallback(rank: int, out: Path, store: Path) -> None:
    """Of every damage: both ranks go on from the checkpoint before, and the damaged one is kept aside."""
    print_to(out / "log")
    _join(rank, store)
    for number, damage in enumerate(DAMAGES.values()):
        own = out.with_name(f"damage-{number}")
        if rank == 0:
            shutil.copytree(out, own)
            damage(own / "checkpoints/step-000004")
        dist.barrier()
        files = RunFiles(shapes=out, costs=out, plan=out, out=own, generation=GENERATION, measured_on=None)
        part = _part(0.0)
        model = SimpleNamespace(nodes=[part])
        step, restarts = take_up(TrainConfig(steps=20), files, model, Observations(own / "observations", rank, ()))
        assert (step, restarts) == (2, 1)
        assert (part.parameters["weight"] == 2).all()
        names = sorted(path.name for path in (own / "checkpoints").iterdir())
        assert names[1:] == ["step-000002"]
        assert names[0].startswith("damaged-step-0000")
        dist.barrier()
    dist.destroy_process_group()


def test_of_a_damaged_checkpoint_the_one_before_is_taken_by_all_ranks(tmp_path):
    out = tmp_path / "train"
    spawn(_save_both, (out, tmp_path / "saving"), nprocs=2)
    (out / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(4)))
    spawn(_check_fallback, (out, tmp_path / "loading"), nprocs=2)
    said = [line for line in (out / "log").read_text().splitlines() if "is damaged: " in line]
    assert len(said) == len(DAMAGES)
    for line, why in zip(said, DAMAGES, strict=True):
        assert why in line
        assert "the one before is taken" in line


def _check_limited(rank: int, folder: Path, store: Path) -> None:
    """A limit on how large a file of the second rank may become: its disk takes no more."""
    _join(rank, store)
    assert save_checkpoint(folder, 2, [_part(2.0)], RUN) is None
    if rank == 1:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, most))
    trouble = save_checkpoint(folder, 4, [_part(4.0)], RUN)
    assert "rank 1" in trouble, trouble
    dist.barrier()  # the first rank has cleared up
    names = [path.name for path in folder.iterdir()]
    assert names == ["step-000002"], (rank, names, trouble)
    dist.barrier()  # both have looked: what the other one writes next is not there yet
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert save_checkpoint(folder, 6, [_part(6.0)], RUN) is None
    assert sorted(path.name for path in folder.iterdir()) == ["step-000002", "step-000006"]
    dist.destroy_process_group()


def test_a_disk_that_takes_no_more_of_one_rank_is_told_to_all_and_the_next_try_succeeds(tmp_path):
    spawn(_check_limited, (tmp_path / "checkpoints", tmp_path / "store"), nprocs=2)


SHARED = {"num_ranks": 4, "tp": 2}
IN_SHARDS = SHARED | {"sharding": "parameters"}
LAYOUTS = (
    Plan(
        placement="monolithic",
        grids=(Grid(module="vision", **SHARED), Grid(module="llm", **SHARED)),
        num_microbatches=1,
    ),
    Plan(
        placement="colocated",
        grids=(Grid(module="vision", num_ranks=4), Grid(module="llm", num_ranks=4, pp=2)),
        num_microbatches=1,
    ),
    Plan(
        placement="monolithic",
        grids=(Grid(module="vision", **IN_SHARDS), Grid(module="llm", **IN_SHARDS)),
        num_microbatches=1,
    ),
)


def _drawn(name: str, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def _held(model: RankModel) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """All values that a rank saves, and what they ought to be: its part of what is drawn by the tensor's name."""
    for own in model.nodes:
        for name, parameter in own.parameters.items():
            shard = own.shards.get(name)

            def ought(kind: str, name=name, shard=shard, shape=parameter.shape) -> torch.Tensor:
                return part_of(_drawn(name + kind, shard.whole if shard else shape), shard, shape)

            if not isinstance(parameter, DTensor):
                yield parameter.detach(), ought("")
            for piece in own.optimizer.pieces(parameter):
                for kind, values in {"": piece.masters, **piece.moments}.items():
                    yield values, ought(kind).flatten()[piece.start :][: len(values)]


def _check_layouts(rank: int, config: dict, folder: Path, store: Path) -> None:
    _join(rank, store, 4)
    sizes: list[int] = []
    for step, place in enumerate((0, 1, 2, 0, 2, 1)):
        plan = LAYOUTS[place]
        topology = place_in_world(make_program(plan), torch.device("cpu"), torch.float32, dist.HashStore())
        model = build_rank_model(load_config(config), plan, topology, torch.float32)
        if step == 0:
            for values, drawn in _held(model):
                values.copy_(drawn)
        else:
            load_checkpoint(folder / f"step-{step:06d}", model.nodes)
        assert all(torch.equal(values, drawn) for values, drawn in _held(model))
        assert save_checkpoint(folder, step + 1, model.nodes, RUN) is None
        sizes.append(sum(path.stat().st_size for path in (folder / f"step-{step + 1:06d}").glob("*.distcp")))
        assert sizes[-1] == pytest.approx(sizes[0], rel=0.1), sizes  # nothing is written twice
    dist.destroy_process_group()


# Qwen has all kinds of tensors: its encoder's queries, keys and values are in one matrix.
@pytest.mark.parametrize("of", ["qwen_run", pytest.param("run", marks=pytest.mark.exhaustive)])
def test_a_checkpoint_goes_from_ranks_that_share_modules_or_parameters_to_those_that_do_not_and_back(
    of, request, tmp_path
):
    _, config = request.getfixturevalue(of)
    spawn(_check_layouts, (config, tmp_path / "checkpoints", tmp_path / "store"), nprocs=4)


def _check_saver(rank: int, folder: Path, store: Path) -> None:
    _join(rank, store)
    part = _part(2.0)
    saver = CheckpointSaver(folder, Observations(folder.parent / "observations", rank, ()))
    for step in (2, 4):
        saver.save(step, [part], RUN)
        # Training goes on while it is written.
        part.parameters["weight"].data.fill_(step + 2.0)
        part.optimizer.zero_grad()
        part.optimizer.step(0.1, 1.0)
        part.optimizer.wait_for_parameters()
    if rank == 1:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        saver.wait()  # for the one of step 4, which is written while there is room
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, most))
    saver.save(6, [part], RUN)
    saver.wait()
    num_steps, trouble = saver.unsaved
    assert num_steps == 6
    assert "rank 1" in trouble, trouble
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["step-000002", "step-000004"]
    for step in (2, 4):
        loaded = _part(0.0)
        load_checkpoint(folder / f"step-{step:06d}", [loaded])
        before = 2.0 if step == 2 else 4.0
        assert loaded.parameters["weight"].unique().tolist() == [before]
    dist.destroy_process_group()


def test_what_is_saved_is_as_it_was_when_saving_began_whatever_training_does_meanwhile(tmp_path):
    spawn(_check_saver, (tmp_path / "checkpoints", tmp_path / "store"), nprocs=2)


def _save_beside_a_gpu(rank: int, folder: Path, store: Path) -> None:
    _join(rank, store, world_size=1)
    asked = []
    torch.cuda.is_available = lambda: True
    torch.cuda.current_stream = lambda *_: asked.append("stream") or SimpleNamespace(synchronize=lambda: None)
    torch.cuda.stream = lambda *_: nullcontext()
    assert save_checkpoint(folder, 2, [_part(2.0)], RUN) is None
    assert not asked
    dist.destroy_process_group()


def test_writing_asks_nothing_of_a_gpu(tmp_path):
    spawn(_save_beside_a_gpu, (tmp_path / "checkpoints", tmp_path / "store"), nprocs=1)
