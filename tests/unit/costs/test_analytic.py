"""Seconds and bytes of counted pieces look and fit as measurements do; a device's data sheet is read and checked."""

import gc
import json
import re
from dataclasses import replace
from functools import cache
from operator import attrgetter

import numpy as np
import polars as pl
import pytest
import torch
from click.testing import CliRunner

from dflop.base import UserError
from dflop.base.devices import DeviceModel, load_device
from dflop.cli import cli
from dflop.config import ModelConfig, load_config
from dflop.costs import CostModel, Loads, StageKind, analytic, fit_costs
from dflop.costs.analytic import IMPLEMENTATIONS, AnalyticPoints, analytic_points, points_of_stage
from dflop.costs.counted import CountedRun, CountedStage, counting
from dflop.costs.design import Point
from dflop.costs.fit import fit_model, median_points
from dflop.costs.measure import Bench
from dflop.costs.meter import Work
from dflop.models import load_model_spec
from dflop.models.loads import FEATURES
from dflop.models.stages import LlmStage
from dflop.plan.layout_key import LayoutKey
from dflop.store import write_costs

LAYERS = (pl.col("piece") == "layers") & ~pl.col("checkpointing")


def points_of(
    preset: str,
    module: str,
    tp: int = 1,
    implementation: str = "eager",
    device: str = "h100-80g",
    family: str = "llava_onevision",
) -> AnalyticPoints:
    return _points_of(preset, module, tp, implementation, device, family)


@cache  # of all arguments, whichever a caller leaves at their defaults
def _points_of(preset: str, module: str, tp: int, implementation: str, device: str, family: str) -> AnalyticPoints:
    spec = load_model_spec(ModelConfig(family=family, preset=preset))
    return analytic_points(spec, module, tp, load_device(device), implementation)


def make_loads(num_items=0, num_tokens=0, sum_sq_tokens=0, num_targets=0) -> Loads:
    return Loads(*(np.asarray(value, dtype=float) for value in (num_items, num_tokens, sum_sq_tokens, num_targets)))


@pytest.mark.parametrize("module", ["vision", pytest.param("llm", marks=pytest.mark.exhaustive)])
def test_compiled_layers_take_less_time_and_keep_less_than_eager_ones(module):
    eager, compiled = (points_of("tiny", module, 1, implementation).measurements for implementation in IMPLEMENTATIONS)
    assert (compiled.filter(LAYERS)["seconds"] < eager.filter(LAYERS)["seconds"]).all()
    assert (compiled.filter(LAYERS)["saved_bytes"] <= eager.filter(LAYERS)["saved_bytes"]).all()
    ends = pl.col("piece") != "layers"
    assert compiled.filter(ends).equals(eager.filter(ends))


def test_the_command_makes_costs_of_layers_as_the_config_has_them(tmp_path):
    config = {
        "cluster": {"device": "cuda", "device_model": "h100-80g"},
        "costs": {"source": "analytic"},
        "train": {"precision": "bf16"},
    }
    out = tmp_path / "vision.parquet"
    command = ["profile-costs", "--config", json.dumps(config), "--module", "vision", "--out", str(out)]
    CliRunner().invoke(cli, command, catch_exceptions=False)
    points = points_of(load_config().model.preset, "vision", 1, "compiled").measurements
    assert pl.read_parquet(out, columns=points.columns).equals(points)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_head_has_the_counts_of_its_run_for_any_tokens_and_targets(tp, tiny_spec):
    def take_few(stage: LlmStage) -> None:
        stage.hf.lm_head.num_at_once = 4096

    # Less than a chunk, one, one and a little, three, and eight with a smaller one.
    loads = [(64, 3), (4_096, 4_096), (9_000, 4_097), (12_288, 12_288), (65_536, 7 * 4_096 + 100)]
    points = [{"num_tokens": num_tokens, "num_targets": num_targets} for num_tokens, num_targets in loads]
    with counting(tp) as ranks:
        stage = CountedStage(tiny_spec, "llm", 2, ranks, change=take_few)

        def run_at(loads: dict[str, int]) -> CountedRun:
            return stage.run(analytic._point("last", 0, False, **loads))

        runs = list(map(run_at, points))
        counts = analytic._HeadCounts.of(points, run_at, stage.targets_at_once)
    work = [name for name in Work.__dataclass_fields__ if name != "matrices"]
    names = [f"{direction}.{name}" for direction in ("forward", "backward") for name in work]
    for name in ("peak_bytes", "saved_bytes", "forward.product_rows", *names):
        assert np.allclose(counts.at_points(name), [attrgetter(name)(run) for run in runs], rtol=1e-9), name


@pytest.mark.usefixtures("little_cache")
@pytest.mark.parametrize("module", ["vision", "llm"])
def test_points_have_the_columns_that_measuring_gives(module, tiny_spec, tokenizer):
    bench = Bench(
        tiny_spec,
        module,
        2,
        placeholder_ids=tokenizer.placeholder_ids,
        vocab_size=tokenizer.vocab_size(),
        device=torch.device("cpu"),
        precision="bf16",
    )
    gc.unfreeze()
    point = Point("first", 0, False, **({"num_items": 1} if module == "vision" else {"segments": (8,)}))
    rows, points = bench.measure(point, 0), points_of("tiny", module)
    measured = pl.DataFrame(rows, schema_overrides={"attention_s": pl.Float64})
    assert dict(points.measurements.schema) == dict(measured.schema)
    sizes = bench.parameter_sizes()
    assert points.parameters.schema == sizes.schema
    if module == "vision":  # the LLM's vocabulary is the tokenizer's here
        assert points.parameters.equals(sizes)
    counted, measured = (frame.drop("attention_bytes").row(0) for frame in (points.parameters, sizes))
    assert counted == measured
    if module == "llm":  # on CPUs attention's result is kept once more, copied into one row
        counted, measured = (frame["attention_bytes"][0] for frame in (points.parameters, sizes))
        assert measured - counted == pytest.approx(2 * tiny_spec.module("llm").hidden_size, rel=0.01)


def test_points_cover_what_real_models_see():
    vision = points_of("llava_ov_7b", "vision").measurements
    assert (vision["num_items"].min(), vision["num_items"].max()) == (1, 2000)
    llm = points_of("llava_ov_7b", "llm").measurements
    assert (llm["num_tokens"].min(), llm["num_tokens"].max()) == (64, 131_072)
    lengths = llm["sum_sq_tokens"] / llm["num_tokens"]
    assert (lengths.min(), lengths.max()) == (64, 16_384)
    for frame in (vision, llm):
        assert set(frame.filter(pl.col("piece") == "layers")["num_layers"]) == {1, 2}
        assert set(frame["piece"]) == {"layers", "first", "last"}
    assert (llm["seconds"] > 0).all()


@pytest.mark.parametrize(
    ("family", "module", "loads"),
    [
        ("llava_onevision", "llm", {"segments": (9_000,), "num_targets": 2_000}),
        ("llava_onevision", "vision", {"num_items": 120}),
        # Its layers are of the kinds of LLaVA's.
        pytest.param("internvl", "vision", {"num_items": 120}, marks=pytest.mark.exhaustive),
        ("qwen2_5_vl", "vision", {"num_items": 4_096}),
        pytest.param(*("qwen3_vl", "llm", {"segments": (9_000,), "num_targets": 2_000}), marks=pytest.mark.exhaustive),
    ],
)
def test_whole_stages_keep_what_a_model_fitted_to_their_pieces_says(family, module, loads):
    points = points_of("tiny", module, 1, "eager", family=family)
    tables = fit_costs(points.measurements, points.parameters, "analytic")
    assert tables["fit_error"].is_empty()
    spec = load_model_spec(ModelConfig(family=family))
    for checkpointing in (False, True):
        with counting(1) as ranks:
            stage = CountedStage(spec, module, 4, ranks)
            point = Point("whole", 4, checkpointing, **loads)
            run, columns = stage.run(point), stage.runs.loads(point)
        kind = StageKind.whole(module, LayoutKey(1), 4, num_recomputed=4 if checkpointing else 0)
        costs = fitted(points)
        memory = costs.stage_memory(kind, make_loads(*(columns[feature] for feature in FEATURES)))
        assert float(memory.activation_bytes) == pytest.approx(run.saved_bytes, rel=0.05)
        assert float(memory.activation_bytes + memory.transient_bytes) == pytest.approx(run.peak_bytes, rel=0.15)


def fitted(points: AnalyticPoints) -> CostModel:
    return fit_model(median_points(points.measurements), points.parameters, "analytic")


def seconds_of_layer(*devices: DeviceModel, tp: int = 1) -> list[np.ndarray]:
    """On each device, of forwards of the tiny encoder's second layer, ordered by the number of items."""
    spec = load_model_spec(ModelConfig(family="llava_onevision", preset="tiny"))
    with counting(tp) as ranks:
        stage = CountedStage(spec, "vision", 2, ranks)
        stage.run = cache(stage.run)
        found = [points_of_stage(stage, device).measurements for device in devices]
    seconds = []
    for points in found:
        forward = points.filter(LAYERS & (pl.col("pass") == "forward"))
        one, two = (forward.filter(num_layers=depth).sort("num_items")["seconds"].to_numpy() for depth in (1, 2))
        seconds.append(two - one)
    return seconds


def test_a_layer_takes_no_less_than_the_host_needs_to_dispatch_its_kernels():
    device = replace(load_device("h100-80g"), launch_s=0.0)
    at_once, floored, slow = seconds_of_layer(*(replace(device, dispatch_s=dispatch_s) for dispatch_s in (0, 2e-6, 1)))
    num_kernels = slow[0]
    assert num_kernels > 10
    assert np.allclose(slow, num_kernels)  # as many kernels for any load
    assert floored[0] == pytest.approx(num_kernels * 2e-6)
    assert floored[0] > 2 * at_once[0]
    assert floored[-1] == pytest.approx(at_once[-1])  # the host runs ahead of a device that has much to do


def test_an_all_reduce_takes_the_steps_of_its_ring_and_no_less_than_the_host_needs_for_it():
    device = replace(load_device("h100-80g"), dispatch_s=0.0, collective_s=0.0)
    changed = replace(device, hop_s=0.0), replace(device, hop_s=1.0), replace(device, collective_s=1.0)
    at_once, slow, slow_host = seconds_of_layer(*changed, tp=2)
    assert np.allclose(slow - at_once, 2 * 2 * (2 - 1))  # two blocks, each a reduction and a gather over one hop
    assert np.allclose(slow_host, 2)


@pytest.mark.parametrize("tp", [1, 2])
def test_layers_are_fitted_to_their_points(tp, tmp_path):
    both = [points_of("llava_ov_7b", module, tp) for module in ("vision", "llm")]
    measurements = pl.concat([points.measurements for points in both])
    path = tmp_path / "costs.duckdb"
    device = pl.DataFrame({"device": ["h100-80g"], "overhead_bytes": [0], "allocator_share": [0.0]})
    tables = fit_costs(measurements, pl.concat([points.parameters for points in both]), "analytic")
    write_costs(path, {"measurements": measurements, "device": device, **tables}, {})
    costs = CostModel.load(path)
    for module in ("vision", "llm"):
        frame = measurements.filter(LAYERS, module=module, num_layers=2)
        for direction in ("forward", "backward"):
            points = frame.filter(pl.col("pass") == direction)
            loads = Loads(*(points[feature].to_numpy().astype(float) for feature in FEATURES))
            found_s = costs.times[module, LayoutKey(tp), "stage", False, direction](loads)
            found_s = found_s + 2 * costs.times[module, LayoutKey(tp), "layer", False, direction](loads)
            errors = np.abs(found_s / points["seconds"].to_numpy() - 1)
            assert np.quantile(errors, 0.95) < 0.05


@pytest.mark.parametrize(
    ("device", "module"),
    [
        ("h100-80g", "vision"),
        ("h100-80g", "llm"),
        ("a100-80g", "llm"),
        pytest.param("h200-141g", "vision", marks=pytest.mark.exhaustive),
        pytest.param("a100-80g", "vision", marks=pytest.mark.exhaustive),
        pytest.param("h200-141g", "llm", marks=pytest.mark.exhaustive),
    ],
)
def test_a_large_microbatch_runs_at_a_share_of_the_peak_that_training_is_known_to_reach(module, device):
    sheet, loads = load_device(device), {"num_items": 55} if module == "vision" else {"num_tokens": 8192}
    frame = points_of("llava_ov_7b", module, 1, "eager", device).measurements.filter(LAYERS, num_layers=2, **loads)
    parameters = points_of("llava_ov_7b", module, 1, "eager", device).parameters.filter(part="layer")
    positions = 55 * 729 if module == "vision" else 8192
    products = 2 * 6 * positions * parameters["parameter_bytes"].item() / 4  # of two layers, without attention
    for one in frame.partition_by("sum_sq_tokens", "num_targets"):
        assert 0.27 < products / one["seconds"].sum() / sheet.peak_flops_per_s < 0.67


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_seconds_and_bytes_grow_with_every_load(direction, tp):
    vision, llm = (points_of("llava_ov_7b", module, tp).measurements for module in ("vision", "llm"))
    kinds = ("piece", "num_layers", "checkpointing")
    for frame in vision.filter(pl.col("pass") == direction).partition_by(*kinds):
        assert frame["peak_bytes"].diff().drop_nulls().min() > 0
        # Few items take as long as the host needs for their kernels.
        assert frame["seconds"].diff().drop_nulls().min() >= -1e-12
        assert frame["seconds"].tail(5).diff().drop_nulls().min() > 0
    forms = {
        "length": pl.col("sum_sq_tokens") // pl.col("num_tokens"),
        "share": pl.col("num_targets") * 20 // pl.col("num_tokens"),
    }
    llm = llm.filter(pl.col("pass") == direction, pl.col("num_tokens") >= 16_384).with_columns(**forms)
    for frame in llm.partition_by(*kinds, *forms):
        assert frame["seconds"].diff().drop_nulls().min() > 0
        # A whole embedding keeps nothing but the tokens' numbers, which are not counted.
        assert frame["peak_bytes"].diff().drop_nulls().min() > 0 or (frame["piece"] == "first").all()


def test_backward_takes_longer_than_forward_and_more_layers_longer_than_few():
    for module in ("vision", "llm"):
        frame = points_of("llava_ov_7b", module).measurements.filter(LAYERS)
        forward, backward = (frame.filter(pl.col("pass") == name)["seconds"] for name in ("forward", "backward"))
        assert (backward > 1.9 * forward).all()
        shallow, deep = (frame.filter(pl.col("num_layers") == depth)["seconds"] for depth in (1, 2))
        assert (deep > 1.5 * shallow).all()


def test_many_ranks_help_a_large_microbatch_more_than_a_small_one():
    one, two = (points_of("llava_ov_7b", "llm", tp).measurements.filter(LAYERS) for tp in (1, 2))
    share = {
        tokens: two.filter(num_tokens=tokens)["seconds"].sum() / one.filter(num_tokens=tokens)["seconds"].sum()
        for tokens in (64, 131_072)
    }
    assert 0.5 < share[131_072] < 0.75
    assert share[131_072] < share[64] < 1.1


@pytest.mark.parametrize(
    ("preset", "module", "tp", "reason"),
    [
        ("llava_ov_7b", "llm", 8, "28 attention heads and 4 key-value heads of llava_ov_7b; use one of 1, 2, 4"),
        ("llava_ov_7b", "llm", 0, "28 attention heads and 4 key-value heads of llava_ov_7b; use one of 1, 2, 4"),
    ],
)
def test_a_tp_that_does_not_divide_the_heads_names_those_that_do(preset, module, tp, reason):
    with pytest.raises(UserError, match=f"^tp={tp} does not divide {module}'s {reason}$"):
        points_of(preset, module, tp)


def test_products_reach_their_share_of_the_peak_where_they_are_large():
    h100 = load_device("h100-80g")
    rates = h100.matmul_flops_per_s(np.array([0.0, 1e5, h100.matmul_half_size, 1e7, 1e12])) / h100.peak_flops_per_s
    assert (np.diff(rates) > 0).all()
    assert rates[2] == pytest.approx(h100.matmul_share / 2)
    assert rates[-1] == pytest.approx(h100.matmul_share, rel=1e-3)


def test_a_device_that_is_not_known_names_those_that_are_and_the_way_to_add_one():
    with pytest.raises(UserError) as caught:
        load_device("h100")
    message = str(caught.value)
    assert "`cluster.device_model` is 'h100', a device of which no data sheet is known; " in message
    assert "choose one of a100-80g, a800-80g, h100-80g, h100-96g, h200-141g, or copy an entry of " in message
    assert "name the file in `cluster.device_models`" in message


ENTRY = """
mine:
  peak_flops_per_s: 200e12
  memory_bytes_per_s: 1.0e12
  memory_bytes: 48e9
  link_bytes_per_s: 64e9
  matmul_share: 0.7
  matmul_half_size: 500000
  attention_share: 0.4
  memory_share: 0.8
  link_share: 0.7
  launch_s: 0
"""


def test_a_file_of_ones_own_adds_devices_and_replaces_ours(tmp_path):
    path = tmp_path / "devices.yaml"
    path.write_text(ENTRY + ENTRY.replace("mine", "a100-80g"), encoding="utf-8")
    assert (load_device("mine", path).peak_flops_per_s, load_device("mine", path).launch_s) == (2e14, 0)
    assert load_device("a100-80g", path).memory_bytes == 48e9
    assert load_device("h100-80g", path) == load_device("h100-80g")
    with pytest.raises(UserError, match=r"choose one of .*h200-141g, mine, or copy"):
        load_device("yours", path)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("  link_share: 0.7\n", "", "`mine.link_share` is missing"),
        ("link_share: 0.7", "link_share: 70", "`mine.link_share` is 70; it must be a share above 0 to 1"),
        ("memory_bytes: 48e9", "memory_bytes: 48 GB", "`mine.memory_bytes` is '48 GB'; it must be a number above 0"),
        ("launch_s: 0", "launch_s: -1", "`mine.launch_s` is -1; it must be a number from 0"),
        ("mine:", "mine:\n  hop_s: -1", "`mine.hop_s` is -1; it must be a number from 0"),
        ("mine:", "mine:\n  allocator_share: 2", "`mine.allocator_share` is 2; it must be a share from 0 to 1"),
        ("memory_bytes: 48e9", "memory_bytes: -1", "`mine.memory_bytes` is -1; it must be"),
        ("memory_bytes: 48e9", "memory_bytes: true", "`mine.memory_bytes` is True; it must be"),
        ("memory_bytes: 48e9", "memory_bytes: .nan", "`mine.memory_bytes` is nan; it must be"),
        ("memory_bytes: 48e9", "memory_bytes: [1]", r"`mine.memory_bytes` is \[1\]; it must be"),
        ("launch_s", "launch_us", "`mine.launch_us` is not known; the keys are peak_flops_per_s, "),
        (ENTRY, "mine: fast", "`mine` must hold the keys peak_flops_per_s, "),
        (ENTRY, "- mine", "holds a list; it must hold one entry a device"),
        (ENTRY, "", "holds nothing; it must hold one entry a device"),
        (ENTRY, "mine: [\n", "cannot be read: while parsing a flow node .* line 2, column 1"),
    ],
)
def test_an_entry_that_is_no_device_names_the_file_and_the_key(old, new, reason, tmp_path):
    path = tmp_path / "devices.yaml"
    path.write_text(ENTRY.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError, match=f"{re.escape(str(path))}.*{reason}"):
        load_device("mine", path)


def test_a_file_that_is_not_there_says_so(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml \(`cluster\.device_models` names it\) cannot be read"):
        load_device("mine", tmp_path / "none.yaml")
