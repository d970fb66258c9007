"""A checkpoint that a stranger made runs none of the stranger's code, and a damaged index is refused in one line."""

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from fuzzing import fuzz
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from dflop.base import UserError
from dflop.train.adamw import Piece
from dflop.train.checkpoint import load_checkpoint, save_checkpoint
from dflop.train.checkpoint_index import IndexReader


class Optimizer:
    def pieces(self, parameter: torch.Tensor) -> list[Piece]:
        return [Piece(0, parameter.detach().flatten(), {})]

    def go_on_from(self, num_steps: int) -> None:
        pass


def part(value: float) -> SimpleNamespace:
    parameters = {
        str(dtype): nn.Parameter(torch.full((5, 4), value, dtype=dtype))
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    }
    return SimpleNamespace(parameters=parameters, shards={}, optimizer=Optimizer(), written_elsewhere=())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert save_checkpoint(folder, 1, [part(3.0)], {}) is None
        yield folder / "step-000001"
    finally:
        dist.destroy_process_group()


class Call:
    """As a pickle, a call of a function."""

    def __init__(self, function, *arguments: object) -> None:
        self._reduced = function, arguments

    def __reduce__(self):
        return self._reduced


def test_a_checkpoint_whose_index_calls_a_function_is_refused_and_the_function_is_not_called(checkpoint, tmp_path):
    read = part(0.0)
    load_checkpoint(checkpoint, [read])
    assert all(bool((values == 3).all()) for values in read.parameters.values())
    (tmp_path / "run.json").write_text(json.dumps({"step": 1}))
    code = f"open({str(tmp_path / 'called')!r}, 'w')"
    for function, arguments in ((exec, (code,)), (torch.load, ("other.pt",)), (getattr, ("", "join"))):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Call(function, *arguments)))
        with pytest.raises(
            UserError, match=rf"\.metadata: it names \S+\.{function.__name__}, as no checkpoint of dflop"
        ):
            load_checkpoint(tmp_path, [part(0.0)])
    assert not (tmp_path / "called").exists()


def test_an_index_that_names_a_file_outside_the_checkpoint_is_refused(checkpoint, tmp_path):
    index = FileSystemReader(checkpoint).read_metadata()
    next(iter(index.storage_data.values())).relative_path = "../other/__0_0.distcp"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match=r"it names the file \.\./other/__0_0\.distcp"):
        IndexReader(tmp_path).read_metadata()


def test_a_damaged_index_is_refused_or_read(checkpoint, tmp_path):
    def read(path: Path) -> None:
        assert isinstance(IndexReader(path.parent).read_metadata(), Metadata)

    fuzz({".metadata": (checkpoint / ".metadata").read_bytes()}, read, UserError, tmp_path)


def test_an_index_that_changes_a_class_is_refused_and_the_class_is_as_it_was(checkpoint, tmp_path):
    """A prefix in front of a right index: it sets `Path.exists`, and drops what it made."""
    own = (checkpoint / ".metadata").read_bytes()
    state = pickle.dumps({"exists": "x"}, protocol=2)[2:-1]
    (tmp_path / ".metadata").write_bytes(own[:2] + b"cpathlib\nPosixPath\n" + state + b"b0" + own[2:])
    with pytest.raises(UserError, match=r"\.metadata: it sets attributes of a class, as no checkpoint of dflop does"):
        IndexReader(tmp_path).read_metadata()
    assert callable(Path.exists)
