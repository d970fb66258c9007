"""What people and files are told of a search: the table, plan.yaml and the explanation, held against recorded ones."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import yaml
from spaces import LITTLE_GIB, make_config, with_quick_tp_2

from dflop.comparison import price_baselines
from dflop.costs.fitted import LoadRange
from dflop.plan import load_plan
from dflop.plan.layout_key import LayoutKey
from dflop.search import (
    Baseline,
    candidates_frame,
    describe_choice,
    explain_choice,
    faster_baselines_note,
    read_baselines,
)
from dflop.shapes import SampleShapes

RECORDED = Path(__file__).parent / "recorded"
PASSES = ("forward", "backward")
CONTRACT = [
    *("rank", "placement", "vision_tp", "vision_pp", "vision_dp", "llm_tp", "llm_pp", "llm_dp"),
    *("num_microbatches", "checkpointing", "schedule", "step_s", "idle"),
    *("vision_memory_bytes", "llm_memory_bytes", "bottleneck"),
]


@pytest.fixture(scope="module")
def explain(tiny_spec, costs, samples, search):
    def run(config, recorded=samples, costs=costs) -> str:
        found = search(config, costs=costs, samples=recorded, compares=True)
        return explain_choice(found, price_baselines(config, tiny_spec, costs, recorded), config, costs)

    return run


@pytest.fixture(scope="module")
def recorded_samples() -> SampleShapes:
    """Sixty samples with a few large ones, kept as a table so that no generator decides what is expected."""
    table = pl.read_csv(RECORDED / "samples.csv")
    return SampleShapes(
        sample_id=np.array([f"s{row}" for row in range(len(table))], dtype=object),
        source=np.full(len(table), "recorded", dtype=object),
        row=np.arange(len(table)),
        encoders=("vision",),
        num_items=table.select("num_items").to_numpy(),
        kept_tokens=table.select("kept_vision_tokens").to_numpy(),
        **{name: table[name].to_numpy() for name in ("llm_tokens", "target_tokens")},
    )


def test_the_table_has_the_promised_columns_first_and_in_order(search):
    found = search(make_config(6, 8, num_nodes=2))
    frame = candidates_frame(found)
    assert frame.columns[: len(CONTRACT)] == CONTRACT
    assert frame["rank"].to_list() == list(range(1, len(found.candidates) + 1))
    assert frame["step_s"].to_list() == [own.step_s for own in found.candidates]
    ranks = pl.col("llm_dp") * pl.col("llm_pp") * pl.col("llm_tp")
    encoders = pl.col("vision_dp") * pl.col("vision_pp") * pl.col("vision_tp")
    disjoint, colocated = (frame.filter(placement=name) for name in ("disjoint", "colocated"))
    assert disjoint.select((ranks + encoders == 6).all()).item()
    assert colocated.select(((ranks == 6) & (encoders == 6)).all()).item()
    assert all(sum(own) == 4 for own in frame["llm_layers"].drop_nulls())


def test_the_file_of_the_choice_loads_as_the_best_plan_with_its_prediction(search, costs, tmp_path):
    config, costs = make_config(4, 8, memory_gib=LITTLE_GIB), with_quick_tp_2(costs)
    found = search(config, costs=costs)
    path = tmp_path / "plan.yaml"
    path.write_text(describe_choice(found, [], config, costs))
    assert load_plan(path) == found.best.plan
    said = yaml.safe_load(path.read_text())
    assert said["predicted"]["step_s"] == pytest.approx(found.best.step_s, rel=1e-5)
    assert said["predicted"]["samples_per_s"] == pytest.approx(8 / found.best.step_s, rel=1e-3)
    assert said["costs"] == "cpu, measured"
    assert found.best.bottleneck in said["why"]


def test_more_memory_is_said_to_help_where_it_does(explain, search):
    config = make_config(4, 8)
    assert "more memory per device" not in explain(config)
    needed = [max(own.memory_bytes.values()) / 2**30 for own in search(config).candidates]
    said = explain(make_config(4, 8, memory_gib=0.98 * min(needed[:3])))
    assert "next: with " in said
    assert "more memory per device" in said


def test_a_batch_that_replicas_cannot_share_equally_is_noted(explain):
    pins = {"placement": "disjoint", "llm": {"dp": 3}}
    note = (
        "note: 8 samples do not divide by 3 LLM replicas: 2 of them get 3, the others 2; `train.global_batch_size: 9`"
    )
    assert note in explain(make_config(4, 8, fixed=pins))
    assert "note:" not in explain(make_config(4, 9, fixed=pins))


def test_baselines_stand_beside_the_plan_and_the_faster_of_them_are_said(search, tiny_spec, costs, samples, tmp_path):
    config = make_config(4, 8)
    found = search(config)
    baselines = price_baselines(config, tiny_spec, costs, samples)
    path = tmp_path / "plan.yaml"
    path.write_text(describe_choice(found, baselines, config, costs))
    said = read_baselines(path)
    assert said == {own.name: f"{own.step_s / found.best.step_s:.3f}x as long" for own in baselines}
    for own, written in zip(baselines, yaml.safe_load(path.read_text())["baselines"], strict=True):
        least, most = written["over_batches"]
        assert least - 1e-3 <= own.step_s / found.best.step_s <= most + 1e-3
    slower, faster = (
        [Baseline(name=baselines[0].name, priced=replace(found.best, steps_s=(factor * found.best.step_s,)))]
        for factor in (0.999, 0.5)
    )
    # Scheduled batches have chosen a plan that is not the fastest by price.
    found = replace(found, chosen=replace(found.best, steps_s=(1.02 * found.best.step_s,)))
    assert faster_baselines_note(found, slower) == ""
    assert faster_baselines_note(found, faster).endswith(f"{baselines[0].name} 0.50x as long")


def test_a_plan_that_is_bound_by_memory_says_that_it_recomputes(search, costs, monkeypatch):
    config = make_config(4, 8, memory_gib=0.0095)
    said = yaml.safe_load(describe_choice(search(config), [], config, costs))
    for module in ("best_first", "explain"):
        monkeypatch.setattr(f"dflop.search.{module}.MORE_GIB", 0.005)
    with_more = search(config)
    more = yaml.safe_load(describe_choice(with_more, [], config, costs))["next"]
    assert more.endswith(f"; with 0.005 GiB more, the fastest plan here would take {with_more.with_more:.2f}x as long")
    assert with_more.with_more < 1
    assert said["plan"]["checkpointing"]
    assert "bound by memory (it recomputes some layers: kept, they would not fit into 0.0095 GiB)" in said["why"]


def test_a_plan_whose_microbatches_are_too_small_to_take_less_time_is_bound_by_launches(search, costs):
    config = make_config(4, 8)
    found = search(config)
    bound = replace(found, candidates=[replace(found.best, bottleneck="llm compute")], chosen=None)
    passes = {
        (*key, name): costs.times[*key, name] for key in [("llm", LayoutKey(), "layer", False)] for name in PASSES
    }
    slow = replace(
        costs,
        times=costs.times | {key: form.raised_by(1.0) for key, form in passes.items()},
        ranges={("llm", LayoutKey(), False): LoadRange((0, 64, 4096, 4), (0, 1e6, 1e9, 9e4))},
    )
    told = yaml.safe_load(describe_choice(bound, [], config, slow))["next"]
    own = f"{found.best.mean_load['llm']:,.0f}"
    assert re.search(
        rf"bound by launches: below [\d,]+ tokens a microbatch of llm takes the same time, .* {own};", told
    )
    assert "launches" not in describe_choice(bound, [], config, costs)


def test_baselines_that_do_not_fit_are_named(explain):
    """Within what checkpointing and a disjoint encoder need, a device cannot hold the whole model."""
    said = explain(make_config(4, 8, memory_gib=0.0095))
    assert "    nothing fits     monolithic, random batches (Megatron-style)" in said


@pytest.mark.parametrize("memory_gib", [64, 0.016])
def test_a_recorded_case_is_told_in_the_recorded_words(explain, search, tiny_spec, costs, recorded_samples, memory_gib):
    """Six devices on two nodes. After a change that is meant, look at the difference and write the files anew."""
    config = make_config(6, 12, num_nodes=2, memory_gib=memory_gib)
    told = {
        f"explanation_{memory_gib:g}_gib.txt": explain(config, recorded_samples) + "\n",
        f"plan_{memory_gib:g}_gib.yaml": describe_choice(
            search(config, samples=recorded_samples),
            price_baselines(config, tiny_spec, costs, recorded_samples),
            config,
            costs,
        ),
    }
    for name, text in told.items():
        assert text == (RECORDED / name).read_text(encoding="utf-8"), name
