"""What is counted on fake tensors is what torch counts and keeps when the same pieces run on a CPU."""

from copy import deepcopy
from functools import cache, partial

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface

from dflop.config import ModelConfig
from dflop.costs.counted import CountedRun, CountedStage, counting
from dflop.costs.design import Point
from dflop.costs.made_up import MadeUpRuns
from dflop.costs.meter import Meter
from dflop.models import ModelSpec, family_names, family_of, load_model_spec, load_runtime
from dflop.models.attention import PACKED, packed_attention
from dflop.models.compilation import recomputing_pointwise, replace_forwards
from dflop.models.precision import compute_in
from dflop.plan.trained import EVERYTHING, Lora, TrainedSet

FAMILIES = {name: family_of(name) for name in family_names()}
MODULES = [(name, module.name) for name in FAMILIES for module in load_model_spec(ModelConfig(family=name)).modules]
PIECES = [("first", 0), ("layers", 1), ("layers", 2), ("last", 0)]
# Changes to a family's tiny preset that real encoders and LLMs have, each of one module.
VARIANTS = {
    "llama with biases": (
        "llava_onevision",
        {},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    ),
    "qwen3": ("internvl", {}, {"model_type": "qwen3", "head_dim": 40}),
    "InternViT 6B": (
        "internvl",
        {"attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm", "use_mean_pooling": False},
        {},
    ),
}


CHANGED = [("llama with biases", "llm"), ("qwen3", "llm"), ("InternViT 6B", "vision")]


@cache
def variant(name: str) -> ModelSpec:
    if name in FAMILIES:
        return load_model_spec(ModelConfig(family=name))
    family, vision, text = VARIANTS[name]
    fields = deepcopy(FAMILIES[family].presets["tiny"])
    fields["vision_config"] |= vision
    fields["text_config"] |= text
    return FAMILIES[family].make_spec("tried", fields, {})


CASES = [*MODULES, *CHANGED]
# To trace a layer takes a second: one of each kind is traced in CI, and all of them by the exhaustive tests.
TRACED = {("llava_onevision", "llm"), ("qwen3_vl", "vision")}
# Modules whose layers are those of another family's: Qwen2's, and the encoder of Qwen2.5-VL.
ALIKE = {(name, "llm") for name in ("internvl", "qwen2_5_vl", "qwen2_5_omni_thinker")}
ALIKE |= {("qwen2_5_omni_thinker", "vision")}
TRACED_ALONE = TRACED | {
    ("llava_onevision", "vision"),
    ("qwen3_vl", "llm"),
    ("qwen2_5_omni_thinker", "audio"),
    ("InternViT 6B", "vision"),
}
FROZEN = TrainedSet(("llm",))
_LORA = Lora(modules=("llm", "vision.encoder"), targets=("*",), rank=8, alpha=16, dropout=0.0, rslora=False)
ADAPTED = TrainedSet((), _LORA)
CASES_IN_CI = [case for case in CASES if case not in ALIKE]
# Qwen2's layers, which have biases, and Qwen3's, which have norms of heads.
KEPT_IN_PART = {("llava_onevision", "llm"), ("qwen3_vl", "llm")}
KEPT_BY_COMPILER = {("llava_onevision", "trained"), ("qwen3", "frozen")}


def point(module: str, piece: str, depth: int, size: int = 96, *, checkpointing: bool = False) -> Point:
    if module == "llm":
        return Point(piece, depth, checkpointing, segments=(size,), num_targets=size // 3)
    return Point(piece, depth, checkpointing, num_items=size // 16)


def in_ci_if(chosen: bool, *values: object, id: str | None = None) -> ParameterSet:
    return pytest.param(*values, id=id, marks=() if chosen else pytest.mark.exhaustive)


def eager_and_compiled(cases: list[tuple[str, str]]) -> list[ParameterSet]:
    """Each case with eager layers, and with compiled ones."""
    return [
        in_ci_if(
            case not in ALIKE and (kind == "eager" or case in TRACED),
            *case,
            kind == "compiled",
            id="-".join((*case, kind)),
        )
        for case in cases
        for kind in ("eager", "compiled")
    ]


@cache
def counted(
    name: str,
    module: str,
    *points: Point,
    tp: int = 1,
    is_compiled: bool = False,
    trained: TrainedSet = EVERYTHING,
) -> list[CountedRun]:
    with counting(tp) as ranks:
        stage = CountedStage(variant(name), module, 2, ranks, is_compiled=is_compiled, trained=trained)
        return [stage.run(at) for at in points]


def counted_pieces(name: str, module: str, trained: TrainedSet = EVERYTHING) -> list[CountedRun]:
    """Of each of `PIECES`."""
    return counted(name, module, *(point(module, piece, depth) for piece, depth in PIECES), trained=trained)


class RealStage:
    """The same pieces on the CPU, with values."""

    def __init__(self, spec: ModelSpec, module: str, trained: TrainedSet = EVERYTHING) -> None:
        runtime = load_runtime(spec.family)
        spec = runtime.with_depth(spec, module, 2)
        names = ("image", "video", "audio", *spec.rules.special_tokens)
        config = runtime.make_config(spec, {name: place for place, name in enumerate(names)}, 0)
        self.stage = runtime.build_stage(config, module, layers=range(2), seed=0, trained=trained)
        self.stage.train_those(partial(trained.is_measured_as_trained, module))
        compute_in(self.stage, torch.bfloat16)
        self._runs = MadeUpRuns(spec, module, self.stage, torch.bfloat16)

    def run(self, point: Point):
        self.stage.layers = range(point.num_layers)
        return self._runs.make(point)

    def flops(self, point: Point) -> tuple[int, int]:
        """torch's count of forward and of backward. It does not know the CPU's fused attention."""
        run = self.run(point)
        with sdpa_kernel(SDPBackend.MATH):
            with FlopCounterMode(display=False) as in_forward:
                outputs = run.forward()
            with FlopCounterMode(display=False) as in_backward:
                sum(output.float().sum() for output in outputs).backward()
        return in_forward.get_total_flops(), in_backward.get_total_flops()

    def saved_bytes(self, point: Point) -> int:
        """Bytes that autograd keeps between forward and backward, parameters left out."""
        run = self.run(point)
        held = {tensor.untyped_storage().data_ptr() for tensor in (*self.stage.parameters(), *self.stage.buffers())}
        storages, kept = {}, []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if (place := tensor.untyped_storage().data_ptr()) not in held:
                storages[place] = tensor.untyped_storage().nbytes()
                kept.append(tensor)  # while it lives, no other storage can take its address
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run.forward()
        return sum(storages.values())


def whole_squares(module: str, work) -> float:
    """FLOPs as torch counts them, which for causal attention are those of whole squares."""
    return work.product_flops + work.attention_flops * (2 if module == "llm" else 1)


@pytest.mark.parametrize(("name", "module"), [in_ci_if(case not in ALIKE, *case) for case in CASES])
def test_flops_are_those_that_torch_counts(name, module):
    spec, points = variant(name), [point(module, piece, depth) for piece, depth in PIECES]
    if module != "llm" and load_runtime(spec.family).packs_media:
        points = [at._replace(num_items=1) for at in points]  # one item: several would be segments
    real = RealStage(spec, module)
    for at, run in zip(points, counted(name, module, *points), strict=True):
        forward, backward = real.flops(at) if at.piece != "first" or module != "llm" else (0, 0)
        assert whole_squares(module, run.forward) == pytest.approx(forward, rel=1e-3)
        assert whole_squares(module, run.backward) == pytest.approx(backward, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "module", "trained"),
    [
        in_ci_if(case in (KEPT_IN_PART if kind != "trained" else CASES_IN_CI), *case, trained, id=f"{case[0]}-{kind}")
        for case in CASES
        if case[1] == "llm"
        for kind, trained in (("trained", EVERYTHING), ("frozen", FROZEN), ("adapted", ADAPTED))
    ],
)
def test_what_an_llm_keeps_is_what_autograd_keeps(name, module, trained):
    points = [point(module, "layers", depth) for depth in (1, 2)]
    real = RealStage(variant(name), module, trained)
    _, one, two, _ = (run.saved_bytes for run in counted_pieces(name, module, trained))
    # Without a variable-length kernel the segments' outputs are copied into one tensor, which is kept as well where it
    # is the input of a matrix that is trained.
    inner = real.stage.hf.model.language_model.layers[0].self_attn.o_proj
    copied = 0 if trained is FROZEN else 2 * 96 * inner.in_features
    found = [real.saved_bytes(at) for at in points]
    assert two - one == pytest.approx(found[1] - found[0] - copied, rel=1e-3)


@pytest.mark.parametrize("name", ["llava_onevision", "internvl", "InternViT 6B"])
def test_what_an_encoder_keeps_is_what_autograd_keeps(name):
    points = [point("vision", piece, depth) for piece, depth in PIECES]
    real = RealStage(variant(name), "vision")
    for at, run in zip(points, counted_pieces(name, "vision"), strict=True):
        assert run.saved_bytes == pytest.approx(real.saved_bytes(at), rel=1e-3)


def test_a_head_keeps_a_chunk_of_logits_and_computes_the_others_again(monkeypatch):
    monkeypatch.setattr("dflop.models.loss_head._LOGITS_BYTES", 1)  # 128 targets at a time
    at = [Point("last", 0, False, segments=(1024,), num_targets=count) for count in (64, 128, 256, 512)]
    with counting(1) as ranks:
        stage = CountedStage(variant("llava_onevision"), "llm", 2, ranks)
        runs = [stage.run(one) for one in at]
    sizes = variant("llava_onevision").hf_config["text_config"]
    of_target = 2 * sizes["hidden_size"] * sizes["vocab_size"]
    assert [run.forward.product_flops for run in runs] == [count * of_target for count in (64, 128, 256, 512)]
    again = [run.backward.product_flops - 2 * run.forward.product_flops for run in runs]
    assert again == [0, 0, 128 * of_target, 384 * of_target]
    logits = 4 * sizes["vocab_size"]
    kept = [run.saved_bytes for run in runs]
    assert (kept[1] - kept[0]) / 64 > logits > 2 * (kept[3] - kept[2]) / 256


@pytest.mark.parametrize("name", [in_ci_if(case not in ALIKE, case[0]) for case in MODULES if case[1] == "llm"])
def test_frozen_layers_compute_gradients_of_inputs_only(name):
    (_, trained, *_), (_, frozen, *_) = (counted_pieces(name, "llm", trained) for trained in (EVERYTHING, FROZEN))
    assert frozen.forward.product_flops == trained.forward.product_flops
    assert trained.backward.product_flops == pytest.approx(2 * frozen.backward.product_flops)
    assert frozen.backward.attention_flops == trained.backward.attention_flops
    assert frozen.saved_bytes < trained.saved_bytes


@pytest.mark.parametrize(("name", "module", "is_compiled"), eager_and_compiled(MODULES))
def test_recomputed_layers_run_forward_again_and_keep_their_input(name, module, is_compiled):
    points = [point(module, "layers", depth, checkpointing=again) for again in (False, True) for depth in (1, 2)]
    one, _, again, two_again = counted(name, module, *points, is_compiled=is_compiled)
    least = one.forward.product_flops + one.backward.product_flops
    assert again.backward.product_flops > one.backward.product_flops
    assert again.backward.product_flops <= least
    eager_one, _, eager_again, _ = counted(name, module, *points)
    repeated = eager_again.backward.product_flops - eager_one.backward.product_flops
    assert again.backward.product_flops - one.backward.product_flops == pytest.approx(repeated, rel=1e-3)
    assert again.backward.attention_flops == one.forward.attention_flops + one.backward.attention_flops
    kept, num_units = two_again.saved_bytes - again.saved_bytes, points[0].num_tokens or points[0].num_items
    assert kept % (2 * variant(name).module(module).hidden_size * num_units) == 0, "an input in bf16"
    assert 0 < kept < one.saved_bytes / 3


@pytest.mark.parametrize(("name", "module"), [in_ci_if(case in TRACED_ALONE, *case) for case in CASES])
def test_compiled_layers_do_the_same_products_and_move_and_keep_less(name, module):
    (eager,), (compiled,) = (
        counted(name, module, point(module, "layers", 1, 256), is_compiled=is_compiled) for is_compiled in (False, True)
    )
    for one, other in ((eager.forward, compiled.forward), (eager.backward, compiled.backward)):
        assert other.product_flops == pytest.approx(one.product_flops, rel=1e-3)
        assert other.attention_flops == one.attention_flops
        assert other.pointwise_bytes < one.pointwise_bytes
        assert other.num_kernels < one.num_kernels
    assert compiled.saved_bytes <= eager.saved_bytes


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        in_ci_if((name, kind) in KEPT_BY_COMPILER, name, trained, id=f"{name}-{kind}")
        for name in ("llava_onevision", "llama with biases", "qwen3")
        for kind, trained in (("trained", EVERYTHING), ("frozen", FROZEN))
    ],
)
def test_a_compiled_layer_keeps_what_torch_compile_keeps(name, trained, monkeypatch):
    at = point("llm", "layers", 1, 256)
    (run,) = counted(name, "llm", at, is_compiled=True, trained=trained)
    monkeypatch.setitem(AttentionInterface._global_mapping, PACKED, torch.compiler.disable(packed_attention))
    kept = []
    backend = "aot_eager_decomp_partition"  # chooses what is kept as torch.compile does, and needs no compiler
    for of_layers in (recomputing_pointwise(backend), backend):
        real = RealStage(variant(name), "llm", trained)
        replace_forwards(real.stage, partial(torch.compile, backend=of_layers))
        inner = real.stage.hf.model.language_model.layers[0].self_attn.o_proj
        copied = 0 if trained is FROZEN else 2 * 256 * inner.in_features
        kept.append(real.saved_bytes(at) - copied)
        torch._dynamo.reset()
    assert run.saved_bytes == pytest.approx(kept[0], rel=0.05)
    assert kept[0] < (0.85 if trained is EVERYTHING else 1.01) * kept[1]


@pytest.mark.parametrize(
    ("name", "module", "is_compiled"), eager_and_compiled([case for case in MODULES if case[1] != "audio"])
)
def test_two_ranks_halve_products_and_exchange_hidden_states(name, module, is_compiled):
    spec, at = variant(name), point(module, "layers", 1)
    (alone,), (shared,) = (counted(name, module, at, tp=tp, is_compiled=is_compiled) for tp in (1, 2))
    assert alone.forward.round_bytes == 0
    for one, other in ((alone.forward, shared.forward), (alone.backward, shared.backward)):
        assert other.product_flops == pytest.approx(one.product_flops / 2, rel=1e-3)
        assert other.attention_flops == one.attention_flops / 2
        assert one.pointwise_bytes / 2 < other.pointwise_bytes
        if module == "llm":  # norms are shared, the ends of a stage are not
            assert other.pointwise_bytes < 0.75 * one.pointwise_bytes
    positions = 96 if module == "llm" else shared.forward.product_rows
    hidden_bytes = 2 * positions * spec.module(module).hidden_size
    # Two all-reduces of two rounds each; for an LLM as many rounds, and one where the layers end. Features that are
    # added behind a layer have one more in backward.
    further = (0, 1) if spec.family == "qwen3_vl" else (0, 0)
    for of_pass, num_further in zip((shared.forward, shared.backward), further, strict=True):
        num_rounds = 5 + num_further if module == "llm" else 4
        assert of_pass.round_bytes == num_rounds * hidden_bytes
        assert of_pass.num_rounds == num_rounds
    assert alone.saved_bytes / 2 < shared.saved_bytes < alone.saved_bytes


@pytest.mark.parametrize(("name", "module"), [in_ci_if(case not in ALIKE, *case) for case in CASES])
def test_parts_have_the_parameters_of_the_whole_model(name, module):
    spec = variant(name)
    with counting(1) as ranks:
        sizes = dict(CountedStage(spec, module, 2, ranks).parameter_sizes().select("part", "parameter_bytes").rows())
    real = RealStage(spec, module).stage
    assert sizes["first"] + sizes["last"] + 2 * sizes["layer"] == sum(
        4 * tensor.numel() for tensor in real.parameters()
    )


def metered(function, *args):
    with Meter() as meter:
        result = function(*args)
    del result
    return meter.work


def test_kernels_read_their_inputs_and_write_their_outputs_and_views_are_none():
    a, b = torch.ones(8, 4), torch.ones(8, 4)
    assert metered(lambda: a + b).pointwise_bytes == 3 * 128
    assert metered(lambda: a.add_(b)).pointwise_bytes == 3 * 128
    assert metered(lambda: a + a).pointwise_bytes == 2 * 128
    assert metered(lambda: a + torch.ones(1, 4).expand(8, 4)).pointwise_bytes == 16 + 2 * 128 + 16
    assert metered(lambda: a.T.view(2, 2, 8).detach()[0]).num_kernels == 0
    assert metered(lambda: torch.empty(100)).num_kernels == 0


def test_a_lookup_reads_only_what_it_finds():
    table, ids = nn.Embedding(1000, 4), torch.arange(8)
    assert metered(table, ids).pointwise_bytes == 2 * 8 * 4 * 4 + 8 * 8


def test_a_product_has_flops_bytes_and_rows():
    work = metered(lambda: torch.ones(8, 4) @ torch.ones(4, 2))
    assert (work.product_flops, work.product_rows, work.product_bytes) == (2 * 8 * 4 * 2, 8, 4 * (32 + 8 + 16))


def test_a_chain_of_operations_can_count_as_one_kernel():
    a = torch.ones(8, 4)
    with Meter() as meter:
        made = meter.one_kernel(lambda values: (values * 2 + 1).relu(), a)
        assert (meter.work.num_kernels, meter.work.pointwise_bytes, meter.now) == (1, 2 * 128, made.nbytes)
        meter.one_kernel(lambda values: values.view(4, 8), a)
        assert meter.work.num_kernels == 1
