"""A chat template and the named special tokens, from the files of a checkpoint or tokenizer directory.

Hugging Face's tokenizers and processors have kept them in different files over the years. If several files hold a
template, the one that `AutoProcessor` would take is used; of several named templates, the one called `default`.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflop.base import UserError
from dflop.shapes.record_media import is_text

__all__ = ["TemplateFile", "read_named_tokens", "read_template", "write_template"]

_PLAIN, _NAMED = "chat_template.jinja", "additional_chat_templates"
_CONFIG, _LEGACY_MAP = "tokenizer_config.json", "special_tokens_map.json"
# JSON files whose template takes precedence over the plain file's, the first before the second.
_PROCESSOR, _LEGACY = "processor_config.json", "chat_template.json"
_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class TemplateFile:
    """A template's source, and the file that it was read from."""

    path: Path
    source: str


def read_template(folder: Path) -> TemplateFile:
    """The template of a directory.

    Raises:
        UserError: when it has no template, only named ones of which none is `default`, or a file that cannot be read.
    """
    for name in (_PROCESSOR, _LEGACY):
        if found := _in_json(folder / name):
            return found
    if (folder / _PLAIN).is_file():
        return TemplateFile(folder / _PLAIN, _read_text(folder / _PLAIN))
    named = {path.stem: path for path in sorted((folder / _NAMED).glob("*.jinja"))}
    if _DEFAULT in named:
        return TemplateFile(named[_DEFAULT], _read_text(named[_DEFAULT]))
    if found := _in_json(folder / _CONFIG):
        return found
    if named:
        raise _no_default(folder / _NAMED, named)
    raise UserError(f"{folder} has no chat template: put one into {_PLAIN} or `chat_template` of {_CONFIG}")


def write_template(folder: Path, source: str) -> None:
    """Make `source` the template that `read_template` finds in a directory.

    If it is already, nothing changes. Otherwise it is written to the plain file, and the templates that would take
    precedence are removed.

    Raises:
        UserError: when `processor_config.json` cannot be read.
    """
    with suppress(UserError):  # the directory has no template, or none that can be read
        if read_template(folder).source == source:
            return
    settings = _read_json(folder / _PROCESSOR)
    if settings.pop("chat_template", None) is not None:
        (folder / _PROCESSOR).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / _LEGACY).unlink(missing_ok=True)
    (folder / _PLAIN).write_text(source, encoding="utf-8")


def read_named_tokens(folder: Path) -> dict[str, str]:
    """Special tokens by their names in templates: `bos_token`, `eos_token`, `image_token` and so on.

    Raises:
        UserError: when a file of the directory cannot be read, or a token holds an unpaired surrogate.
    """
    settings = _read_json(folder / _CONFIG)
    if "added_tokens_decoder" not in settings:  # before transformers 4.34, special tokens had a file of their own
        settings |= _read_json(folder / _LEGACY_MAP)
    named = {key: value for key, value in settings.items() if key.endswith("_token")}
    for group in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(settings.get(group), dict):
            named |= settings[group]
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    for name, text in texts.items():
        if isinstance(text, str) and not is_text(text):
            raise _broken(folder, f"gives `{name}` half a surrogate pair, which is no character")
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _in_json(path: Path) -> TemplateFile | None:
    """The template in a JSON file: a string, or named strings as an object or as a list of objects."""
    found = _read_json(path).get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    if isinstance(found, dict):
        if _DEFAULT not in found:
            raise _no_default(path, found)
        found = found[_DEFAULT]
    if not isinstance(found, str):
        return None
    if not is_text(found):
        raise _broken(path, "has a chat template with half a surrogate pair, which is no character")
    return TemplateFile(path, found)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    text = _read_text(path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"is not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise _broken(path, "holds no JSON object")
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _broken(path, f"is not UTF-8 text ({error})") from None


def _broken(path: Path, fault: str) -> UserError:
    return UserError(f"{path} {fault}; copy it again from where the checkpoint is from")


def _no_default(path: Path, templates: Mapping[Any, Any]) -> UserError:
    names = ", ".join(map(str, templates)) or "none"
    return UserError(f"{path} has no chat template called `default` (it has: {names}); put the right one into {_PLAIN}")
