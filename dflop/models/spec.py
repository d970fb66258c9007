"""What the rest of dflop knows of a model without building it: its modules' sizes and its shape rules.

A family makes the spec from a preset or from the `config.json` of a Hugging Face checkpoint (`family`), without torch
or transformers.
"""

import difflib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

import numpy as np

from dflop.base import UserError
from dflop.config import AudioConfig

__all__ = [
    "SOUND_RATE_HZ",
    "ItemCount",
    "ModelSpec",
    "ModuleSpec",
    "ShapeRules",
    "check_modules",
    "check_tp",
    "digest_of_spec",
    "encoder_of",
    "vision_and_llm",
]


# The sample rate that sounds are resampled to: that of all Whisper-like encoders.
SOUND_RATE_HZ = 16_000


class ItemCount(NamedTuple):
    """What one medium becomes: items for its encoder and tokens for the LLM.

    `sum_sq_items` is for encoders whose items attend to each other in runs of different lengths: the sum of the runs'
    squared lengths in items, averaged over the layers. `grid` is for encoders whose items are not pictures of one size:
    the numbers of steps in time, and of rows and columns of patches; for a sound the number of mel frames, 1 and 1.
    """

    num_items: int
    num_tokens: int
    sum_sq_items: float = 0.0
    grid: tuple[int, int, int] = (0, 0, 0)


class ShapeRules(Protocol):
    """A family's rules from media sizes, as headers give them, to items and tokens. A size that the model cannot take
    raises ValueError."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Tokens that the family's text needs beside the media's placeholders."""

    @property
    def num_position_axes(self) -> int:
        """How many position ids a token has in the LLM. With several, `run_positions` gives those of media tokens."""
        return 1

    def image(self, width: int, height: int, num_images: int) -> ItemCount:
        """One picture of `width` x `height` pixels, in a sample that holds `num_images` pictures."""

    def video(self, num_frames: int, width: int, height: int) -> ItemCount:
        """One clip of which `num_frames` frames of `width` x `height` pixels are used."""

    def audio(self, seconds: float, audio: AudioConfig) -> ItemCount:
        """One sound of this length."""

    def placeholder(self, kind: str) -> str:
        """The token that stands for media of this kind in tokenised text; kinds of one encoder may share it."""

    def in_text(self, kind: str, count: ItemCount, times_s: Sequence[float] = ()) -> str:
        """What replaces a medium's `<kind>` in a record's text before the text is tokenised.

        Each `placeholder(kind)` in the result stands for an equal share of the medium's `num_tokens` tokens. `times_s`
        are the times in seconds, from the beginning of the clip, of the frames that are used.
        """

    def run_positions(self, kind: str, count: ItemCount, frame_s: float) -> tuple[np.ndarray, int]:
        """The position ids of the tokens that one `placeholder(kind)` stands for, int64 [num_position_axes,
        num_tokens], relative to the position at which the medium begins; and the relative position of what follows it.

        `frame_s` are the seconds between two of the frames that are used of a clip.

        Raises:
            NotImplementedError: for a family with one position id a token.
        """
        raise NotImplementedError(f"the LLM of {type(self).__name__} has one position a token: its place in the sample")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleSpec:
    """Sizes of one separately parallelised module; `media` are the kinds that an encoder takes (the LLM: none)."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    media: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model of one family.

    `hf_config` holds the fields of its Hugging Face config. `modules` are its encoders, any number of them, and then
    the LLM, whose name is `llm`; no two encoders take the same kind of medium. After each of the LLM's first
    `num_deepstack` layers, further encoder features are added to the hidden states of media tokens (DeepStack).
    """

    family: str
    name: str
    hf_config: dict[str, Any]
    modules: tuple[ModuleSpec, ...]
    rules: ShapeRules
    num_deepstack: int = 0

    def __post_init__(self) -> None:
        assert [module.name == "llm" for module in self.modules] == [False] * (len(self.modules) - 1) + [True]
        kinds = [kind for module in self.modules for kind in module.media]
        assert len(kinds) == len(set(kinds)), f"two encoders of {self.name} take the same kind of medium: {kinds}"

    @property
    def encoders(self) -> tuple[ModuleSpec, ...]:
        """The modules before the LLM, which is the last."""
        return self.modules[:-1]

    @property
    def has_tied_head(self) -> bool:
        """Whether the LLM's head is, or may be, its embedding: the config does not say that it is not."""
        return bool(self.hf_config.get("tie_word_embeddings", True))

    @property
    def part_names(self) -> list[str]:
        """The names of modules, and of encoders without their projectors and the projectors alone (`plan.trained`)."""
        parts = [f"{encoder.name}.{part}" for encoder in self.encoders for part in ("encoder", "projector")]
        return [*(module.name for module in self.modules), *parts]

    @property
    def feature_size(self) -> int:
        """The width of the features that encoders give for a token: the LLM's hidden size, plus as much again for each
        DeepStack layer."""
        return self.hidden_size_before(0)

    def hidden_size_before(self, layer: int) -> int:
        """The width of what enters a layer of the LLM for each token: its hidden state, and the DeepStack features that
        are still to be added, after this layer or a later one. For layer 0 this is `feature_size`."""
        return self.module("llm").hidden_size * (1 + max(0, self.num_deepstack - layer))

    @property
    def most_positions(self) -> int | None:
        """How many positions the LLM was made for; None if its config does not say."""
        return self.hf_config.get("text_config", {}).get("max_position_embeddings")

    @property
    def keys_and_values(self) -> int:
        """The number of values in a token's keys and values, of one layer of the LLM."""
        llm, text = self.module("llm"), self.hf_config.get("text_config", {})
        return 2 * llm.num_kv_heads * (text.get("head_dim") or llm.hidden_size // llm.num_heads)

    @property
    def media(self) -> tuple[str, ...]:
        """The kinds of media that the model takes."""
        return tuple(kind for module in self.encoders for kind in module.media)

    def module(self, name: str) -> ModuleSpec:
        """The module of this name.

        Raises:
            UserError: when the model has no such module.
        """
        for module in self.modules:
            if module.name == name:
                return module
        names = ", ".join(module.name for module in self.modules)
        raise UserError(f"{self.name} has no module `{name}`; it has {names}")


def check_modules(spec: ModelSpec, names: Iterable[str], key: str) -> None:
    """Check that the model has every module that is named under a key of the config.

    Raises:
        UserError: naming the one that it lacks, and those that it has.
    """
    known = [module.name for module in spec.modules]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean `{key}.{near[0]}`? " if near else ""
            raise UserError(f"`{key}.{name}` is of no module of {spec.name}; {meant}it has {', '.join(known)}")


def check_tp(spec: ModelSpec, module: str, tp: int) -> None:
    """Check that `tp` ranks can divide the module: each takes as many attention heads and key-value heads.

    Raises:
        UserError: when they cannot, naming the sizes that can.
    """
    sizes = spec.module(module)
    most = math.gcd(sizes.num_heads, sizes.num_kv_heads)
    if not _divides(sizes, tp):
        able = ", ".join(str(size) for size in range(1, most + 1) if _divides(sizes, size))
        raise UserError(
            f"tp={tp} does not divide {module}'s {sizes.num_heads} attention heads and {sizes.num_kv_heads} key-value "
            f"heads of {spec.name}; use one of {able}"
        )


def able_tp_sizes(spec: ModelSpec, tp_sizes: Sequence[int]) -> dict[str, list[int]]:
    """For each module, by name, those of the tensor-parallel sizes that can divide it.

    Raises:
        UserError: for a module that none of them can divide, naming the sizes that can.
    """
    able = {}
    for module in spec.modules:
        able[module.name] = [tp for tp in tp_sizes if _divides(module, tp)]
        if not able[module.name]:
            check_tp(spec, module.name, tp_sizes[0])
    return able


def _divides(sizes: "ModuleSpec", tp: int) -> bool:
    """Whether every one of `tp` ranks gets the same number of attention heads and of key-value heads."""
    return tp >= 1 and sizes.num_heads % tp == 0 and sizes.num_kv_heads % tp == 0


def digest_of_spec(spec: ModelSpec) -> str:
    """A digest of what the costs of a model depend on: its family and the fields of its config."""
    return sha256(json.dumps([spec.family, spec.hf_config], sort_keys=True).encode()).hexdigest()[:16]


def vision_and_llm(name: str, vision: dict[str, Any], text: dict[str, Any]) -> tuple[ModuleSpec, ModuleSpec]:
    """The modules of a vision-language model, from its `vision_config` (complete) and `text_config`.

    Raises:
        UserError: naming the field that `text_config` lacks.
    """
    try:
        llm = ModuleSpec(
            name="llm",
            num_layers=text["num_hidden_layers"],
            hidden_size=text["hidden_size"],
            num_heads=text["num_attention_heads"],
            num_kv_heads=text.get("num_key_value_heads", text["num_attention_heads"]),
        )
    except KeyError as error:
        raise UserError(f"the config of {name} has no `text_config.{error.args[0]}`") from None
    return encoder_of("vision", vision, ("image", "video")), llm


def encoder_of(name: str, config: dict[str, Any], media: tuple[str, ...]) -> ModuleSpec:
    """An encoder's module, from its part of the Hugging Face config (complete), and the kinds of media it takes."""
    num_heads = config["num_attention_heads"]
    return ModuleSpec(
        name=name,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_heads=num_heads,
        num_kv_heads=num_heads,
        media=media,
    )
