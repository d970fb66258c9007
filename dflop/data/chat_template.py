"""A tokenizer's chat template: a conversation as one text, and which of its characters are learned (enter the loss).

The assistant's answers are learned, each with the token that ends it. If the template has generation blocks, these mark
the answers. Otherwise an answer is what follows its prompt: the text rendered up to the answer, minus the text rendered
with a generation prompt instead of it.

Templates are small programs, and running one takes longer than tokenising its output. A template that only copies what
turns say is therefore run once per sequence of roles, with signs (placeholders) instead of contents. The contents are
then put where the signs came out. A template that looks into the contents is run for each conversation.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError

from dflop.data.records import RecordError, Turn, is_text
from dflop.data.template_forms import (
    MARKS_OF_FORMS,
    OF_SIGNS,
    SIGN,
    Form,
    Pieces,
    Rendered,
    around,
    between,
    extended,
    take_out_marks,
    unused_marks,
)
from dflop.data.template_language import MARKS, has_generation_blocks, make_environment
from dflop.data.template_texts import PASSED, mark_branches, only_copies_texts
from dflop.runtime import UserError

__all__ = ["ChatTemplate", "Rendered"]

# How many sequences of roles have their form kept: most datasets have a few dozen.
_MOST_FORMS = 4096
# What a template's code may raise.
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_WAY_OUT = "copy it again from where the checkpoint is from, or mend it"
# The roles of the conversations that a template is tried with: some refuse a system turn, others a lone user turn.
_TRIED_ROLES = (("user",), ("user", "assistant"), ("system", "user", "assistant"))
_CANNOT_TELL = (
    "the tokenizer's chat template changes turn {} when others follow, so that the learned tokens cannot be told; "
    "put {{% generation %}} and {{% endgeneration %}} around what it writes of the assistant"
)


class _Message(NamedTuple):
    """A turn as templates get it: its text, and the media before the text if they are given as parts of their own."""

    role: str
    text: str
    kind: str = ""
    num_media: int = 0
    has_text: bool = True


class _Shape(NamedTuple):
    """All of a message but its text."""

    role: str
    kind: str = ""
    num_media: int = 0
    has_text: bool = True

    def message(self, text: str) -> _Message:
        return _Message(self.role, text if self.has_text else "", *self[1:])


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
        environment = make_environment()
        where = f"the chat template of {file}" if file else "the chat template"
        try:
            self._template = environment.from_string(source)
            self._tree = environment.parse(source)
            mark_branches(self._tree)
            self._marked = environment.from_string(self._tree)
        except (*_REFUSALS, SyntaxError) as error:  # Jinja computes constant parts here, so any of these may be raised
            raise UserError(f"{where} is not valid Jinja: {error}; {_WAY_OUT}") from None
        self._given: dict[str, Any] = {**(named_tokens or {}), "tools": None, "documents": None}
        self._copies: dict[frozenset[int], bool] = {}
        self._forms: dict[tuple[_Shape | str, ...], Form | None] = {}
        if why := self._why_useless():
            raise UserError(f"{where} {why}; {_WAY_OUT}")
        self._wants_parts = self._template_wants_parts()
        self._media_first = self._find_media_first(placeholders or {})
        self._has_blocks = has_generation_blocks(self._tree)
        self._ending = self._find_ending(special_tokens) if self._has_blocks else ""

    def render(self, turns: Sequence[Turn]) -> Rendered:
        """The whole text and the character spans `[start, end)` that are learned: each answer with its end-of-turn
        token.

        Raises:
            RecordError: bad_record, when the template refuses a conversation, or rewrites it so that its learned tokens
                cannot be determined.
        """
        if self._media_first:
            messages = self._messages(turns)
            form = self._form(tuple([_Shape(each.role, *each[2:]) for each in messages]))
            return self._render(messages) if form is None else form.fill([message.text for message in messages])
        form = self._form(tuple([turn.role for turn in turns]))
        return self.render_by_itself(turns) if form is None else form.fill([turn.content for turn in turns])

    def render_by_itself(self, turns: Sequence[Turn]) -> Rendered:
        """The result of `render`, from running the template on this conversation instead of filling a known form.

        Raises:
            RecordError: as `render`.
        """
        return self._render(self._messages(turns))

    def _render(self, messages: Sequence[_Message]) -> Rendered:
        whole = self._run(messages)
        if self._has_blocks:
            found = self._blocks(messages)
            if found and found[0] == whole:
                return whole, [(start, extended(whole, end, self._ending)) for start, end in found[1]]
        return whole, self._spans_behind_prompts(messages, whole)

    def _blocks(self, messages: Sequence[_Message]) -> Rendered | None:
        """The text and the spans of its generation blocks; None if blocks are nested."""
        marks = unused_marks([message.text for message in messages])
        return take_out_marks(self._run(messages, marks=marks), marks)

    def _spans_behind_prompts(self, messages: Sequence[_Message], whole: str) -> list[tuple[int, int]]:
        """The span of each answer: from where its prompt ends to where the text of all turns up to and including the
        answer ends. If the whole text does not begin with one of these two, the answer is marked to find that edge."""
        spans = []
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before = self._run_or_none(messages[:index], prompt=True)
            until = whole if index == len(messages) - 1 else self._run_or_none(messages[: index + 1])
            start = len(before) if before is not None and whole.startswith(before) else None
            end = len(until.rstrip()) if until is not None and whole.startswith(until.rstrip()) else None
            if start is None or end is None:
                its_start, its_end = self._find_answer(messages, index, whole)
                start, end = its_start if start is None else start, its_end if end is None else end
            if start is None or end is None:
                raise RecordError("bad_record", _CANNOT_TELL.format(index + 1))
            spans.append((start, end))
        return spans

    def _find_answer(self, messages: Sequence[_Message], index: int, whole: str) -> tuple[int | None, int | None]:
        """Where an answer begins and ends; each is None if it cannot be determined. The template is run with marks at
        the answer's ends. A run in which the marks change anything else is not used."""
        marks = unused_marks([message.text for message in messages])
        for mark in (between, around):
            marked = list(messages)
            marked[index] = messages[index]._replace(text=mark(messages[index].text, marks))
            rendered = self._run_or_none(marked)
            if rendered is None or rendered.count(marks[1]) != 1 or re.sub(f"[{marks}]", "", rendered) != whole:
                continue
            *before, answer = rendered[: rendered.index(marks[1])].split(marks[0])
            end = len("".join(before)) + len(answer)
            alone = self._run_or_none(marked[: index + 1]) or ""
            ending = alone.rpartition(marks[1])[2].rstrip()
            return end - len(answer) if len(before) == 1 else None, extended(whole, end, ending)
        return None, None

    def _run_or_none(self, messages: Sequence[_Message], *, prompt: bool = False) -> str | None:
        try:
            return self._run(messages, prompt=prompt)
        except RecordError:
            return None

    def _run(
        self,
        messages: Sequence[_Message],
        *,
        prompt: bool = False,
        marks: str | None = None,
        passed: set[int] | None = None,
    ) -> str:
        """The rendered text, with `marks` around generation blocks. The numbers of all branches that the template takes
        are added to `passed`."""
        given = self._given | {"messages": [self._as_given(each) for each in messages], "add_generation_prompt": prompt}
        if marks:
            given[MARKS] = marks
        try:
            if passed is None:
                return self._template.render(given)
            return self._marked.render(given | {PASSED: lambda number: passed.add(number) or ""})
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
                found = self._blocks(asked)
            except RecordError:
                continue
            if found and found[1]:
                text, blocks = found
                behind = re.compile(rf"\s*(?:{tokens})").match(text, blocks[len(blocks) // num - 1][1])
                endings.add(behind[0] if behind else "")
        return endings.pop() if len(endings) == 1 else ""

    def _form(self, shapes: tuple[_Shape | str, ...]) -> Form | None:
        """The form of conversations with messages of these shapes; a role alone stands for a message of text only."""
        if shapes not in self._forms:
            if len(self._forms) == _MOST_FORMS:
                self._forms.clear()
            self._forms[shapes] = self._make_form([_Shape(each) if isinstance(each, str) else each for each in shapes])
        return self._forms[shapes]

    def _make_form(self, shapes: Sequence[_Shape]) -> Form | None:
        """The form of all conversations of these shapes. None if the template refuses them or looks into their texts,
        or if the form does not tell where the learned spans are."""
        passed: set[int] = set()
        try:
            whole = self._pieces(shapes, passed)
            edges = whole and (self._edges_of_blocks if self._has_blocks else self._edges)(shapes, whole, passed)
        except Exception:  # any kind: if it concerns a conversation, rendering that one by itself raises it again
            return None
        if not whole or edges is None or not self._copies_in(frozenset(passed)):
            return None
        return Form(whole, edges)

    def _edges(self, shapes: Sequence[_Shape], whole: Pieces, passed: set[int]) -> list | None:
        edges = []
        for index in (index for index, shape in enumerate(shapes) if shape.role == "assistant"):
            before = self._pieces(shapes[:index], passed, prompt=True)
            until = self._pieces(shapes[: index + 1], passed)
            if not (before and until and until.strip_end()):
                return None
            if not (whole.begin_with(before) and whole.begin_with(until)):
                return None
            edges.append((before.end, until.end))
        return edges

    def _edges_of_blocks(self, shapes: Sequence[_Shape], whole: Pieces, passed: set[int]) -> list | None:
        marked = self._pieces(shapes, passed, marks=MARKS_OF_FORMS)
        edges = marked and marked.take_out_blocks(self._ending)
        return edges if marked and (marked.texts, marked.places) == (whole.texts, whole.places) else None

    def _copies_in(self, passed: frozenset[int]) -> bool:
        if passed not in self._copies:
            self._copies[passed] = only_copies_texts(self._tree, passed, in_parts=self._wants_parts)
        return self._copies[passed]

    def _pieces(
        self, shapes: Sequence[_Shape], passed: set[int], *, prompt: bool = False, marks: str | None = None
    ) -> Pieces | None:
        """What the template writes around the texts of messages; None if that holds characters that signs are made
        of."""
        beside = self._run([shape.message("") for shape in shapes], prompt=prompt, passed=passed)
        if not OF_SIGNS.isdisjoint(beside):
            return None
        signs = [shape.message(SIGN.format(number)) for number, shape in enumerate(shapes)]
        return Pieces(self._run(signs, prompt=prompt, marks=marks, passed=passed))


def _hint(error: Exception) -> str:
    """What to do if the template asks for a special token that is not defined; else empty."""
    name = re.search(r"'(\w+_token)' is undefined", str(error))
    return f"; give `{name[1]}` a text in tokenizer_config.json" if name else ""
