"""Where caches lie when neither the workflow's folder nor the user's cache folder can be written."""

import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime import cache_dir_utils

from dflop.base import artifacts
from dflop.models import compilation


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The system's temporary folder; nothing else can be written to."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_is_found_again_and_only_its_user_can_enter_it(temporary):
    found = artifacts.cache_folder()
    assert found == temporary / f"dflop-{os.getuid()}"
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    artifacts._own_folder_in.cache_clear()  # as a later process
    assert artifacts.cache_folder() == found


def open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def link(path: Path) -> None:
    path.with_name("elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.with_name("elsewhere"))


def of_another_user(path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize("take", [open_to_all, link, of_another_user, Path.touch])
def test_a_name_that_another_user_may_have_taken_is_left_alone(temporary, take):
    taken = temporary / f"dflop-{os.getuid()}"
    take(taken)
    found = artifacts.cache_folder()
    assert found.parent == temporary
    assert found != taken
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    assert artifacts.cache_folder() == found


def test_what_torch_compiles_does_not_lie_where_another_user_may_have_put_something(temporary, monkeypatch):
    """torch's own choice is `torchinductor_USER`, whoever made it, and it runs what it finds there."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(compilation, "_missing_compiler", lambda device: "compiler")
    compilation.compiles_layers("on", torch.device("cpu"))
    assert cache_dir_utils.cache_dir() == str(temporary / f"dflop-{os.getuid()}/compiled")
