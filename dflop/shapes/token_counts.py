"""How many tokens a text has, counted word by word: most words occur many times in a dataset.

A byte-level BPE tokenizer, as in Qwen and Llama 3, first cuts a text by a pattern and then tokenises each piece by
itself. It always cuts in these places: on both sides of a special token, before a space that follows a character that
is not white space, and between a line break and a character that is not white space. The number of tokens between two
such places depends on the characters there alone, so a known word need not be tokenised again.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, filterfalse, pairwise

from tokenizers import Tokenizer

__all__ = ["TextCounts", "WordCounter"]

# Patterns for which this holds: a match has a space only as its first character or among white space, white space up to
# the last line break is one match, and there is no look-behind. They differ in how many digits one match takes.
_PATTERNS = {
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in ("", "{1,3}")
}
_SPACE_TO_CUT_AT = re.compile(r" (?<=\S )")
# ASCII white space other than the space itself.
_OTHER_SPACE = [chr(code) for code in range(128) if chr(code).isspace() and chr(code) != " "]
# How many words are kept, and how many characters they may have: in some languages a whole paragraph has no space.
_MOST_WORDS, _LONGEST_WORD = 1 << 17, 32
# A count is one integer: all tokens in the lower bits, and the tokens that stand for media above these bits.
_MEDIA_BITS = 32


@dataclass(frozen=True, slots=True)
class TextCounts:
    """Counts of one sample's text before media are put in: its tokens, those that are learned, and those that stand
    for media."""

    num_tokens: int
    num_targets: int
    num_placeholders: int


# A run of text as words: the first one, which has no space before it, and the others, which are after a space.
_Stretch = tuple[str, list[str]]


class WordCounter:
    """Counts the tokens of texts, and remembers words. `able` says which tokenizers it knows."""

    def __init__(self, tokenizer: Tokenizer, media_ids: Sequence[int]) -> None:
        self._tokenizer, self._media_ids = tokenizer, frozenset(media_ids)
        self._special = tuple(token.content for token in tokenizer.get_added_tokens_decoder().values())
        # Counts of words after a space (the key leaves the space out), and of words that begin a stretch.
        self._behind_space: dict[str, int] = {}
        self._first: dict[str, int] = {}

    @staticmethod
    def able(tokenizer: Tokenizer) -> bool:
        """Whether the tokenizer is of the kind whose tokens can be counted word by word."""
        made = json.loads(tokenizer.to_str())
        cutting = made["pre_tokenizer"] or {}
        steps = cutting.get("pretokenizers", [cutting])
        kinds = [step.get("type") for step in steps]
        return (
            kinds == ["Split", "ByteLevel"]
            and steps[0]["pattern"].get("Regex") in _PATTERNS
            and (steps[0]["behavior"], steps[0]["invert"]) == ("Isolated", False)
            and not steps[1]["add_prefix_space"]
            and not steps[1]["use_regex"]
            and (made["normalizer"] or {"type": "NFC"})["type"] == "NFC"
            and made["model"]["type"] == "BPE"
            and not made["model"].get("dropout")
            and _stand_alone(made["added_tokens"])
        )

    def count(self, texts: Sequence[tuple[str, Sequence[tuple[int, int]]]]) -> list[TextCounts | None]:
        """The counts of each text, given with its learned spans of characters. None for a text of which a span may
        begin or end inside a token."""
        cut = [self._stretches(text, spans) for text, spans in texts]
        stretches = [stretch for pieces in cut if pieces is not None for stretch in pieces]
        behind_space = chain.from_iterable([words for _, words in stretches])
        long = [
            (known, self._learn(known, needed, before))
            for known, needed, before in (
                (self._behind_space, behind_space, " "),
                (self._first, [first for first, _ in stretches], ""),
            )
        ]
        counts = [None if pieces is None else self._sum_up(pieces) for pieces in cut]
        for known, words in long:
            for word in words:
                del known[word]
        return counts

    def _stretches(self, text: str, spans: Sequence[tuple[int, int]]) -> list[_Stretch] | None:
        """The text, cut at the edges of the spans: every second stretch is learned. None as in `count`."""
        edges = [edge for span in spans for edge in span]
        if edges != sorted(edges) or not all(self._is_cut(text, edge) for edge in edges):
            return None  # a span may end before it begins: an empty answer, if the template writes nothing after it
        parts = [text[start:end] for start, end in zip([0, *edges], [*edges, len(text)], strict=True)]
        is_simple = _is_cut_at_every_space(text)
        words_of = [part.split(" ") if is_simple else _SPACE_TO_CUT_AT.split(part) for part in parts]
        return [(words.pop(0), words) for words in words_of]

    def _is_cut(self, text: str, edge: int) -> bool:
        """Whether no token can lie on both sides of an edge."""
        if edge in (0, len(text)):
            return True
        if text.startswith(self._special, edge) or text.endswith(self._special, 0, edge):
            return True
        return text[edge - 1 : edge] == "\n" and not text[edge : edge + 1].isspace()

    def _learn(self, known: dict[str, int], words: Iterable[str], before: str) -> list[str]:
        """Count the words that are not yet in `known`; returns those that are too long to be kept there."""
        if len(known) > _MOST_WORDS:
            known.clear()
        new = list(set(filterfalse(known.__contains__, words)))
        encodings = self._tokenizer.encode_batch_fast([before + word for word in new], add_special_tokens=False)
        for word, encoding in zip(new, encodings, strict=True):
            num_media = sum(token in self._media_ids for token in encoding.ids)
            known[word] = len(encoding) + (num_media << _MEDIA_BITS)
        return [word for word in new if len(word) > _LONGEST_WORD]

    def _sum_up(self, stretches: list[_Stretch]) -> TextCounts:
        first_count, count = self._first.__getitem__, self._behind_space.__getitem__
        counts = [first_count(first) + sum(map(count, words)) for first, words in stretches]
        whole, learned = sum(counts), sum(counts[1::2])
        return TextCounts(_tokens(whole), _tokens(learned), whole >> _MEDIA_BITS)


def _is_cut_at_every_space(text: str) -> bool:
    """Whether each space follows a character that is not white space; False also if a quick look cannot tell. A space
    at the beginning of a stretch may be cut at as well: the word before it is empty."""
    return (
        text.isascii() and "  " not in text and not any(space in text and f"{space} " in text for space in _OTHER_SPACE)
    )


def _tokens(count: int) -> int:
    return count & ((1 << _MEDIA_BITS) - 1)


def _stand_alone(added_tokens: Sequence[dict]) -> bool:
    """Whether each special token is found wherever its characters occur: it takes no white space around it, has no
    place to cut at inside, and no other special token can begin inside it or extend it."""
    texts = sorted(token["content"] for token in added_tokens)
    begins = {text[:1] for text in texts}
    return not (
        any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added_tokens)
        or any(sign.isspace() or sign in begins for text in texts for sign in text[1:])
        or any(other.startswith(text) for text, other in pairwise(texts))
    )
