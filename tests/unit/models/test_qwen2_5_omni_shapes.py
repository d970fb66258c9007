"""Qwen2.5-Omni's rules, sounds and positions agree with transformers' processor, feature extractor and model."""

import functools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import Qwen2_5OmniThinkerConfig, WhisperFeatureExtractor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder, Qwen2_5OmniThinkerModel
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import _get_feat_extract_output_lengths

from dflop.base import UserError
from dflop.config import ModelConfig, load_config
from dflop.models import family_for, load_model_spec
from dflop.models.qwen2_5_omni_thinker import PRESETS, make_spec
from dflop.models.qwen2_5_omni_thinker.processing import Qwen25OmniSounds
from dflop.shapes.reader import MediumShape, MediumSize, PlacedText, ShapeReader, expand_text, place_positions
from dflop.shapes.record_media import RecordError
from dflop.shapes.records import parse_record
from dflop.shapes.text import TokenizedText

RATE = 16_000
SPEC = make_spec("a model", PRESETS["tiny"])
IDS = {"image": 1, "video": 2, "audio": 3}
AROUND = {"image": (4, 5), "video": (4, 5), "audio": (6, 7)}


@pytest.fixture(scope="module")
def extractor() -> WhisperFeatureExtractor:
    """It pads sounds to 30 s, and not to 300 s as the released one: longer ones are not drawn here."""
    return WhisperFeatureExtractor(feature_size=80, chunk_length=30, return_attention_mask=True)


def heard(extractor: WhisperFeatureExtractor, samples: np.ndarray) -> np.ndarray:
    """The mel frames that the processor gives the model, [num_mel_bins, num_frames]."""
    made = extractor(samples, sampling_rate=RATE, padding="max_length", return_attention_mask=True, return_tensors="np")
    return made["input_features"][0][:, : int(made["attention_mask"].sum())]


@settings(max_examples=15)
@given(num_samples=st.integers(321, 20 * RATE))
@example(num_samples=321)
@example(num_samples=2 * RATE)
@example(num_samples=2 * RATE + 1)
def test_a_sound_has_the_frames_and_tokens_that_transformers_gives_it(extractor, num_samples):
    samples = np.random.default_rng(num_samples).normal(size=num_samples).astype(np.float32)
    frames = heard(extractor, samples)
    count = SPEC.rules.audio(num_samples / RATE, None)
    assert count.grid == (frames.shape[1], 1, 1)
    assert count.num_tokens == _get_feat_extract_output_lengths(frames.shape[1])
    assert count.num_tokens == Qwen2_5OmniAudioEncoder._get_feat_extract_output_lengths(None, frames.shape[1])[1]
    items = Qwen25OmniSounds(SPEC).sound(samples)
    assert items.shape == (count.num_items, 80, 200)
    in_a_row = items.transpose(1, 0, 2).reshape(80, -1)
    np.testing.assert_allclose(in_a_row[:, : frames.shape[1]], frames, atol=1e-6)
    assert not in_a_row[:, frames.shape[1] :].any()


@pytest.mark.parametrize("table", ["clotho_audio", "soundbible_audio"])
def test_the_sounds_of_real_tables_have_transformers_tokens(shape_table, table):
    """A frame starts every 160 samples, as drawn sounds show above; what lies behind five minutes is not heard."""
    rules = make_spec("a model", PRESETS["qwen2_5_omni_7b"]).rules
    seconds = [float(row["audio_seconds"]) for row in shape_table(table)]
    assert len(seconds) > 1000
    counts = [rules.audio(own, None) for own in seconds]
    frames = [min(30_000, math.ceil(round(own * RATE) / 160)) for own in seconds]
    assert [count.grid for count in counts] == [(own, 1, 1) for own in frames]
    assert [count.num_tokens for count in counts] == [_get_feat_extract_output_lengths(own) for own in frames]


def test_of_a_long_sound_the_first_minutes_are_heard():
    whole, longer = (SPEC.rules.audio(seconds, None) for seconds in (300.0, 3000.0))
    assert whole == longer
    assert (whole.num_items, whole.num_tokens) == (150, 7500)
    short = make_spec("a model", PRESETS["tiny"], {"chunk_length": 4})
    assert len(Qwen25OmniSounds(short).sound(np.zeros(5 * RATE, dtype=np.float32))) == 2


def test_a_sound_that_is_too_short_for_a_token_rejects_its_record():
    reader = ShapeReader(SPEC.rules, load_config().data)
    turns = [{"from": "human", "value": "<audio>"}, {"from": "gpt", "value": "A click."}]
    record = parse_record({"id": "a", "audio": "a.wav", "conversations": turns})
    (shape,) = reader.stored_media(record, [MediumSize(0, 0, 0, num_samples=321)])
    assert shape.count.num_tokens == 1
    with pytest.raises(RecordError, match=r"0\.02 s of sound are too short") as refused:
        reader.stored_media(record, [MediumSize(0, 0, 0, num_samples=320)])
    assert refused.value.reason == "unreadable_media"


grids = st.tuples(st.integers(1, 6), st.integers(1, 6))
media = st.one_of(
    st.tuples(st.just("image"), st.just(1), grids, st.just(0.0)),
    st.tuples(st.just("video"), st.integers(1, 8), grids, st.floats(0.01, 40)),
    st.tuples(st.just("audio"), st.integers(3, 500), st.just((1, 1)), st.just(0.0)),
)


@settings(max_examples=100)
@given(drawn=st.lists(media, max_size=4), texts=st.lists(st.integers(1, 6), min_size=5, max_size=5))
def test_positions_are_those_of_transformers_model(drawn, texts):
    ids, placed, num_tokens, grids, num_frames = [0] * texts[0], [], [], {"image": [], "video": []}, []
    for (kind, steps, (rows, columns), frame_s), behind in zip(drawn, texts[1:], strict=False):
        if kind == "audio":
            count = SPEC.rules.audio(steps / 100, None)
            num_frames.append(steps)
        else:
            count = SPEC.rules._of_grid((steps, 2 * rows, 2 * columns))
            grids[kind].append(count.grid)
        placed.append(MediumShape(kind, count, frame_us=round(1e6 * frame_s)))
        num_tokens.append(count.num_tokens)
        before, after = AROUND[kind]
        ids += [before, IDS[kind], after] + [0] * behind
    ids = np.array(ids)
    text = TokenizedText(ids, np.zeros(len(ids), dtype=bool), np.flatnonzero(np.isin(ids, list(IDS.values()))))
    token_ids, _ = expand_text(text, num_tokens, 1 << 20)
    ours = place_positions(text, PlacedText((), placed, num_tokens), SPEC.rules, 1 << 20)
    of_steps = [2 * medium.frame_us / 1e6 for medium in placed if medium.kind == "video"]
    theirs, _ = positions_model().get_rope_index(
        torch.from_numpy(token_ids)[None],
        attention_mask=torch.ones(1, len(token_ids)),
        audio_seqlens=torch.tensor(num_frames) if num_frames else None,
        second_per_grids=torch.tensor(of_steps) if of_steps else None,
        **{f"{kind}_grid_thw": torch.tensor(own) for kind, own in grids.items() if own},
    )
    np.testing.assert_array_equal(ours, theirs[:, 0].numpy())


@functools.cache
def positions_model() -> Qwen2_5OmniThinkerModel:
    fields = {key: value for key, value in PRESETS["tiny"].items() if key != "model_type"}
    config = Qwen2_5OmniThinkerConfig(**fields)
    for kind, number in IDS.items():
        setattr(config, f"{kind}_token_id", number)
    config.vision_start_token_id, config.audio_start_token_id = AROUND["image"][0], AROUND["audio"][0]
    with torch.device("meta"):
        return Qwen2_5OmniThinkerModel(config)


@pytest.mark.parametrize(
    ("part", "field", "value", "complaint"),
    [
        ("audio_config", "output_dim", 64, "`audio_config.output_dim` 64, but its LLM has `hidden_size` 128"),
        ("vision_config", "out_hidden_size", 64, "`vision_config.out_hidden_size` 64, but its LLM"),
        ("text_config", "use_sliding_window", True, "`use_sliding_window`: true"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(part, field, value, complaint):
    fields = PRESETS["tiny"] | {part: PRESETS["tiny"][part] | {field: value}}
    with pytest.raises(UserError, match=complaint):
        make_spec("a model", fields)


def test_a_feature_extractor_that_hears_otherwise_than_the_model_is_refused():
    with pytest.raises(UserError, match=r"`feature_size` 128, but by its config\.json it is 80"):
        make_spec("a model", PRESETS["tiny"], {"feature_extractor": {"feature_size": 128}})


def test_of_a_checkpoint_of_the_whole_model_the_thinker_is_read(tmp_path):
    whole = {"model_type": "qwen2_5_omni", "talker_config": {}, "thinker_config": PRESETS["qwen2_5_omni_3b"]}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    read = load_model_spec(ModelConfig(family="qwen2_5_omni_thinker", path=str(tmp_path)))
    assert read == make_spec(tmp_path.name, PRESETS["qwen2_5_omni_3b"])
    assert family_for("qwen2_5_omni") == "qwen2_5_omni_thinker"
    with pytest.raises(UserError, match=r"holds a 'qwen2_5_omni' model, .* use `model.family: qwen2_5_omni_thinker`"):
        load_model_spec(ModelConfig(family="qwen2_5_vl", path=str(tmp_path)))


def test_a_whole_model_without_a_thinker_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_omni"}')
    with pytest.raises(UserError, match=r"has no `thinker_config`, the config of the model that is trained"):
        load_model_spec(ModelConfig(family="qwen2_5_omni_thinker", path=str(tmp_path)))


def test_the_encoders_take_kinds_of_their_own():
    assert {encoder.name: encoder.media for encoder in SPEC.encoders} == {
        "vision": ("image", "video"),
        "audio": ("audio",),
    }
