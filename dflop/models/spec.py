"""What the rest of dflop knows of a model without building it: its modules' sizes and its shape rules.

A family makes the spec from a preset or from the `config.json` of a Hugging Face checkpoint (`family`); neither torch
nor transformers is imported for it.
"""

import difflib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

import numpy as np

from dflop.config import AudioConfig
from dflop.runtime import UserError

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


# What sounds are resampled to, by all encoders of Whisper's kind.
SOUND_RATE_HZ = 16_000


class ItemCount(NamedTuple):
    """What one medium becomes: items for its encoder and tokens for the LLM.

    Where an encoder's items attend to each other in runs that differ in length, `sum_sq_items` is the sum of these
    runs' squared lengths, the mean of its layers. `grid` is what the items are laid out by where they are not pictures
    of one size: steps in time, rows and columns of patches; of a sound its frames.
    """

    num_items: int
    num_tokens: int
    sum_sq_items: float = 0.0
    grid: tuple[int, int, int] = (0, 0, 0)


class ShapeRules(Protocol):
    """A family's rule from media sizes, as their headers give them, to items and tokens."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Tokens that the family's text needs beside the media's placeholders."""

    @property
    def num_position_axes(self) -> int:
        """How many positions a token has in the LLM; with several, `run_positions` gives those of media's tokens."""
        return 1

    def image(self, width: int, height: int, num_images: int) -> ItemCount:
        """One picture of a sample that holds `num_images` pictures."""

    def video(self, num_frames: int, width: int, height: int) -> ItemCount:
        """One clip of which `num_frames` frames of this size are taken."""

    def audio(self, seconds: float, audio: AudioConfig) -> ItemCount:
        """One audio file."""

    def placeholder(self, kind: str) -> str:
        """The token that stands for media of this kind in tokenised text; kinds of one encoder may share it."""

    def in_text(self, kind: str, count: ItemCount, times_s: Sequence[float] = ()) -> str:
        """What the `<kind>` of one medium in a record becomes in the text before it is tokenised.

        Each `placeholder(kind)` in it stands for `num_tokens` over the number of them: an equal share of the tokens.
        `times_s` are the seconds into a clip at which the frames stand that are taken of it.
        """

    def run_positions(self, kind: str, count: ItemCount, frame_s: float) -> tuple[np.ndarray, int]:
        """Positions [num_position_axes, num_tokens] of the tokens that one `placeholder(kind)` stands for, counted from
        the first, and by how much the position of what follows is more than that of the first.

        `frame_s` are the seconds between frames that are taken of a clip.
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
    the LLM, whose name is `llm`; no two encoders take the same kind of medium. Behind each of the LLM's first
    `num_deepstack` layers further features of the media are added to those of their tokens (DeepStack).
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
    def feature_size(self) -> int:
        """How wide the features are that encoders give for a token: what the embedding has, and for each layer that
        takes further ones as much again."""
        return self.hidden_size_before(0)

    def hidden_size_before(self, layer: int) -> int:
        """How wide the hidden states of a token are that come to a layer of the LLM, with the further features that
        wait for it or for a later one: before the first layer `feature_size`."""
        return self.module("llm").hidden_size * (1 + max(0, self.num_deepstack - layer))

    @property
    def media(self) -> tuple[str, ...]:
        """The kinds of media that the model takes."""
        return tuple(kind for module in self.encoders for kind in module.media)

    def module(self, name: str) -> ModuleSpec:
        for module in self.modules:
            if module.name == name:
                return module
        names = ", ".join(module.name for module in self.modules)
        raise UserError(f"{self.name} has no module `{name}`; it has {names}")


def check_modules(spec: ModelSpec, names: Iterable[str], key: str) -> None:
    """Whether the model has every module that is named below a key of the config.

    Raises:
        UserError: naming the one that it has not, and those that it has.
    """
    known = [module.name for module in spec.modules]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean `{key}.{near[0]}`? " if near else ""
            raise UserError(f"`{key}.{name}` is of no module of {spec.name}; {meant}it has {', '.join(known)}")


def check_tp(spec: ModelSpec, module: str, tp: int) -> None:
    """Whether `tp` ranks can divide the module, whose attention they share head by head.

    Raises:
        UserError: naming the sizes that can.
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
    """Of these tensor-parallel sizes those that can divide each module, by its name.

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
    """Whether each of `tp` ranks gets as many attention heads, and as many key-value heads."""
    return tp >= 1 and sizes.num_heads % tp == 0 and sizes.num_kv_heads % tp == 0


def digest_of_spec(spec: ModelSpec) -> str:
    """What the costs of a model depend on: its family and the fields of its config."""
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
