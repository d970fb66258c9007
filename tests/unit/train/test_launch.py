"""Before anything is started: the plan must be for the devices there are, and threads are shared among ranks."""

import dataclasses
import math
import os

import pytest
import yaml
from small_plans import disjoint

from dflop.base import UserError
from dflop.base.torchrun import threads_per_rank
from dflop.config import ClusterConfig, load_config
from dflop.plan import Grid, Plan
from dflop.schedule import Learner
from dflop.schedule.correction import BinKey, LearnedBin
from dflop.train import check_devices, launch_ranks
from dflop.train.summary import what_to_rerun

PLAN = disjoint(vision_dp=2, llm_dp=3, num_microbatches=2)


def test_a_plan_for_more_devices_than_there_are_says_both_numbers():
    with pytest.raises(UserError) as caught:
        check_devices(load_config({"cluster": {"devices_per_node": 4}}), PLAN)
    message = str(caught.value)
    assert "the plan needs 5 devices, `cluster` has 4 (1 x 4)" in message
    assert "run `dflop plan` again for this cluster" in message


@pytest.mark.parametrize(("num_nodes", "devices_per_node", "have"), [(2, 2, 4), (3, 2, 6)])
def test_several_nodes_must_have_exactly_the_plans_devices(num_nodes, devices_per_node, have):
    config = load_config({"cluster": {"num_nodes": num_nodes, "devices_per_node": devices_per_node}})
    with pytest.raises(UserError, match=f"the plan is for 5 devices, `cluster` has {have} on {num_nodes} nodes"):
        check_devices(config, PLAN)


@pytest.mark.parametrize("devices_per_node", [5, 8])
def test_a_plan_for_the_devices_there_are_or_fewer_of_one_node_passes(devices_per_node):
    check_devices(load_config({"cluster": {"devices_per_node": devices_per_node}}), PLAN)


def test_nothing_is_started_for_a_plan_that_does_not_fit(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({"plan": PLAN.to_dict()}))
    with pytest.raises(UserError, match="the plan needs 5 devices"):
        launch_ranks(load_config({"cluster": {"devices_per_node": 2}}), plan=path, arguments={})
    with pytest.raises(UserError, match="make it with `dflop plan`"):
        launch_ranks(load_config(), plan=tmp_path / "none.yaml", arguments={})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_ranks": 4, "tp": 4}, "tp=4 does not divide llm's 4 attention heads and 2 key-value heads of tiny; use"),
        (
            {"num_ranks": 1, "recomputed": (9,)},
            r"`plan.grids.llm.recomputed\[0\]` is 9; the stage has 4 layers: use at most 4",
        ),
    ],
)
def test_nothing_is_started_for_a_plan_that_does_not_fit_the_model(tmp_path, change, complaint):
    grids = (PLAN.grids[0], Grid(module="llm", rank_offset=2, **change))
    plan = dataclasses.replace(PLAN, grids=grids, checkpointing=True)
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({"plan": plan.to_dict()}))
    with pytest.raises(UserError, match=f"plan.yaml: {complaint}"):
        launch_ranks(load_config({"cluster": {"devices_per_node": 8}}), plan=path, arguments={})


def test_nothing_is_started_for_a_plan_without_encoders(tmp_path):
    alone = Plan(placement="disjoint", grids=(Grid(module="llm", num_ranks=1),), num_microbatches=1)
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({"plan": alone.to_dict()}))
    with pytest.raises(UserError, match=r"plan.yaml: the plan has 0 encoders .* use a model with one"):
        launch_ranks(load_config({"cluster": {"devices_per_node": 8}}), plan=path, arguments={})


def test_nothing_is_started_for_a_family_that_cannot_be_trained_yet(tmp_path, made_up):
    config = load_config({"model": {"family": made_up}})
    with pytest.raises(UserError, match="which cannot be measured or trained yet"):
        launch_ranks(config, plan=tmp_path / "none.yaml", arguments={})


def test_outside_srun_several_nodes_of_gpus_say_how_to_start_before_any_rank(tmp_path, monkeypatch, capsys):
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({"plan": disjoint(vision_dp=2, llm_dp=2, num_microbatches=2).to_dict()}))
    with pytest.raises(UserError, match=r"`cluster\.num_nodes` is 2.*`srun --nodes=2 .*--profile slurm"):
        launch_ranks(
            load_config({"cluster": {"device": "cuda", "num_nodes": 2, "devices_per_node": 2}}),
            plan=path,
            arguments={"out": str(tmp_path)},
        )
    assert capsys.readouterr().out == ""


def test_ranks_on_cpus_share_the_cores_and_each_has_at_least_one():
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank(ClusterConfig(device="cpu", devices_per_node=1)) == cores
    assert threads_per_rank(ClusterConfig(device="cpu", devices_per_node=1), num_nodes_here=cores) == 1
    assert threads_per_rank(ClusterConfig(device="cpu", devices_per_node=cores)) == 1
    assert threads_per_rank(ClusterConfig(device="cpu", devices_per_node=10 * cores)) == 1
    assert threads_per_rank(ClusterConfig(device="cuda", devices_per_node=1)) == 1


def test_who_trained_with_stale_costs_is_told_how_far_they_are_off_and_what_to_run():
    def learned(ratio: float) -> LearnedBin:
        return LearnedBin(log_ratio=math.log(ratio), num_cells=50, num_steps=9, recent=(math.log(ratio),) * 3)

    keys = [BinKey("llm", "forward", load_bin, 7) for load_bin in (8, 9, 10)] + [BinKey("vision", "backward", 4, 0)]
    stale = Learner(dict(zip(keys, map(learned, (1.5, 0.5, 1.0, 1.25)), strict=True)))
    line = what_to_rerun(stale)
    assert "75% of the shape bins" in line
    assert "llm up to 0.50x, vision up to 1.25x" in line
    assert "`dflop profile-costs`" in line
    assert "\n" not in line
    assert what_to_rerun(Learner(dict(zip(keys, map(learned, (1.5, 1.1, 1.0, 1.0)), strict=True)))) is None
    assert what_to_rerun(Learner()) is None
