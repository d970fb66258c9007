"""Measuring runs the real layers: every point has its columns, times are times, and saved bytes grow with the load."""

import gc

import polars as pl
import pytest
import torch

from dflop.costs import fit_costs, measure
from dflop.costs.model import FEATURES, column_of
from dflop.errors import UserError
from dflop.models import internvl

COLUMNS = ("module", "tp", "num_layers", *FEATURES, "pass", "seconds", "peak_bytes", "repeat")


@pytest.fixture(scope="module")
def measured(tiny_spec, tokenizer):
    """Both modules at a few small sizes."""
    gc.freeze()  # measuring collects garbage at each point, for which torch and transformers are a large heap
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_NUM_ITEMS", (1, 4, 7, 12, 15))
        patch.setattr(measure, "_NUM_TOKENS", (32, 128, 256))
        both = {
            module: measure.measure_module(
                tiny_spec,
                module,
                placeholder_ids=tokenizer.placeholder_ids,
                vocab_size=tokenizer.vocab_size,
                repeats=1,
                device=torch.device("cpu"),
                precision="fp32",
            )
            for module in ("vision", "llm")
        }
    gc.unfreeze()
    return both


def test_every_point_is_measured_forward_and_backward_at_two_depths(measured):
    frame = measured["llm"].measurements
    assert set(COLUMNS) == set(frame.columns)
    assert len(frame) == 2 * 2 * 3 * 3
    assert set(frame["num_layers"]) == {1, 4}
    assert set(frame["pass"]) == {"forward", "backward"}
    assert (frame["seconds"] > 0).all()
    assert (frame["num_items"] == 0).all()
    vision = measured["vision"].measurements
    assert set(vision["num_items"]) == {1, 4, 7, 12, 15}
    assert (vision["num_tokens"] == 0).all()


def test_segments_square_apart(measured):
    frame = measured["llm"].measurements
    whole = frame.filter(pl.col("num_tokens") == 256)["sum_sq_tokens"].unique().sort().to_list()
    assert whole == [8 * 32**2, 4 * 64**2, 256**2]


@pytest.mark.parametrize(("module", "load"), [("vision", "num_items"), ("llm", "num_tokens")])
def test_what_autograd_keeps_grows_with_the_load_and_the_depth(measured, module, load):
    frame = measured[module].measurements.filter(pl.col("pass") == "forward")
    if module == "llm":
        frame = frame.filter(pl.col("sum_sq_tokens") == pl.col("num_tokens") ** 2)
    for depth in (1, 4):
        sizes = frame.filter(pl.col("num_layers") == depth).sort(load)["peak_bytes"].to_list()
        assert sizes == sorted(set(sizes))
        assert sizes[0] > 10_000
    deep, shallow = (frame.filter(pl.col("num_layers") == depth).sort(load)["peak_bytes"] for depth in (4, 1))
    assert (deep > 1.5 * shallow).all()


def test_parameters_are_counted_by_layer_and_rest(measured, tiny_spec):
    for module, attention in (("vision", 4 * 96 * 96), ("llm", 2 * 128 * 128 + 2 * 128 * 64)):
        sizes = {row["part"]: row for row in measured[module].parameters.iter_rows(named=True)}
        hidden, inner = (96, 256) if module == "vision" else (128, 352)
        matrices = attention + (2 if module == "vision" else 3) * hidden * inner
        assert sizes["layer"]["parameter_bytes"] == pytest.approx(4 * matrices, rel=0.02)
        positions = tiny_spec.rules.tokens_per_item if module == "vision" else 1
        load = "num_items" if module == "vision" else "num_tokens"
        assert sizes["layer_input"][column_of(load, "bytes")] == 4 * hidden * positions
        others = [column_of(feature, "bytes") for feature in FEATURES if feature != load]
        assert all(sizes["layer_input"][column] == 0 for column in others)
    embedding_and_head = 2 * 1024 * 128 * 4
    llm = {row["part"]: row["parameter_bytes"] for row in measured["llm"].parameters.iter_rows(named=True)}
    assert llm["rest"] == pytest.approx(embedding_and_head, rel=0.02)


def test_measurements_can_be_fitted(measured):
    tables = fit_costs(
        pl.concat([part.measurements for part in measured.values()]),
        pl.concat([part.parameters for part in measured.values()]),
    )
    assert set(tables["time_model"]["module"]) == {"vision", "llm"}
    assert tables["memory_model"].filter(pl.col("part") == "layer")["per_token_bytes"].max() > 1000


def test_a_size_that_takes_too_long_is_the_last_once_there_are_enough(tiny_spec, tokenizer, monkeypatch):
    monkeypatch.setattr(measure, "_NUM_ITEMS", (1, 2, 3, 4))
    monkeypatch.setattr(measure, "_LONGEST_RUN_S", 0.0)
    monkeypatch.setattr(measure, "_LEAST_SIZES", 2)
    frame = measure.measure_module(
        tiny_spec,
        "vision",
        placeholder_ids=tokenizer.placeholder_ids,
        vocab_size=tokenizer.vocab_size,
        repeats=1,
        device=torch.device("cpu"),
        precision="fp64",
    ).measurements
    assert set(frame["num_items"]) == {1, 2}


def test_bytes_are_counted_once_a_storage_and_without_parameters():
    layer = torch.nn.Linear(8, 8)
    batch = torch.ones(5, 8, requires_grad=True)  # so that the layer's weight is needed, too

    def forward():
        hidden = layer(batch)
        return (hidden * hidden).sum(), None

    # The input of the layer and its output, which the square keeps twice.
    assert measure._saved_bytes(forward, layer) == 4 * (5 * 8 + 5 * 8)


def test_a_family_that_cannot_be_built_yet_is_refused_before_anything_is_measured(tokenizer):
    spec = internvl.make_spec("tiny", internvl.PRESETS["tiny"])
    with pytest.raises(UserError, match="its shapes can be profiled; measuring and training it is not possible yet"):
        measure.measure_module(
            spec,
            "llm",
            placeholder_ids=tokenizer.placeholder_ids,
            vocab_size=tokenizer.vocab_size,
            repeats=1,
            device=torch.device("cpu"),
            precision="fp32",
        )
