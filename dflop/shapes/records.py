"""One record of a manifest, read into a common form: its media and its turns.

Two forms are read: LLaVA's and ShareGPT's `conversations` (`from`, `value`), and OpenAI's `messages` (`role`,
`content`, where content is a text or a list of parts). Each medium has one placeholder in the text. `<image>` may stand
for a video, as in LLaVA's own files. A medium is a path, or bytes that the manifest itself holds.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from dflop.base import printable
from dflop.shapes.record_media import (
    MEDIA_KINDS,
    Embedded,
    ImageSize,
    Medium,
    RecordError,
    from_base64,
    is_text,
    medium_file,
)

__all__ = ["Record", "Turn", "media_paths", "parse_record", "record_id"]

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
# The types of parts that hold a medium, as Hugging Face and OpenAI call them, each with the medium's kind.
_PARTS = {kind: kind for kind in MEDIA_KINDS} | {f"{kind}_url": kind for kind in MEDIA_KINDS} | {"input_audio": "audio"}
_PLACEHOLDER = re.compile("|".join(f"<{kind}>" for kind in MEDIA_KINDS))


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation; `role` is user, assistant or system."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Record:
    """A record with its media in the order of their placeholders. Each placeholder in the turns names its medium's
    kind."""

    sample_id: str | None
    media: tuple[Medium, ...]
    turns: tuple[Turn, ...]


def parse_record(raw: Any, *, trust_sizes: bool = False) -> Record:
    """Read one record. With `trust_sizes` its `width` and `height` are taken as its pictures' sizes.

    Raises:
        RecordError: bad_record, empty or placeholder_mismatch.
    """
    if isinstance(raw, RecordError):
        raise raw
    if not isinstance(raw, dict):
        raise RecordError("bad_record", f"a record is an object, this is {_json_name(raw)}")
    turns, parts = _turns(raw)
    by_kind: dict[str, list[Medium]] = {}
    for kind in MEDIA_KINDS:
        files = _media_files(raw, kind, parts[kind])
        sizes = _trusted_sizes(raw, len(files)) if trust_sizes and kind == "image" else [None] * len(files)
        by_kind[kind] = [Medium(kind, file, size) for file, size in zip(files, sizes, strict=True)]
    turns, media = _match_placeholders(turns, by_kind)
    return Record(record_id(raw), tuple(media), tuple(turns))


def media_paths(raw: Any) -> list[str]:
    """The paths of all media that a raw record names; none if the record cannot be used."""
    try:
        record = parse_record(raw)
    except RecordError:
        return []
    return [medium.file for medium in record.media if isinstance(medium.file, str)]


def record_id(raw: Any) -> str | None:
    """The id that a raw record gives itself, or None. Unprintable characters become escapes, and such an id gets a
    digest behind it: another record may have the text of the escapes."""
    given = raw.get("id") if isinstance(raw, dict) else None
    if given in (None, ""):
        return None
    shown = printable(text := str(given))
    if shown == text:
        return text
    return f"{shown}~{blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"


def _media_files(raw: dict[str, Any], kind: str, parts: list[str | Embedded]) -> list[str | Embedded]:
    """A record's media of one kind. A record may name them under several keys, but not different ones.

    Raises:
        RecordError: bad_record.
    """
    given = {"the parts of `messages`": parts} if parts else {}
    for key in (kind, f"{kind}s"):
        value = raw.get(key)
        entries = value if isinstance(value, list) else [] if value is None or value == "" else [value]
        files = [medium_file(entry, f"{kind}-{number}", f"`{key}`") for number, entry in enumerate(entries)]
        if files:
            given[f"`{key}`"] = files
    if any(files != other for files, other in pairwise(given.values())):
        raise RecordError("bad_record", f"{' and '.join(given)} give different media; keep one of them")
    return next(iter(given.values()), [])


def _trusted_sizes(raw: dict[str, Any], num_images: int) -> list[ImageSize | None]:
    """The size of each picture from the record's `width` and `height`, which are numbers or lists of numbers; None for
    a picture whose size they do not give."""
    width, height = (
        value if isinstance(value, list) else [value] * min(num_images, 1)
        for value in (raw.get("width"), raw.get("height"))
    )
    if len(width) != num_images or len(height) != num_images:
        return [None] * num_images
    return [
        ImageSize(*pair) if all(type(side) is int and side > 0 for side in pair) else None
        for pair in zip(width, height, strict=True)
    ]


def _turns(raw: dict[str, Any]) -> tuple[list[Turn], dict[str, list[str | Embedded]]]:
    """The turns, and by kind the media that are given as parts of a content in `messages`.

    Raises:
        RecordError: bad_record or empty.
    """
    forms = {"conversations": ("from", "value"), "messages": ("role", "content")}
    present = [key for key in forms if raw.get(key) is not None]
    if not present:
        raise RecordError("bad_record", "a record needs `conversations` or `messages`")
    key = next(filter(raw.get, present), present[0])
    role_key, text_key = forms[key]
    if not isinstance(raw[key], list):
        raise RecordError("bad_record", f"`{key}` must be a list of turns")
    turns: list[Turn] = []
    parts: dict[str, list[str | Embedded]] = {kind: [] for kind in MEDIA_KINDS}
    for number, entry in enumerate(raw[key]):
        where = f"`{key}[{number}]`"
        content = entry.get(text_key) if isinstance(entry, dict) else None
        if isinstance(content, list) and key == "messages":
            content = "".join(_read_parts(content, parts))
        if not isinstance(content, str):
            raise RecordError("bad_record", f"{where} needs `{role_key}` and a text in `{text_key}`")
        if not is_text(content):
            raise RecordError("bad_record", f"{where} holds half a surrogate pair, which is no character")
        speaker = entry.get(role_key)
        if not isinstance(speaker, str) or speaker not in _ROLES:
            raise RecordError("bad_record", f"{where} has the unknown speaker {speaker!r}; known: {', '.join(_ROLES)}")
        turns.append(Turn(_ROLES[speaker], content))
    system = raw.get("system")  # as ShareGPT's exports have it, beside the turns
    if system is not None and not is_text(system):
        raise RecordError("bad_record", "`system` holds no text")
    if system and turns and turns[0].role != "system":
        turns.insert(0, Turn("system", system))
    if not any(turn.role == "assistant" and turn.content.strip() for turn in turns):
        raise RecordError("empty", "no turn of the assistant holds any text: there is nothing to learn")
    return turns, parts


def _read_parts(content: list[Any], media: dict[str, list[str | Embedded]]) -> Iterator[str]:
    """The texts of a content's parts, with a placeholder for each medium.

    A medium's part may name the file (`{type: image, image: …}`, or `{type: image_url, image_url: {url: …}}`), which is
    then added to `media`, or leave that to the record's `images`.

    Raises:
        RecordError: bad_record.
    """
    for part in content:
        name = part.get("type") if isinstance(part, dict) else None
        kind = _PARTS.get(name) if isinstance(name, str) else None
        if name == "text" and is_text(part.get("text")):
            yield part["text"]
        elif kind is not None:
            given = next((part[key] for key in (name, "url", "path", "bytes") if part.get(key) is not None), None)
            where = f"a part of type {name}"
            if name == "input_audio" and isinstance(given, dict):
                given = from_base64(given.get("data"), where)
            elif name != kind and isinstance(given, dict):
                given = given.get("url")
            if given is not None:
                media[kind].append(medium_file(given, f"{kind}-{len(media[kind])}", where))
            yield f"<{kind}>"
        else:
            raise RecordError("bad_record", f"a part of `content` must have a `type` of text, {', '.join(_PARTS)}")


def _json_name(value: Any) -> str:
    """What JSON calls a value that is no object."""
    names = {type(None): "null", bool: "true or false", str: "a text", list: "a list"}
    return names.get(type(value), "a number")


def _match_placeholders(turns: list[Turn], by_kind: dict[str, list[Medium]]) -> tuple[list[Turn], list[Medium]]:
    """Pair placeholders with media, in order. `<image>` becomes `<video>` if only then placeholders and media match.

    Raises:
        RecordError: placeholder_mismatch.
    """
    found = [kind[1:-1] for turn in turns for kind in _PLACEHOLDER.findall(turn.content)]
    have = {kind: len(media) for kind, media in by_kind.items()}
    if found.count("image") == have["video"] > 0 == have["image"] == found.count("video"):
        turns = [Turn(turn.role, turn.content.replace("<image>", "<video>")) for turn in turns]
        found = ["video" if kind == "image" else kind for kind in found]
    for kind in MEDIA_KINDS:
        if found.count(kind) != have[kind]:
            raise RecordError(
                "placeholder_mismatch", f"{have[kind]} {kind} file(s) but {found.count(kind)} <{kind}> in the text"
            )
    remaining = {kind: iter(media) for kind, media in by_kind.items()}
    return turns, [next(remaining[kind]) for kind in found]
