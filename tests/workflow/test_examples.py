"""Every config in config/examples does what its header says, with a tiny model and the demo's data.

The commands are those of the headers.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from dflop.demo import make_demo_data

pytestmark = pytest.mark.serial

FOLDER = Path(__file__).parents[2] / "config/examples"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
DEMO = "data.sources=[{path: results/demo-data/train.json}]"
# Instead of the examples' placeholders.
AT_HAND = {"slurm_one_node": (DEMO, "model={path: null}"), "slurm_eight_nodes": (DEMO, "model={path: null}")}


def commands_of(name: str) -> list[list[str]]:
    """The arguments of each `snakemake` command in an example's header, without a dry run's flag."""
    header = re.match(r"(#.*\n)+", (FOLDER / f"{name}.yaml").read_text())[0]
    lines = re.sub(r"\\\n#", "", header).splitlines()
    commands = [shlex.split(line[1:], comments=True) for line in lines if line[1:].split()[:1] == ["snakemake"]]
    return [[part for part in command[1:] if part != "-n"] for command in commands]


def with_settings(command: list[str], settings: Sequence[str]) -> list[str]:
    """The command with more config keys; Snakemake reads only the last `--config`."""
    return command + ["--config"] * bool(settings and "--config" not in command) + list(settings)


@pytest.fixture(scope="module")
def checkout(make_checkout):
    """With data where config/examples/own_data_cpu.yaml says that a user's would be."""
    made = make_checkout()
    make_demo_data(made.folder / "data", num_records=40)
    return made


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_commands_of_an_examples_header_list_the_jobs_that_they_promise(checkout, name):
    commands = commands_of(name)
    assert commands
    for command in commands:
        jobs = checkout.jobs_of_dry_run(*with_settings(command, AT_HAND.get(name, ())))
        assert "search_plan" in jobs
        assert ("report" in jobs) == (not any(part.startswith("results/") for part in command)), command
