"""Compiled layers compute what eager ones do, and are compiled once for any number of tokens and samples."""

import itertools
import re
import sys
from collections.abc import Sequence
from copy import deepcopy
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor_config
from transformers import AttentionInterface

from dflop.costs.design import Point
from dflop.costs.made_up import MadeUpRuns
from dflop.costs.measure import Bench
from dflop.models import compile_log, family_of, load_runtime
from dflop.models.attention import PACKED, packed_attention
from dflop.models.compilation import compile_layers, compiles_layers
from dflop.models.compile_log import Stopwatch, compiled_so_far, why_not_compiled
from dflop.models.microbatch import EncoderBatch, MediumLayout, SegmentEnds, TextBatch
from dflop.models.stages import LlmStage, Stage
from dflop.plan.trained import TrainedSet

pytestmark = pytest.mark.usefixtures("little_cache")

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NUM_LAYERS = 2
# A backend for tests of what torch.compile traces, and not of what a compiler makes of it.
TRACED = "eager"


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    """What compiling sets for the whole process is what it was for the tests that follow."""
    monkeypatch.setitem(AttentionInterface._global_mapping, PACKED, packed_attention)
    with torch._dynamo.config.patch(suppress_errors=False, recompile_limit=8):
        yield
    torch._dynamo.reset()


def build(module: str, num_layers: int = NUM_LAYERS, **settings: object) -> Stage:
    family = family_of("llava_onevision")
    runtime = load_runtime(family.name)
    spec = family.make_spec("tiny", deepcopy(family.presets["tiny"]), {})
    spec = runtime.with_depth(spec, module, num_layers)
    config = runtime.make_config(spec, {"image": 1001, "video": 1002, "audio": 1003}, 1024)
    return with_hooks(
        runtime.build_stage(config, module, layers=range(num_layers), seed=2, dtype=torch.float64, **settings)
    )


def with_hooks(stage: Stage) -> Stage:
    """The stage with hooks behind its gradients, as those in which training begins to sum them."""
    for parameter in (own for own in stage.parameters() if own.requires_grad):
        parameter.register_post_accumulate_grad_hook(lambda own: None)
    return stage


def text_of(lengths: Sequence[int]) -> TextBatch:
    num_tokens, starts = sum(lengths), [sum(lengths[:place]) for place in range(len(lengths))]
    ids = torch.randint(1000, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
    return TextBatch(
        token_ids=ids,
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        segment_ends=SegmentEnds([*starts[1:], num_tokens]),
        feature_positions=(),
        target_positions=torch.arange(0, num_tokens - 1, 2),
        target_ids=ids[1::2],
    )


def passed(stage: Stage, size: Sequence[int]) -> list[torch.Tensor]:
    """What comes out of a stage, and all of its gradients."""
    stage.zero_grad()
    if isinstance(stage, LlmStage):
        text = text_of(size)
        output = stage(stage.embed(text, []), text)
    else:
        side = stage.hf.config.vision_config.image_size
        items = torch.randn(sum(size), 3, side, side, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        media = tuple((MediumLayout("video", count, side, side),) for count in size)
        output = (
            torch.cat(stage(EncoderBatch(items=items, media=media, kept_tokens=(1000,) * len(size)))).square().sum()
        )
    output.backward()
    return [output, *(parameter.grad for parameter in stage.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize(
    ("module", "settings", "sizes"),
    [
        pytest.param("llm", {}, [[30, 11], [9, 50, 3], [64]], marks=pytest.mark.exhaustive),
        # One layer is recomputed, one but for attention, and one is not.
        (
            "llm",
            {"num_layers": 3, "num_recomputed": 2, "num_attention_kept": 1},
            [[30, 11], [9, 50, 3], [64]],
        ),
        pytest.param(
            *("vision", {"num_layers": 1}, [[2, 1], [5], [1, 1, 2]]),
            marks=pytest.mark.skipif(
                torch.__version__ < (2, 12), reason="torch 2.11 compiles no attention of fp64 for CPUs"
            ),
        ),
    ],
)
def test_compiled_layers_have_the_gradients_of_eager_ones_whatever_the_size(module, settings, sizes):
    eager, compiled = (build(module, **settings) for _ in range(2))
    torch._dynamo.utils.counters.clear()
    compile_layers(compiled)
    num_graphs = []
    for size in sizes:
        for theirs, ours in zip(passed(eager, size), passed(compiled, size), strict=True):
            scale = max(float(theirs.detach().abs().max()), 1e-6)
            assert float((ours - theirs).detach().abs().max()) < 1e-10 * scale
        num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert num_graphs[0] > 0
    assert num_graphs == [num_graphs[0]] * len(sizes)


def products_in(module: str, size: Sequence[int], num_recomputed: int) -> int:
    """How many matrix products a pass through compiled layers and back computes."""
    stage, computed = build(module, num_layers=1, num_recomputed=num_recomputed), []

    def counted(graph, _):
        names = [getattr(node.target, "overloadpacket", None) for node in graph.graph.nodes]
        products = [name for name in names if name in (torch.ops.aten.mm, torch.ops.aten.addmm)]

        def run(*args):
            computed.extend(products)
            return graph(*args)

        return make_boxed_func(run)

    for name in stage.layer_names:
        for own in stage.hf.get_submodule(name).modules():
            if isinstance(own, nn.Linear):
                own.forward = partial(computed_eagerly, computed, own.forward)
    compile_layers(stage, aot_autograd(fw_compiler=counted, bw_compiler=counted))
    passed(stage, size)
    torch._dynamo.reset()
    return len(computed)


def computed_eagerly(computed: list, forward, hidden):
    made = forward(hidden)
    if not torch.compiler.is_compiling():
        computed.append(forward)
    return made


@pytest.mark.parametrize(
    ("module", "size", "num_products"),
    [("llm", [30, 11], 7), pytest.param("vision", [2, 1], 6, marks=pytest.mark.exhaustive)],
)
def test_the_last_product_of_a_compiled_layer_is_not_computed_again(module, size, num_products):
    none, some = (products_in(module, size, num_recomputed) for num_recomputed in (0, 1))
    not_counted = 2  # in the backward of a product that is not compiled
    assert some - none + not_counted == num_products - 1


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("llava_onevision", "vision"),
        ("llava_onevision", "llm"),
        ("internvl", "vision"),
        ("qwen2_5_vl", "vision"),
        pytest.param("qwen3_vl", "vision", marks=pytest.mark.exhaustive),
        ("qwen2_5_omni_thinker", "audio"),
    ],
)
def test_layers_of_bf16_with_gradients_in_fp32_are_compiled_whole_but_for_packed_attention(
    monkeypatch, tokenizer, family, module
):
    # What torch.compile traces is what counts here, and not what its compiler makes of it.
    monkeypatch.setattr("dflop.costs.measure.compile_layers", partial(compile_layers, backend=TRACED))
    own = family_of(family)
    spec, is_llm = own.make_spec("tiny", deepcopy(own.presets["tiny"]), {}), module == "llm"
    bench = Bench(
        spec,
        module,
        NUM_LAYERS,
        placeholder_ids=tokenizer.placeholder_ids,
        vocab_size=tokenizer.vocab_size(),
        device=CPU,
        precision="bf16",
        is_compiled=True,
    )
    with_hooks(bench.stage)
    of_layers = [own for name, own in bench.stage.named_parameters() if own.ndim > 1 and own.requires_grad]
    before = [own.grad for own in of_layers]
    torch._dynamo.utils.counters.clear()
    for size in (3, 5):
        bench.measure(Point("whole", NUM_LAYERS, False, 0 if is_llm else size, (9, size) if is_llm else (), size), 1)
    for own, gradient in zip(of_layers, before, strict=True):
        assert own.grad is gradient
        assert gradient.dtype == torch.float32
        assert gradient.any()
    found = torch._dynamo.utils.counters
    assert all("packed_attention" in reason for reason in found["graph_break"])
    # Qwen's encoder layers loop over segments around packed attention. This loop, which goes round once, is eager where
    # Python makes a function of a list comprehension, as it did before 3.12.
    is_loop_apart = family.startswith("qwen") and sys.version_info < (3, 12)
    assert found["frames"]["total"] - found["frames"]["ok"] == is_loop_apart


@pytest.mark.parametrize(
    ("wanted", "device", "expected"),
    [("off", GPU, False), ("auto", CPU, False), ("on", CPU, True), ("off", CPU, False)],
)
def test_layers_are_compiled_where_the_config_has_it(wanted, device, expected):
    assert compiles_layers(wanted, device) == (expected, None)


def test_a_compiler_that_fails_is_found_out_before_layers_run(monkeypatch):
    why_not_compiled.cache_clear()
    with inductor_config.patch({"cpp.cxx": ("false",)}):
        is_compiled, why_not = compiles_layers("on", CPU)
    why_not_compiled.cache_clear()
    assert not is_compiled
    assert re.fullmatch(r"`train.compile` is 'on', and torch.compile fails \(\w+: .+\): layers stay eager", why_not)


def test_a_layer_that_cannot_be_compiled_runs_eager_and_is_counted_with_the_reason():
    def no_backend(graph, inputs):
        raise MemoryError("no room for a kernel")

    eager, compiled = build("llm"), build("llm")
    compile_layers(compiled, no_backend)
    before = compiled_so_far().num_fallbacks
    for theirs, ours in zip(passed(eager, [9]), passed(compiled, [9]), strict=True):
        assert torch.equal(theirs, ours)
    assert compiled_so_far().num_fallbacks > before
    assert compiled_so_far().reason == "MemoryError: no room for a kernel"


# Layers recomputed, whether the stage is trained and whether its input is: every pair of them in the first half.
MODES = sorted(itertools.product((0, 1), (True, False), (True, False)), key=lambda mode: sum(mode) % 2)


def run_modes(stage: LlmStage, modes: Sequence[tuple[int, bool, bool]]) -> None:
    """Passes that training and evaluation have."""
    for num_recomputed, is_trained, learns_input in modes:
        stage.set_recomputed(num_recomputed)
        stage.requires_grad_(is_trained)
        for lengths in ([7, 5], [30], [1]):
            text = text_of(lengths)
            # Evaluation computes no gradients, whatever is trained.
            for is_training in (True, False) if is_trained else (True,):
                stage.train(is_training)
                with torch.set_grad_enabled(is_training):
                    output = stage(stage.embed(text, []).detach().requires_grad_(learns_input), text)
                if output.requires_grad:
                    output.backward()


@pytest.mark.exhaustive
@pytest.mark.parametrize("modes", [MODES[:4], MODES], ids=["pairs", "all"])
def test_every_mode_of_many_layers_is_compiled_and_where_torch_gives_up_it_is_counted(modes):
    before, num_compiled = compiled_so_far().num_eager, compiled_so_far().num_ended
    many, one = build("llm", num_layers=9), build("llm", num_layers=1)  # nine are more than a function's graphs may be
    for stage in (many, one):
        compile_layers(stage, TRACED)
    passed(many, [7, 5])
    run_modes(one, modes)
    assert compiled_so_far().num_eager == before
    assert compiled_so_far().num_ended > num_compiled + 9
    assert compiled_so_far().seconds > 0.0
    torch._dynamo.reset()
    stage = build("llm", num_layers=1)
    compile_layers(stage, TRACED)
    with torch._dynamo.config.patch(recompile_limit=2):
        run_modes(stage, MODES[:3])
    assert compiled_so_far().num_limits > 0
    assert "recompile_limit" in compiled_so_far().reason


# Each with other modes: whether layers are recomputed, and whether they are frozen.
FAMILIES_IN_MODES = [
    ("qwen3_vl", "llm", False, False),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in [
            ("internvl", "vision", True, False),
            ("qwen2_5_vl", "vision", False, True),
            ("llava_onevision", "vision", False, False),
            ("qwen3_vl", "vision", True, False),
            ("qwen2_5_omni_thinker", "audio", False, True),
            ("internvl", "llm", False, True),
            ("qwen2_5_vl", "llm", True, True),
            ("qwen2_5_omni_thinker", "llm", True, False),
        ]
    ),
]


@pytest.mark.parametrize(("family", "module", "is_recomputed", "is_frozen"), FAMILIES_IN_MODES)
def test_a_run_of_any_family_needs_a_quarter_of_the_graphs_that_it_may_have(
    monkeypatch, tokenizer, family, module, is_recomputed, is_frozen
):
    """A run trains and evaluates in one of four modes, and a process may see all of them."""
    monkeypatch.setattr("dflop.costs.measure.compile_layers", partial(compile_layers, backend=TRACED))
    own, num_layers = family_of(family), 4
    spec = own.make_spec("tiny", deepcopy(own.presets["tiny"]), {})
    about = {"placeholder_ids": tokenizer.placeholder_ids, "vocab_size": tokenizer.vocab_size(), "device": CPU}
    trained = TrainedSet((module,) if is_frozen else ())
    bench = Bench(spec, module, num_layers, **about, precision="bf16", is_compiled=True, trained=trained)
    stage, runs = bench.stage, MadeUpRuns(spec, module, bench.stage, torch.bfloat16)
    stage.set_recomputed(num_layers // 2 if is_recomputed else 0)
    before, num_compiled = compiled_so_far().num_eager, compiled_so_far().num_ended
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit // 4):
        for size, is_training in itertools.product((3, 5, 1), (True, False)):
            loads = {"segments": (size, 2 * size), "num_targets": 1} if module == "llm" else {"num_items": size}
            stage.train(is_training)
            with torch.set_grad_enabled(is_training):
                outputs = runs.make(Point("whole", num_layers, is_recomputed, **loads)).forward()
            for output in outputs:
                if output.requires_grad:
                    output.sum().backward()
    assert compiled_so_far().num_ended > num_compiled
    assert compiled_so_far().num_eager == before, compiled_so_far().reason


def test_first_compiles_take_nothing_of_a_budget_of_seconds(monkeypatch):
    class Clock:
        now_s = 0.0

        def monotonic(self) -> float:
            self.now_s += 0.001
            return self.now_s

    clock = Clock()

    def slow_compiler(graph, inputs):
        clock.now_s += 500.0
        return graph

    monkeypatch.setattr(compile_log, "time", clock)
    compile_log.keep_log()
    stopwatch = Stopwatch()
    torch.compile(lambda values: values + 1, backend=slow_compiler)(torch.ones(2))
    assert clock.now_s > 500.0
    assert stopwatch.seconds < 1.0


def test_without_a_compiler_layers_stay_eager_and_it_is_said(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    is_compiled, why_not = compiles_layers("on", CPU)
    assert not is_compiled
    assert why_not == (
        "`train.compile` is 'on', and torch.compile finds no C++ compiler (no-such-compiler): layers stay eager"
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "no package triton" in compiles_layers("auto", GPU)[1]
