"""What jobs on GPUs ask Slurm for: an `sbatch` that writes down its options stands in, and every job then fails."""

import json
import re

import pytest

from dflop.demo import make_demo_data

pytestmark = pytest.mark.serial
pytest.importorskip("snakemake_executor_plugin_slurm")

CONFIG = {
    "run": "gpus",
    "data": {"sources": [{"path": "data/train.json"}]},
    "cluster": {"device": "cuda", "num_nodes": 2, "devices_per_node": 8, "device_model": "h100-80g"},
    "costs": {"tp_sizes": [1, 8]},
    "train": {"global_batch_size": 16},
    "slurm": {
        "account": "me",
        "partition": "gpu",
        "cpu_partition": "cpu",
        "gpu_type": "h100",
        "stages": {"train": {"time": "2d", "extra": "--mail-type=END --wckey='$(touch ran) a'"}},
    },
}
SBATCH = """#!/bin/sh
cat > script; printf '%s ' "$@" | tr '\\n' ' ' >> asked; echo >> asked; grep -c . asked
"""
SQUEUE = """#!/bin/sh
for number in 1 2 3 4 5 6 7 8 9; do echo "$number|FAILED|NonZeroExitCode"; done
"""
REFUSE = "#!/bin/sh\nexit 1\n"


@pytest.fixture(scope="module")
def asked(make_checkout):
    """The options of each job that is submitted, by its name, with the config changed as said."""
    checkout = make_checkout()
    make_demo_data(checkout.folder / "data", num_records=40)
    config = checkout.write_config("gpus.yaml", **CONFIG)
    path = checkout.path_with_stubs(sbatch=SBATCH, squeue=SQUEUE, sacct=REFUSE, scontrol=REFUSE, sinfo=REFUSE)
    done = checkout.snakemake("--cores", "2", "--configfile", config, "--", "results/gpus/plan.yaml", PATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    plan = (checkout.folder / "results/gpus/plan.yaml").read_bytes()

    def ask(*arguments: str) -> dict[str, str]:
        (checkout.folder / "asked").unlink(missing_ok=True)
        done = checkout.snakemake(
            *("--profile", "slurm", "--retries", "0", "--keep-going", "--configfile", config), *arguments, PATH=path
        )
        assert done.returncode == 1, done.stdout + done.stderr
        (checkout.folder / "results/gpus/plan.yaml").write_bytes(plan)
        assert not (checkout.folder / "ran").exists()
        lines = (checkout.folder / "asked").read_text().splitlines()
        return {re.search(r"--job-name (\S+)", line)[1]: line for line in lines}

    return ask


def test_training_asks_for_all_nodes_their_gpus_its_time_and_a_warning_and_no_shell_reads_a_name(asked):
    names = {key: f"{key}'\"`touch ran`$(touch ran);touch ran\n{key}" for key in ("account", "partition", "qos")}
    config = [f"slurm.{key}={json.dumps(name)}" for key, name in names.items()]
    options = asked("--config", *config, "--", "results/gpus/train/summary.json")["train"]
    for option in (
        *("-t 2880", "--nodes=2", "--ntasks=2", "--gres=gpu:h100:8", "--cpus-per-task=64"),
        *("--signal=USR1@300", "--mail-type=END", "--requeue", "--mem 524288"),
        "--wckey=$(touch ran) a",  # as it stands in the config
    ):
        assert f" {option} " in options, options
    for option, name in zip(("-A ", "-p ", "--qos="), names.values(), strict=True):
        assert f" {option}{name} ".replace("\n", " ") in options, options


def test_measuring_asks_for_the_gpus_of_its_tp_and_their_share_of_the_node(asked):
    jobs = asked(
        *("--forcerun", "profile_costs", "profile_links", "--config", "slurm.gpu_request=gpus", "--"),
        *(
            "results/gpus/costs/links.parquet",
            "results/gpus/costs/llm.tp1.parquet",
            "results/gpus/costs/llm.tp8.parquet",
        ),
    )
    assert set(jobs) == {"profile_links", "profile_costs.module=llm.tp=1", "profile_costs.module=llm.tp=8"}
    for name, gpus, cpus in (("tp=1", 1, 8), ("tp=8", 8, 64)):
        options = jobs[f"profile_costs.module=llm.{name}"]
        assert f" --gpus-per-node=h100:{gpus} " in options
        assert f" --cpus-per-task={cpus} " in options
        assert "--nodes" not in options
    for option in ("-A me", "-p gpu", "--nodes=2"):
        assert f" {option} " in jobs["profile_links"]


def test_what_needs_no_gpu_goes_where_there_are_none(asked):
    options = asked("--forcerun", "search_plan", "--", "results/gpus/plan.yaml")["search_plan"]
    assert " -p cpu " in options
    assert "gres" not in options
