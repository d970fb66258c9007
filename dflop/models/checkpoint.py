"""What a Hugging Face checkpoint directory says of itself: its config, its processor's settings, its tensors' names.

Only JSON is read, no weights, and torch is not imported.
"""

import json
import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from dflop.base import UserError

__all__ = [
    "check_output_width",
    "check_processor",
    "check_weights",
    "part_of_config",
    "read_hf_config",
    "read_image_fields",
    "read_processor",
    "tensor_shapes",
    "weights_digest",
]

_PROCESSOR = "processor_config.json"
_BLOCK_BYTES = 1 << 12  # of each tensor, for `weights_digest`
_HEADER_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # as safetensors allows


def read_hf_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint.

    If it does not say whether the head is tied to the embedding, the tensors do: a head among them is not tied.
    transformers decides likewise.

    Raises:
        UserError: when there is no config.json, or a file cannot be read.
    """
    fields = _read_fields(folder / "config.json")
    if fields is None:
        raise UserError(
            f"`model.path` {folder} is not a Hugging Face checkpoint directory: it has no config.json; "
            f"{_way_to(folder)}, or set `model.path: null` and choose a `model.preset`"
        )
    if "tie_word_embeddings" not in fields and any(name.endswith("lm_head.weight") for name in _tensor_names(folder)):
        fields["tie_word_embeddings"] = False
    return fields


def weights_digest(folder: Path) -> str:
    """A digest of a checkpoint's weights: of its safetensors files' names and headers, and of the first 4 KiB of each
    tensor, since to read all takes minutes; a tensor that was trained differs there. Empty where there are none.

    Raises:
        UserError: when a file cannot be read, or is no safetensors file.
    """
    running = sha256()
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        try:
            with path.open("rb") as file:
                tensors = _header(path, file)
                first = file.tell()
                running.update(f"{path.name}\0{json.dumps(tensors, sort_keys=True)}\0".encode())
                for name in sorted(tensors.keys() - {"__metadata__"}):
                    begin, end = tensors[name]["data_offsets"]
                    file.seek(first + begin)
                    running.update(file.read(min(_BLOCK_BYTES, end - begin)))
        except UserError:
            raise
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}; copy it again") from None
    return running.hexdigest()[:16] if files else ""


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in a safetensors file, from its header.

    Raises:
        UserError: when the file cannot be read, or is no safetensors file.
    """
    try:
        with path.open("rb") as file:
            return {name: tuple(own["shape"]) for name, own in _header(path, file).items() if name != "__metadata__"}
    except UserError:
        raise
    except (OSError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}; copy it again") from None


def check_weights(folder: str | None) -> None:
    """Check that `model.weights`, if it is given, holds weights.

    Raises:
        UserError: when it holds none.
    """
    if folder and not weights_digest(Path(folder)):
        raise UserError(
            f"`model.weights` is {folder}, which holds no *.safetensors file; of another run they are in train/model"
        )


def part_of_config(folder: Path, hf_config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The config under `key` in a larger model's, of a model that is a part of it.

    Raises:
        UserError: when the config has no such part.
    """
    part = hf_config.get(key)
    if not isinstance(part, dict):
        raise UserError(
            f"the config.json of {folder} has no `{key}`, the config of the model that is "
            "trained; take the config.json that the checkpoint came with"
        )
    kept = {name: hf_config[name] for name in ("tie_word_embeddings",) if name in hf_config}
    return kept | part


def _way_to(folder: Path) -> str:
    """What to do about a folder that is no checkpoint. The id of a model on the Hub is not a folder."""
    if not folder.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)):
        return f"download a model of the Hub with `hf download {folder} --local-dir FOLDER` and name FOLDER"
    return "name the folder that `save_pretrained` wrote"


def read_processor(folder: Path) -> dict[str, Any]:
    """The fields that a checkpoint's processor and its image processor set. Files are looked up in transformers' order:
    `processor_config.json` first. Under `video_processor` are the fields of the video processor, or else those of the
    image processor.

    Raises:
        UserError: when a file cannot be read.
    """
    whole = _read_fields(folder / _PROCESSOR) or {}
    _, images = _image_fields(folder, whole)
    videos = _section(folder, whole, "video_processor") or _read_fields(folder / "video_preprocessor_config.json")
    videos = videos or images
    own = {key: value for key, value in whole.items() if not isinstance(value, dict)}
    return own | images | {"video_processor": videos}


def read_image_fields(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The fields of a checkpoint's image processor, and the file that has them; none if it has no image processor.

    Raises:
        UserError: when a file cannot be read.
    """
    return _image_fields(folder, _read_fields(folder / _PROCESSOR) or {})


def _image_fields(folder: Path, whole: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    if fields := _section(folder, whole, "image_processor"):
        return folder / _PROCESSOR, fields
    path = folder / "preprocessor_config.json"
    return path, _read_fields(path) or {}


def _section(folder: Path, whole: Mapping[str, Any], key: str) -> dict[str, Any]:
    section = whole.get(key) or {}
    if not isinstance(section, dict):
        raise UserError(
            f"{folder / _PROCESSOR} has `{key}` {_shown(section)}; it must hold keys and values as Hugging Face writes"
        )
    return section


def check_output_width(name: str, field: str, width: int, text_config: Mapping[str, Any]) -> None:
    """Check that an encoder's output is as wide as the LLM's hidden states. `field` is the config's name of `width`.

    Raises:
        UserError: naming both fields.
    """
    if text_config.get("hidden_size", width) != width:
        raise UserError(
            f"the config of {name} has `{field}` {width}, but its LLM has `hidden_size` {text_config['hidden_size']}; "
            "they must be equal"
        )


def check_processor(name: str, processor: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Check that a checkpoint's processor has the values that follow from the model's config (`wanted`).

    Raises:
        UserError: naming the first field that contradicts the config.
    """
    for key, value in wanted.items():
        found = processor.get(key)
        if found is not None and found != value:
            raise UserError(
                f"the processor of {name} has `{key}` {_shown(found)}, but by its config.json it is {_shown(value)}; "
                "take both from one checkpoint"
            )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _tensor_names(folder: Path) -> Iterator[str]:
    """The names of the tensors in all safetensors files, from their index or else from each file's header."""
    index = _read_fields(folder / "model.safetensors.index.json")
    if index is not None:
        weights = index.get("weight_map")
        if not isinstance(weights, dict):
            raise UserError(f"{folder / 'model.safetensors.index.json'} has no `weight_map` of names; copy it again")
        yield from weights
        return
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            yield from _header(path, file)


def _header(path: Path, file: BinaryIO) -> dict[str, Any]:
    """The header of an open safetensors file; its tensors' bytes follow.

    Raises:
        UserError: when it is no such file.
    """
    length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
    try:
        header = json.loads(file.read(min(length, _MOST_HEADER_BYTES)))
    except (ValueError, RecursionError):
        header = None
    if isinstance(header, dict):
        return header
    raise UserError(f"{path} is no safetensors file, or it is cut off; copy it again")


def _read_fields(path: Path) -> dict[str, Any] | None:
    """A JSON file's keys and values; None if there is no file.

    Raises:
        UserError: when the file cannot be read, or is not a JSON object.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(fields, dict):
        raise UserError(f"{path} holds a {type(fields).__name__}; it must hold keys and values as Hugging Face writes")
    return fields
