"""A rank on fake tensors holds what the memory model says, by category; nothing is held of the real memory."""

import dataclasses
import json
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path

import polars as pl
import pytest
import torch.distributed as dist
import yaml
from click.testing import CliRunner

from dflop.base import UserError
from dflop.base.devices import load_device
from dflop.checks.of_plan import MadeUpLoad
from dflop.checks.of_plan.memory import check_rank
from dflop.cli import cli
from dflop.config import Config, ModelConfig, load_config
from dflop.costs import CostModel, analytic, fit_costs
from dflop.costs.analytic import AnalyticPoints, analytic_points
from dflop.models import ModelSpec, digest_of_spec, family_names, family_of, load_model_spec, offloading
from dflop.plan import Grid, Plan, leaving
from dflop.plan.trained import EVERYTHING, TrainedSet
from dflop.schedule import MEMORY_CATEGORIES
from dflop.shapes.text import BUNDLED_TOKENIZER
from dflop.store import write_costs

CONFIG = {
    "cluster": {"device_model": "h100-80g", "devices_per_node": 4},
    "costs": {"source": "analytic"},
    "train": {"precision": "bf16"},
}
LOAD = MadeUpLoad(num_pictures=3, picture_side=168, text_tokens=800)
SHARED = {"sharding": "parameters"}
PLANS = {
    "pipelined": Plan(
        placement="colocated",
        grids=(Grid(module="vision", num_ranks=4), Grid(module="llm", num_ranks=4, pp=2)),
        num_microbatches=4,
    ),
    "parameters shared": Plan(
        placement="monolithic",
        grids=(Grid(module="vision", num_ranks=4, **SHARED), Grid(module="llm", num_ranks=4, **SHARED)),
        num_microbatches=2,
    ),
    "parameters shared, tensor parallelism": Plan(
        placement="colocated",
        grids=(Grid(module="vision", num_ranks=4, **SHARED), Grid(module="llm", num_ranks=4, tp=2, **SHARED)),
        num_microbatches=2,
    ),
    "samples over several replicas": Plan(
        placement="colocated",
        grids=(Grid(module="vision", num_ranks=4), Grid(module="llm", num_ranks=4, cp=4)),
        num_microbatches=2,
    ),
    "samples over several replicas, pipelined, recomputing": Plan(
        placement="disjoint",
        grids=(
            Grid(module="vision", num_ranks=2, recomputed=(4,)),
            Grid(module="llm", num_ranks=4, pp=2, cp=2, rank_offset=2, recomputed=(2, 2), attention_kept=(1, 2)),
        ),
        num_microbatches=2,
        checkpointing=True,
    ),
    "offloaded to the host's memory": Plan(
        placement="disjoint",
        grids=(
            Grid(module="vision", num_ranks=2, offloaded=(3,)),
            Grid(module="llm", num_ranks=2, rank_offset=2, offloaded=(2,)),
        ),
        num_microbatches=2,
    ),
    "optimiser offloaded": Plan(
        placement="colocated",
        grids=(Grid(module="vision", num_ranks=4), Grid(module="llm", num_ranks=4, **SHARED)),
        num_microbatches=2,
        offloads_optimizer=True,
    ),
    "tensor parallelism, recomputing and offloaded": Plan(
        placement="disjoint",
        grids=(
            Grid(module="vision", num_ranks=2, recomputed=(2,), offloaded=(1,)),
            Grid(module="llm", num_ranks=4, tp=2, pp=2, rank_offset=2, recomputed=(1, 0), offloaded=(1, 1)),
        ),
        num_microbatches=2,
        checkpointing=True,
    ),
    "tensor parallelism, recomputing": Plan(
        placement="disjoint",
        grids=(
            Grid(module="vision", num_ranks=2, recomputed=(4,)),
            Grid(module="llm", num_ranks=4, tp=2, rank_offset=2, recomputed=(4,), attention_kept=(3,)),
        ),
        num_microbatches=2,
        checkpointing=True,
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _few_points():
    """Six points of an LLM in place of 48: these models keep bytes in proportion to loads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analytic, "_NUM_TOKENS", (64, 1_024, 16_384))
        patch.setattr(analytic, "_TEXT_FORMS", ((16_384, 0.5), (256, 0.1)))
        patch.setattr(offloading, "LEAST_BYTES", 1 << 14)  # these models' tensors are small
        patch.setattr(leaving, "_MOST_VALUES", 1 << 13)
        yield


@pytest.fixture(scope="module")
def costs_file(tmp_path_factory):
    return write_tiny_costs(tmp_path_factory.mktemp("costs") / "costs.duckdb", llm_tp=(1, 2))


def write_tiny_costs(
    path: Path,
    family: str = "llava_onevision",
    llm_tp: Sequence[int] = (1,),
    trained: TrainedSet = EVERYTHING,
) -> Path:
    """Costs of a family's tiny model."""
    spec = tiny(family)
    names = [module.name for module in spec.modules]
    points = [tiny_points(family, name, tp, trained) for name in names for tp in (llm_tp if name == "llm" else (1,))]
    return write_costs_of(spec, path, points)


def tiny(family: str) -> ModelSpec:
    return load_model_spec(ModelConfig(family=family, preset="tiny"))


@cache
def tiny_points(family: str, module: str, tp: int, trained: TrainedSet) -> AnalyticPoints:
    return analytic_points(tiny(family), module, tp, load_device("h100-80g"), trained=trained)


def write_costs_of(spec: ModelSpec, path: Path, points: Sequence[AnalyticPoints]) -> Path:
    measurements = pl.concat([measured.measurements for measured in points])
    tables = fit_costs(measurements, pl.concat([measured.parameters for measured in points]))
    device = {"device": "a card", "overhead_bytes": 0, "allocator_share": 0.0, "model": digest_of_spec(spec)}
    write_costs(path, {"measurements": measurements, "device": pl.DataFrame([device]), **tables}, {})
    return path


@pytest.mark.parametrize("name", PLANS)
def test_a_rank_holds_what_the_memory_model_says(name, costs_file):
    checked = check_rank(load_config(CONFIG), PLANS[name], CostModel.load(costs_file), LOAD, None)
    assert not dist.is_initialized()
    assert tuple(checked.predicted) == tuple(checked.tracked) == MEMORY_CATEGORIES
    for category in MEMORY_CATEGORIES[:3]:  # parameters begin at round places, which small ones fill with nothing
        assert checked.predicted[category] == pytest.approx(checked.tracked[category], rel=5e-3), category
    assert checked.predicted["activations"] == pytest.approx(checked.tracked["activations"], rel=0.1)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(
            placement="disjoint",
            grids=(Grid(module="vision", num_ranks=2), Grid(module="llm", num_ranks=4, pp=2, rank_offset=2)),
            num_microbatches=4,
        ),
        *(
            pytest.param(plan, marks=pytest.mark.exhaustive)
            for plan in (
                PLANS["pipelined"],
                Plan(
                    placement="bubble_filled",
                    grids=(Grid(module="vision", num_ranks=4), Grid(module="llm", num_ranks=4, pp=2)),
                    num_microbatches=4,
                    schedule="interleaved_1f1b",
                    num_chunks=2,
                ),
                Plan(
                    placement="disjoint",
                    grids=(Grid(module="vision", num_ranks=2), Grid(module="llm", num_ranks=4, rank_offset=2)),
                    num_microbatches=8,
                ),
            )
        ),
    ],
    ids=lambda plan: f"{plan.placement}, {plan.grid('llm').pp} stages",
)
def test_slots_into_which_a_gpu_receives_are_in_the_prediction(plan, costs_file):
    config, costs = load_config(CONFIG), CostModel.load(costs_file)
    gpus = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, device="cuda", memory_gib=72.0))
    load = MadeUpLoad(num_pictures=12, picture_side=168, text_tokens=200)
    for rank in (0, plan.world_size - 2):
        on_cpus, on_gpus = (check_rank(own, plan, costs, load, rank) for own in (config, gpus))
        assert on_gpus.tracked["activations"] > on_cpus.tracked["activations"]
        if rank >= plan.grid("llm").rank_offset:
            assert on_gpus.predicted["activations"] > on_cpus.predicted["activations"]
        for checked in (on_cpus, on_gpus):
            ratio = checked.predicted["activations"] / checked.tracked["activations"]
            # A last stage keeps gradients that it has sent: of one microbatch or, of a single stage, of four.
            is_last = on_gpus.nodes[0].module == "llm" and on_gpus.nodes[0].pp_stage == plan.grid("llm").pp - 1
            assert ratio == pytest.approx(1.0, abs=0.01 if plan.placement == "disjoint" and is_last else 0.05), rank


@pytest.mark.parametrize(
    "name", ["pipelined", pytest.param("tensor parallelism, recomputing", marks=pytest.mark.exhaustive)]
)
def test_a_frozen_llm_keeps_nothing_for_gradients_of_its_weights(name, tmp_path):
    config, grid = load_config(CONFIG | {"model": {"freeze": ["llm"]}}), PLANS[name].grid("llm")
    path = write_tiny_costs(tmp_path / "costs.duckdb", llm_tp=(grid.tp,), trained=TrainedSet(("llm",)))
    costs = CostModel.load(path)
    for rank in (grid.rank_offset, grid.rank_offset + grid.num_ranks - 1):
        checked = check_rank(config, PLANS[name], costs, LOAD, rank)
        assert checked.predicted["activations"] == pytest.approx(checked.tracked["activations"], rel=0.1), rank


# Ranks that share all parameters hold alike.
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param("pipelined", (0, 3), marks=pytest.mark.exhaustive),
        ("parameters shared, tensor parallelism", (0,)),
    ],
)
def test_beside_adapters_the_weights_have_no_gradients_masters_or_moments(name, ranks, tmp_path):
    lora = {"modules": ["llm", "vision.encoder"], "rank": 4}
    config = load_config(CONFIG | {"model": {"lora": lora}})
    plan = PLANS[name]
    path = write_tiny_costs(tmp_path / "costs.duckdb", llm_tp=(plan.grid("llm").tp,), trained=config.model.trained)
    costs = CostModel.load(path)
    for rank in ranks:
        checked = check_rank(config, plan, costs, LOAD, rank)
        assert 0 < checked.tracked["optimizer"] < 2 * checked.tracked["parameters"]  # six times where all is trained
        for category in MEMORY_CATEGORIES[:3]:
            assert checked.predicted[category] == pytest.approx(checked.tracked[category], rel=0.05), (rank, category)
        assert checked.predicted["activations"] == pytest.approx(checked.tracked["activations"], rel=0.1), rank
        predicted, tracked = (sum(sizes.values()) for sizes in (checked.predicted, checked.tracked))
        assert predicted == pytest.approx(tracked, rel=0.05), rank


@pytest.mark.parametrize("name", ["pipelined", pytest.param("parameters shared", marks=pytest.mark.exhaustive)])
def test_a_frozen_encoder_keeps_nothing_before_its_projector(name, costs_file):
    plan, costs = PLANS[name], CostModel.load(costs_file)
    config = load_config(CONFIG | {"model": {"freeze": ["vision.encoder"]}})
    for rank in {0, plan.grid("vision").num_ranks - 1}:
        checked = check_rank(config, plan, costs, LOAD, rank)
        for category in MEMORY_CATEGORIES[:3]:
            assert checked.predicted[category] == pytest.approx(checked.tracked[category], rel=0.01), (rank, category)
        trained = check_rank(load_config(CONFIG), plan, costs, LOAD, rank)
        assert checked.predicted["activations"] < 0.97 * trained.predicted["activations"]
        assert checked.predicted["activations"] == pytest.approx(checked.tracked["activations"], rel=0.1), rank


LAST_LAYERS = ["llm.layers.[2-3]", "llm.norm", "llm.head"]


@pytest.mark.parametrize(
    ("model", "ranks", "checkpointing"),
    [
        pytest.param({"train": ["projector"]}, (0, 3), False, marks=pytest.mark.exhaustive),
        ({"train": ["projector"]}, (0, 3), True),
        pytest.param({"train": ["projector"], "lora": {"rank": 8}}, (0, 3), False, marks=pytest.mark.exhaustive),
        pytest.param({"train": ["projector"], "lora": {"rank": 8}}, (0, 3), True, marks=pytest.mark.exhaustive),
        # Nothing is trained on the other ranks.
        pytest.param({"train": LAST_LAYERS}, (3,), False, marks=pytest.mark.exhaustive),
        ({"train": LAST_LAYERS}, (3,), True),
    ],
)
def test_parts_that_are_trained_and_recomputed_hold_what_the_memory_model_says(model, ranks, checkpointing, tmp_path):
    config = load_config(CONFIG | {"model": model})
    trained = config.model.trained.among(tiny("llava_onevision").modules)
    costs = CostModel.load(write_tiny_costs(tmp_path / "costs.duckdb", trained=trained))
    plan = dataclasses.replace(PLANS["pipelined"], checkpointing=checkpointing)
    for rank in ranks:
        checked = check_rank(config, plan, costs, LOAD, rank)
        predicted, tracked = (sum(sizes.values()) for sizes in (checked.predicted, checked.tracked))
        assert predicted == pytest.approx(tracked, rel=0.05), rank


# The others are left to `make test-all`: `test_counted.py` has the layers of all.
ALIKE = ("internvl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni_thinker")


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.exhaustive if name in ALIKE else ()) for name in family_names()],
)
def test_every_module_of_every_family_can_be_checked(family, tmp_path):
    config = load_config(CONFIG | {"model": {"family": family, "preset": "tiny"}})
    spec = load_model_spec(config.model)
    costs = CostModel.load(write_tiny_costs(tmp_path / "costs.duckdb", family))
    grids = tuple(Grid(module=module.name, num_ranks=1, rank_offset=place) for place, module in enumerate(spec.modules))
    plan = Plan(placement="disjoint", grids=grids, num_microbatches=2)
    for rank in range(plan.world_size):
        checked = check_rank(config, plan, costs, LOAD, rank)
        for category in MEMORY_CATEGORIES[:3]:
            assert checked.predicted[category] == pytest.approx(checked.tracked[category], rel=0.02), (rank, category)
        if spec.modules[rank].media and "image" not in spec.modules[rank].media:
            continue  # what is made up are pictures
        # Pictures, which are no activations, are large beside those of so small a model.
        assert 0.6 * checked.tracked["activations"] < checked.predicted["activations"]
        assert checked.predicted["activations"] < 1.1 * checked.tracked["activations"]


# Released encoders, each of another kind; layers whose output is a feature, or whose attention is not in windows.
ENCODERS = {
    "llava_ov_7b": ("llava_onevision", {}),
    "internvl_8b": ("internvl", {}),
    "internvl_78b": ("internvl", {}),
    "qwen2_5_vl_7b": ("qwen2_5_vl", {"fullatt_block_indexes": [3]}),
    "qwen3_vl_8b": ("qwen3_vl", {"deepstack_visual_indexes": [1, 2, 3]}),
    "qwen2_5_omni_7b": ("qwen2_5_omni_thinker", {"fullatt_block_indexes": [3]}),
}


# The one with layers whose outputs are features. CI checks the kinds of layers of the others in tiny models.
IN_CI = ("qwen3_vl_8b",)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in IN_CI else pytest.mark.exhaustive) for name in ENCODERS],
)
def wide(request, tmp_path_factory) -> tuple[Config, CostModel]:
    """The config of a model with six layers of a released encoder, and its costs."""
    folder, (family, of_layers) = tmp_path_factory.mktemp("wide"), ENCODERS[request.param]
    fields = deepcopy(family_of(family).presets[request.param])
    fields["vision_config"] |= of_layers | {"num_hidden_layers": 6, "depth": 6}
    (folder / "config.json").write_text(json.dumps(fields))
    model = {"family": family, "path": str(folder), "tokenizer": str(BUNDLED_TOKENIZER)}
    config = load_config(CONFIG | {"model": model})
    spec, device = load_model_spec(config.model), load_device("h100-80g")
    points = [analytic_points(spec, module.name, 1, device) for module in spec.modules]
    return config, CostModel.load(write_costs_of(spec, folder / "costs.duckdb", points))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["all kept", "recomputing"])
def test_an_encoder_as_wide_as_a_released_one_holds_what_the_memory_model_says(wide, checkpointing):
    config, costs = wide
    names = [module.name for module in load_model_spec(config.model).modules]
    grids = tuple(Grid(module=name, num_ranks=1, rank_offset=place) for place, name in enumerate(names))
    # Of a single microbatch, the features' gradients are there at the peak. Of others they are counted too early.
    plan = Plan(placement="disjoint", grids=grids, num_microbatches=1, checkpointing=checkpointing)
    load = MadeUpLoad(num_pictures=4, picture_side=768, text_tokens=100)
    checked = check_rank(config, plan, costs, load, 0)
    assert checked.predicted["activations"] == pytest.approx(checked.tracked["activations"], rel=0.03)


def test_a_rank_may_be_chosen_and_one_that_is_not_there_is_refused(costs_file):
    costs = CostModel.load(costs_file)
    (node,) = check_rank(load_config(CONFIG), PLANS["tensor parallelism, recomputing"], costs, LOAD, 1).nodes
    assert (node.module, node.dp_rank) == ("vision", 1)
    with pytest.raises(UserError, match="rank 6: the plan has ranks 0 to 5"):
        check_rank(load_config(CONFIG), PLANS["tensor parallelism, recomputing"], costs, LOAD, 6)


def test_half_precision_alone_has_masters(costs_file):
    config = load_config(CONFIG)
    full = dataclasses.replace(config, train=dataclasses.replace(config.train, precision="fp32"))
    in_half, in_full = (
        check_rank(precise, PLANS["pipelined"], CostModel.load(costs_file), LOAD, 0).tracked
        for precise in (config, full)
    )
    # The encoder's last norm, which no pass reads, stays as it was read.
    num_unread = 2 * load_model_spec(config.model).module("vision").hidden_size
    assert in_half["parameters"] == in_full["parameters"] / 2 + 2 * num_unread
    assert in_half["gradients"] == in_full["gradients"]
    assert in_half["optimizer"] == in_full["optimizer"] * 3 / 2


def test_the_command_prints_a_line_for_each_category(costs_file, tmp_path):
    plan = tmp_path / "plan.yaml"
    plan.write_text(yaml.safe_dump({"plan": PLANS["pipelined"].to_dict()}))
    arguments = ["check-plan", "--config", json.dumps(CONFIG), "--costs", str(costs_file), "--plan", str(plan)]
    result = CliRunner().invoke(
        cli, [*arguments, "--pictures", "1", "--side", "168", "--text-tokens", "100"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[1] == "rank 0: vision stage 0 replica 0 + llm stage 0 replica 0"
    assert [line.split()[0] for line in lines[4:-3]] == [*MEMORY_CATEGORIES, "together"]
    assert "messages of a step end, even if all streams of a GPU shared one queue; on 108 SMs" in lines[-1]
    # Predicted and tracked activations are of different layers: they and the sum have no ratio.
    assert [len(line.split()) for line in lines[4:-3]] == [4, 4, 4, 3, 3]
    assert lines[-3].startswith("no ratio of activations: the costs are of compiled layers, and tracked were eager")
