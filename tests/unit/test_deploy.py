"""What is beside the package to have it elsewhere: container recipes, templates for clusters, CI, how to cite.

Nothing here can be built or launched in a test. What they copy, call and set is held against the repository and the
documented keys: SkyPilot 0.14's task schema, JobSet v1alpha2, whose jobs are those of Kubernetes' batch/v1.
"""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from dflop.cli import cli
from dflop.config import load_config

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


def copied() -> dict[str, set[str]]:
    """What each container recipe copies from the repository."""
    docker = re.findall(r"^COPY (.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    files = (DEPLOY / "apptainer.def").read_text().split("%files\n")[1].split("\n\n")[0]
    return {
        "Dockerfile": {name for line in docker for name in line.split()},
        "apptainer.def": {line.split()[0] for line in files.splitlines()},
    }


def test_both_images_are_made_of_what_the_wheel_needs():
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], PROJECT["project"]["readme"]}
    needed |= {"pyproject.toml", "constraints.txt", "deploy/install.sh", *PROJECT["project"]["license-files"]}
    ignored = (REPOSITORY / ".dockerignore").read_text().split()
    for recipe, names in copied().items():
        assert names == needed, recipe
        assert all((REPOSITORY / name).exists() for name in names)
        assert {f"!{name.partition('/')[0]}" for name in names} <= set(ignored)
    for line in re.findall(r"^ +(\S+) (\S+)$", (DEPLOY / "apptainer.def").read_text(), re.MULTILINE):
        if line[1].startswith("/src/"):
            assert line[1] == f"/src/{line[0]}"


def test_the_script_that_both_images_run_is_a_shell_script_with_the_tested_versions():
    script = DEPLOY / "install.sh"
    subprocess.run(["sh", "-n", script], check=True)
    assert '-c "$1/constraints.txt" "$1[slurm]"' in script.read_text()
    assert "slurm" in PROJECT["project"]["optional-dependencies"]
    for recipe in ("Dockerfile", "apptainer.def"):
        text = (DEPLOY / recipe).read_text()
        assert "sh /src/deploy/install.sh /src" in text
        assert "/opt/dflop/bin" in text
        assert "BASE=python:3.11-slim" in text


def test_the_task_for_skypilot_has_its_keys():
    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    assert set(task) <= {"name", "num_nodes", "resources", "workdir", "setup", "run", "envs", "file_mounts"}
    assert set(task["resources"]) <= {"accelerators", "disk_size", "cpus", "memory", "infra", "image_id", "use_spot"}
    check_commands(task["setup"] + task["run"])


def test_the_jobset_asks_for_the_devices_of_a_node_and_mounts_what_it_names():
    jobset = yaml.safe_load((DEPLOY / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert set(jobset["spec"]) <= {"replicatedJobs", "failurePolicy", "successPolicy", "network", "suspend"}
    (job,) = jobset["spec"]["replicatedJobs"]
    assert set(job) == {"name", "replicas", "template"}
    assert set(job["template"]["spec"]) <= {"parallelism", "completions", "backoffLimit", "template"}
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    one_node = load_config(REPOSITORY / "config/examples/slurm_one_node.yaml")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == one_node.cluster.devices_per_node
    check_commands(container["args"][0])


def check_commands(script: str) -> None:
    """The script is one of the shell, and its commands of dflop exist."""
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    called = set(re.findall(r"\bdflop ([a-z-]+)", script))
    assert called <= set(cli.commands)
    assert "doctor" in called
    assert "--rerun-incomplete" in script


def test_ci_calls_the_script_that_people_run_and_targets_that_there_are():
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text())
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert sum(".ci/run" in command for command in commands) == 1
    for command in commands:
        if command.startswith("make "):
            assert set(command.split()[1:]) <= TARGETS
    versions = {*workflow["jobs"]["pythons"]["strategy"]["matrix"]["python"], "3.11"}
    assert {f"Programming Language :: Python :: {version}" for version in versions} <= set(
        PROJECT["project"]["classifiers"]
    )


def test_the_citation_names_this_version_and_license():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == PROJECT["project"]["version"]
    assert citation["license"] == PROJECT["project"]["license"]
    assert f"## {citation['version']}" in (REPOSITORY / "CHANGELOG.md").read_text()
    assert f"dflop-{citation['version']}-py3-none-any.whl" in (REPOSITORY / "README.md").read_text()


@pytest.mark.parametrize("form", ["bug", "measurement"])
def test_issue_forms_have_the_keys_that_github_demands(form):
    read = yaml.safe_load((REPOSITORY / f".github/ISSUE_TEMPLATE/{form}.yml").read_text())
    assert {"name", "description", "body"} <= set(read)
    names = [field["id"] for field in read["body"]]
    assert len(names) == len(set(names))
    assert all(set(field) <= {"type", "id", "attributes", "validations"} for field in read["body"])
    assert all(field["attributes"]["label"] for field in read["body"])
