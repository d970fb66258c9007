"""A loader process that dies, or cannot hand over what it loaded, ends its run in one line that says the way out."""

import errno
import os
import re

import pytest

from dflop.base import UserError
from dflop.config import load_config
from dflop.train.data_loader import load_ahead
from dflop.train.lost_loaders import in_one_line, why_loading_ended


class Refused:
    """A microbatch for which there is no shared memory, as torch says it."""

    def __reduce__(self):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")


class Changed:
    """A microbatch of a record that is no longer what was profiled."""

    def __init__(self):
        raise UserError("record 3 has changed")


class Dataset:
    def __getitem__(self, kind: type):
        return kind()


class Jobs(list):
    num_forwards = 4


@pytest.mark.timeout(300)  # it would wait for ever
def test_what_ends_a_loader_ends_its_rank_in_one_line():
    """The rank must not wait for a microbatch that could not be handed over."""
    batches = iter(load_ahead(Dataset(), Jobs([Changed, Refused]), load_config({"train": {"loader_workers": 1}})))
    with pytest.raises(UserError, match="Traceback") as raised:
        next(batches)
    assert in_one_line(raised.value) == "record 3 has changed"
    with pytest.raises(RuntimeError, match="DataLoader worker") as raised:
        next(batches)
    reason = why_loading_ended(raised.value)
    assert re.fullmatch(r"/dev/shm \(\S+ GiB\) has no room .*docker run --shm-size=16g.*`train.loader_workers`", reason)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that ...", "--shm-size"),
        ("DataLoader worker (pid 7) exited unexpectedly with exit code 24. Details are lost.", "ulimit -n"),
        ("Too many open files. Communication with the workers is no longer possible.", "ulimit -n"),
        ("received 0 items of ancdata", "loader processes hand over needs more open files than .*ulimit -n"),
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", "signal: Killed; see .* host memory is short"),
    ],
)
def test_the_line_names_what_is_short(error, said, monkeypatch):
    monkeypatch.setattr("dflop.train.lost_loaders._NOTICED_S", 0)
    assert re.search(said, why_loading_ended(RuntimeError(error)))


def test_loaders_are_not_blamed_for_a_file_that_a_rank_itself_cannot_open():
    reason = why_loading_ended(OSError(errno.EMFILE, os.strerror(errno.EMFILE), "run/plan.yaml"))
    assert re.search(r"open files: 'run/plan\.yaml': this rank needs more open files than \d+: ulimit -n \d+$", reason)


def test_other_errors_are_left_to_themselves():
    assert why_loading_ended(RuntimeError("size mismatch")) is None
