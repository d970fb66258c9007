"""What the rest of dflop knows of a model without building it: its modules' sizes and its shape rules.

A spec comes from a preset or from the `config.json` of a Hugging Face checkpoint; neither torch nor
transformers is imported for it. A family is a module named in `_FAMILIES` with `PRESETS` and `make_spec`.
"""

import importlib
import json
import math
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dflop.config import AudioConfig, ModelConfig
from dflop.runtime import UserError

__all__ = [
    "ItemCount",
    "ModelSpec",
    "ModuleSpec",
    "ShapeRules",
    "check_runnable",
    "check_tp",
    "digest_of_spec",
    "load_model_spec",
    "model_digest",
    "vision_and_llm",
]

_FAMILIES = {
    "internvl": "dflop.models.internvl",
    "llava_onevision": "dflop.models.llava_onevision",
}
# Those that can be built and cut into stages; of the others only the shapes are known.
_RUNNABLE = ("llava_onevision",)


class ItemCount(NamedTuple):
    """What one medium becomes: items for its encoder and tokens for the LLM."""

    num_items: int
    num_tokens: int


class ShapeRules(Protocol):
    """A family's rule from media sizes, as their headers give them, to items and tokens."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Tokens that the family's text needs beside the media's placeholders."""

    def image(self, width: int, height: int, num_images: int) -> ItemCount:
        """One picture of a sample that holds `num_images` pictures."""

    def video(self, num_frames: int) -> ItemCount:
        """One clip of which `num_frames` frames are taken."""

    def audio(self, seconds: float, audio: AudioConfig) -> ItemCount:
        """One audio file."""

    def in_text(self, kind: str, count: ItemCount) -> str:
        """What the placeholder `<kind>` of one medium becomes in the text before it is tokenised.

        Each `<kind>` in it stands for `num_tokens` over the number of them: an equal share of the tokens.
        """


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
    the LLM, whose name is `llm`; no two encoders take the same kind of medium.
    """

    family: str
    name: str
    hf_config: dict[str, Any]
    modules: tuple[ModuleSpec, ...]
    rules: ShapeRules

    def __post_init__(self) -> None:
        assert [module.name == "llm" for module in self.modules] == [False] * (len(self.modules) - 1) + [True]
        kinds = [kind for module in self.modules for kind in module.media]
        assert len(kinds) == len(set(kinds)), f"two encoders of {self.name} take the same kind of medium: {kinds}"

    @property
    def encoders(self) -> tuple[ModuleSpec, ...]:
        """The modules before the LLM, which is the last."""
        return self.modules[:-1]

    def module(self, name: str) -> ModuleSpec:
        for module in self.modules:
            if module.name == name:
                return module
        names = ", ".join(module.name for module in self.modules)
        raise UserError(f"{self.name} has no module `{name}`; it has {names}")


def load_model_spec(model: ModelConfig) -> ModelSpec:
    """The spec of the configured model.

    Raises:
        UserError: for an unknown family or preset, or a `model.path` that is no checkpoint directory.
    """
    if model.family not in _FAMILIES:
        raise UserError(f"`model.family` is {model.family!r}; it must be one of {', '.join(_FAMILIES)}")
    family = importlib.import_module(_FAMILIES[model.family])
    if model.path is None:
        if model.preset not in family.PRESETS:
            raise UserError(f"`model.preset` is {model.preset!r}; {model.family} has {', '.join(family.PRESETS)}")
        return family.make_spec(model.preset, family.PRESETS[model.preset])
    folder = Path(model.path)
    hf_config = _read_hf_config(folder)
    model_type = hf_config.get("model_type")
    if model_type != model.family:
        way_out = (
            f"use `model.family: {model_type}`"
            if model_type in _FAMILIES
            else f"known are {', '.join(_FAMILIES)} (of InternVL the checkpoints whose names end in -hf)"
        )
        raise UserError(
            f"`model.path` {folder} holds a {model_type!r} model, but `model.family` is {model.family!r}; {way_out}"
        )
    return family.make_spec(folder.name, hf_config, _read_preprocessor(folder))


def check_runnable(family: str) -> None:
    """Whether models of the family can be built, measured and trained.

    Raises:
        UserError: when only their shapes are known.
    """
    if family not in _RUNNABLE:
        raise UserError(
            f"`model.family` is {family!r}: its shapes can be profiled; measuring and training it is not possible "
            f"yet; use `model.family: {' or '.join(_RUNNABLE)}`"
        )


def check_tp(spec: ModelSpec, module: str, tp: int) -> None:
    """Whether `tp` ranks can divide the module, whose attention they share head by head.

    Raises:
        UserError: naming the sizes that can.
    """
    sizes = spec.module(module)
    shareable = math.gcd(sizes.num_heads, sizes.num_kv_heads)
    if tp < 1 or shareable % tp:
        able = ", ".join(str(size) for size in range(1, shareable + 1) if shareable % size == 0)
        raise UserError(
            f"tp={tp} does not divide {module}'s {sizes.num_heads} attention heads and {sizes.num_kv_heads} key-value "
            f"heads of {spec.name}; use one of {able}"
        )


def digest_of_spec(spec: ModelSpec) -> str:
    """What the costs of a model depend on: its family and the fields of its config."""
    return sha256(json.dumps([spec.family, spec.hf_config], sort_keys=True).encode()).hexdigest()[:16]


def model_digest(model: ModelConfig) -> str:
    """A digest of the files, weights apart, that `model.path` and `model.tokenizer` name."""
    running = sha256()
    for folder in filter(None, (model.path, model.tokenizer)):
        for path in sorted(Path(folder).glob("*.json")) + sorted(Path(folder).glob("*.jinja")):
            if not path.name.endswith(".index.json"):
                running.update(f"{path.name}\0".encode() + path.read_bytes())
    return running.hexdigest()[:16]


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
    encoder = ModuleSpec(
        name="vision",
        num_layers=vision["num_hidden_layers"],
        hidden_size=vision["hidden_size"],
        num_heads=vision["num_attention_heads"],
        num_kv_heads=vision["num_attention_heads"],
        media=("image", "video"),
    )
    return encoder, llm


def _read_hf_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a Hugging Face checkpoint directory."""
    fields = _read_fields(folder / "config.json")
    if fields is None:
        raise UserError(
            f"`model.path` {folder} is not a Hugging Face checkpoint directory: it has no config.json; "
            "name the folder that `save_pretrained` wrote, or set `model.path: null` and choose a `model.preset`"
        )
    return fields


def _read_preprocessor(folder: Path) -> dict[str, Any]:
    """The image processor's fields that a checkpoint sets; as transformers does, a processor's own come first."""
    nested = (_read_fields(folder / "processor_config.json") or {}).get("image_processor")
    return nested or _read_fields(folder / "preprocessor_config.json") or {}


def _read_fields(path: Path) -> dict[str, Any] | None:
    """A JSON file's keys and values; None where there is no file."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path} holds a {type(fields).__name__}; it must hold keys and values as Hugging Face writes")
    return fields
