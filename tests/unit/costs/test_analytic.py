"""Counts agree with torch's own on the real modules; what is made of them looks and fits as measurements do."""

import gc
import json
import re
from copy import deepcopy

import numpy as np
import polars as pl
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from dflop.base import UserError
from dflop.base.devices import load_device
from dflop.cli import cli
from dflop.config import load_config
from dflop.costs import CostModel, Loads, StageKind, analytic_points, fit_costs
from dflop.costs.design import Point
from dflop.costs.measure import Bench
from dflop.models import ModelSpec, count_work, family_names, family_of, load_model_spec, load_runtime
from dflop.models.attention import PACKED
from dflop.models.llava_onevision.stages import VisionStage
from dflop.models.loads import FEATURES, Coefficients
from dflop.models.loss_head import LossHead
from dflop.models.microbatch import EncoderBatch, MediumLayout, TextBatch
from dflop.models.precision import compute_in
from dflop.models.stages import LlmStage
from dflop.models.tensor_group import ALONE, TensorGroup
from dflop.models.work import IMPLEMENTATIONS
from dflop.plan.layout_key import LayoutKey
from dflop.store import write_costs

FAMILIES = {name: family_of(name) for name in family_names()}
PRESETS = [(family, name) for family, own in FAMILIES.items() for name in own.presets]

# Changes to a family's tiny preset that the real encoders and LLMs have, and sizes that no two share.
VARIANTS = {
    "siglip_qwen2": ("llava_onevision", {}, {"vocab_size": 1000}),
    "siglip_llama": (
        "llava_onevision",
        {"image_size": 90},  # does not divide into patches
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    ),
    "internvit_qwen3": ("internvl", {}, {"model_type": "qwen3", "head_dim": 40}),
    "internvit_6b_llama": (
        "internvl",
        {"attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm"},
        {"model_type": "llama"},
    ),
    "internvit_with_last_norm": ("internvl", {"use_mean_pooling": False, "use_mask_token": True}, {}),
    "windows_qwen2_5_vl": ("qwen2_5_vl", {}, {"vocab_size": 1000}),
    "features_qwen3_vl": ("qwen3_vl", {"deepstack_visual_indexes": [0, 1]}, {"vocab_size": 1000}),
    "sounds_qwen2_5_omni": ("qwen2_5_omni_thinker", {}, {"vocab_size": 1000}),
}


def make_spec(family: str, fields: dict) -> ModelSpec:
    return FAMILIES[family].make_spec("tried", fields, {})


def variant(name: str, depth: int = 2, **top_level) -> ModelSpec:
    family, vision, text = VARIANTS[name]
    fields = deepcopy(FAMILIES[family].presets["tiny"]) | top_level
    fields["vision_config"] |= vision | {"num_hidden_layers": depth}
    fields["text_config"] |= text | {"num_hidden_layers": depth}
    return make_spec(family, with_audio_layers(fields, depth))


def with_audio_layers(fields: dict, depth: int) -> dict:
    """The config with so many layers in its audio encoder, if it has one."""
    if "audio_config" in fields:
        fields["audio_config"]["encoder_layers"] = depth
    return fields


def shallow_preset(family: str, name: str) -> ModelSpec:
    fields = deepcopy(FAMILIES[family].presets[name])
    for section in ("vision_config", "text_config"):
        fields[section]["num_hidden_layers"] = 2
    if "fullatt_block_indexes" in fields["vision_config"]:
        fields["vision_config"]["fullatt_block_indexes"] = [1]
    if "deepstack_visual_indexes" in fields["vision_config"]:
        fields["vision_config"]["deepstack_visual_indexes"] = [0, 1]
    return make_spec(family, with_audio_layers(fields, 2))


def build(spec: ModelSpec, attention: str, device: str = "meta") -> PreTrainedModel:
    fields = deepcopy(spec.hf_config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.text_config._attn_implementation, config.vision_config._attn_implementation = attention, "sdpa"
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(config)
    config.text_config._attn_implementation, config.vision_config._attn_implementation = attention, "sdpa"
    if hasattr(config, "audio_config"):
        config.audio_config._attn_implementation = "sdpa"
    model.lm_head = LossHead.of(model.lm_head, model.lm_head.out_features)
    return model.train()


def make_loads(num_items=0, num_tokens=0, sum_sq_tokens=0, num_targets=0) -> Loads:
    return Loads(*(np.asarray(value, dtype=float) for value in (num_items, num_tokens, sum_sq_tokens, num_targets)))


def whole(spec: ModelSpec, module: str, count, tp: int = 1) -> float:
    """`count(part)` of the first and the last part and of every layer."""
    work = count_work(spec, module, tp)
    return float(count(work.first) + count(work.last) + spec.module(module).num_layers * count(work.layer))


def square_flops(spec: ModelSpec, module: str, loads: Loads) -> float:
    """Of one forward pass, attention counted in full as torch counts it."""
    return whole(spec, module, lambda part: part.dense_flops(loads) + part.square_flops(loads))


def media_loads(spec: ModelSpec, num_items: int) -> Loads:
    return make_loads(num_items, 0, load_runtime(spec.family).make_up_media(spec, "vision", num_items).sum_sq_items)


def run_vision(model: PreTrainedModel, spec: ModelSpec, num_items: int) -> torch.Tensor:
    device = model.lm_head.weight.device
    dtype = model.lm_head.weight.dtype
    if spec.family.startswith("qwen"):
        made_up = load_runtime(spec.family).make_up_media(spec, "vision", num_items)
        patches = torch.randn(num_items, *made_up.item_shape, device=device, dtype=dtype, requires_grad=True).flatten(
            0, 1
        )
        grids = torch.tensor([medium.grid for medium in made_up.media])
        positions = get_vision_position_ids(grids, spec.rules.merge_size).to(device)
        if not spec.num_deepstack:
            return model.model.visual(patches, grid_thw=grids, position_ids=positions).pooler_output
        places, weights = get_vision_interpolation_indices_and_weights(
            grids, model.model.visual.num_grid_per_side, align_corners=True, spatial_merge_size=spec.rules.merge_size
        )
        made = model.model.visual(
            patches,
            grid_thw=grids,
            position_ids=positions,
            interp_indices=places.to(device),
            interp_weights=weights.to(device),
        )
        return torch.cat([made.pooler_output, *made.deepstack_features], dim=-1)
    side = spec.rules.image_size
    items = torch.randn(num_items, 3, side, side, device=device, dtype=dtype, requires_grad=True)
    if spec.family == "internvl":
        return model.model.get_image_features(pixel_values=items).pooler_output
    media = tuple((MediumLayout("image", 1, side, side),) for _ in range(num_items))
    batch = EncoderBatch(items=items, media=media, kept_tokens=(1 << 30,) * num_items)
    layers = range(spec.module("vision").num_layers)
    return torch.cat(VisionStage(model, layers, is_first=True, is_last=True)(batch))


def run_audio(model: PreTrainedModel, spec: ModelSpec, num_items: int) -> torch.Tensor:
    """Whole chunks, through transformers' own encoder; what it would read of tensors' values is given."""
    weight, made_up = model.lm_head.weight, load_runtime(spec.family).make_up_media(spec, "audio", num_items)
    num_mels, chunk = made_up.item_shape
    num_positions = num_items * chunk // 2
    return model.model.audio_tower(
        padded_feature=torch.randn(
            num_items, num_mels, chunk, device=weight.device, dtype=weight.dtype, requires_grad=True
        ),
        chunk_lengths=torch.full((num_items,), chunk, device=weight.device),
        valid_indices=torch.arange(num_positions, device=weight.device),
        pool_indices=torch.arange(0, num_positions, 2, device=weight.device),
        cu_seqlens=torch.arange(0, num_positions + 1, chunk // 2),
    ).last_hidden_state


def run_llm(model: PreTrainedModel, num_segments: int, length: int, num_targets: int) -> torch.Tensor:
    """What our stages do to packed text, all of it visual; one row a segment where attention is not packed."""
    language_model, device = model.model.language_model, model.lm_head.weight.device
    num_tokens = num_segments * length
    targets = torch.arange(num_targets, device=device)
    hidden_size = language_model.config.hidden_size
    dtype = model.lm_head.weight.dtype
    num_deepstack = len(getattr(model.config.vision_config, "deepstack_visual_indexes", ()))
    width = hidden_size * (1 + num_deepstack)
    features = torch.randn(num_tokens, width, device=device, dtype=dtype, requires_grad=True)
    if language_model.config._attn_implementation == PACKED:
        batch = TextBatch(
            token_ids=torch.zeros(num_tokens, dtype=torch.long),
            position_ids=torch.arange(length).repeat(num_segments),
            segment_ends=[length * (index + 1) for index in range(num_segments)],
            feature_positions=(torch.arange(num_tokens),),
            target_positions=targets,
            target_ids=torch.zeros(num_targets, dtype=torch.long),
        )
        layers = range(len(language_model.layers))
        stage = LlmStage(model, layers, is_first=True, is_last=True, num_deepstack=num_deepstack)
        return stage(stage.embed(batch, [features]), batch)
    hidden = features[:, :hidden_size].reshape(num_segments, length, hidden_size)
    rotary = language_model.rotary_emb(hidden, torch.arange(length, device=device)[None])
    for layer in language_model.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
    at_targets = language_model.norm(hidden.flatten(0, 1)[targets])
    return model.lm_head(at_targets, torch.zeros(num_targets, dtype=torch.long, device=device))


def counted_flops(forward) -> tuple[int, int]:
    """torch's count of forward, and of backward."""
    with FlopCounterMode(display=False) as in_forward:
        output = forward()
    with FlopCounterMode(display=False) as in_backward:
        output.sum().backward()
    return in_forward.get_total_flops(), in_backward.get_total_flops()


SPECS = {name: variant(name) for name in VARIANTS}
SPECS |= {name: shallow_preset(family, name) for family, name in PRESETS if name != "tiny"}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("num_items", [1, 7, 131])
def test_the_encoders_flops_are_those_that_torch_counts(name, num_items):
    spec = SPECS[name]
    forward, backward = counted_flops(lambda: run_vision(build(spec, "eager"), spec, num_items))
    expected = square_flops(spec, "vision", media_loads(spec, num_items))
    assert forward == pytest.approx(expected, rel=1e-9)
    assert backward == pytest.approx(2 * expected, rel=1e-9)


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if len(spec.encoders) > 1])
@pytest.mark.parametrize("num_items", [1, 7, 131])
def test_the_audio_encoders_flops_are_those_that_torch_counts(name, num_items):
    spec = SPECS[name]
    forward, backward = counted_flops(lambda: run_audio(build(spec, "eager"), spec, num_items))
    expected = square_flops(spec, "audio", make_loads(num_items))
    assert forward == pytest.approx(expected, rel=1e-9)
    assert backward == pytest.approx(2 * expected, rel=1e-9)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("num_segments", "length", "num_targets"), [(1, 640, 100), (5, 64, 320), (32, 8, 1)])
def test_the_llms_flops_are_those_that_torch_counts(name, num_segments, length, num_targets):
    spec = SPECS[name]
    forward, backward = counted_flops(lambda: run_llm(build(spec, "eager"), num_segments, length, num_targets))
    loads = make_loads(0, num_segments * length, num_segments * length**2, num_targets)
    expected = square_flops(spec, "llm", loads)
    assert forward == pytest.approx(expected, rel=1e-9)
    assert backward == pytest.approx(2 * expected, rel=1e-9)


@pytest.mark.parametrize("name", SPECS)
def test_backward_through_a_frozen_llm_is_what_torch_counts(name):
    spec, loads = SPECS[name], make_loads(0, 640, 2 * 320**2, 320)
    model = build(spec, "eager")
    model.model.language_model.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    forward, backward = counted_flops(lambda: run_llm(model, 2, 320, 320))
    dense, squares = (
        whole(spec, "llm", lambda part, count=count: getattr(part, count)(loads))
        for count in ("dense_flops", "square_flops")
    )
    assert forward == pytest.approx(dense + squares, rel=1e-9)
    assert backward == pytest.approx(dense + 2 * squares, rel=1e-9)


@pytest.fixture
def small_chunks(monkeypatch):
    """Logits of as few targets stand at a time as there can be, 128, whatever the vocabulary."""
    monkeypatch.setattr("dflop.models.llm_work._LOGITS_BYTES", 1)


@pytest.mark.parametrize("name", ["siglip_qwen2", "llava_ov_7b"])
@pytest.mark.parametrize("num_targets", [128, 129, 600])
def test_backward_computes_the_logits_again_that_are_more_than_a_chunk(name, num_targets, small_chunks):
    spec, loads = SPECS[name], make_loads(0, 640, 2 * 320**2, num_targets)
    forward, backward = counted_flops(lambda: run_llm(build(spec, "eager"), 2, 320, num_targets))
    expected, head = square_flops(spec, "llm", loads), count_work(spec, "llm", 1).last
    again = head.again.dense_flops(head.loads_again(loads))
    assert forward == pytest.approx(expected, rel=1e-9)
    assert backward == pytest.approx(2 * expected + again, rel=1e-9)
    assert (again > 0) == (num_targets > 128)


def test_packed_attention_computes_half_of_what_torch_counts_for_it():
    spec = SPECS["siglip_qwen2"]
    loads = make_loads(0, 640, 5 * 128**2, 64)
    with sdpa_kernel(SDPBackend.MATH):  # torch does not count the CPU's fused kernel
        forward, _ = counted_flops(lambda: run_llm(build(spec, PACKED, "cpu"), 5, 128, 64))
    assert forward == pytest.approx(square_flops(spec, "llm", loads), rel=1e-9)
    layer = count_work(spec, "llm", 1).layer
    assert layer.attention_flops(loads) == layer.square_flops(loads) / 2
    seen = count_work(spec, "vision", 1).layer  # nothing is hidden from an encoder
    assert seen.attention_flops(make_loads(3)) == seen.square_flops(make_loads(3))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_model(name, tied):
    spec = SPECS[name]
    spec = make_spec(spec.family, spec.hf_config | {"tie_word_embeddings": tied})
    model = build(spec, "eager")
    llm = {id(weight): weight for weight in (*model.model.language_model.parameters(), model.lm_head.weight)}
    heard = {name: weight for name, weight in model.named_parameters() if ".audio_tower." in name}
    parts = {
        "vision": [own for name, own in model.named_parameters() if id(own) not in llm and name not in heard],
        "llm": llm.values(),
    }
    parts |= {"audio": heard.values()} if heard else {}
    for module, weights in parts.items():
        expected = 4 * sum(weight.numel() for weight in weights)
        frame = analytic_points(spec, module, 1, load_device("a100-80g")).parameters
        found = {row["part"]: row["parameter_bytes"] for row in frame.iter_rows(named=True)}
        assert found["first"] + found["last"] + 2 * found["layer"] == expected


@pytest.mark.parametrize(("family", "silent"), [("internvl", True), ("llava_onevision", False), ("qwen2_5_vl", False)])
def test_a_config_that_does_not_say_whether_the_head_is_the_embedding_is_read_as_transformers_does(family, silent):
    fields = {key: value for key, value in FAMILIES[family].presets["tiny"].items() if key != "tie_word_embeddings"}
    spec = make_spec(family, fields)
    model = build(spec, "eager")
    assert (model.lm_head.weight is model.model.language_model.embed_tokens.weight) == silent
    tied = make_spec(family, fields | {"tie_word_embeddings": silent})
    assert count_work(spec, "llm", 1) == count_work(tied, "llm", 1)


def saved_bytes(model: PreTrainedModel, forward) -> int:
    """Bytes that autograd keeps between a forward in bf16 and its backward, parameters left out."""
    compute_in(model, torch.bfloat16)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages, kept = {}, []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # while it lives, no other storage can take its address
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks:
        forward()
    return sum(storages.values())


def num_layer_norms(spec: ModelSpec) -> int:
    """How many positions of an item pass LayerNorms, each counted as often as it does."""
    module, vision = spec.module("vision"), spec.hf_config["vision_config"]
    if spec.family.startswith("qwen2_5"):
        return 0  # it has root-mean-square norms
    if spec.family == "qwen3_vl":
        patches = spec.rules.merge_size**2
        return patches * (2 * module.num_layers + 1) + spec.num_deepstack
    if spec.family == "llava_onevision":
        return 2 * module.num_layers * spec.rules.tokens_per_item
    positions = (spec.rules.image_size // spec.rules.patch_size) ** 2 + 1
    of_layers = 0 if vision.get("norm_type") == "rms_norm" else 2 * module.num_layers * positions
    return of_layers + positions * (not vision.get("use_mean_pooling", True)) + spec.rules.tokens_per_tile


@pytest.mark.parametrize("name", VARIANTS)
def test_what_an_encoder_keeps_is_what_autograd_keeps(name):
    spec = variant(name)
    model = build(spec, "sdpa", "cpu")
    for num_items in (2, 9):
        found = saved_bytes(model, lambda num_items=num_items: run_vision(model, spec, num_items))
        loads = media_loads(spec, num_items)
        expected = whole(spec, "vision", lambda part, loads=loads: part.saved_bytes(loads))
        expected += count_work(spec, "vision", 1).stage_bytes(loads)
        # GPUs keep LayerNorms' mean and deviation in fp32, CPUs in bf16. A table of position ids is not counted.
        expected -= 4 * num_items * num_layer_norms(spec)
        assert found == pytest.approx(expected, rel=1e-3)


def test_gradients_of_features_wait_beside_the_backward_of_later_layers():
    fields, loads, passing = deepcopy(FAMILIES["qwen3_vl"].presets["tiny"]), make_loads(9), []
    for features in ([], [0, 1]):
        fields["vision_config"] |= {"deepstack_visual_indexes": features}
        work = count_work(make_spec("qwen3_vl", fields), "vision", 1)
        passing.append([own.most_passing_bytes(loads) for own in (work.layer, work.layer.fused, work.layer.frozen)])
    assert np.diff(passing, axis=0)[0] == pytest.approx([2 * float(work.input_bytes(loads))] * 3)


def test_what_an_audio_encoder_keeps_is_what_autograd_keeps():
    spec = variant("sounds_qwen2_5_omni")
    model, positions = build(spec, "sdpa", "cpu"), spec.rules.chunk_frames // 2
    for num_items in (2, 9):
        found = saved_bytes(model, lambda num_items=num_items: run_audio(model, spec, num_items))
        expected = whole(spec, "audio", lambda part, num_items=num_items: part.saved_bytes(make_loads(num_items)))
        # transformers' mask of frames is wider than ours, and it keeps the places of positions.
        found -= num_items * (7 * spec.rules.chunk_frames + 8 * positions)
        # GPUs keep LayerNorms' mean and deviation in fp32, CPUs in bf16.
        expected -= 4 * num_items * (2 * 2 * positions + positions // 2)
        assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", VARIANTS)
def test_what_an_llm_keeps_is_what_autograd_keeps(name, is_frozen):
    spec = variant(name)
    model = build(spec, PACKED, "cpu").requires_grad_(not is_frozen)
    for num_segments, length, num_targets in ((1, 160, 40), (4, 200, 777)):
        num_tokens = num_segments * length
        found = saved_bytes(model, lambda form=(num_segments, length, num_targets): run_llm(model, *form))
        # Without a variable-length kernel the segments' outputs are copied into one tensor, which is kept as well where
        # it is the input of a matrix that is trained.
        attention = model.model.language_model.layers[0].self_attn.o_proj.in_features
        copies = 0 if is_frozen else 2 * 2 * num_tokens * attention
        copies += 2 * num_tokens * spec.feature_size  # features came over an edge, and are counted there
        loads = make_loads(0, num_tokens, num_segments * length**2, num_targets)
        work = count_work(spec, "llm", 1)
        work = work.without_training() if is_frozen else work
        expected = work.first.saved_bytes(loads) + 2 * work.layer.saved_bytes(loads) + work.last.saved_bytes(loads)
        # A chunk of log-probabilities is kept by the head itself, of which autograd knows nothing.
        expected -= 4 * num_targets * spec.hf_config["text_config"]["vocab_size"]
        expected += work.stage_bytes(loads)
        assert found - copies == pytest.approx(expected, rel=1e-5)  # nor the loss's weight


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", ["siglip_qwen2", "siglip_llama", "internvit_qwen3"])
def test_what_a_compiled_layer_keeps_is_what_fused_layers_are_taken_to_keep(name, is_frozen):
    spec, length = variant(name), 256
    model = build(spec, "sdpa", "cpu").model.language_model.requires_grad_(not is_frozen)
    compute_in(model, torch.bfloat16)
    hidden = torch.randn(1, length, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    positions = model.rotary_emb(hidden, torch.arange(length)[None])
    # The backend that chooses what is kept as torch.compile does, and needs no compiler.
    layer = torch.compile(model.layers[0], backend="aot_eager_decomp_partition")
    found = saved_bytes(model, lambda: layer(hidden, position_embeddings=positions))
    eager = count_work(spec, "llm", 1)
    eager = eager.without_training() if is_frozen else eager
    work = eager.by("compiled")
    expected = work.layer.saved_bytes(make_loads(num_tokens=length)) + work.stage_bytes(make_loads(num_tokens=length))
    assert found == pytest.approx(expected, rel=0.03)
    assert found < 0.85 * eager.layer.saved_bytes(make_loads(num_tokens=length))


def test_the_more_is_fused_the_less_time_it_takes_and_the_less_it_keeps(h100):
    for module in ("vision", "llm"):
        eager, compiled, fused = (
            analytic_points(SPECS["internvl_8b"], module, 1, h100, implementation).measurements
            for implementation in IMPLEMENTATIONS
        )
        layers, last = pl.col("piece") == "layers", pl.col("piece") == "last"
        for column in ("seconds", "peak_bytes"):
            assert (compiled[column] <= eager[column]).all()
        assert (fused["seconds"] <= compiled["seconds"]).all()
        # A fused loss keeps all logits, and not a chunk of them.
        assert (fused.filter(layers)["peak_bytes"] <= compiled.filter(layers)["peak_bytes"]).all()
        assert (compiled.filter(layers)["seconds"] < eager.filter(layers)["seconds"]).all()
        assert compiled.filter(last).equals(eager.filter(last))
        assert fused.filter(last).equals(eager.filter(last)) == (module == "vision")


def test_the_command_makes_costs_of_layers_as_training_makes_them(tmp_path, h100):
    points = {
        name: analytic_points(load_model_spec(load_config().model), "llm", 1, h100, name).measurements
        for name in IMPLEMENTATIONS
    }
    for compiles, implementation, expected in (
        ("auto", "auto", "compiled"),
        ("off", "auto", "eager"),
        ("auto", "fused", "fused"),
    ):
        config = {
            "cluster": {"device": "cuda", "device_model": "h100-80g"},
            "costs": {"source": "analytic", "implementation": implementation},
            "train": {"precision": "bf16", "compile": compiles},
        }
        out = tmp_path / f"{expected}.parquet"
        command = ["profile-costs", "--config", json.dumps(config), "--module", "llm", "--out", str(out)]
        CliRunner().invoke(cli, command, catch_exceptions=False)
        assert pl.read_parquet(out, columns=points[expected].columns).equals(points[expected])


@pytest.fixture
def alone():
    """A process group of this process: all that ranks do to share a vocabulary, which is then whole."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield TensorGroup((0,), 0, dist.group.WORLD)
    dist.destroy_process_group()


def head_bench(tokenizer, vocab_size: int, ranks: TensorGroup = ALONE) -> tuple[ModelSpec, Bench]:
    fields = deepcopy(FAMILIES["llava_onevision"].presets["tiny"])
    fields["text_config"]["vocab_size"] = vocab_size
    spec = make_spec("llava_onevision", fields)
    bench = Bench(
        spec,
        "llm",
        1,
        placeholder_ids=tokenizer.placeholder_ids,
        vocab_size=vocab_size,
        device=torch.device("cpu"),
        precision="bf16",
        ranks=ranks,
    )
    gc.unfreeze()
    return spec, bench


def passing_bytes_of_head(bench: Bench, num_targets: int) -> int:
    point = Point("last", 0, False, segments=(2048,), num_targets=num_targets)
    row = bench.measure(point, 0)[0]
    return row["peak_bytes"] - row["saved_bytes"]


# What is not counted is of the order of the hidden states: 128 wide beside a vocabulary of 4,000.
@pytest.mark.parametrize("num_targets", [2, 30, 60, 512, 2000])
def test_the_heads_passing_memory_is_what_is_measured(num_targets, tokenizer):
    spec, bench = head_bench(tokenizer, 4000)
    expected = count_work(spec, "llm", 1).last.most_passing_bytes(make_loads(0, 2048, 2048**2, num_targets))
    assert passing_bytes_of_head(bench, num_targets) == pytest.approx(float(expected), rel=0.04)


@pytest.mark.parametrize("num_targets", [100, 128, 150, 256, 300, 2000])
def test_no_more_than_a_chunk_of_logits_takes_memory(num_targets, tokenizer, small_chunks):
    spec, bench = head_bench(tokenizer, 8000)
    row = bench.measure(Point("last", 0, False, segments=(2048,), num_targets=num_targets), 0)[0]
    head, loads = count_work(spec, "llm", 1).last, make_loads(0, 2048, 2048**2, num_targets)
    assert row["saved_bytes"] == pytest.approx(float(head.saved_bytes(loads)), rel=0.03)
    passing_bytes = float(head.most_passing_bytes(loads))
    of_hidden = 2 * 2 * 128 * num_targets  # which is not counted
    assert row["peak_bytes"] - row["saved_bytes"] == pytest.approx(passing_bytes, rel=0.05, abs=of_hidden)


@pytest.mark.parametrize("num_targets", [2, 30, 512, 2000])
def test_the_passing_memory_of_a_shared_vocabulary_is_what_is_measured(num_targets, tokenizer, alone):
    spec, _ = head_bench(tokenizer, 8000)  # of which each of two ranks has half
    _, bench = head_bench(tokenizer, 4000, alone)
    expected = count_work(spec, "llm", 2).last.most_passing_bytes(make_loads(0, 2048, 2048**2, num_targets))
    assert passing_bytes_of_head(bench, num_targets) == pytest.approx(float(expected), rel=0.04)


@pytest.mark.parametrize("module", ["vision", "llm"])
def test_checkpointing_keeps_a_layers_input_in_bf16(module):
    spec = variant("internvit_6b_llama", depth=1)
    model = build(spec, PACKED if module == "llm" else "sdpa", "cpu")
    seen = []
    layers = model.model.language_model.layers if module == "llm" else model.model.vision_tower.encoder.layer
    layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    compute_in(model, torch.bfloat16)
    run_llm(model, 2, 30, 5) if module == "llm" else run_vision(model, spec, 3)
    loads = make_loads(0, 60, 1800, 5) if module == "llm" else make_loads(3)
    assert count_work(spec, module, 1).input_bytes(loads) == seen[0].nbytes


@pytest.fixture(scope="module")
def h100():
    return load_device("h100-80g")


@pytest.mark.parametrize("module", ["vision", "llm"])
def test_points_have_the_columns_that_measuring_gives(module, tiny_spec, tokenizer, h100):
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
    points, measured = analytic_points(tiny_spec, module, 1, h100), pl.DataFrame(bench.measure(point, 0))
    assert dict(points.measurements.schema) == dict(measured.schema)
    sizes = bench.parameter_sizes()
    assert points.parameters.schema == sizes.schema
    if module == "vision":  # the LLM's vocabulary is the tokenizer's here
        assert points.parameters.equals(sizes)
    assert points.parameters.row(0) == sizes.row(0)


def test_points_cover_what_real_models_see(h100):
    spec = SPECS["llava_ov_7b"]
    vision = analytic_points(spec, "vision", 1, h100).measurements
    assert (vision["num_items"].min(), vision["num_items"].max()) == (1, 2000)
    llm = analytic_points(spec, "llm", 1, h100).measurements
    assert (llm["num_tokens"].min(), llm["num_tokens"].max()) == (64, 131_072)
    lengths = llm["sum_sq_tokens"] / llm["num_tokens"]
    assert (lengths.min(), lengths.max()) == (64, 16_384)
    for frame in (vision, llm):
        assert set(frame.filter(pl.col("piece") == "layers")["num_layers"]) == {1, 4}
        assert set(frame["piece"]) == {"layers", "first", "last", "whole"}
    assert (llm["seconds"] > 0).all()


@pytest.mark.parametrize("device", ["a100-80g", "h100-80g", "h200-141g"])
@pytest.mark.parametrize(
    ("family", "name", "tp"),
    [("llava_onevision", "llava_ov_7b", 2), ("internvl", "internvl_78b", 1), ("internvl", "tiny", 1)],
)
def test_the_cost_model_is_fitted_to_points_as_to_measurements(family, name, tp, device, tmp_path):
    spec, model = make_spec(family, FAMILIES[family].presets[name]), load_device(device)
    both = [analytic_points(spec, module, tp, model) for module in ("vision", "llm")]
    measurements = pl.concat([points.measurements for points in both])
    tables = fit_costs(measurements, pl.concat([points.parameters for points in both]))
    # What the fit leaves is where a product is bound by memory, and not by computing.
    errors = tables["fit_error"]
    assert (errors.filter(quantity="seconds")["p95_error"] < 0.05).all()
    # The head passes the larger of two numbers, one of which falls with the targets: no line follows that.
    assert (errors.filter(quantity="peak_bytes")["p95_error"] < 0.2).all()
    path = tmp_path / "costs.duckdb"
    device_frame = pl.DataFrame({"device": [device], "overhead_bytes": [0], "allocator_share": [0.0]})
    write_costs(path, {"measurements": measurements, "device": device_frame, **tables}, {})
    costs, loads = CostModel.load(path), make_loads(0, 6000, 9e6, 1500)
    kept = costs.stage_memory(StageKind.whole("llm", LayoutKey(tp), 20), loads)
    work = count_work(spec, "llm", tp)
    ends = (work.first, work.last)
    expected = 20 * work.layer.saved_bytes(loads) + sum(part.saved_bytes(loads) for part in ends)
    expected += work.stage_bytes(loads)
    assert float(kept.activation_bytes) == pytest.approx(float(expected), rel=1e-3)
    num_parameters = 20 * work.layer.num_parameters + sum(part.num_parameters for part in ends)
    assert costs.stage_parameter_bytes(StageKind.whole("llm", LayoutKey(tp), 20)) == 4 * num_parameters
    checkpointed = costs.stage_memory(StageKind.whole("llm", LayoutKey(tp), 20, num_recomputed=20), loads)
    assert checkpointed.activation_bytes < kept.activation_bytes / 2


@pytest.mark.parametrize("device", ["a100-80g", "h100-80g", "h200-141g"])
@pytest.mark.parametrize(("family", "name"), [entry for entry in PRESETS if entry[1] != "tiny"])
def test_a_large_microbatch_runs_at_a_share_of_the_peak_that_training_is_known_to_reach(family, name, device):
    spec, model = SPECS[name], load_device(device)
    items = 16_384 if spec.family.startswith("qwen") else 55
    for module, wanted in (("vision", {"num_items": items}), ("llm", {"num_tokens": 8192})):
        points = analytic_points(spec, module, 1, model).measurements
        points = points.filter((pl.col("num_layers") == 4) & ~pl.col("checkpointing"))
        for one in points.filter(pl.col(key) == count for key, count in wanted.items()).partition_by(
            "sum_sq_tokens", "num_targets"
        ):
            loads = make_loads(*(one[feature][0] for feature in FEATURES))
            work = count_work(spec, module, 1)
            flops = sum(
                times * (part.dense_flops(loads) + part.attention_flops(loads)) for part, times in ((work.layer, 4),)
            )
            # Qwen2.5-VL's encoder is narrow, and its gated layers move more bytes for what they compute; so is the LLM
            # of 1.7B parameters, which has norms of each head besides.
            is_narrow = spec.family.startswith("qwen2_5") and module == "vision"
            least = 0.28 if is_narrow or (name, module) == ("qwen3_vl_2b", "llm") else 0.3
            assert least < 3 * flops / one["seconds"].sum() / model.peak_flops_per_s < 0.67


@given(
    module=st.sampled_from(["vision", "llm"]),
    less=st.lists(st.integers(0, 10**5), min_size=4, max_size=4),
    more=st.lists(st.integers(0, 10**5), min_size=4, max_size=4),
)
def test_more_load_never_does_less(module, less, more):
    work = count_work(SPECS["internvl_78b"], module, 1)
    small, large = make_loads(*less), make_loads(*np.add(less, more))
    for part in (work.layer, work.first, work.last):
        for name in ("dense_flops", "square_flops", "matmul_bytes", "pointwise_bytes", "saved_bytes", "size"):
            assert getattr(part, name)(large) >= getattr(part, name)(small)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_seconds_and_bytes_grow_with_every_load(direction, tp, h100):
    spec = SPECS["llava_ov_7b"]
    vision, llm = (analytic_points(spec, module, tp, h100).measurements for module in ("vision", "llm"))
    kinds = ("piece", "num_layers", "checkpointing")
    for frame in vision.filter(pl.col("pass") == direction).partition_by(*kinds):
        for column in ("seconds", "peak_bytes"):
            assert frame[column].diff().drop_nulls().min() > 0
    forms = {
        "length": pl.col("sum_sq_tokens") // pl.col("num_tokens"),
        "share": pl.col("num_targets") * 20 // pl.col("num_tokens"),
    }
    llm = llm.filter(pl.col("pass") == direction, pl.col("num_tokens") >= 16_384).with_columns(**forms)
    for frame in llm.partition_by(*kinds, *forms):
        for column in ("seconds", "peak_bytes"):
            assert frame[column].diff().drop_nulls().min() > 0


def test_backward_takes_longer_than_forward_and_more_layers_longer_than_few(h100):
    for module in ("vision", "llm"):
        frame = analytic_points(SPECS["internvl_8b"], module, 1, h100).measurements
        frame = frame.filter((pl.col("piece") == "layers") & ~pl.col("checkpointing"))
        forward, backward = (frame.filter(pl.col("pass") == name)["seconds"] for name in ("forward", "backward"))
        assert (backward > 1.9 * forward).all()
        shallow, deep = (frame.filter(pl.col("num_layers") == depth)["seconds"] for depth in (1, 4))
        assert (deep > 1.5 * shallow).all()


def ratio(whole_work: Coefficients, share: Coefficients) -> set[float]:
    pairs = zip((whole_work.const, *whole_work.per_load), (share.const, *share.per_load), strict=True)
    return {round(part / full, 9) for full, part in pairs if full}


@pytest.mark.parametrize("name", ["llava_ov_72b", "internvl_8b", "siglip_llama", "qwen2_5_vl_7b"])
@pytest.mark.parametrize("module", ["vision", "llm"])
def test_tensor_parallelism_halves_products_and_leaves_norms_whole(name, module):
    spec = SPECS[name] if name != "siglip_llama" else make_spec(
        "llava_onevision", deepcopy(FAMILIES["llava_onevision"].presets["siglip_llama3_8b"])
    )  # fmt: skip
    one, two = count_work(spec, module, 1), count_work(spec, module, 2)
    assert ratio(one.layer.dense_flops, two.layer.dense_flops) == {0.5}
    assert ratio(one.layer.square_flops, two.layer.square_flops) == {0.5}
    assert ratio(one.layer.size, two.layer.size) == {0.5}
    assert one.layer.num_matrix_parameters == 2 * two.layer.num_matrix_parameters
    hidden = spec.module(module).hidden_size
    norms = 2 * two.layer.num_parameters - one.layer.num_parameters
    # A gain for each of two RMSNorms; or two each of LayerNorms, and the biases after both reductions (and scales).
    of_vision = {"llava_onevision": 6, "internvl": 8, "qwen2_5_vl": 4}[spec.family]
    assert norms == (2 if module == "llm" else of_vision) * hidden
    assert all(0.5 < share < 1 for share in ratio(one.layer.pointwise_bytes, two.layer.pointwise_bytes))
    kept = [work.layer.saved_bytes.per_load[0 if module == "vision" else 1] for work in (one, two)]
    assert 0.5 < kept[1] / kept[0] < 1
    assert one.input_bytes == two.input_bytes


def test_the_vocabulary_is_divided_and_the_patch_embedding_is_not():
    spec = SPECS["llava_ov_7b"]
    one, two = count_work(spec, "llm", 1), count_work(spec, "llm", 2)
    assert ratio(one.last.dense_flops, two.last.dense_flops) == {0.5}
    assert 2 * two.first.num_parameters == one.first.num_parameters
    assert 2 * two.last.num_parameters - one.last.num_parameters == 3584  # the last norm
    one, two = count_work(spec, "vision", 1), count_work(spec, "vision", 2)
    projector = 1152 * 3584 + 3584**2
    assert one.last.num_matrix_parameters - two.last.num_matrix_parameters == projector / 2


def test_a_layer_reduces_its_hidden_states_twice_in_either_direction(h100):
    spec, loads = SPECS["llava_ov_7b"], make_loads(0, 1000, 10**6, 0)
    for tp in (1, 2, 4):
        layer = count_work(spec, "llm", tp).layer
        assert [float(reduced(loads)) for reduced in layer.reduced_bytes] == [2 * 2 * 3584 * 1000] * 2
    two, four = (
        analytic_points(spec, "llm", tp, h100).measurements.filter(pl.col("piece") == "layers") for tp in (2, 4)
    )
    busiest = pl.col("num_tokens") == 131_072
    assert (four.filter(busiest)["seconds"] < two.filter(busiest)["seconds"]).all()
    # Many ranks help a large microbatch, and not a small one, whose norms and launches stay.
    smallest = pl.col("num_tokens") == 64
    assert (four.filter(smallest)["seconds"] > 0.5 * two.filter(smallest)["seconds"]).all()


@pytest.mark.parametrize(
    ("name", "module", "tp", "reason"),
    [
        ("llava_ov_7b", "llm", 8, "28 attention heads and 4 key-value heads of tried; use one of 1, 2, 4"),
        ("internvl_78b", "vision", 2, "25 attention heads and 25 key-value heads of tried; use one of 1, 5, 25"),
        ("internvl_2b", "llm", 0, "12 attention heads and 2 key-value heads of tried; use one of 1, 2"),
    ],
)
def test_a_tp_that_does_not_divide_the_heads_names_those_that_do(name, module, tp, reason, h100):
    with pytest.raises(UserError, match=f"^tp={tp} does not divide {module}'s {reason}$"):
        analytic_points(SPECS[name], module, tp, h100)


@pytest.mark.parametrize(
    ("section", "change", "reason"),
    [
        ("text_config", {"model_type": "mamba"}, "is a 'mamba', of which no analytic costs are known .*qwen2, qwen3"),
        ("text_config", {"intermediate_size": None}, "has no `text_config.intermediate_size`"),
        ("text_config", {"vocab_size": None}, "has no `text_config.vocab_size`"),
        ("vision_config", {"intermediate_size": None}, "has no `vision_config.intermediate_size`"),
        ("vision_config", {"vision_use_head": True}, "set `vision_config.vision_use_head` to false"),
    ],
)
def test_a_model_that_cannot_be_counted_is_refused(section, change, reason):
    fields = deepcopy(FAMILIES["llava_onevision"].presets["tiny"])
    fields[section] |= change
    with pytest.raises(UserError, match=reason):
        count_work(make_spec("llava_onevision", fields), "llm" if section == "text_config" else "vision", 1)


def test_products_reach_their_share_of_the_peak_where_they_are_large(h100):
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
