"""How many tokens a text has, counted word by word: most of a dataset's words were counted before.

A tokenizer of this kind (byte-level BPE as in Qwen and Llama 3) first cuts a text by a pattern, and then takes each
piece by itself. Some places are cut whatever stands around them: on both sides of a special token, before a space that
follows any other character, and behind a line's end that such a character follows. Between two of these places the
number of tokens depends on the characters there alone, and a word that is met again need not be tokenised again.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tokenizers import Tokenizer

__all__ = ["TextCounts", "WordCounter"]

# Patterns of which the above holds: a match holds a space only as its first sign or among white space, white space up
# to the last line's end is one match, and nothing looks behind itself. They differ in how many digits they take.
_PATTERNS = {
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in ("", "{1,3}")
}
_SPACE_TO_CUT_AT = re.compile(r" (?<=\S )")
# Words that are kept, and the longest of them: in some languages a whole paragraph has no space.
_MOST_WORDS, _LONGEST_WORD = 1 << 17, 32
# A count is one number: tokens that stand for media, above the number of all tokens.
_MEDIA_BITS = 32


@dataclass(frozen=True, slots=True)
class TextCounts:
    """Of one sample's text before media are put in: its tokens, those that are learned, and those that stand for
    media."""

    num_tokens: int
    num_targets: int
    num_placeholders: int


class WordCounter:
    """Counts the tokens of texts, and remembers words. `able` says which tokenizers it knows."""

    def __init__(self, tokenizer: Tokenizer, media_ids: Sequence[int]) -> None:
        self._tokenizer, self._media_ids = tokenizer, frozenset(media_ids)
        self._special = tuple(token.content for token in tokenizer.get_added_tokens_decoder().values())
        # Of words behind a space, which the key leaves out, and of those that begin a stretch of text.
        self._behind_space: dict[str, int] = {}
        self._first: dict[str, int] = {}

    @staticmethod
    def able(tokenizer: Tokenizer) -> bool:
        """Whether the tokens of a text can be counted in parts."""
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
        """The counts of each text, of which spans of characters are learned; None where a span may begin or end inside
        a token."""
        cut = [self._stretches(text, spans) for text, spans in texts]
        stretches = [words for each in cut if each is not None for words in each]
        behind_space = set[str]().union(*(words[1:] for words in stretches))
        firsts = {words[0] for words in stretches}
        long = [
            (known, self._learn(known, needed, before))
            for known, needed, before in ((self._behind_space, behind_space, " "), (self._first, firsts, ""))
        ]
        counts = [None if each is None else self._sum_up(each) for each in cut]
        for known, words in long:
            for word in words:
                del known[word]
        return counts

    def _stretches(self, text: str, spans: Sequence[tuple[int, int]]) -> list[list[str]] | None:
        """The words of each stretch of text between the edges of the spans; every second stretch is learned."""
        edges = [edge for span in spans for edge in span]
        if edges != sorted(edges) or not all(self._is_cut(text, edge) for edge in edges):
            return None  # a span may end before it begins: an empty answer, of a template without a sign for its end
        return [
            _SPACE_TO_CUT_AT.split(text[start:end]) for start, end in zip([0, *edges], [*edges, len(text)], strict=True)
        ]

    def _is_cut(self, text: str, edge: int) -> bool:
        """Whether no token can lie on both sides of an edge."""
        if edge in (0, len(text)):
            return True
        if text.startswith(self._special, edge) or text.endswith(self._special, 0, edge):
            return True
        return text[edge - 1 : edge] == "\n" and not text[edge : edge + 1].isspace()

    def _learn(self, known: dict[str, int], words: set[str], before: str) -> list[str]:
        """Count the words that are not known; returns those that are too long to be kept."""
        if len(known) > _MOST_WORDS:
            known.clear()
        new = [word for word in words if word not in known]
        encodings = self._tokenizer.encode_batch_fast([before + word for word in new], add_special_tokens=False)
        for word, encoding in zip(new, encodings, strict=True):
            num_media = sum(token in self._media_ids for token in encoding.ids)
            known[word] = len(encoding) + (num_media << _MEDIA_BITS)
        return [word for word in new if len(word) > _LONGEST_WORD]

    def _sum_up(self, stretches: list[list[str]]) -> TextCounts:
        behind_space, first = self._behind_space, self._first
        counts = [first[words[0]] + sum([behind_space[word] for word in words[1:]]) for words in stretches]
        whole, learned = sum(counts), sum(counts[1::2])
        return TextCounts(_tokens(whole), _tokens(learned), whole >> _MEDIA_BITS)


def _tokens(count: int) -> int:
    return count & ((1 << _MEDIA_BITS) - 1)


def _stand_alone(added_tokens: Sequence[dict]) -> bool:
    """Whether a special token is found wherever its signs stand: it takes no white space around it, holds no place to
    cut at, and no other one can begin inside it or go on where it ends."""
    texts = sorted(token["content"] for token in added_tokens)
    begins = {text[:1] for text in texts}
    return not (
        any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added_tokens)
        or any(sign.isspace() or sign in begins for text in texts for sign in text[1:])
        or any(other.startswith(text) for text, other in pairwise(texts))
    )
