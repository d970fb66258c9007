"""A stage sees the keys it lists and no other, and its code digest follows the code it lists."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dflop
from dflop.config import load_config, select_keys
from dflop.stages import STAGES, restrict

PACKAGE = Path(dflop.__file__).parent

PRINT_DIGESTS = """
import json
from dflop.stages import STAGES
print(json.dumps({name: stage.code_digest for name, stage in STAGES.items()}))
"""


def digests(root: Path) -> dict[str, str]:
    """The digests that a copy of the package under `root` reports of itself."""
    done = subprocess.run([sys.executable, "-c", PRINT_DIGESTS], cwd=root, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def changed_stages(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


def test_a_restricted_config_has_the_keys_it_was_given():
    config = load_config({"train": {"lr": 0.5}, "data": {"sources": [{"path": "a.json"}]}})
    part = restrict(config, ["seed", "train.lr", "data"])
    assert (part.seed, part.train.lr, part.data) == (0, 0.5, config.data)


@pytest.mark.parametrize("read", [lambda c: c.run, lambda c: c.model, lambda c: c.train.steps, lambda c: c.data.video])
def test_reading_any_other_key_of_a_restricted_config_fails(read):
    part = restrict(load_config(), ["seed", "train.lr", "data.sources"])
    with pytest.raises(AttributeError):
        read(part)


def test_restricting_leaves_the_config_itself_alone():
    config = load_config()
    restrict(config, ["seed", "train.lr"])
    assert config == load_config()


@pytest.mark.parametrize("name", STAGES)
def test_every_key_that_a_stage_reads_exists(name):
    config = load_config()
    part = restrict(config, STAGES[name].reads)
    assert select_keys(part, STAGES[name].reads) == select_keys(config, STAGES[name].reads)


@pytest.mark.parametrize("name", STAGES)
def test_every_code_path_of_a_stage_exists(name):
    missing = [path for path in STAGES[name].code if not (PACKAGE / path).exists()]
    assert not missing


def test_the_digest_changes_with_the_stages_own_code_and_with_no_other(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "dflop", ignore=shutil.ignore_patterns("__pycache__"))
    before = digests(tmp_path)
    assert digests(tmp_path) == before == {name: stage.code_digest for name, stage in STAGES.items()}

    for path, of_whom in (
        ("costs/fit.py", {"fit-costs"}),
        ("costs/links.py", {"profile-links"}),
        ("costs/link_model.py", {"fit-costs", "plan", "schedule"}),
        ("planning/space.py", {"plan"}),
        ("data/tokenizer/chat_template.jinja", {"profile-shapes", "profile-costs", "train"}),
        ("store.py", set(STAGES)),
    ):
        file = tmp_path / "dflop" / path
        original = file.read_bytes()
        file.write_bytes(original + b"\n")
        assert changed_stages(before, digests(tmp_path)) == of_whom, path
        file.write_bytes(original)


def test_a_file_that_is_renamed_changes_the_digest(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "dflop", ignore=shutil.ignore_patterns("__pycache__"))
    before = digests(tmp_path)
    # Its place in the order of the files stays.
    (tmp_path / "dflop" / "planning" / "space.py").rename(tmp_path / "dflop" / "planning" / "spaces.py")
    assert changed_stages(before, digests(tmp_path)) == {"plan"}


def test_compiled_files_do_not_change_the_digest(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "dflop", ignore=shutil.ignore_patterns("__pycache__"))
    before = digests(tmp_path)
    cache = tmp_path / "dflop" / "planning" / "__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "space.cpython-311.pyc").write_bytes(b"x")
    assert digests(tmp_path) == before
