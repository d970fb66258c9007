"""A made-up family with two encoders, written as README.md of `dflop/models` says, of which no model can be built."""

import sys

import pytest

import dflop.models

__all__ = ["NAMES", "made_up"]

FILES = {
    "__init__.py": '''
"""Pictures by one encoder, sounds by another: a picture is four items, a frame one, a window of sound one."""

from dataclasses import dataclass

from dflop.models.audio import whisper_audio
from dflop.models.family import Family
from dflop.models.presets import TINY_LLM
from dflop.models.spec import ItemCount, ModelSpec, ShapeRules, encoder_of, vision_and_llm

TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
PRESETS = {"tiny": {"model_type": "made_up", "text_config": TINY_LLM, "vision_config": TOWER, "audio_config": TOWER}}


@dataclass(frozen=True)
class Rules(ShapeRules):
    special_tokens = ("<sound>",)

    def image(self, width, height, num_images):
        return ItemCount(4, 36)

    def video(self, num_frames, width, height):
        return ItemCount(num_frames, 9 * num_frames)

    def audio(self, seconds, audio):
        return whisper_audio(seconds, audio)

    def placeholder(self, kind):
        return f"<{kind}>"

    def in_text(self, kind, count, times_s=()):
        return f"<sound><{kind}>" if kind == "audio" else f"<{kind}>"


def make_spec(name, hf_config, preprocessor):
    vision, llm = vision_and_llm(name, hf_config["vision_config"], hf_config["text_config"])
    audio = encoder_of("audio", hf_config["audio_config"], ("audio",))
    return ModelSpec(family="made_up", name=name, hf_config=hf_config, modules=(vision, audio, llm), rules=Rules())


FAMILY = Family(name="made_up", presets=PRESETS, make_spec=make_spec)
''',
}


NAMES = ["vision", "audio", "llm"]


@pytest.fixture
def made_up(tmp_path, monkeypatch) -> str:
    folder = tmp_path / "families" / "made_up"
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(dflop.models, "__path__", [*dflop.models.__path__, str(folder.parent)])
    yield folder.name
    for name in [name for name in sys.modules if name.startswith("dflop.models.made_up")]:
        del sys.modules[name]
    del dflop.models.made_up
