"""The audio rule gives the tokens that Whisper's features and Qwen2-Audio's encoder give."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder

from dflop.config import AudioConfig, ModelConfig
from dflop.models import load_model_spec
from dflop.models.audio import whisper_audio

SAMPLE_RATE = 16_000
QWEN2_AUDIO = AudioConfig()


@pytest.fixture(scope="module")
def extractor() -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=4)


def tokens_of_one_window(extractor: WhisperFeatureExtractor, num_samples: int) -> int:
    features = extractor(
        np.zeros(num_samples, dtype=np.float32),
        sampling_rate=SAMPLE_RATE,
        padding="max_length",
        return_attention_mask=True,
        return_tensors="np",
    )
    num_mel_frames = torch.tensor([int(features["attention_mask"].sum())])
    return int(Qwen2AudioEncoder._get_feat_extract_output_lengths(None, num_mel_frames)[1])


@settings(max_examples=40)
@given(num_samples=st.integers(400, 30 * SAMPLE_RATE))
@example(num_samples=17_600)  # 1.1 s, and 1.1 * 100 is not quite 110 in floating point
def test_a_sound_within_one_window_takes_the_tokens_that_transformers_gives_it(extractor, num_samples):
    count = whisper_audio(num_samples / SAMPLE_RATE, QWEN2_AUDIO)
    assert count[:2] == (1, tokens_of_one_window(extractor, num_samples))


@pytest.mark.parametrize(
    ("seconds", "num_windows", "num_tokens"),
    [(30.0, 1, 750), (60.0, 2, 1500), (30.01, 2, 751), (45.0, 2, 1125), (0.001, 1, 1), (0.0, 1, 1)],
)
def test_a_long_sound_is_cut_into_windows_and_a_short_one_still_takes_a_token(seconds, num_windows, num_tokens):
    """transformers gives sounds of less than 20 ms no token at all; here each has one, so that it has a place."""
    assert whisper_audio(seconds, QWEN2_AUDIO)[:2] == (num_windows, num_tokens)


@given(
    num_samples=st.integers(1, 200 * SAMPLE_RATE), window_s=st.sampled_from([1.0, 8.0, 30.0]), pooling=st.integers(1, 9)
)
def test_every_window_is_convolved_and_pooled_on_its_own(num_samples, window_s, pooling):
    """Counted as the layers do it: Whisper's second convolution, then an average over `pooling` positions."""
    windows = torch.zeros(num_samples).split(int(window_s * SAMPLE_RATE))
    num_tokens = 0
    for window in windows:
        mel = torch.zeros(1, 1, math.ceil(len(window) / (SAMPLE_RATE // 100)))
        positions = torch.nn.functional.conv1d(mel, torch.zeros(1, 1, 3), stride=2, padding=1)
        enough = positions.shape[-1] >= pooling
        num_tokens += torch.nn.functional.avg_pool1d(positions, pooling).shape[-1] if enough else 1
    count = whisper_audio(num_samples / SAMPLE_RATE, AudioConfig(window_s=window_s, pooling=pooling))
    assert count[:2] == (len(windows), num_tokens)


@given(seconds=st.floats(0.0, 3600.0), more=st.floats(0.0, 60.0))
def test_a_longer_sound_never_takes_less(seconds, more):
    short, long = whisper_audio(seconds, QWEN2_AUDIO), whisper_audio(seconds + more, QWEN2_AUDIO)
    assert long.num_items >= short.num_items
    assert long.num_tokens >= short.num_tokens
    assert short.num_items == max(1, math.ceil(seconds / 30))


@pytest.mark.parametrize("family", ["llava_onevision", "internvl", "qwen2_5_vl", "qwen3_vl"])
def test_a_family_without_an_audio_encoder_has_this_rule_and_its_placeholder_alone(family):
    rules = load_model_spec(ModelConfig(family=family)).rules
    count = rules.audio(12.3, QWEN2_AUDIO)
    assert count == whisper_audio(12.3, QWEN2_AUDIO)
    assert rules.in_text("audio", count) == rules.placeholder("audio") == "<audio>"
