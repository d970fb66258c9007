"""`dflop check-model`: stages are as transformers has the model, and what is broken on purpose is found and named."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from transformers import AttentionInterface

from dflop.checks.model_arithmetic import CheckedModel, check_model
from dflop.cli import cli
from dflop.config import ModelConfig, load_config
from dflop.loading import dataset as loading
from dflop.models import load_model_spec
from dflop.models.attention import PACKED, packed_attention
from dflop.models.microbatch import SegmentEnds
from dflop.models.qwen2_5_vl import Qwen25VlShapes
from dflop.plan import Grid, Plan

FAMILIES = ("llava_onevision", "internvl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni_thinker")


def plan_of(family: str) -> Plan:
    """Every module in two stages."""
    names = [module.name for module in load_model_spec(ModelConfig(family=family)).modules]
    grids = (Grid(module=name, num_ranks=2, pp=2, rank_offset=2 * place) for place, name in enumerate(names))
    return Plan(placement="disjoint", grids=tuple(grids), num_microbatches=2)


@pytest.fixture(scope="module")
def run_of(demo_data, tmp_path_factory):
    """`run_of(family)`: the folder of a run of its tiny model on the demo's pictures and clips."""
    made: dict[str, Path] = {}

    def run(family: str) -> Path:
        if family not in made:
            manifests = [demo_data.train_manifest, demo_data.audio_manifest]
            made[family] = _make_run(tmp_path_factory.mktemp(family), family, manifests)
        return made[family]

    return run


def _make_run(folder: Path, family: str, manifests: list[Path]) -> Path:
    config = {
        "run": "checked",
        "data": {"sources": [{"path": str(path)} for path in manifests]},
        "model": {"family": family, "preset": "tiny"},
    }
    text = json.dumps(config)
    (folder / "config.yaml").write_text(text)
    (folder / "plan.yaml").write_text(yaml.safe_dump({"plan": plan_of(family).to_dict()}))
    shards = CliRunner().invoke(cli, ["list-shards", "--config", text], catch_exceptions=False).stdout.splitlines()
    for shard in (line.split("\t")[0] for line in shards):
        out = str(folder / "shapes" / f"{shard}.parquet")
        profile = ["profile-shapes", "--config", text, "--shard", shard, "--out", out, "--workers", "1"]
        CliRunner().invoke(cli, profile, catch_exceptions=False)
    merge = ["merge-shapes", "--config", text, "--shapes", str(folder / "shapes")]
    CliRunner().invoke(cli, [*merge, "--out", str(folder / "shapes.duckdb")], catch_exceptions=False)
    return folder


@pytest.fixture
def checked(run_of):
    """`checked(family)`: what is found of five samples."""

    def check(family: str) -> CheckedModel:
        folder = run_of(family)
        config = load_config(str(folder / "config.yaml"))
        return check_model(config, plan_of(family), folder / "shapes.duckdb", num_samples=5, precision="fp64")

    return check


# Their layers are those of LLaVA's and of Omni's.
ALIKE = ("internvl", "qwen2_5_vl")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.exhaustive if name in ALIKE else ()) for name in FAMILIES]
)
def test_packed_samples_are_those_of_transformers_one_by_one(family, checked):
    found = checked(family)
    assert not found.faults
    kinds = {"text", "image", "multi_image", "video"} | ({"audio"} if "omni" in family else set())
    assert {sample.modality for sample in found.samples} == kinds
    assert max(*found.alone[:3], *found.packed[:3]) < 1e-10
    assert set(found.num_stages.values()) == {2}


def _sees_all(*args, segment_ends, **kwargs):
    return packed_attention(*args, segment_ends=SegmentEnds(segment_ends.ends[-1:]), **kwargs)


# The test of the command finds it in Qwen2.5-VL.
@pytest.mark.parametrize("family", ["llava_onevision", pytest.param("qwen2_5_vl", marks=pytest.mark.exhaustive)])
def test_attention_beyond_a_sample_is_found(family, checked, monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, PACKED, _sees_all)
    found = checked(family)
    # Attention of the LLM is causal: the first sample sees none, and each other one all before it.
    names = [sample.sample_id for sample in found.samples]
    if "qwen" not in family:  # whose pictures see each other as well
        assert [sample.sees for sample in found.samples] == [tuple(names[:place]) for place in range(len(names))]
        assert max(found.alone[:3]) < 1e-10
    assert found.packed.loss > 1e-6
    assert any("packed samples see each other" in fault for fault in found.faults)


def test_positions_that_run_on_from_sample_to_sample_are_found(checked, monkeypatch):
    """Rotary positions count by their distances alone, so that no loss would tell."""
    segments_of = loading.segments_of

    def running_on(llm_tokens, group=None):
        _, ends = segments_of(llm_tokens)
        return torch.arange(ends.ends[-1]), ends

    monkeypatch.setattr(loading, "segments_of", running_on)
    found = checked("llava_onevision")
    assert [sample.has_positions_packed for sample in found.samples] == [True, False, False, False, False]
    assert all(sample.has_positions_alone for sample in found.samples)
    assert "packed, are not those of transformers" in found.faults[0]


def test_positions_of_pictures_that_are_counted_like_text_are_found(checked, monkeypatch):
    def as_text(self, kind, count, frame_s):
        return np.tile(np.arange(count.num_tokens), (3, 1)), count.num_tokens

    monkeypatch.setattr(Qwen25VlShapes, "run_positions", as_text)
    found = checked("qwen2_5_vl")
    for sample in found.samples:
        assert sample.has_positions_alone == sample.has_positions_packed == (sample.modality == "text")
        assert not sample.sees
    assert found.alone.loss > 1e-6
    assert len(found.faults) == 4


def test_the_command_says_what_it_found(run_of, monkeypatch):
    folder = run_of("qwen2_5_vl")
    command = ["check-model", str(folder), "--samples", "4"]
    result = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert result.exit_code == 0
    assert "stages: vision in 2, llm in 2; fp64" in result.output
    assert "Packed samples do not see each other" in result.output
    monkeypatch.setitem(AttentionInterface._global_mapping, PACKED, _sees_all)
    broken = CliRunner().invoke(cli, [*command, "--precision", "fp32"])
    assert broken.exit_code != 0
    assert "packed samples see each other" in str(broken.exception)
