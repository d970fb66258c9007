"""Forms: what a chat template writes around the contents of messages, for all conversations with the same roles.

A template that only copies contents is run once with signs (placeholders) instead of contents. Each conversation's
contents are then put where the signs came out. Marks around generation blocks tell which characters are learned.
"""

import re
from collections.abc import Sequence
from itertools import accumulate

from dflop.data.records import RecordError

__all__ = [
    "MARKS_OF_FORMS",
    "OF_SIGNS",
    "SIGN",
    "Form",
    "Pieces",
    "Rendered",
    "around",
    "between",
    "extended",
    "take_out_marks",
    "unused_marks",
]

# A conversation as one text, and the spans `[start, end)` of its characters that are learned.
Rendered = tuple[str, list[tuple[int, int]]]
# A place in the text of a form: how many contents are before it, and how many characters of the template.
Edge = tuple[int, int]

# The sign that stands for a content: the message's number between two of Unicode's noncharacters, with white space
# around. The white space is gone if the template trims the content.
SIGN = "\x1c\ufdd0{}\ufdd1\x1c"
_FIND_SIGNS = re.compile("(\x1c)?\ufdd0(\\d+)\ufdd1(?(1)\x1c)")
MARKS_OF_FORMS = "\ufdd2\ufdd3"
# Characters that no text should hold. Two of them that a conversation does not hold can mark places in it.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
OF_SIGNS = frozenset(SIGN + MARKS_OF_FORMS) - frozenset("{}")


class Pieces:
    """A rendered text, cut at its signs. `texts` are the template's own parts. `places` has one entry between each two
    of them: the number of the message whose content goes there, and whether the content is trimmed."""

    def __init__(self, rendered: str) -> None:
        cut = _FIND_SIGNS.split(rendered)
        self.texts = cut[::3]
        self.places = [(int(number), not space) for space, number in zip(cut[1::3], cut[2::3], strict=True)]

    @property
    def end(self) -> Edge:
        return len(self.places), sum(map(len, self.texts))

    def strip_end(self) -> bool:
        """Strip white space from the end. False if a content then comes last, as its own white space is not known."""
        self.texts[-1] = self.texts[-1].rstrip()
        return bool(self.texts[-1])

    def begin_with(self, other: "Pieces") -> bool:
        """Whether this text begins with the other one, whatever the contents are."""
        num = len(other.places)
        return (
            self.places[:num] == other.places
            and self.texts[:num] == other.texts[:num]
            and self.texts[num].startswith(other.texts[num])
        )

    def take_out_blocks(self, ending: str) -> list[tuple[Edge, Edge]] | None:
        """Remove the marks from the texts and return the spans between them. Each span includes the `ending`, if that
        follows it. None if contents decide whether the ending follows, or if the marks do not alternate."""
        if not _are_in_turn(re.findall(f"[{MARKS_OF_FORMS}]", "".join(self.texts)), MARKS_OF_FORMS):
            return None
        edges: list[Edge] = []
        beside = 0
        for number, text in enumerate(self.texts):
            cut = re.split(f"[{MARKS_OF_FORMS}]", text)
            self.texts[number] = "".join(cut)
            ends = list(accumulate(map(len, cut)))
            for end in ends[:-1]:
                learned = end
                if len(edges) % 2:
                    rest = self.texts[number][end:]
                    if not rest.startswith(ending) and number < len(self.places) and ending.startswith(rest):
                        return None
                    learned = extended(self.texts[number], end, ending)
                edges.append((number, beside + learned))
            beside += ends[-1]
        return list(zip(edges[::2], edges[1::2], strict=True))


class Form:
    """What all conversations of the same form share: the text around their contents, and where learned spans are."""

    def __init__(self, whole: Pieces, edges: Sequence[tuple[Edge, Edge]]) -> None:
        self._pieces = [piece for text in whole.texts for piece in (text, "")][:-1]
        self._places = whole.places
        self._edges = edges

    def fill(self, texts: Sequence[str]) -> Rendered:
        """The conversation whose messages have these texts."""
        contents = [texts[number].strip() if is_trimmed else texts[number] for number, is_trimmed in self._places]
        pieces = self._pieces.copy()
        pieces[1::2] = contents
        lengths = [0, *accumulate(map(len, contents))]  # of the first contents together
        spans = [
            (lengths[start] + beside_start, lengths[end] + beside_end)
            for (start, beside_start), (end, beside_end) in self._edges
        ]
        return "".join(pieces), spans


def unused_marks(texts: Sequence[str]) -> str:
    """Two characters that no text holds.

    Raises:
        RecordError: bad_record, when there are no two.
    """
    unused = [character for character in _NONCHARACTERS if not any(character in text for text in texts)]
    if len(unused) < 2:
        raise RecordError("bad_record", "its text holds nearly all of U+FDD0 to U+FDEF, which are no characters")
    return "".join(unused[:2])


def between(text: str, marks: str) -> str:
    """A text with marks between it and the white space at its ends, which templates may trim."""
    said = text.strip()
    begin = len(text) - len(text.lstrip()) if said else len(text)
    return text[:begin] + marks[0] + said + marks[1] + text[begin + len(said) :]


def around(text: str, marks: str) -> str:
    """A text with marks at its ends."""
    return marks[0] + text + marks[1]


def take_out_marks(rendered: str, marks: str) -> Rendered | None:
    """A text without its two marks, and the spans from each first to the next second mark; None if the marks do not
    alternate."""
    if not _are_in_turn(re.findall(f"[{marks}]", rendered), marks):
        return None
    cut = re.split(f"[{marks}]", rendered)
    edges = list(accumulate(map(len, cut)))[:-1]
    return "".join(cut), list(zip(edges[::2], edges[1::2], strict=True))


def _are_in_turn(found: Sequence[str], marks: str) -> bool:
    """Whether first and second marks alternate, so that no block is inside another."""
    return list(found) == list(marks) * (len(found) // 2)


def extended(text: str, end: int, ending: str) -> int:
    """The end of a span, after the `ending` if that follows the span."""
    return end + len(ending) if text.startswith(ending, end) else end
