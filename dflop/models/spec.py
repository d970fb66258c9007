"""What the rest of dflop knows of a model without building it: its modules' sizes and its shape rules.

A spec comes from a preset or from the `config.json` of a Hugging Face checkpoint; neither torch nor
transformers is imported for it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dflop.config import ModelConfig
from dflop.errors import UserError

__all__ = ["ItemCount", "ModelSpec", "ModuleSpec", "ShapeRules", "load_model_spec"]


class ItemCount(NamedTuple):
    """What one medium becomes: items for its encoder and tokens for the LLM."""

    num_items: int
    num_tokens: int


class ShapeRules(Protocol):
    """A family's rule from media sizes, as their headers give them, to items and tokens."""

    def image(self, width: int, height: int, num_images: int) -> ItemCount:
        """One picture of a sample that holds `num_images` pictures."""

    def video(self, num_frames: int) -> ItemCount:
        """One clip of which `num_frames` frames are taken."""

    def audio(self, seconds: float) -> ItemCount:
        """One audio file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleSpec:
    """Sizes of one separately parallelised module."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model of one family: `hf_config` holds the fields of its Hugging Face config."""

    family: str
    name: str
    hf_config: dict[str, Any]
    modules: tuple[ModuleSpec, ...]
    rules: ShapeRules

    @property
    def encoders(self) -> tuple[ModuleSpec, ...]:
        return tuple(module for module in self.modules if module.name != "llm")

    def module(self, name: str) -> ModuleSpec:
        for module in self.modules:
            if module.name == name:
                return module
        names = ", ".join(module.name for module in self.modules)
        raise UserError(f"{self.name} has no module `{name}`; it has {names}")


def load_model_spec(model: ModelConfig) -> ModelSpec:
    """The spec of the configured model.

    Raises:
        UserError: for an unknown preset, or a `model.path` that is no checkpoint directory.
    """
    from dflop.models import llava_onevision as family

    if model.path is None:
        if model.preset not in family.PRESETS:
            raise UserError(f"`model.preset` is {model.preset!r}; {model.family} has {', '.join(family.PRESETS)}")
        return family.make_spec(model.preset, family.PRESETS[model.preset])
    hf_config = read_hf_config(Path(model.path))
    if hf_config.get("model_type") != model.family:
        raise UserError(
            f"`model.path` {model.path} holds a {hf_config.get('model_type')!r} model, "
            f"but `model.family` is {model.family!r}"
        )
    return family.make_spec(Path(model.path).name, hf_config)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a Hugging Face checkpoint directory."""
    path = folder / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"`model.path` {folder} is not a Hugging Face checkpoint directory: it has no config.json; "
            "name the folder that `save_pretrained` wrote, or set `model.path: null` and choose a `model.preset`"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
