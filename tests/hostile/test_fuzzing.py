"""The fuzzer finds a reader that breaks, or that takes too long or too much memory, and leaves the file that did it."""

import random

import fuzzing
import pytest
from fuzzing import damaged, fuzz

GOOD = {"good.txt": b"0123456789" * 10}


@pytest.fixture(autouse=True)
def few_files(monkeypatch):
    monkeypatch.setattr(fuzzing, "SECONDS", 0)


def test_a_reader_that_refuses_damage_passes(tmp_path):
    seen = set()

    def read(file):
        seen.add(file.read_bytes())
        raise ValueError

    fuzz(GOOD, read, ValueError, tmp_path, num_files=50)
    assert len(seen - set(GOOD.values())) > 40


def test_a_reader_that_breaks_is_found_with_the_file_that_broke_it(tmp_path):
    def read(file):
        return file.read_bytes()[99]

    with pytest.raises(AssertionError, match=r"good\.txt: copy \d+ of FUZZ_SEED=\d+ raised IndexError"):
        fuzz(GOOD, read, ValueError, tmp_path, num_files=500)
    assert len((tmp_path / "good.txt").read_bytes()) < 100


@pytest.mark.parametrize(("limit", "said"), [({"most_s": 0}, "took 0 s"), ({"most_bytes": -1}, "bytes of memory")])
def test_a_reader_over_a_limit_is_found(tmp_path, limit, said):
    with pytest.raises(AssertionError, match=said):
        fuzz(GOOD, lambda file: None, ValueError, tmp_path, **limit, damage=lambda content, rng: content)


def test_a_copy_is_made_again_by_its_seed():
    copies = [damaged(GOOD["good.txt"], random.Random("0 7")) for _ in range(2)]
    assert copies[0] == copies[1]
