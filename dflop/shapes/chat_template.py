"""A tokenizer's chat template: a conversation as one text, and which of its characters are learned (enter the loss).

The assistant's answers are learned, each with the token that ends it. If the template has generation blocks, these mark
the answers. Otherwise an answer is what follows its prompt: the text rendered up to the answer, minus the text rendered
with a generation prompt instead of it. A template that writes turn by turn tells both for all answers at once.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError

from dflop.base import UserError
from dflop.shapes.record_media import RecordError, is_text
from dflop.shapes.records import Turn
from dflop.shapes.template_language import MARKS, has_generation_blocks, make_environment
from dflop.shapes.template_limits import MOST_STEPS_OF_ALL, STEPS, Steps, TooManySteps
from dflop.shapes.template_turns import TURN, TurnByTurn, find_turn_by_turn

__all__ = ["ChatTemplate", "Rendered"]

# Where an answer begins and ends in the whole text; None if the renderings that were compared do not tell.
_Edges = tuple[int | None, int | None]
# A conversation as one text, and the spans `[start, end)` of its characters that are learned.
Rendered = tuple[str, list[tuple[int, int]]]

# Characters that no text should hold. Two of them that a conversation does not hold can mark places in it.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
# What a template's code may raise.
_REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
_MAX_CHARACTERS = 1 << 20
_WAY_OUT = "copy it again from where the checkpoint is from, or mend it"
# The roles of the conversations that a template is tried with: some refuse a system turn, others a lone user turn.
_TRIED_ROLES = (("user",), ("user", "assistant"), ("system", "user", "assistant"))
_CANNOT_TELL = (
    "the tokenizer's chat template changes turn {} when others follow, so that the learned tokens cannot be told; "
    "put {{% generation %}} and {{% endgeneration %}} around what it writes of the assistant"
)
_TOO_MANY_ANSWERS = (
    "to find its {:,} answers, the tokenizer's chat template takes more than {:,} steps; split the conversation, or "
    "put {{% generation %}} and {{% endgeneration %}} around what the template writes of the assistant"
)


class _Message(NamedTuple):
    """A turn as templates get it: its text, and the media before the text if they are given as parts of their own."""

    role: str
    text: str
    kind: str = ""
    num_media: int = 0
    has_text: bool = True


class _Endless(RecordError):
    """A conversation for which the template takes too many steps."""


class ChatTemplate:
    """A template of a Hugging Face tokenizer, run in a sandbox."""

    def __init__(
        self,
        source: str,
        *,
        file: Path | None = None,
        named_tokens: Mapping[str, str] | None = None,
        special_tokens: Collection[str] = (),
        placeholders: Mapping[str, str] | None = None,
    ) -> None:
        """Compile a template. `file` is where it was read from, for messages.

        Templates see `named_tokens` (`bos_token` and so on) as variables. Of the `special_tokens`, the one that ends a
        turn is learned. `placeholders` are the texts that stand for media, by kind.

        Raises:
            UserError: when it is not a template, writes nothing of what turns say, or writes invalid characters.
        """
        self._source, environment = source, make_environment()
        where = f"the chat template of {file}" if file else "the chat template"
        if len(source) > _MAX_CHARACTERS:
            raise UserError(f"{where} has {len(source):,} characters; {_WAY_OUT}")
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(tree)
        except (*_REFUSALS, SyntaxError) as error:  # Jinja computes constant parts here, so any of these may be raised
            raise UserError(f"{where} is not valid Jinja: {error}; {_WAY_OUT}") from None
        self._has_blocks = has_generation_blocks(tree)
        self._given: dict[str, Any] = {**(named_tokens or {}), "tools": None, "documents": None}
        try:
            if why := self._why_useless():
                raise UserError(f"{where} {why}; {_WAY_OUT}")
            self._wants_parts = self._template_wants_parts()
            self._media_first = self._find_media_first(placeholders or {})
            self._ending = self._find_ending(special_tokens) if self._has_blocks else ""
        except _Endless as error:
            raise UserError(f"{where} does not end: {error}; {_WAY_OUT}") from None

    def render(self, turns: Sequence[Turn]) -> Rendered:
        """The whole text and the character spans `[start, end)` that are learned: each answer with its end-of-turn
        token.

        Raises:
            RecordError: bad_record, when the template refuses a conversation, or rewrites it so that its learned tokens
                cannot be determined.
        """
        messages, steps = self._messages(turns), Steps()
        whole, taken = self._run(messages, steps), steps.taken
        if self._has_blocks:
            found = self._blocks(messages, steps)
            if found and found[0] == whole:
                return whole, [(start, _extended(whole, end, self._ending)) for start, end in found[1]]
        num_answers = sum(message.role == "assistant" for message in messages)
        told = self._edges_by_turn(messages, whole, steps) if num_answers > 1 else {}
        num_left = num_answers - sum(None not in edges for edges in told.values())
        too_many = RecordError("bad_record", _TOO_MANY_ANSWERS.format(num_answers, MOST_STEPS_OF_ALL))
        # Each other answer is found by two renderings, of half the conversation on average, or by some more.
        if num_left * taken > MOST_STEPS_OF_ALL:
            raise too_many
        try:
            return whole, self._spans_behind_prompts(messages, whole, steps, told)
        except _Endless as error:
            raise (too_many if steps.are_all_taken else error) from None

    def _blocks(self, messages: Sequence[_Message], steps: Steps) -> Rendered | None:
        """The text and the spans of its generation blocks; None if blocks are nested."""
        marks = _unused_marks([message.text for message in messages])
        return _take_out_marks(self._run(messages, steps, marks=marks), marks)

    def _spans_behind_prompts(
        self, messages: Sequence[_Message], whole: str, steps: Steps, told: Mapping[int, _Edges]
    ) -> list[tuple[int, int]]:
        """The span of each answer in `whole`. Of answers whose edges are not `told`, two shorter renderings are
        compared with it; an edge that is still unknown is found by marks."""
        spans = []
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            start, end = told[index] if index in told else self._compared(messages, index, whole, steps)
            if start is None or end is None:
                its_start, its_end = self._find_answer(messages, index, whole, steps)
                start, end = its_start if start is None else start, its_end if end is None else end
            if start is None or end is None:
                raise RecordError("bad_record", _CANNOT_TELL.format(index + 1))
            spans.append((start, end))
        return spans

    def _compared(self, messages: Sequence[_Message], index: int, whole: str, steps: Steps) -> _Edges:
        """The edges of an answer. The turns before it, with a generation prompt, end where it begins. The turns up to
        and including the answer end where it ends. Either text may not be what `whole` begins with."""
        before = self._run_or_none(messages[:index], steps, prompt=True)
        until = whole if index == len(messages) - 1 else self._run_or_none(messages[: index + 1], steps)
        start = len(before) if before is not None and whole.startswith(before) else None
        end = len(until.rstrip()) if until is not None and whole.startswith(until.rstrip()) else None
        return start, end

    def _edges_by_turn(self, messages: Sequence[_Message], whole: str, steps: Steps) -> dict[int, _Edges]:
        """What `_compared` finds for the answers, by their number among `messages`, from two renderings: one tells
        where turns begin, the other which prompt follows them. Empty if the template does not write turn by turn."""
        if not self._by_turn:
            return {}
        try:
            mark = _unused_marks([message.text for message in messages])[0]
            pieces = self._run(messages, steps, turn=mark).split(mark)
            first = len(messages) - (len(pieces) - 2)  # the number of the turn that the loop begins with
            answers = [
                index
                for index in range(max(first, self._by_turn.min_turns), len(messages))
                if messages[index].role == "assistant"
            ]
            if "".join(pieces) != whole or not answers:
                return {}
            prompt = self._run(messages[: answers[0]], steps, prompt=True, turn=mark).rpartition(mark)[2]
        except RecordError:
            return {}
        return _edges_of_turns(whole, pieces, answers, first, prompt)

    @cached_property
    def _by_turn(self) -> TurnByTurn | None:
        try:
            return find_turn_by_turn(make_environment(), self._source)
        except RecursionError:
            return None

    def _find_answer(self, messages: Sequence[_Message], index: int, whole: str, steps: Steps) -> _Edges:
        """Where an answer begins and ends; each is None if it cannot be determined. The template is run with marks at
        the answer's ends. A run in which the marks change anything else is not used."""
        marks = _unused_marks([message.text for message in messages])
        for mark in (_between, _around):
            marked = list(messages)
            marked[index] = messages[index]._replace(text=mark(messages[index].text, marks))
            rendered = self._run_or_none(marked, steps)
            if rendered is None or rendered.count(marks[1]) != 1 or re.sub(f"[{marks}]", "", rendered) != whole:
                continue
            *before, answer = rendered[: rendered.index(marks[1])].split(marks[0])
            end = len("".join(before)) + len(answer)
            alone = self._run_or_none(marked[: index + 1], steps) or ""
            ending = alone.rpartition(marks[1])[2].rstrip()
            return end - len(answer) if len(before) == 1 else None, _extended(whole, end, ending)
        return None, None

    def _run_or_none(
        self, messages: Sequence[_Message], steps: Steps | None = None, *, prompt: bool = False
    ) -> str | None:
        try:
            return self._run(messages, steps, prompt=prompt)
        except _Endless:
            raise
        except RecordError:
            return None

    def _run(
        self,
        messages: Sequence[_Message],
        steps: Steps | None = None,
        *,
        prompt: bool = False,
        marks: str | None = None,
        turn: str | None = None,
    ) -> str:
        """The rendered text, with `marks` around generation blocks, or with the mark `turn` before each turn and
        behind the last. A conversation that is rendered several times has the same `steps` each time."""
        steps = steps or Steps()
        steps.begin(sum(len(message.text) for message in messages))
        given = self._given | {
            "messages": [self._as_given(message) for message in messages],
            "add_generation_prompt": prompt,
            STEPS: steps,
        }
        if marks:
            given[MARKS] = marks
        template = self._template
        if turn and self._by_turn:
            given[TURN], template = turn, self._by_turn.template
        try:
            return template.render(given)
        except TooManySteps as error:
            raise _Endless("bad_record", f"the tokenizer's chat template takes too long for it: {error}") from None
        except _REFUSALS as error:
            raise RecordError(
                "bad_record", f"the tokenizer's chat template refuses it: {error}{_hint(error)}"
            ) from None

    def _messages(self, turns: Sequence[Turn]) -> list[_Message]:
        if not self._media_first:
            return [_Message(turn.role, turn.content) for turn in turns]
        return [self._with_media_first(turn) for turn in turns]

    def _with_media_first(self, turn: Turn) -> _Message:
        for kind, token in self._media_first.items():
            if turn.content.startswith(token):
                leading = re.match(f"(?:{re.escape(token)}\n?)+", turn.content)
                assert leading is not None
                text = turn.content[leading.end() :]
                return _Message(turn.role, text, kind, leading[0].count(token), bool(text))
        return _Message(turn.role, turn.content)

    def _as_given(self, message: _Message) -> dict[str, Any]:
        if not self._wants_parts:
            return {"role": message.role, "content": message.text}
        parts = [{"type": message.kind} for _ in range(message.num_media)]
        if message.has_text:
            parts.append({"type": "text", "text": message.text})
        return {"role": message.role, "content": parts}

    def _why_useless(self) -> str:
        """Why no conversation could be learned with this template; empty if one could. It is also empty if the template
        refuses every trial: each record's error then says why."""
        written = []
        for in_parts in (False, True):
            self._wants_parts = in_parts
            for roles in _TRIED_ROLES:
                pair = [self._run_or_none([_Message(role, text) for role in roles]) for text in ("probe", "a")]
                if None not in pair:
                    written.append(pair)
        if written and all(one == other for one, other in written):
            return "writes nothing of what turns say"
        if not all(map(is_text, chain(*written))):
            return "writes half a surrogate pair, which is no character"
        return ""

    def _template_wants_parts(self) -> bool:
        """Whether message content must be a list of parts (multimodal processors) instead of a text."""
        self._wants_parts = False
        for roles in _TRIED_ROLES:
            rendered = self._run_or_none([_Message(role, "probe") for role in roles])
            if rendered is not None:
                return "probe" not in rendered
        return True

    def _find_media_first(self, placeholders: Mapping[str, str]) -> dict[str, str]:
        """The kinds of media, with their placeholders, for which the template writes a line break between a medium and
        the text after it. Such media are given to the template as parts if a turn begins with them, so that the line
        break comes after them. All other media stay in the text: templates would move parts to the front."""
        found = {}
        for kind, token in placeholders.items() if self._wants_parts else ():
            rendered = self._run_or_none([_Message("user", "probe", kind, 1)])
            if rendered is not None and rendered.count(token) == 1 and f"{token}\nprobe" in rendered:
                found[kind] = token
        return found

    def _find_ending(self, special_tokens: Collection[str]) -> str:
        """The special token, with white space before it, that ends each turn after its generation block. A model that
        does not learn this token does not stop."""
        if not special_tokens:
            return ""
        tokens = "|".join(re.escape(token) for token in sorted(special_tokens, key=len, reverse=True))
        endings = set()
        for num in (1, 2):
            asked = [_Message(role, "probe") for _ in range(num) for role in ("user", "assistant")]
            try:
                found = self._blocks(asked, Steps())
            except _Endless:
                raise
            except RecordError:
                continue
            if found and found[1]:
                text, blocks = found
                behind = re.compile(rf"\s*(?:{tokens})").match(text, blocks[len(blocks) // num - 1][1])
                endings.add(behind[0] if behind else "")
        return endings.pop() if len(endings) == 1 else ""


def _edges_of_turns(
    whole: str, pieces: Sequence[str], answers: Sequence[int], first: int, prompt: str
) -> dict[int, _Edges]:
    """The edges of `answers`, numbers of turns, in the text `whole` of a template that writes turn by turn.

    `pieces` are what it writes before the loop, for each turn from the `first` on, and behind the loop. It would write
    `prompt` behind the turns before an answer.
    """
    begins = list(accumulate(map(len, pieces)))  # of these turns, and of what is behind the loop
    said, behind, end = [], pieces[-1].rstrip(), 0
    for begin, piece in zip([0, *begins], pieces, strict=False):
        end = begin + len(piece.rstrip()) if piece.strip() else end
        said.append(end)
    edges = {}
    for index in answers:
        begin, end = begins[index - first], begins[index - first + 1]
        start = begin + len(prompt) if whole.startswith(prompt, begin) else None
        stop = end + len(behind) if whole.startswith(behind, end) else None
        edges[index] = start, stop if behind else said[index - first + 1]
    return edges


def _extended(text: str, end: int, ending: str) -> int:
    """The end of a span, moved behind the `ending` if the text goes on with that."""
    return end + len(ending) if text.startswith(ending, end) else end


def _unused_marks(texts: Sequence[str]) -> str:
    """Two characters that no text holds.

    Raises:
        RecordError: bad_record, when there are no two.
    """
    unused = (character for character in _NONCHARACTERS if not any(character in text for text in texts))
    marks = "".join(islice(unused, 2))
    if len(marks) < 2:
        raise RecordError("bad_record", "its text holds nearly all of U+FDD0 to U+FDEF, which are no characters")
    return marks


def _take_out_marks(rendered: str, marks: str) -> Rendered | None:
    """A text without its two marks, and the spans from each first to the next second mark. None if the marks do not
    alternate: a generation block is then inside another."""
    found = re.findall(f"[{marks}]", rendered)
    if found != list(marks) * (len(found) // 2):
        return None
    cut = re.split(f"[{marks}]", rendered)
    edges = list(accumulate(map(len, cut)))[:-1]
    return "".join(cut), list(zip(edges[::2], edges[1::2], strict=True))


def _between(text: str, marks: str) -> str:
    """A text with marks between it and the white space at its ends, which templates may trim."""
    said = text.strip()
    begin = len(text) - len(text.lstrip()) if said else len(text)
    return text[:begin] + marks[0] + said + marks[1] + text[begin + len(said) :]


def _around(text: str, marks: str) -> str:
    """A text with marks at its ends."""
    return marks[0] + text + marks[1]


def _hint(error: Exception) -> str:
    """What to do if the template asks for a special token that is not defined; else empty."""
    name = re.search(r"'(\w+_token)' is undefined", str(error))
    return f"; give `{name[1]}` a text in tokenizer_config.json" if name else ""
