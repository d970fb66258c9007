"""Text as the LLM sees it: chat template, tokens, which tokens are learned (enter the loss), and where media go.

Shape profiling and training share this file, so that their token counts agree by construction. Only the
`tokenizers` library and a Jinja template are needed; transformers is not imported.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from dflop.base import UserError
from dflop.config import ModelConfig
from dflop.models import ShapeRules
from dflop.shapes.chat_template import ChatTemplate, Rendered
from dflop.shapes.record_media import MEDIA_KINDS, RecordError
from dflop.shapes.records import Turn
from dflop.shapes.template_files import TemplateFile, read_named_tokens, read_template, write_template
from dflop.shapes.token_counts import TextCounts, WordCounter

__all__ = ["BUNDLED_TOKENIZER", "TOKENIZER_FILES", "ChatTokenizer", "TokenizedText", "tokenizer_folder"]

BUNDLED_TOKENIZER = Path(__file__).parent / "tokenizer"

TOKENIZER_FILES = (
    "tokenizer*.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
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


class ChatTokenizer:
    """A Hugging Face tokenizer directory: `tokenizer.json` and its chat template."""

    def __init__(self, folder: Path | None = None, rules: ShapeRules | None = None) -> None:
        """Load from `folder`, or the bundled tokenizer. Tokens that a model family's `rules` need are added if they are
        missing.

        Raises:
            UserError: when the folder is not a tokenizer directory, or its chat template cannot be used.
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
        self._template_file = read_template(self.folder)
        self._template = self._compile(self._template_file)
        self._media_ids = list(self.placeholder_ids.values())
        is_countable = WordCounter.able(self._tokenizer)
        self._counter = WordCounter(self._tokenizer, self._media_ids) if is_countable else None

    def _compile(self, file: TemplateFile) -> ChatTemplate:
        added = self._tokenizer.get_added_tokens_decoder().values()
        placeholders = set(self._placeholders.values())
        return ChatTemplate(
            file.source,
            file=file.path,
            named_tokens=read_named_tokens(self.folder),
            special_tokens=[token.content for token in added if token.special and token.content not in placeholders],
            placeholders=self._placeholders,
        )

    def vocab_size(self, kinds: Iterable[str] = MEDIA_KINDS) -> int:
        """How many ids a model needs if its texts have media of these kinds: one more than the largest that can
        occur."""
        unused = {f"<{kind}>" for kind in MEDIA_KINDS} - self._tokens_of(kinds)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        return 1 + max(number for token, number in ids.items() if token not in unused)

    def save(self, folder: Path, kinds: Iterable[str] = MEDIA_KINDS) -> None:
        """Copy the tokenizer's files to `folder`, with the added tokens if texts with media of these kinds need any."""
        for pattern in TOKENIZER_FILES:
            for file in self.folder.glob(pattern):
                copy = folder / file.relative_to(self.folder)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)  # not its mode: a read-only file's copy may have to be changed
        if self._tokens_of(kinds) & set(self._lacked):
            self._tokenizer.save(str(folder / "tokenizer.json"))

    def save_template(self, folder: Path) -> None:
        """Make this tokenizer's chat template that of `folder`, which may also hold the files of another checkpoint's
        processor.

        Raises:
            UserError: when `processor_config.json` of the folder cannot be read.
        """
        write_template(folder, self._template_file.source)

    def _tokens_of(self, kinds: Iterable[str]) -> set[str]:
        return {*self._special_tokens, *(self._placeholders[kind] for kind in kinds)}

    def encode(self, conversations: Sequence[Sequence[Turn]]) -> list[TokenizedText]:
        """Tokenise conversations; each placeholder in the turns becomes one token.

        Raises:
            RecordError: bad_record, when the chat template refuses a conversation, or rewrites it so that its learned
                tokens cannot be determined, or when the tokenizer gives up.
        """
        return self._encode([self._template.render(turns) for turns in conversations])

    def count(self, conversations: Sequence[Sequence[Turn]]) -> list[TextCounts]:
        """How many tokens `encode` makes of each conversation. For tokenizers that `WordCounter` knows they are counted
        word by word, which is faster.

        Raises:
            RecordError: as `encode`.
        """
        rendered = [self._template.render(turns) for turns in conversations]
        with _tokenizing():
            counts = self._counter.count(rendered) if self._counter else [None] * len(rendered)
        uncounted = [text for text, found in zip(rendered, counts, strict=True) if found is None]
        encoded = iter(self._encode(uncounted))
        return [_counts_of(next(encoded)) if found is None else found for found in counts]

    def _encode(self, rendered: Sequence[Rendered]) -> list[TokenizedText]:
        with _tokenizing():
            encodings = self._tokenizer.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        texts = []
        for (text, spans), encoding in zip(rendered, encodings, strict=True):
            token_ids = np.asarray(encoding.ids, dtype=np.int64)
            is_target = np.zeros(len(token_ids), dtype=bool)
            for start, end in spans:
                first = _token_at(encoding, text, start)
                last = _token_at(encoding, text, end)
                is_target[first:last] = True
                if start < end < len(text) and encoding.char_to_token(end - 1) == last < len(is_target):
                    is_target[last] = True  # a token with the answer's last characters and what follows them
            placeholders = np.flatnonzero(np.isin(token_ids, self._media_ids))
            texts.append(TokenizedText(token_ids, is_target, placeholders))
        return texts


@contextmanager
def _tokenizing() -> Iterator[None]:
    """The library panics where a pattern tries too much, which is no `Exception`. It can be used again."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RecordError("bad_record", f"the tokenizer gives up: {error}") from None


def _counts_of(text: TokenizedText) -> TextCounts:
    return TextCounts(len(text.token_ids), int(text.is_target.sum()), len(text.placeholders))


def _token_at(encoding, text: str, position: int) -> int:
    """Index of the first token that begins at or after a character position."""
    while position < len(text):
        token = encoding.char_to_token(position)
        if token is not None:
            return token
        position += 1
    return len(encoding.ids)
