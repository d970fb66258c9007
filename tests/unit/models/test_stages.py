"""The model cut into stages is the Hugging Face model: same names, same weights, same loss, same gradients.

The oracle is each family's own Hugging Face model, run on one sample at a time in double precision.
"""

import itertools
import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig

from dflop.base import UserError
from dflop.costs.live_bytes import LiveBytes
from dflop.models import ItemCount, family_of, load_runtime
from dflop.models.microbatch import EncoderBatch, MediumLayout, SegmentEnds, TextBatch
from dflop.models.presets import TINY_LLM
from dflop.models.runtime import FamilyRuntime
from dflop.models.spec import ModelSpec
from dflop.models.stages import EncoderStage, LlmStage
from dflop.models.weights import norms_in_float64
from dflop.plan import split_layers
from dflop.shapes.reader import MediumShape, PlacedText, expand_text, place_positions
from dflop.shapes.text import TokenizedText

NUM_LAYERS = TINY_LLM["num_hidden_layers"]  # as many as of the encoders'
SEED = 3

HfInputs = Callable[[str, list[np.ndarray], list[tuple[int, int]], list[ItemCount]], dict[str, torch.Tensor]]
# Seconds between frames of clips.
FRAME_S = 0.7


@dataclass(frozen=True, kw_only=True)
class Case:
    """A family's tiny model; `hf_inputs(kind, items of each medium, sizes, counts)` is what the Hugging Face one takes.

    `more` are other fields of its parts; `hub_names` lead from its names to those in checkpoints on the hub, whose
    parts lie at the top, but for what begins with `hub_prefix`.
    """

    family: str
    hf_inputs: HfInputs
    placeholders: dict[str, int]
    hub_names: tuple[tuple[str, str], ...]
    hub_parts: frozenset[str]
    hub_prefix: str = "model."
    more: dict[str, dict] = field(default_factory=dict)

    @property
    def runtime(self) -> FamilyRuntime:
        return load_runtime(self.family)

    @property
    def spec(self) -> ModelSpec:
        family = family_of(self.family)
        fields = deepcopy(family.presets["tiny"])
        for part, more in self.more.items():
            fields[part] |= more
        return family.make_spec("tiny", fields, {})

    def config(self) -> PretrainedConfig:
        return self.runtime.make_config(self.spec, self.placeholders, 1024)

    def stage(self, config: PretrainedConfig, module: str, **settings) -> EncoderStage | LlmStage:
        arguments = {"layers": range(NUM_LAYERS), "seed": SEED, "dtype": torch.float64} | settings
        return self.runtime.build_stage(config, module, **arguments)

    def stages(self, config: PretrainedConfig, pp: int, **settings) -> tuple[EncoderStage, list[LlmStage]]:
        llm = [self.stage(config, "llm", layers=layers, **settings) for layers in split_layers(NUM_LAYERS, pp)]
        return self.stage(config, "vision", **settings), llm


def inputs_of_llava(
    kind: str, items: list[np.ndarray], sizes: list[tuple[int, int]], counts: list[ItemCount]
) -> dict[str, torch.Tensor]:
    if kind == "video":
        return {"pixel_values_videos": torch.from_numpy(items[0])[None]}
    most = max(map(len, items))
    padded = np.stack([np.pad(part, ((0, most - len(part)), (0, 0), (0, 0), (0, 0))) for part in items])
    return {
        "pixel_values": torch.from_numpy(padded),
        "image_sizes": torch.tensor([(height, width) for width, height in sizes]),
        "batch_num_images": torch.tensor([len(sizes)]),
    }


def inputs_of_internvl(
    kind: str, items: list[np.ndarray], sizes: list[tuple[int, int]], counts: list[ItemCount]
) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.from_numpy(np.concatenate(items))}


def inputs_of_qwen(
    kind: str, items: list[np.ndarray], sizes: list[tuple[int, int]], counts: list[ItemCount]
) -> dict[str, torch.Tensor]:
    patches = torch.from_numpy(np.concatenate(items)).flatten(0, 1)
    grids = torch.tensor([count.grid for count in counts])
    if kind == "video":
        seconds = torch.tensor([2 * FRAME_S] * len(counts))
        return {"pixel_values_videos": patches, "video_grid_thw": grids, "second_per_grid_ts": seconds}
    return {"pixel_values": patches, "image_grid_thw": grids}


def inputs_of_qwen3(
    kind: str, items: list[np.ndarray], sizes: list[tuple[int, int]], counts: list[ItemCount]
) -> dict[str, torch.Tensor]:
    inputs = inputs_of_qwen(kind, items, sizes, counts)
    return {name: value for name, value in inputs.items() if name != "second_per_grid_ts"}


LLAVA_ONEVISION = Case(
    family="llava_onevision",
    hf_inputs=inputs_of_llava,
    placeholders={"image": 1001, "video": 1002, "audio": 1003},
    hub_names=(
        ("model.language_model.", "language_model.model."),
        ("model.vision_tower.", "vision_tower.vision_model."),
        ("lm_head", "language_model.lm_head"),
    ),
    hub_parts=frozenset({"language_model", "vision_tower", "multi_modal_projector", "image_newline"}),
)
INTERNVL = Case(
    family="internvl",
    hf_inputs=inputs_of_internvl,
    placeholders={"image": 1001, "video": 1001, "audio": 1003},
    hub_names=(("model.language_model.", "language_model.model."), ("lm_head", "language_model.lm_head")),
    hub_parts=frozenset({"language_model", "vision_tower", "multi_modal_projector"}),
)
# As InternViT-6B and Qwen3 have it.
INTERNVL_6B = replace(
    INTERNVL,
    more={
        "vision_config": {"attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm"},
        "text_config": {"model_type": "qwen3", "head_dim": 32},
    },
)
QWEN2_5_VL = Case(
    family="qwen2_5_vl",
    hf_inputs=inputs_of_qwen,
    placeholders={"image": 1001, "video": 1002, "audio": 1003},
    hub_names=(("model.language_model.", "model."), ("model.visual.", "visual.")),
    hub_parts=frozenset({"model", "visual", "lm_head"}),
    hub_prefix="",
)
QWEN3_VL = Case(
    family="qwen3_vl",
    hf_inputs=inputs_of_qwen3,
    placeholders={"image": 1001, "video": 1002, "audio": 1003, "<|vision_start|>": 1004, "<|vision_end|>": 1005},
    hub_names=(),
    hub_parts=frozenset({"model", "lm_head"}),
    hub_prefix="",
)
CASES = {
    "llava_onevision": LLAVA_ONEVISION,
    "internvl": INTERNVL,
    "internvl 6b qwen3": INTERNVL_6B,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
}


@pytest.fixture(scope="module", params=["llava_onevision", "internvl", "qwen2_5_vl", "qwen3_vl"])
def case(request) -> Case:
    return CASES[request.param]


def union_of(stages: list) -> dict[str, torch.Tensor]:
    parts = [stage.hf_state_dict() for stage in stages]
    assert sum(map(len, parts)) == len(set().union(*parts)), "a tensor is owned twice"
    return {name: tensor for part in parts for name, tensor in part.items()}


def whole_model(case: Case, config: PretrainedConfig, weights: dict[str, torch.Tensor]):
    config = deepcopy(config)
    config._attn_implementation = "sdpa"
    model = case.runtime.architecture(config).double()
    model.load_state_dict(weights)
    norms_in_float64(model)
    return model.train()


@dataclass
class Sample:
    """One sample with its pixels as our encoder stage and as transformers' model want them."""

    token_ids: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    items: np.ndarray
    media: tuple[MediumLayout, ...]
    hf_inputs: dict = field(default_factory=dict)

    @property
    def is_visual(self) -> torch.Tensor:
        return self.token_ids > 1000


def draw_sample(case: Case, pixels, rules, rng, sizes=(), num_frames=0) -> Sample:
    """A sample with pictures of the given sizes, or with a clip, between two pieces of text."""
    items, counts, hf_inputs = [np.zeros((0, *pixels.item_shape))], [], {}
    kind = "video" if num_frames else "image"
    if sizes:
        pictures = [
            Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)) for width, height in sizes
        ]
        items = [
            pixels.pixel_values.of(torch.from_numpy(part), torch.float64).numpy() for part in pixels.images(pictures)
        ]
        counts = [rules.image(width, height, len(sizes)) for width, height in sizes]
        assert [count.num_items for count in counts] == list(map(len, items))
    elif num_frames:
        sizes = [(60, 100)]
        counts = [rules.video(num_frames, *sizes[0])]
        items = [rng.normal(size=(counts[0].num_items, *pixels.item_shape))]
    media = [
        MediumLayout(kind, count.num_items, height, width, count.grid)
        for count, (width, height) in zip(counts, sizes, strict=True)
    ]
    text, placeholder = rng.integers(0, 1000, 24), case.placeholders[kind]
    # Of a clip each step may stand alone, behind its time.
    num_runs = counts[0].grid[0] if num_frames and case.family == "qwen3_vl" else 1
    pieces = [text[:9], *(np.array([placeholder, text[0]]) for _ in range(num_runs * len(counts))), text[9:]]
    of_text = np.concatenate(pieces)
    tokenized = TokenizedText(of_text, np.zeros(len(of_text), dtype=bool), np.flatnonzero(of_text == placeholder))
    placed = PlacedText(
        (),
        [MediumShape(kind, count, frame_us=round(FRAME_S * 1e6)) for count in counts for _ in range(num_runs)],
        [count.num_tokens // num_runs for count in counts for _ in range(num_runs)],
    )
    token_ids = torch.from_numpy(expand_text(tokenized, placed.num_tokens, 1 << 20)[0])
    targets = len(token_ids) - 1 - torch.from_numpy(np.sort(rng.choice(12, size=7, replace=False))).flip(0)
    positions = torch.arange(len(token_ids))
    if rules.num_position_axes > 1:
        positions = torch.from_numpy(place_positions(tokenized, placed, rules, 1 << 20))
    if counts:
        hf_inputs = case.hf_inputs(kind, items, list(sizes), counts)
    if case.family.startswith("qwen"):
        of_image, of_video = (token_ids == case.placeholders[own] for own in ("image", "video"))
        hf_inputs["mm_token_type_ids"] = (of_image + 2 * of_video)[None]
    return Sample(token_ids, targets, positions, np.concatenate(items), tuple(media), hf_inputs)


@pytest.fixture(scope="module")
def samples(case) -> list[Sample]:
    pixels = case.runtime.processors["vision"](case.spec, None)
    rng = np.random.default_rng(0)

    def draw(**content):
        return draw_sample(case, pixels, case.spec.rules, rng, **content)

    return [
        draw(sizes=[(200, 90)]),
        draw(),
        draw(sizes=[(50, 80), (300, 20), (84, 84)]),
        draw(num_frames=5),
        draw(sizes=[(600, 590)]),  # more crops than the LLM may see in full
        draw(sizes=[(21, 20)]),
    ]


def visual_batch(case: Case, samples: list[Sample], kept: int = 1 << 30) -> EncoderBatch:
    return case.runtime.encoder_batch(
        case.spec,
        "vision",
        items=torch.from_numpy(np.concatenate([sample.items for sample in samples])),
        media=tuple(sample.media for sample in samples),
        kept_tokens=(kept,) * len(samples),
    )


def packed_text(samples: list[Sample], encoder_of: list[int]) -> TextBatch:
    ends = list(itertools.accumulate(len(sample.token_ids) for sample in samples))
    starts = [end - len(sample.token_ids) for end, sample in zip(ends, samples, strict=True)]
    visual = [
        torch.cat(
            [torch.zeros(0, dtype=torch.long)]
            + [
                start + sample.is_visual.nonzero()[:, 0]
                for start, sample, rank in zip(starts, samples, encoder_of, strict=True)
                if rank == wanted
            ]
        )
        for wanted in (0, 1)
    ]
    learned = torch.cat([start + sample.targets for start, sample in zip(starts, samples, strict=True)])
    token_ids = torch.cat([sample.token_ids for sample in samples])
    return TextBatch(
        token_ids=token_ids,
        position_ids=torch.cat([sample.positions for sample in samples], dim=-1),
        segment_ends=SegmentEnds(ends),
        feature_positions=tuple(visual),
        target_positions=learned - 1,
        target_ids=token_ids[learned],
    )


def run_stages(case: Case, vision: EncoderStage, llm: list[LlmStage], samples: list[Sample]) -> torch.Tensor:
    """Loss of one packed microbatch whose media two encoder ranks share."""
    encoder_of = [index % 2 for index in range(len(samples))]
    features = []
    for rank in (0, 1):
        own = [sample for sample, encoder in zip(samples, encoder_of, strict=True) if encoder == rank and sample.media]
        features.append(torch.cat(vision(visual_batch(case, own))))
    text = packed_text(samples, encoder_of)
    hidden = llm[0].embed(text, features)
    for stage in llm:
        hidden = stage(hidden, text)
    return hidden


def run_whole(model, samples: list[Sample]) -> torch.Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        logits = model(input_ids=sample.token_ids[None], use_cache=False, **sample.hf_inputs).logits[0]
        loss = loss + cross_entropy(logits[sample.targets - 1], sample.token_ids[sample.targets], reduction="sum")
    return loss


def gradients_of(stages: list) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for stage in stages for name, parameter in stage.named_hf_parameters().items()}


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_the_stages_together_hold_exactly_the_whole_models_tensors(case, pp):
    config = case.config()
    vision, llm = case.stages(config, pp)
    union = union_of([vision, *llm])
    whole = case.runtime.architecture(deepcopy(config)).state_dict()
    assert {name: tensor.shape for name, tensor in union.items()} == {
        name: tensor.shape for name, tensor in whole.items()
    }


def test_every_layout_starts_from_the_same_weights_and_another_seed_from_others(case):
    config = case.config()
    (vision, llm), (vision_2, llm_2) = case.stages(config, 1), case.stages(config, 3)
    one, three = union_of([vision, *llm]), union_of([vision_2, *llm_2])
    assert all(torch.equal(one[name], three[name]) for name in one)
    other_vision, other_llm = case.stages(config, 1, seed=SEED + 1)
    other = union_of([other_vision, *other_llm])
    drawn = [name for name in one if one[name].numel() > 1 and one[name].unique().numel() > 1]
    assert len(drawn) > 40
    assert not [name for name in drawn if torch.equal(one[name], other[name])]


def test_layers_that_are_alike_do_not_start_alike(case):
    weights = union_of(case.stages(case.config(), 2)[1])
    name = "model.language_model.layers.{}.mlp.up_proj.weight"
    assert not torch.equal(weights[name.format(0)], weights[name.format(1)])
    assert not torch.equal(weights[name.format(0)], weights[name.format(2)])


def test_random_weights_are_spread_as_transformers_spreads_them(case):
    config = case.config()
    vision, llm = case.stages(config, 2)
    ours = union_of([vision, *llm])
    torch.manual_seed(0)
    theirs = case.runtime.architecture(deepcopy(config)).state_dict()
    for name, tensor in ours.items():
        if tensor.numel() > 2000:
            assert float(tensor.std()) == pytest.approx(float(theirs[name].double().std()), rel=0.1, abs=1e-4), name
        elif tensor.unique().numel() == 1:
            assert torch.equal(tensor, theirs[name].double()), name


@pytest.mark.parametrize(
    ("case", "pp", "num_recomputed"),
    [
        *((name, pp, num_recomputed) for name in CASES for pp, num_recomputed in ((1, 0), (2, 2))),
        ("llava_onevision", 3, 0),
    ],
    indirect=["case"],
)
def test_a_packed_microbatch_gives_the_loss_and_gradients_of_its_samples_alone(case, samples, pp, num_recomputed):
    config = case.config()
    # Of an LLM's two recomputed layers, one is recomputed but for attention.
    how = {"num_recomputed": num_recomputed, "num_attention_kept": num_recomputed // 2}
    vision, llm = case.stages(config, pp, **how)
    model = whole_model(case, config, union_of([vision, *llm]))
    loss, expected = run_stages(case, vision, llm, samples), run_whole(model, samples)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    loss.backward()
    expected.backward()
    ours, theirs = gradients_of([vision, *llm]), dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    num_compared, unread = 0, {name for stage in (vision, *llm) for name in stage.unread}
    for name, gradient in ours.items():
        # Sums over replicas wait for the gradient of every parameter that is not said to be unread.
        assert (gradient is None) == (name in unread), name
        if theirs[name].grad is None:
            assert gradient is None, name
            continue
        torch.testing.assert_close(gradient, theirs[name].grad, rtol=1e-10, atol=1e-10, msg=name)
        num_compared += bool(gradient.abs().max() > 1e-6)
    assert num_compared > 100


@pytest.mark.parametrize("pp", [2, 4])
def test_what_goes_from_stage_to_stage_has_the_shape_they_say_and_the_result_is_the_whole_models(case, samples, pp):
    """Also where features of the encoder's layers go along, and those that the LLM's next layers take."""
    config = case.config()
    whole, llm = case.stages(config, 1)
    parts = split_layers(NUM_LAYERS, pp)
    encoder = [case.stage(config, "vision", layers=layers) for layers in parts]
    batch, made = visual_batch(case, [samples[0], samples[3]]), None
    for stage in encoder:
        if made is not None:
            expected = stage.hidden_shape(len(batch.items), stage.layers.start)
            assert made.shape == expected == encoder[0].hidden_shape(len(batch.items), stage.layers.start)
        made = stage(batch, made)
    with torch.no_grad():
        for own, features in zip(made, whole(batch), strict=True):
            assert own.shape[1] == case.spec.feature_size
            torch.testing.assert_close(own, features, rtol=1e-12, atol=1e-12)
    stages, text = case.stages(config, pp)[1], packed_text([samples[0], samples[3]], [0, 0])
    features = [torch.cat(made), torch.zeros(0, case.spec.feature_size, dtype=torch.float64)]
    hidden = stages[0].embed(text, features)
    for stage in stages:
        assert hidden.shape == stage.hidden_shape(len(text.token_ids), stage.layers.start)
        hidden = stage(hidden, text)
    assert hidden.item() == pytest.approx(llm[0](llm[0].embed(text, features), text).item(), rel=1e-12)


COPYING_NORMS = ("internvl 6b qwen3", "qwen2_5_vl")


@pytest.mark.parametrize(
    ("name", "is_frozen"), [*((name, False) for name in COPYING_NORMS), *((name, True) for name in CASES)]
)
def test_an_encoder_holds_no_outputs_of_layers_that_nothing_reads(name, is_frozen):
    """Backward needs them where norms do not copy their inputs, unless the encoder is frozen."""
    case = CASES[name]
    stage = case.stage(case.config(), "vision", dtype=torch.bfloat16)
    stage.requires_grad_(not is_frozen)
    made_up = case.runtime.make_up_media(case.spec, "vision", 4)
    items = torch.zeros(4, *made_up.item_shape, dtype=torch.bfloat16)
    batch = case.runtime.encoder_batch(case.spec, "vision", items=items, media=(made_up.media,), kept_tokens=(1 << 30,))
    outputs, vision = [], stage.hf.config.vision_config
    for layer in stage.layer_names:
        stage.hf.get_submodule(layer).register_forward_hook(lambda _, __, made: outputs.append(weakref.ref(made)))
    encoded = stage.encode(stage.embed(batch), batch)
    features = {NUM_LAYERS - 1, *getattr(vision, "deepstack_visual_indexes", ())}
    if chosen := getattr(stage.hf.config, "vision_feature_layer", None):
        features |= {(layer - 1) % NUM_LAYERS if layer > 0 else NUM_LAYERS + layer for layer in np.atleast_1d(chosen)}
    assert {layer for layer, own in enumerate(outputs) if own() is not None} == features
    assert encoded[-1] is outputs[-1]()


def test_each_recomputed_layer_keeps_less_between_forward_and_backward(case, samples):
    kept = []
    for num_recomputed in range(NUM_LAYERS + 1):
        vision, llm = case.stages(case.config(), 1, num_recomputed=num_recomputed)
        sizes: dict[int, int] = {}

        def note(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            run_stages(case, vision, llm, samples)
        kept.append(sum(sizes.values()))
    # Mergers of several layers' features are behind the layers, and keep as much either way.
    assert kept[-1] < kept[0] / (2 if case.spec.num_deepstack else 2.5)
    saved = -np.diff(kept)
    assert (saved > 0).all()
    assert saved == pytest.approx([saved.mean()] * NUM_LAYERS, rel=0.1)


def test_frozen_layers_have_no_backward_where_layers_are_recomputed(case, samples):
    vision, (llm,) = case.stages(case.config(), 1, num_recomputed=NUM_LAYERS)
    has_backward = []
    for stage in (vision, llm):
        for name in stage.layer_names:
            layer = stage.hf.get_submodule(name)
            layer.register_forward_hook(lambda _, __, made: has_backward.append(made.requires_grad))
    vision.train_those(lambda name: name.startswith("vision.projector"))
    assert all(features.requires_grad for features in vision(visual_batch(case, samples[:1])))
    assert has_backward == [False] * NUM_LAYERS
    vision.train_those(lambda name: False)
    llm.train_those(lambda name: name.startswith(f"llm.layers.{NUM_LAYERS - 1}"))
    del has_backward[:]
    run_stages(case, vision, [llm], samples).backward()
    assert has_backward == [False] * (3 * NUM_LAYERS - 1) + [True]  # two encoder ranks, and the LLM


def test_a_truncated_sample_keeps_the_first_of_its_visual_tokens(case, samples):
    vision, _ = case.stages(case.config(), 1)
    with torch.no_grad():
        whole, cut = vision(visual_batch(case, samples[:1])), vision(visual_batch(case, samples[:1], kept=11))
    assert len(whole[0]) == int(samples[0].is_visual.sum())
    assert torch.equal(cut[0], whole[0][:11])


def test_a_vocabulary_that_is_too_small_grows_to_the_tokenizers_and_a_larger_one_stays(case):
    make_config = case.runtime.make_config
    assert make_config(case.spec, case.placeholders, 1500).text_config.vocab_size == 1500
    config = make_config(case.spec, case.placeholders, 100)
    assert config.text_config.vocab_size == 1024
    ids = {"image": config.image_token_id, "video": getattr(config, "video_token_id", config.image_token_id)}
    assert ids == {kind: case.placeholders[kind] for kind in ids}


def saved_model(case: Case, folder: Path, config: PretrainedConfig, **settings) -> dict[str, torch.Tensor]:
    """Save a Hugging Face model of random weights; returns them."""
    torch.manual_seed(11)
    model = case.runtime.architecture(deepcopy(config))
    model.save_pretrained(folder, **settings)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


class Drawn(TorchDispatchMode):
    """The operations that draw random numbers inside this context."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in operation.tags and not made.is_meta:
            self.operations.append(str(operation))
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stage_from_a_checkpoint_draws_nothing_and_needs_hardly_more_than_it_holds(case, tmp_path, dtype):
    config = case.config()
    saved_model(case, tmp_path, config)
    with Drawn() as drawn:
        case.stage(config, "llm")
    assert any("normal_" in name for name in drawn.operations)
    for module in ("vision", "llm"):
        with Drawn() as drawn, LiveBytes() as live:
            stage = case.stage(config, module, checkpoint=tmp_path, dtype=dtype)
        assert not drawn.operations
        assert {own.dtype for own in stage.parameters()} == {dtype}
        assert live.peak < 1.2 * sum(own.nbytes for own in [*stage.parameters(), *stage.buffers()])


@pytest.mark.parametrize("max_shard_size", ["5GB", "400KB"])
def test_a_saved_hugging_face_model_is_loaded_tensor_by_tensor(case, tmp_path, max_shard_size):
    config = case.config()
    expected = saved_model(case, tmp_path, config, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "400KB")
    vision, llm = case.stages(config, 2, checkpoint=tmp_path, dtype=torch.float32)
    loaded = union_of([vision, *llm])
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_a_checkpoint_under_the_hubs_names_is_loaded(case, tmp_path):
    """The released checkpoints were written when the LLM and the encoder lay at the top."""
    config = case.config()
    expected = saved_model(case, tmp_path, config)
    (file,) = tmp_path.glob("*.safetensors")
    renamed = {}
    for name, tensor in expected.items():
        released = name
        for ours, theirs in case.hub_names:
            released = released.replace(ours, theirs)
        renamed[released.removeprefix(case.hub_prefix)] = tensor
    assert {name.split(".")[0] for name in renamed} == case.hub_parts
    save_file(renamed, file)
    vision, llm = case.stages(config, 1, checkpoint=tmp_path, dtype=torch.float32)
    loaded = union_of([vision, *llm])
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_weights_written_by_the_stages_themselves_are_loaded_again_and_by_transformers(case, tmp_path):
    config = case.config()
    vision, llm = case.stages(config, 2, dtype=torch.float32)
    union = union_of([vision, *llm])
    save_file(union, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(tmp_path)
    vision, llm = case.stages(config, 3, seed=SEED + 1, checkpoint=tmp_path, dtype=torch.float32)
    assert all(torch.equal(tensor, union[name]) for name, tensor in union_of([vision, *llm]).items())
    model = case.runtime.architecture.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, union[name]) for name, tensor in model.state_dict().items())


def test_a_checkpoint_that_lacks_a_tensor_names_it_and_only_to_the_stage_that_needs_it(case, tmp_path):
    config = case.config()
    saved_model(case, tmp_path, config)
    (file,) = tmp_path.glob("*.safetensors")
    weights = load_file(file)
    (lost,) = [name for name in weights if name.endswith("layers.3.mlp.up_proj.weight")]
    save_file({name: tensor for name, tensor in weights.items() if name != lost}, file)
    first, last = split_layers(NUM_LAYERS, 2)
    case.stage(config, "llm", layers=first, checkpoint=tmp_path)
    with pytest.raises(UserError, match=r"lacks 1 tensors .* model\.language_model\.layers\.3\.mlp\.up_proj\.weight"):
        case.stage(config, "llm", layers=last, checkpoint=tmp_path)


def test_a_checkpoint_with_a_tensor_that_the_model_has_not_names_it(case, tmp_path):
    config = case.config()
    saved_model(case, tmp_path, config)
    (file,) = tmp_path.glob("*.safetensors")
    more = {"language_model.model.layers.9.mlp.up_proj.weight": torch.zeros(2), "rotary_emb.inv_freq": torch.zeros(2)}
    save_file(load_file(file) | more, file)
    with pytest.raises(UserError, match=r"holds language_model\.model\.layers\.9\.mlp\.up_proj\.weight, which a model"):
        case.stage(config, "vision", checkpoint=tmp_path)


def test_a_tensor_of_another_shape_is_named(case, tmp_path):
    config = case.config()
    saved_model(case, tmp_path, config)
    config.get_text_config().vocab_size += 8
    with pytest.raises(UserError, match=r"holds [\w.]+\.weight of shape \[1024, 128\], its config says \[1032, 128\]"):
        case.stage(config, "llm", checkpoint=tmp_path)


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_head_beside_a_tied_embedding_must_be_its_copy(case, tmp_path, is_copy):
    config = case.config()
    config.tie_word_embeddings = True
    weights = saved_model(case, tmp_path, config)
    (file,) = tmp_path.glob("*.safetensors")
    head = weights["lm_head.weight"].clone() if is_copy else weights["lm_head.weight"] + 1
    save_file(load_file(file) | {"lm_head.weight": head}, file)
    if is_copy:
        case.stage(config, "llm", checkpoint=tmp_path, dtype=torch.float32)
        return
    with pytest.raises(UserError, match="holds a head that is not its embedding"):
        case.stage(config, "llm", checkpoint=tmp_path)


def test_a_folder_without_weights_says_how_to_save_them(case, tmp_path):
    with pytest.raises(UserError, match=r"holds no \*\.safetensors file; save the model with `save_pretrained`"):
        case.stage(case.config(), "vision", checkpoint=tmp_path)


def test_a_head_that_is_tied_to_the_embedding_stays_tied_and_loads_from_the_embedding_alone(case, tmp_path):
    config = case.config()
    config.tie_word_embeddings = True
    expected = saved_model(case, tmp_path, config)
    (file,) = tmp_path.glob("*.safetensors")
    assert not [name for name in load_file(file) if "lm_head" in name]
    stage = case.stage(config, "llm", checkpoint=tmp_path, dtype=torch.float32)
    assert stage.hf.lm_head.weight is stage.hf.model.language_model.embed_tokens.weight
    assert torch.equal(stage.hf.lm_head.weight, expected["lm_head.weight"])


def test_the_last_of_several_stages_has_a_copy_of_a_tied_embedding_under_its_name(case):
    config = case.config()
    config.tie_word_embeddings = True
    first, last = case.stages(config, 2)[1]
    name = "model.language_model.embed_tokens.weight"
    assert torch.equal(first.named_hf_parameters()[name], last.named_hf_parameters()[name])
    assert last.hf.lm_head.weight is last.named_hf_parameters()[name]
    assert "lm_head.weight" not in first.hf_state_dict()
