"""Every config in config/examples does what its header says, with a tiny model and the demo's data.

The commands are those of the headers. The ordinary tests list their jobs. The exhaustive ones run them: on CPUs from
the first rule to the report, for GPUs as far as the plan, with analytic costs.
"""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from dflop.demo import make_demo_data

pytestmark = pytest.mark.serial

FOLDER = Path(__file__).parents[2] / "config/examples"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
ON_CPUS = [name for name in EXAMPLES if name.endswith("_cpu")]
DEMO = "data.sources=[{path: results/demo-data/train.json}]"
# Instead of the examples' placeholders.
AT_HAND = {"slurm_one_node": (DEMO, "model={path: null}"), "slurm_eight_nodes": (DEMO, "model={path: null}")}
# As little as every rule needs.
QUICK = (
    *("costs.repeats=1", "costs.time_budget_s=1", "plan.search_batches=2", "schedule.time_limit_s=0.1"),
    *("train.global_batch_size=8", "train.steps=2", "train.checkpoint_every=2", "train.loader_workers=0"),
)


def commands_of(name: str) -> list[list[str]]:
    """The arguments of each `snakemake` command in an example's header, without a dry run's flag."""
    header = re.match(r"(#.*\n)+", (FOLDER / f"{name}.yaml").read_text())[0]
    lines = re.sub(r"\\\n#", "", header).splitlines()
    commands = [shlex.split(line[1:], comments=True) for line in lines if line[1:].split()[:1] == ["snakemake"]]
    return [[part for part in command[1:] if part != "-n"] for command in commands]


def with_settings(command: list[str], settings: Sequence[str]) -> list[str]:
    """The command with more config keys; Snakemake reads only the last `--config`."""
    return command + ["--config"] * bool(settings and "--config" not in command) + list(settings)


def run_of(name: str) -> str:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["run"]


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


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ON_CPUS)
def test_an_example_on_cpus_runs_from_its_first_rule_to_its_report(checkout, name):
    (command,) = commands_of(name)
    done = checkout.snakemake(*with_settings(command, QUICK))
    assert done.returncode == 0, done.stdout + done.stderr
    folder = checkout.folder / "results" / run_of(name)
    assert json.loads((folder / "train/summary.json").read_text())["num_steps"] == 2
    assert "What bounds this run, and what to change" in (folder / "report/index.html").read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in ON_CPUS])
def test_an_example_for_gpus_is_planned_without_any(checkout, name):
    plan = f"results/{run_of(name)}/plan.yaml"
    settings = ("costs.source=analytic", "plan.search_batches=2", "train.global_batch_size=256")
    done = checkout.snakemake(
        *(plan, plan.replace("plan.yaml", "schedule.parquet"), "--cores", "2"),
        *("--configfile", f"config/examples/{name}.yaml", "--config", *settings, *AT_HAND.get(name, ())),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cluster = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["cluster"]
    grids = yaml.safe_load((checkout.folder / plan).read_text())["plan"]["grids"].values()
    assert max(grid["rank_offset"] + grid["num_ranks"] for grid in grids) == cluster["num_nodes"] * 8
