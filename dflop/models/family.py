"""Families: each is one folder below `dflop/models/`, and one object by which the rest of dflop knows it.

A folder has the name of Hugging Face's `model_type`, and is found without a list of names. It offers `FAMILY`, an
instance of `Family`. `runtime.py` builds and feeds the model, for its costs and for training, and is the only file that
imports torch and transformers. README.md beside this file says how to add a family.
"""

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflop.base import UserError
from dflop.config import ModelConfig
from dflop.models.adapter_files import check_settings
from dflop.models.checkpoint import part_of_config, read_hf_config, read_processor
from dflop.models.spec import ModelSpec, ShapeRules
from dflop.plan.trained import may_match, names_of

if TYPE_CHECKING:
    from dflop.models.runtime import FamilyRuntime

__all__ = [
    "Family",
    "check_adapter",
    "check_parts",
    "check_runnable",
    "family_for",
    "family_names",
    "family_of",
    "load_model_spec",
    "load_runtime",
    "model_digest",
]

_HOW_TO_ADD = "dflop/models/README.md says how to add another"
_SIDES = ("image_size", "patch_size")
_MOST = dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers"), 10_000) | dict.fromkeys(_SIDES, 8192)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What is known of a family without building a model.

    `name` is the folder's name and the `model_type` in Hugging Face's configs. `presets` maps a preset's name to the
    fields of such a config. `make_spec(name, hf_config, processor)` makes the spec of a config; `processor` holds the
    fields that a checkpoint's processor and its image processor set. `part_of` maps the `model_type` of larger models,
    of which this model is a part, to the key of its config in theirs; the rest of such a checkpoint is not read.
    `other_checkpoints` maps the `model_type` of other forms of this model, which cannot be read, to advice for the
    user. `evaluated_as` is the name by which lmms-eval knows such checkpoints, if it does.
    """

    name: str
    presets: Mapping[str, dict[str, Any]]
    make_spec: Callable[[str, dict[str, Any], dict[str, Any]], ModelSpec]
    part_of: Mapping[str, str] = field(default_factory=dict)
    other_checkpoints: Mapping[str, str] = field(default_factory=dict)
    evaluated_as: str = ""


def family_names() -> list[str]:
    """The names of all families: the folders beside this file."""
    return sorted(module.name for module in pkgutil.iter_modules(sys.modules[__package__].__path__) if module.ispkg)


def family_of(name: str) -> Family:
    """The family of this name.

    Raises:
        UserError: when there is none, naming all families.
    """
    if name not in family_names():
        raise UserError(f"`model.family` is {name!r}; it must be one of {', '.join(family_names())}. {_HOW_TO_ADD}")
    family = importlib.import_module(f"dflop.models.{name}").FAMILY
    assert family.name == name, f"the folder {name} holds the family {family.name}"
    return family


def family_for(model_type: str) -> str | None:
    """The name of the family that reads checkpoints of this `model_type`; None if no family does."""
    names = family_names()
    if model_type in names:
        return model_type
    return next((name for name in names if model_type in family_of(name).part_of), None)


def load_runtime(name: str) -> "FamilyRuntime":
    """The half of a family that builds and feeds its models' stages. Importing it imports torch and transformers.

    Raises:
        UserError: when the family has no `runtime.py` yet.
    """
    check_runnable(name)
    return importlib.import_module(f"dflop.models.{name}.runtime").RUNTIME


def check_runnable(name: str) -> None:
    """Raise `UserError` for a family whose models cannot be built."""
    if not (family_of(name) and _has_runtime(name)):
        runnable = " or ".join(other for other in family_names() if _has_runtime(other))
        raise UserError(
            f"`model.family` is {name!r}, which cannot be measured or trained yet. Its shapes can be profiled. For "
            f"costs, plans and training, use `model.family: {runnable}`"
        )


def load_model_spec(model: ModelConfig) -> ModelSpec:
    """The spec of the configured model.

    Raises:
        UserError: for an unknown family or preset, a `model.path` that is not a checkpoint directory of the family, or
            a `model.train`, `model.freeze` or `model.lora` that names an unknown part, or a `model.freeze` that leaves
            nothing to train.
    """
    spec = _make_spec(model)
    for key in ("train", "freeze"):  # commands that do not depend on these keys do not see them
        check_parts(
            spec, {f"model.{key}[{number}]": name for number, name in enumerate(getattr(model, key, None) or ())}
        )
    lora = getattr(model, "lora", None)
    adaptable = [*(f"{encoder.name}.encoder" for encoder in spec.encoders), "llm"]
    for number, name in enumerate(lora.modules if lora else ()):
        if name not in adaptable:
            raise UserError(f"`model.lora.modules[{number}]` is {name!r}; it must be one of {', '.join(adaptable)}")
    if all(hasattr(model, key) for key in ("train", "freeze", "lora")):
        trained = model.trained.among(spec.modules)
        if not any(map(trained.trains, (module.name for module in spec.modules))):
            raise UserError(
                "`model.freeze` names all that would be trained, which leaves nothing to train; take a name out"
            )
    return spec


def check_adapter(spec: ModelSpec, model: ModelConfig) -> None:
    """Check that `model.adapter`, if it is given, has adapters of this model that are as `model.lora` says.

    Raises:
        UserError: naming the first thing that is not so.
    """
    if model.adapter is None:
        return
    folder = Path(model.adapter)
    check_settings(folder, model.trained.lora)
    runtime = load_runtime(spec.family)
    runtime.check_adapter(spec, runtime.make_config(spec, {}, 0), model.trained, folder)


def check_parts(spec: ModelSpec, names: Mapping[str, str]) -> None:
    """Check that the model may have what these names, by the config key that has them, are patterns for.

    Raises:
        UserError: naming the first key for which it has nothing.
    """
    units = names_of(spec.modules)
    for key, name in names.items():
        if not any(may_match(name, unit) for unit in units):
            raise UserError(
                f"`{key}` is {name!r}; it must be one of {', '.join(spec.part_names)}, or a pattern below them such as "
                f"llm.head or llm.layers.[0-{spec.module('llm').num_layers - 1}]"
            )


def _make_spec(model: ModelConfig) -> ModelSpec:
    family = family_of(model.family)
    if model.path is None:
        if model.preset not in family.presets:
            raise UserError(f"`model.preset` is {model.preset!r}; {model.family} has {', '.join(family.presets)}")
        return family.make_spec(model.preset, family.presets[model.preset], {})
    folder = Path(model.path)
    hf_config = read_hf_config(folder)
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str):
        model_type = None
    if key := family.part_of.get(model_type):
        hf_config = part_of_config(folder, hf_config, key)
    elif model_type != family.name:
        raise UserError(
            f"`model.path` {folder} holds a {model_type!r} model, but `model.family` is {model.family!r}; "
            f"{_way_out(model_type)}"
        )
    processor = read_processor(folder)
    try:
        _check_numbers(hf_config)
        spec = family.make_spec(folder.name, hf_config, processor)
        _try_rules(spec.rules)
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise UserError(
            f"the config.json of {folder}, or its processor's, has a value that no {family.name} has ({error}); "
            "copy it again from where the checkpoint is from"
        ) from None
    return spec


def _try_rules(rules: ShapeRules) -> None:
    """Ask for the tokens of a picture and a clip: rules of values that no model has fail here, not at a record."""
    for kind, count in (("image", rules.image(640, 480, 1)), ("video", rules.video(2, 640, 480))):
        rules.in_text(kind, count, (0.0, 1.0))
        if rules.num_position_axes > 1:
            with np.errstate(invalid="raise", over="raise"):
                rules.run_positions(kind, count, 1.0)


def _check_numbers(hf_config: Mapping[str, Any]) -> None:
    """Refuse numbers of layers that are none, or so large that a loop over them would not end, and sides of an
    encoder's items with which one item fills a loader's memory."""
    for key, value in hf_config.items():
        if key in _MOST and (value is not None or key not in _SIDES):
            for number in value if key in _SIDES and isinstance(value, list) else (value,):
                if type(number) is not int or not 0 < number <= _MOST[key]:
                    raise ValueError(f"`{key}` is {value!r}; it must be 1 to {_MOST[key]:,}")
        elif isinstance(value, dict):
            _check_numbers(value)


def model_digest(model: ModelConfig) -> str:
    """A digest of the configs, tokenizer files and templates in `model.path` and `model.tokenizer`, without weights."""
    running = sha256()
    for folder in filter(None, (model.path, model.tokenizer)):
        for path in sorted(Path(folder).glob("*.json")) + sorted(Path(folder).glob("*.jinja")):
            if not path.name.endswith(".index.json"):
                running.update(f"{path.name}\0".encode() + path.read_bytes())
    return running.hexdigest()[:16]


def _way_out(model_type: Any) -> str:
    """What to do with a checkpoint of this type."""
    if own := family_for(model_type):
        limits = "" if _has_runtime(own) else " (for shapes only)"
        return f"use `model.family: {own}`{limits}"
    for name in family_names():
        if advice := family_of(name).other_checkpoints.get(model_type):
            return advice
    return f"known are {', '.join(family_names())}; {_HOW_TO_ADD}"


def _has_runtime(family: str) -> bool:
    return importlib.util.find_spec(f"dflop.models.{family}.runtime") is not None
