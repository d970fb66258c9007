"""Measuring runs the real layers: every piece has its columns, times are times, and bytes are those that live."""

import gc
import itertools
import sys
import weakref
from types import SimpleNamespace

import polars as pl
import pytest
import torch

from dflop.base import UserError
from dflop.config import ModelConfig
from dflop.costs import clocks
from dflop.costs.design import Point, fitted_depths
from dflop.costs.live_bytes import LiveBytes
from dflop.costs.measure import Bench
from dflop.costs.measured import POINT_KEYS
from dflop.models import load_model_spec

pytestmark = pytest.mark.usefixtures("little_cache")

COLUMNS = {*POINT_KEYS, "pass", "seconds", "attention_s", "peak_bytes", "saved_bytes", "repeat"}
PIECES = ("layers", "first", "last", "whole")


def make_bench(spec, tokenizer, module, precision="fp32", depth=4):
    return Bench(
        spec,
        module,
        depth,
        placeholder_ids=tokenizer.placeholder_ids,
        vocab_size=tokenizer.vocab_size(),
        device=torch.device("cpu"),
        precision=precision,
    )


@pytest.fixture(scope="module")
def benches(tiny_spec, tokenizer):
    yield {module: make_bench(tiny_spec, tokenizer, module) for module in ("vision", "llm")}
    gc.unfreeze()


def point_of(module, piece, size, *, depth=1, checkpointing=False, segments=None):
    if module != "llm":
        return Point(piece, depth, checkpointing, num_items=size)
    return Point(piece, depth, checkpointing, segments=segments or (size,), num_targets=size // 4)


def measure(bench, point):
    return pl.DataFrame(bench.measure(point, 0))


@pytest.mark.parametrize("module", ["vision", "llm"])
@pytest.mark.parametrize("piece", PIECES)
def test_every_piece_is_measured_forward_and_backward(benches, module, piece):
    frame = measure(benches[module], point_of(module, piece, 32 if module == "llm" else 3))
    assert set(frame.columns) == COLUMNS
    assert frame["pass"].to_list() == ["forward", "backward"]
    assert (frame["seconds"] > 0).all()
    assert (frame["peak_bytes"] >= frame["saved_bytes"]).all()
    assert frame["num_items"][0] == (3 if module == "vision" else 0)


def test_an_llms_layers_say_which_of_their_forwards_seconds_are_of_attention(benches):
    """Of one segment of 2,000 tokens it takes more than of forty."""
    one, forty = (
        measure(benches["llm"], point_of("llm", "layers", 2000, depth=4, segments=segments))
        for segments in ((2000,), (50,) * 40)
    )
    for frame in (one, forty):
        assert 0 < frame["attention_s"][0] < frame["seconds"][0]
        assert frame["attention_s"][1] is None
    assert one["attention_s"][0] > 2 * forty["attention_s"][0]
    others = [point_of("llm", "layers", 32, checkpointing=True), point_of("llm", "whole", 32)]
    for frame in (
        measure(benches["vision"], point_of("vision", "layers", 3)),
        *(measure(benches["llm"], own) for own in others),
    ):
        assert frame["attention_s"].null_count() == 2


@pytest.mark.parametrize("module", ["vision", "llm"])
def test_bytes_grow_with_the_load_and_the_depth_and_checkpointing_saves_most_of_them(benches, module):
    def saved(**arguments):
        return measure(benches[module], point_of(module, "layers", **arguments))["saved_bytes"][0]

    small, large = (8, 16) if module == "vision" else (256, 512)
    assert saved(size=large, depth=4) == pytest.approx(2 * saved(size=small, depth=4), rel=0.05)
    assert saved(size=small, depth=4) == pytest.approx(4 * saved(size=small, depth=1), rel=0.05)
    thin = saved(size=small, depth=4, checkpointing=True)
    assert thin < 0.3 * saved(size=small, depth=4)
    # The output of each layer is the next one's input; text has rotary cosines and sines beside.
    hidden_bytes, rotary_bytes = (4 * small * 96 * 36, 0) if module == "vision" else (4 * small * 128, 8 * small * 32)
    assert thin == pytest.approx(4 * hidden_bytes + rotary_bytes, rel=0.01)


def test_a_whole_stage_keeps_what_its_parts_keep(benches):
    for module, size in (("vision", 8), ("llm", 256)):
        kept = {
            piece: measure(benches[module], point_of(module, piece, size, depth=2))["saved_bytes"][0]
            for piece in PIECES
        }
        assert kept["whole"] == pytest.approx(kept["first"] + kept["layers"] + kept["last"], rel=0.1)


@pytest.mark.parametrize("segments", [(256,), (32,) * 8, (5, 200, 51)])
def test_segments_square_apart(benches, segments):
    frame = measure(benches["llm"], point_of("llm", "layers", 256, segments=segments))
    assert frame["num_tokens"][0] == 256
    assert frame["sum_sq_tokens"][0] == sum(length**2 for length in segments)
    # No matrix of tokens by tokens is kept: what backward needs is the same however the tokens are cut.
    whole = measure(benches["llm"], point_of("llm", "layers", 256))
    assert frame["saved_bytes"].equals(whole["saved_bytes"])


def test_parameters_are_counted_by_part(benches):
    for module, hidden, inner, attention in (
        ("vision", 96, 256, 4 * 96 * 96),
        ("llm", 128, 352, 2 * 128 * 128 + 2 * 128 * 64),
    ):
        sizes = dict(benches[module].parameter_sizes().select("part", "parameter_bytes").rows())
        matrices = attention + (2 if module == "vision" else 3) * hidden * inner
        assert sizes["layer"] == pytest.approx(4 * matrices, rel=0.02)
        whole = sum(4 * parameter.numel() for parameter in benches[module].stage.parameters())
        assert 4 * sizes["layer"] + sizes["first"] + sizes["last"] == whole
        if module == "llm":
            assert sizes["first"] == 1024 * 128 * 4
            assert sizes["last"] == pytest.approx(1024 * 128 * 4, rel=0.01)


def test_bytes_are_measured_in_the_first_repeat_alone(benches):
    point = point_of("vision", "layers", 2)
    first, second = (pl.DataFrame(benches["vision"].measure(point, repeat)) for repeat in (0, 1))
    assert first["peak_bytes"].null_count() == 0
    assert second["peak_bytes"].null_count() == second["saved_bytes"].null_count() == 2
    assert second["repeat"].to_list() == [1, 1]
    assert (second["seconds"] > 0).all()


def test_before_a_point_is_timed_the_device_is_loaded_where_its_clocks_depend_on_that(benches, monkeypatch):
    """As on a GPU, with tiny matrices."""
    seen = []
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args: seen.append(len(args[0])) or multiply(*args))
    monkeypatch.setattr(clocks, "_SIZE", 8)
    measure(benches["vision"], point_of("vision", "layers", 2))
    assert not seen  # a CPU needs no load
    monkeypatch.setitem(clocks._LOAD_S, "cpu", 1e-3)
    measure(benches["vision"], point_of("vision", "layers", 2))
    assert set(seen) == {8}


def test_clocks_are_those_of_the_driver_and_unknown_where_it_does_not_tell_them(monkeypatch):
    class DriverError(Exception):
        pass

    def refuse(_):
        raise DriverError

    monkeypatch.setitem(clocks._LOAD_S, "cuda", 0.0)
    assert clocks.sm_mhz(torch.device("cpu")) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert clocks.sm_mhz(torch.device("cuda")) is None
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=DriverError))
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda _: 1755)
    assert clocks.sm_mhz(torch.device("cuda")) == 1755.0
    monkeypatch.setattr(torch.cuda, "clock_rate", refuse)
    assert clocks.sm_mhz(torch.device("cuda")) is None


def test_what_a_process_holds_beside_its_tensors_grows_with_what_else_it_holds(benches):
    measure(benches["vision"], point_of("vision", "layers", 32, depth=4))
    before, share = benches["vision"].overhead()
    ballast = bytes(range(256)) * (1 << 19)
    after, _ = benches["vision"].overhead()
    assert after - before == pytest.approx(len(ballast), rel=0.1)
    assert 0 <= share < 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_optimisers_step_is_clocked(benches, monkeypatch, precision):
    """At a clock that takes half a second from one look to the next, fp32 touches 44 bytes of a value, bf16 50."""
    bench = benches["llm"]
    monkeypatch.setattr(bench, "_dtype", {"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    looks = itertools.count()
    monkeypatch.setattr(bench, "_mark", lambda: next(looks) / 2)
    per_value = {"fp32": 44, "bf16": 50}[precision]
    assert bench.update_bytes_per_s() == per_value * 2**21 / 0.5


def test_running_out_of_memory_is_a_measurement(benches, monkeypatch):
    bench = benches["llm"]

    def run_out(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(bench, "_bytes", run_out)
    frame = measure(bench, point_of("llm", "layers", 64))
    assert frame["pass"].to_list() == ["forward", "backward"]
    assert frame["seconds"].null_count() == frame["peak_bytes"].null_count() == 2

    def break_down(*_):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(bench, "_bytes", break_down)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        bench.measure(point_of("llm", "layers", 64), 0)


def test_what_ran_out_of_memory_is_given_back_before_the_next_point(benches, monkeypatch):
    bench, outputs = benches["llm"], []

    def run_out(run):
        (output,) = run.forward()
        outputs.append(weakref.ref(output))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(bench, "_timed", run_out)
    gc.disable()  # so that nothing is given back by chance
    try:
        rows = bench.measure(point_of("llm", "layers", 64), 1)
    finally:
        gc.enable()
    assert [row["seconds"] for row in rows] == [None, None]
    assert [output() for output in outputs] == [None]


def test_a_storage_that_is_given_up_while_its_tensor_stays_is_not_counted():
    with LiveBytes() as live:
        gathered = torch.zeros(1000)
        assert live.now == 4000
        gathered.untyped_storage().resize_(0)
        assert live.now == 0
        gathered.untyped_storage().resize_(4000)
        assert (live.now, live.peak) == (4000, 4000)
        del gathered
    assert live.now == 0
    resized = torch.zeros(10)
    resized.untyped_storage().resize_(0)  # outside, nothing is noted
    assert live.peak == 4000


def test_live_bytes_are_those_of_new_tensors_while_they_live():
    weight = torch.ones(8, 8, requires_grad=True)
    with LiveBytes() as live:
        hidden = torch.ones(5, 8) @ weight.t()  # 160 bytes twice; the transposed weight is a view
        assert live.now == 2 * 160
        doubled = hidden * 2
        assert live.now == 3 * 160
        doubled.add_(1)
        assert live.now == 3 * 160
        del doubled
        assert live.now == 2 * 160
    assert live.peak == 3 * 160


@pytest.mark.parametrize(
    ("family", "module"),
    [
        *((family, module) for family in ("internvl", "qwen2_5_vl", "qwen3_vl") for module in ("vision", "llm")),
        *(("qwen2_5_omni_thinker", module) for module in ("vision", "audio", "llm")),
    ],
)
def test_a_family_is_measured_piece_by_piece(tokenizer, family, module):
    spec = load_model_spec(ModelConfig(family=family))
    size = tokenizer.vocab_size()
    assert size <= spec.hf_config["text_config"]["vocab_size"]
    one, deepest = fitted_depths(spec.module(module).num_layers)
    bench = make_bench(spec, tokenizer, module, depth=deepest)
    kept = {}
    for piece, depth in (("first", 0), ("last", 0), ("layers", one), ("layers", deepest), ("whole", 2), ("whole", 3)):
        rows = bench.measure(point_of(module, piece, 6, depth=depth), 0)
        assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 for row in rows)
        if family in ("qwen2_5_vl", "qwen3_vl") and module == "vision":
            assert [row["sum_sq_tokens"] for row in rows] == [36, 36]  # one picture of 2 x 3 items
        kept[piece, depth] = rows[0]["saved_bytes"]
    # What features of earlier layers need is with the last part: a further layer adds the same wherever it is.
    a_layer = (kept["layers", deepest] - kept["layers", one]) / (deepest - one)
    assert kept["whole", 3] - kept["whole", 2] == pytest.approx(a_layer, rel=0.05)
    parts = kept["first", 0] + kept["layers", one] + a_layer + kept["last", 0]
    assert kept["whole", 2] == pytest.approx(parts, rel=0.1)
    gc.unfreeze()


def test_gradients_of_features_wait_while_later_layers_are_computed_again(tokenizer):
    bench = make_bench(load_model_spec(ModelConfig(family="qwen3_vl")), tokenizer, "vision")
    first, layers, whole = (
        bench.measure(point_of("vision", piece, 60, depth=3, checkpointing=piece != "first"), 0)[0]
        for piece in ("first", "layers", "whole")
    )
    # What the last part kept is free by then.
    assert whole["peak_bytes"] == pytest.approx(first["saved_bytes"] + layers["peak_bytes"], rel=0.03)
    gc.unfreeze()


def test_a_family_that_cannot_be_built_yet_is_refused_before_anything_is_measured(tokenizer, made_up):
    spec = load_model_spec(ModelConfig(family=made_up))
    with pytest.raises(UserError, match="which cannot be measured or trained yet"):
        make_bench(spec, tokenizer, "llm")


def test_a_point_for_which_the_allocator_has_no_room_ends_its_share_and_not_the_profile(benches, monkeypatch):
    bench, tried = benches["vision"], []

    def once(point) -> None:
        tried.append(point)
        if len(tried) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench, "_measured", ["first", "second", "third"])
    monkeypatch.setattr(bench, "_once", once)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 115)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 100)
    assert bench._reserved_share() == pytest.approx(0.15)
    assert tried == ["first", "second"]
