"""Costs measured for real: gloo ranks on this machine, alone and sharing a module."""

import json

import polars as pl
import pytest
from processes import run_command

from dflop.costs import fit_costs
from dflop.costs.design import LoadBounds
from dflop.costs.measured import POINT_KEYS

pytestmark = pytest.mark.serial

BOUNDS = LoadBounds(num_items=(1, 8), num_tokens=(32, 256), segment_tokens=(32, 128), target_share=(0.1, 0.5))

ON_AN_UNKNOWN_DEVICE = {
    "costs": {"source": "analytic"},
    "cluster": {"device_model": "h900"},
    "train": {"precision": "bf16"},
}


def arguments_of(tmp_path, module: str, tp: int, **sections) -> list[str]:
    """Of a command on two ranks with hardly any time, which writes to `tmp_path`."""
    costs = {"repeats": 2, "time_budget_s": 0.1, "tp_sizes": [tp]}
    config = json.dumps({"cluster": {"devices_per_node": 2}, "costs": costs} | sections)
    bounds = tmp_path / "load_bounds.json"
    bounds.write_text(BOUNDS.to_json())
    out = tmp_path / f"{module}.tp{tp}.parquet"
    return [
        *("profile-costs", "--config", config, "--module", module),
        *("--tp", str(tp), "--bounds", str(bounds), "--out", str(out)),
    ]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder with what was measured of both modules, alone and shared by two ranks."""
    folder = tmp_path_factory.mktemp("costs")
    for module in ("vision", "llm"):
        for tp in (1, 2):
            code = run_command(arguments_of(folder, module, tp), folder / "log")
            assert code == 0, (folder / "log").read_text()
    return folder


def frames_of(folder, module, tp) -> list[pl.DataFrame]:
    return [pl.read_parquet(folder / f"{module}.tp{tp}{kind}.parquet") for kind in ("", ".parameters", ".device")]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("module", ["vision", "llm"])
def test_a_module_is_measured_over_the_datas_range_however_little_time_there_is(measured, module, tp):
    rows, parameters, device = frames_of(measured, module, tp)
    assert set(rows.columns) == {*POINT_KEYS, "pass", "seconds", "attention_s", "peak_bytes", "saved_bytes", "repeat"}
    assert (rows["seconds"] > 0).all()
    assert set(rows["piece"]) == {"layers", "first", "last", "whole"}
    load = "num_tokens" if module == "llm" else "num_items"
    assert (rows[load].min(), rows[load].max()) == getattr(BOUNDS, load)
    assert device.select("module", "tp", "num_ranks", "threads").row(0) == (module, tp, 2, 1)
    tables = fit_costs(rows, parameters)
    assert tables["fit_error"]["num_held_out"].min() >= 1
    assert (tables["fit_error"]["median_error"] < 2).all()


@pytest.mark.parametrize("module", ["vision", "llm"])
def test_ranks_that_share_a_module_hold_half_of_it_each(measured, module):
    alone, shared = (dict(frames_of(measured, module, tp)[1].select("part", "parameter_bytes").rows()) for tp in (1, 2))
    # Norms are whole on both, and so is the patches' embedding.
    for part in ("layer", "last") if module == "vision" else ("layer", "first", "last"):
        assert shared[part] == pytest.approx(alone[part] / 2, rel=0.03), part


@pytest.mark.parametrize(
    ("module", "tp", "sections", "said"),
    [
        ("llm", 3, {}, "tp=3 does not divide llm's 4 attention heads and 2 key-value heads of tiny; use one of 1, 2"),
        ("vision", 4, {}, "tp=4: a node has 2 devices (`cluster.devices_per_node`), and tensor parallelism does not"),
        ("llm", 1, {"cluster": {"device": "cuda"}}, "(`cluster.device` is cuda), but torch finds 0 GPU(s) here"),
        ("llm", 1, {"model": {"path": "/nowhere"}}, "`model.path` /nowhere is not a Hugging Face checkpoint directory"),
        ("llm", 1, {"model": {"tokenizer": "/nowhere"}}, "/nowhere is not a tokenizer directory"),
        ("llm", 1, ON_AN_UNKNOWN_DEVICE, "`cluster.device_model` is 'h900', a device of which no data sheet is known"),
    ],
)
def test_what_cannot_be_measured_is_one_line_with_the_way_out(tmp_path, module, tp, sections, said):
    code = run_command(arguments_of(tmp_path, module, tp, **sections), tmp_path / "log")
    printed = (tmp_path / "log").read_text()
    assert code == 2, printed
    assert said in printed
    assert "Traceback" not in printed
    if sections.get("cluster", {}).get("device") != "cuda":  # only the ranks find out how many GPUs there are
        assert printed.count("\n") == 1
    assert not list(tmp_path.glob("*.parquet"))
