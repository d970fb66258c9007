"""A directory of adapters, as the package peft writes it, from which training goes on: what it says of itself, and
whether it fits the model and its `model.lora`.

It has `adapter_config.json` and `adapter_model.safetensors`. In the latter are the adapters' matrices and the tensors
that were trained as a whole, such as a projector or peft's `modules_to_save`. Only JSON and headers are read here;
`weights.load_adapter` reads the values.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflop.base import UserError
from dflop.models.checkpoint import tensor_shapes

if TYPE_CHECKING:
    from dflop.plan.trained import Lora

__all__ = ["INSIDE", "SETTINGS", "TENSORS", "adapter_names", "check_settings", "check_tensors", "is_adapter"]

TENSORS = "adapter_model.safetensors"
# The model's name inside the model that peft makes of it.
INSIDE = "base_model.model."
# The names of an adapter's matrices (`models.lora`) in the linear layer that they belong to.
_MATRIX = re.compile(r"\.lora_[AB]\.weight$")
SETTINGS = "adapter_config.json"
# What peft calls our settings, and further ones with the only value that we can go on from.
_OURS = {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora"}
_PLAIN = {
    "peft_type": "LORA",
    "use_dora": False,
    "alpha_pattern": {},
    "rank_pattern": {},
    "layer_replication": None,
    "bias": "none",
    "lora_bias": False,
    "alora_invocation_tokens": None,
}
# How adapters began, where the base model's weights stayed as they were: PiSSA and others change these, too.
_BEGAN = (True, False, "gaussian")


def is_adapter(name: str) -> bool:
    """Whether this name of a parameter is that of an adapter's matrix."""
    return bool(_MATRIX.search(name))


def check_settings(folder: Path, lora: "Lora | None") -> None:
    """Check that `model.adapter` is a directory of adapters, and that `model.lora` makes such ones.

    Raises:
        UserError: naming the first thing that is not so.
    """
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"`model.adapter` is {folder}, which holds no {SETTINGS}; of a run the adapters are in train/adapter"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder / SETTINGS} cannot be read: {error}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{folder / SETTINGS} holds a {type(settings).__name__}; copy it again")
    if not (folder / TENSORS).is_file():
        raise UserError(
            f"`model.adapter` is {folder}, which holds no {TENSORS}; save it anew with peft's save_pretrained"
        )
    for key, value in _PLAIN.items():
        if (found := settings.get(key, value) or value) != value:
            raise UserError(
                f"the adapter {folder} has `{key}` {json.dumps(found)}; only LoRA with one rank and one alpha is known"
            )
    if (began := settings.get("init_lora_weights", True)) not in _BEGAN:
        raise UserError(
            f"the adapter {folder} has `init_lora_weights` {json.dumps(began)}, which changed the base model's weights "
            "as well; save it with peft's `path_initial_model_for_weight_conversion`, as one of the model as it was"
        )
    if lora is None:
        ours = {name: settings[key] for name, key in _OURS.items() if settings.get(key)}
        raise UserError(f"`model.adapter` is given and `model.lora` is not; set it to {_flow(ours)}, and its modules")
    for name, key in _OURS.items():
        ours, theirs = getattr(lora, name), settings.get(key, False)
        if ours != theirs:
            raise UserError(
                f"`model.lora.{name}` is {_flow(ours)}, but the adapter {folder} was made with `{key}` "
                f"{_flow(theirs)}; they must be equal"
            )


def adapter_names(folder: Path, renamings: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The names of the adapter's tensors in the file, by their names in the model.

    `renamings` are those of a family's checkpoints (`FamilyRuntime.weight_renamings`).
    """
    names = {_in_model(name, renamings): name for name in tensor_shapes(folder / TENSORS)}
    names.pop("", None)  # of a part that is not trained
    return names


def check_tensors(folder: Path, renamings: Sequence[tuple[str, str]], shapes: Mapping[str, Sequence[int]]) -> None:
    """Check that the model, whose tensors have these `shapes` with `model.lora` in place, has each tensor of the
    adapter, and the adapter a matrix for each layer that is adapted.

    Raises:
        UserError: naming the first tensor of which this is not so.
    """
    stored = tensor_shapes(folder / TENSORS)
    found = {name: stored[own] for name, own in adapter_names(folder, renamings).items()}
    linears = {own: own.rpartition(".lora_")[0] for own in found if is_adapter(own)}
    for name, linear in linears.items():
        if f"{linear}.weight" not in shapes:
            raise UserError(f"the adapter {folder} is for another model: this one has no layer {linear}")
        if name not in shapes:
            raise UserError(
                f"the adapter {folder} adapts {linear}, and `model.lora` does not; its `targets`, in the right "
                f"`modules`, are {_flow(_kinds(linears.values()))}"
            )
    if missing := next((own for own in shapes if is_adapter(own) and own not in found), None):
        raise UserError(
            f"`model.lora.targets` match {missing.rpartition('.lora_')[0]}, which the adapter {folder} does not adapt; "
            f"set them to what it does: {_flow(_kinds(linears.values()))}"
        )
    for name, shape in found.items():
        if name not in shapes:
            raise UserError(f"the adapter {folder} is for another model: it holds {name}, which this one does not have")
        own = tuple(shapes[name])
        if own != shape and not (own[1:] == shape[1:] and re.search(r"(embed_tokens|lm_head)\.weight$", name)):
            raise UserError(
                f"the adapter {folder} is for another model: it holds {name} of shape {list(shape)}, and here that has "
                f"{list(own)}"
            )


def _in_model(name: str, renamings: Sequence[tuple[str, str]]) -> str:
    name = name.removeprefix(INSIDE)
    for pattern, replacement in renamings:
        name = re.sub(pattern, replacement, name)
    return name


def _kinds(linears: Any) -> list[str]:
    """Patterns for these layers, e.g. "*.q_proj"."""
    return sorted({f"*.{name.rpartition('.')[2]}" for name in linears})


def _flow(value: Any) -> str:
    """A value as a config file may have it."""
    return json.dumps(value).replace('"', "") if isinstance(value, dict) else json.dumps(value)
