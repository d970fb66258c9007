"""One record of a manifest, read into one form: its media and its turns.

Read are LLaVA's `conversations` (`from`, `value`) and the chat form `messages` (`role`, `content`). Each
medium has one placeholder in the text; `<image>` may stand for a video, as LLaVA's own files have it.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["MEDIA_KINDS", "Medium", "Record", "RecordError", "Turn", "parse_record", "record_id", "resolve_medium"]

MEDIA_KINDS = ("image", "video", "audio")

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_PLACEHOLDER = re.compile("|".join(f"<{kind}>" for kind in MEDIA_KINDS))


class RecordError(Exception):
    """Why one record cannot be used: `reason` is one of the closed list in `store.REJECT_REASONS`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Medium:
    kind: str
    path: str


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Record:
    """A record whose media stand in the order of their placeholders; every placeholder names its kind."""

    sample_id: str | None
    media: tuple[Medium, ...]
    turns: tuple[Turn, ...]


def parse_record(raw: Any) -> Record:
    """Read one record.

    Raises:
        RecordError: bad_record, empty or placeholder_mismatch.
    """
    if not isinstance(raw, dict):
        raise RecordError("bad_record", f"a record is an object, this is a {type(raw).__name__}")
    by_kind = {kind: _media_paths(raw, kind) for kind in MEDIA_KINDS}
    turns, media = _match_placeholders(_turns(raw), by_kind)
    return Record(record_id(raw), tuple(media), tuple(turns))


def record_id(raw: Any) -> str | None:
    """The id that a raw record gives itself; half surrogate pairs, which JSON may hold, are written as escapes."""
    given = raw.get("id") if isinstance(raw, dict) else None
    return None if given is None else str(given).encode("utf-8", "backslashreplace").decode()


def resolve_medium(media_root: Path, medium: Medium) -> Path:
    """The file of a medium, which must lie inside `media_root` after all links are followed.

    Raises:
        RecordError: path_escape or missing_media.
    """
    root = media_root.resolve()
    try:
        path = (root / medium.path).resolve()
        is_file = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links that lead in a circle
        raise RecordError("missing_media", f"{medium.path!r}: {error}") from None
    if not path.is_relative_to(root):
        raise RecordError("path_escape", f"{medium.path} lies outside the media root {media_root}")
    if not is_file:
        raise RecordError("missing_media", f"{medium.path} is not a file under {media_root}")
    return path


def _media_paths(raw: dict[str, Any], kind: str) -> list[str]:
    value = raw.get(kind, raw.get(f"{kind}s"))
    if value is None or value == "":
        return []
    paths = value if isinstance(value, list) else [value]
    for path in paths:
        if not _is_text(path):
            raise RecordError("bad_record", f"`{kind}` holds {path!r}; it must be a path or a list of paths")
    return paths


def _turns(raw: dict[str, Any]) -> list[Turn]:
    forms = {"conversations": ("from", "value"), "messages": ("role", "content")}
    key = next((key for key in forms if key in raw), None)
    if key is None:
        raise RecordError("bad_record", "a record needs `conversations` or `messages`")
    role_key, text_key = forms[key]
    if not isinstance(raw[key], list):
        raise RecordError("bad_record", f"`{key}` must be a list of turns")
    turns = []
    for entry in raw[key]:
        if not isinstance(entry, dict) or not _is_text(entry.get(text_key)):
            raise RecordError("bad_record", f"a turn of `{key}` needs `{role_key}` and a text in `{text_key}`")
        speaker = entry.get(role_key)
        if not isinstance(speaker, str) or speaker not in _ROLES:
            raise RecordError("bad_record", f"unknown speaker {speaker!r}; known: {', '.join(_ROLES)}")
        turns.append(Turn(_ROLES[speaker], entry[text_key]))
    if not any(turn.role == "assistant" and turn.content.strip() for turn in turns):
        raise RecordError("empty", "no turn of the assistant holds any text: there is nothing to learn")
    return turns


def _is_text(value: Any) -> bool:
    """Whether it is a str without half surrogate pairs, which no tokenizer, table or file system takes."""
    return isinstance(value, str) and not _HALF_PAIR.search(value)


def _match_placeholders(turns: list[Turn], by_kind: dict[str, list[str]]) -> tuple[list[Turn], list[Medium]]:
    """Pair placeholders with media, in order; `<image>` becomes `<video>` where only that makes them match."""
    found = [kind[1:-1] for turn in turns for kind in _PLACEHOLDER.findall(turn.content)]
    have = {kind: len(paths) for kind, paths in by_kind.items()}
    if found.count("image") == have["video"] > 0 == have["image"] == found.count("video"):
        turns = [Turn(turn.role, turn.content.replace("<image>", "<video>")) for turn in turns]
        found = ["video" if kind == "image" else kind for kind in found]
    for kind in MEDIA_KINDS:
        if found.count(kind) != have[kind]:
            raise RecordError(
                "placeholder_mismatch", f"{have[kind]} {kind} file(s) but {found.count(kind)} <{kind}> in the text"
            )
    remaining = {kind: iter(paths) for kind, paths in by_kind.items()}
    return turns, [Medium(kind, next(remaining[kind])) for kind in found]
