"""Text as the LLM sees it: chat template, tokens, which of them are learned, and where media go.

Shape profiling and training share this file, so that their token counts agree by construction. Only the
`tokenizers` library and a Jinja template are needed; transformers is not imported.
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from dflop.config import ModelConfig
from dflop.data.records import MEDIA_KINDS, RecordError, Turn
from dflop.data.token_counts import TextCounts, WordCounter
from dflop.models import ShapeRules
from dflop.runtime import UserError

__all__ = ["BUNDLED_TOKENIZER", "ChatTokenizer", "TokenizedText", "tokenizer_folder"]

BUNDLED_TOKENIZER = Path(__file__).parent / "tokenizer"

_FILES = (
    "tokenizer*.json",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
)


def tokenizer_folder(model: ModelConfig) -> Path:
    """The tokenizer directory of a run: the configured one, else the checkpoint's, else the bundled one."""
    folder = model.tokenizer or model.path
    return Path(folder) if folder else BUNDLED_TOKENIZER


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Tokens of one sample before media are put in.

    `token_ids` [num_tokens] holds one placeholder id per medium; `is_target` [num_tokens] marks the
    assistant's tokens, end-of-turn included; `placeholders` are the positions of the media, in order.
    """

    token_ids: np.ndarray
    is_target: np.ndarray
    placeholders: np.ndarray


# A conversation as one text, and the spans of its characters that are learned.
_Rendered = tuple[str, list[tuple[int, int]]]


class ChatTokenizer:
    """A Hugging Face tokenizer directory: `tokenizer.json` and its chat template."""

    def __init__(self, folder: Path | None = None, rules: ShapeRules | None = None) -> None:
        """Load from `folder`, or the bundled tokenizer; tokens that the texts of a family need by its `rules`, and that
        are not there, are added.

        Raises:
            UserError: when the folder is not a tokenizer directory.
        """
        self.folder = Path(folder) if folder else BUNDLED_TOKENIZER
        tokenizer_file = self.folder / "tokenizer.json"
        if not tokenizer_file.is_file():
            raise UserError(
                f"{self.folder} is not a tokenizer directory: it has no tokenizer.json; "
                "write one with `AutoTokenizer.from_pretrained(…).save_pretrained(folder)`"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # the library raises no narrower one
            raise UserError(
                f"{tokenizer_file} is not a tokenizer ({error}); "
                "write it again with `AutoTokenizer.from_pretrained(…).save_pretrained(folder)`"
            ) from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._placeholders = {kind: rules.placeholder(kind) if rules else f"<{kind}>" for kind in MEDIA_KINDS}
        self._special_tokens = rules.special_tokens if rules else ()
        needed = dict.fromkeys([*self._placeholders.values(), *self._special_tokens])
        self._lacked = [token for token in needed if self._tokenizer.token_to_id(token) is None]
        self._tokenizer.add_special_tokens(self._lacked)
        self.placeholder_ids = {kind: self._tokenizer.token_to_id(token) for kind, token in self._placeholders.items()}
        self.special_ids = {token: self._tokenizer.token_to_id(token) for token in self._special_tokens}
        self._template = _compile_template(_read_template(self.folder))
        self._wants_parts = self._template_wants_parts()
        self._media_ids = list(self.placeholder_ids.values())
        is_countable = WordCounter.able(self._tokenizer)
        self._counter = WordCounter(self._tokenizer, self._media_ids) if is_countable else None

    def vocab_size(self, kinds: Iterable[str] = MEDIA_KINDS) -> int:
        """How many ids a model needs whose texts have media of these kinds: up to the largest that can occur."""
        unused = {f"<{kind}>" for kind in MEDIA_KINDS} - self._tokens_of(kinds)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        return 1 + max(number for token, number in ids.items() if token not in unused)

    def save(self, folder: Path, kinds: Iterable[str] = MEDIA_KINDS) -> None:
        """Copy the tokenizer's files. Where texts with media of these kinds need tokens that were added, those are in
        the files, too."""
        for pattern in _FILES:
            for file in self.folder.glob(pattern):
                shutil.copy(file, folder / file.name)
        if self._tokens_of(kinds) & set(self._lacked):
            self._tokenizer.save(str(folder / "tokenizer.json"))

    def _tokens_of(self, kinds: Iterable[str]) -> set[str]:
        return {*self._special_tokens, *(self._placeholders[kind] for kind in kinds)}

    def encode(self, conversations: Sequence[Sequence[Turn]]) -> list[TokenizedText]:
        """Tokenise conversations; the turns' placeholders become one token each.

        Raises:
            RecordError: when the chat template refuses a conversation, or rewrites it so that its learned tokens
                cannot be told.
        """
        return self._encode([self._render_with_targets(turns) for turns in conversations])

    def count(self, conversations: Sequence[Sequence[Turn]]) -> list[TextCounts]:
        """How many tokens `encode` makes of each, without making them where the tokenizer is of a kind that allows it.

        Raises:
            RecordError: as `encode`.
        """
        rendered = [self._render_with_targets(turns) for turns in conversations]
        counts = self._counter.count(rendered) if self._counter else [None] * len(rendered)
        uncounted = [each for each, found in zip(rendered, counts, strict=True) if found is None]
        encoded = iter(self._encode(uncounted))
        return [_counts_of(next(encoded)) if found is None else found for found in counts]

    def _encode(self, rendered: Sequence[_Rendered]) -> list[TokenizedText]:
        encodings = self._tokenizer.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        texts = []
        for (text, spans), encoding in zip(rendered, encodings, strict=True):
            token_ids = np.asarray(encoding.ids, dtype=np.int64)
            is_target = np.zeros(len(token_ids), dtype=bool)
            for start, end in spans:
                first = _token_at(encoding, text, start)
                last = _token_at(encoding, text, end)
                is_target[first:last] = True
            placeholders = np.flatnonzero(np.isin(token_ids, self._media_ids))
            texts.append(TokenizedText(token_ids, is_target, placeholders))
        return texts

    def _render(self, turns: Sequence[Turn], *, prompt: bool) -> str:
        messages = [
            {"role": turn.role, "content": _as_part(turn.content) if self._wants_parts else turn.content}
            for turn in turns
        ]
        try:
            return self._template.render(messages=messages, add_generation_prompt=prompt)
        except TemplateError as error:
            raise RecordError("bad_record", f"the tokenizer's chat template refuses it: {error}") from None

    def _render_with_targets(self, turns: Sequence[Turn]) -> _Rendered:
        """The whole text and the character spans that are learned: each answer with its end-of-turn token."""
        whole = self._render(turns, prompt=False)
        spans = []
        for index, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            before = self._render(turns[:index], prompt=True)
            until = whole if index == len(turns) - 1 else self._render(turns[: index + 1], prompt=False)
            if not (whole.startswith(before) and whole.startswith(until.rstrip())):
                detail = (
                    f"the tokenizer's chat template changes turn {index + 1} when others follow, so that the learned "
                    "tokens cannot be told; use a template that only appends"
                )
                raise RecordError("bad_record", detail)
            spans.append((len(before), len(until.rstrip())))
        return whole, spans

    def _template_wants_parts(self) -> bool:
        """Whether message content must be a list of parts (multimodal processors) instead of a text."""
        try:
            return "probe" not in self._template.render(
                messages=[{"role": "user", "content": "probe"}], add_generation_prompt=False
            )
        except TemplateError:
            return True


def _counts_of(text: TokenizedText) -> TextCounts:
    return TextCounts(len(text.token_ids), int(text.is_target.sum()), len(text.placeholders))


def _as_part(content: str) -> list[dict[str, str]]:
    """A content as a single part of text, placeholders included: of parts, templates move the media to the front."""
    return [{"type": "text", "text": content}]


def _token_at(encoding, text: str, position: int) -> int:
    """Index of the first token that begins at or after a character position."""
    while position < len(text):
        token = encoding.char_to_token(position)
        if token is not None:
            return token
        position += 1
    return len(encoding.ids)


def _read_template(folder: Path) -> str:
    plain = folder / "chat_template.jinja"
    if plain.is_file():
        return plain.read_text(encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = folder / name
        if path.is_file():
            template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
            if isinstance(template, str):
                return template
    raise UserError(
        f"{folder} has no chat template: put one into chat_template.jinja or `chat_template` of tokenizer_config.json"
    )


def _compile_template(source: str):
    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise UserError(f"the chat template is not valid Jinja: {error}") from None
