"""Whether a chat template only copies what messages say, so that the messages' roles alone decide all other text.

Most templates put fixed text around each content and look at roles, numbers and positions. Others look into a content:
they split it, compare it, or leave it out if it is empty. The template's syntax tree tells which of the two it does.
Each expression gets a kind, which says how it may depend on contents. The answer is no for a template with a construct
that is not listed here.

Many templates look into the contents of tool calls only. So branches are marked, and only those are read that the
template took for a sequence of roles. If no condition on its way depends on contents, the template takes the same
branches for all contents.
"""

from collections.abc import Iterable, Set
from enum import Enum

from jinja2 import nodes

from dflop.data.template_language import is_generation_block

__all__ = ["PASSED", "mark_branches", "only_copies_texts"]

# The function that a marked template calls with the number of each branch that it takes. It returns an empty text. No
# template can use a name that begins with a digit.
PASSED = "0passed"


class _Kind(Enum):
    """What an expression holds."""

    FREE = "the same for all contents"
    CONTENT = "one content as it is"
    TEXT = "contents, as they are or trimmed, joined with texts that are the same for all contents"
    MESSAGES = "a list of messages"
    MESSAGE = "one of them, with `role` and `content`"
    PARTS = "a list of a content's parts"
    PART = "one of them, with `type` and `text`"


class _LooksIntoTexts(Exception):
    """The template looks into texts, or that cannot be ruled out."""


_FREE, _CONTENT, _TEXT = _Kind.FREE, _Kind.CONTENT, _Kind.TEXT
_MEMBER_OF = {_FREE: _FREE, _Kind.MESSAGES: _Kind.MESSAGE, _Kind.PARTS: _Kind.PART}
_LISTS, _OBJECTS = (_Kind.MESSAGES, _Kind.PARTS), (_Kind.MESSAGE, _Kind.PART)
_NAMES_OF_KINDS = {_Kind.MESSAGE: "role", _Kind.PART: "type"}
_PLACES = {"first", "last", "index", "index0", "revindex", "revindex0", "length"}
_TESTS_OF_TYPE = {"string", "defined", "undefined", "none", "mapping", "iterable", "sequence", "number", "boolean"}


def mark_branches(template: nodes.Template) -> None:
    """Put a call of `PASSED` at the beginning of each branch of a condition or loop. Changes the template in place."""
    deciding = list(template.find_all((nodes.If, nodes.For)))
    for number, branch in enumerate(branch for own in deciding for branch in (own.body, own.else_) if branch):
        call = nodes.Call(nodes.Name(PASSED, "load"), [nodes.Const(number)], [], None, None)
        branch.insert(0, nodes.Output([call]))
    template.set_lineno(1).set_environment(template.environment)


def only_copies_texts(template: nodes.Template, passed: Set[int], *, in_parts: bool) -> bool:
    """Whether the messages' roles decide all that a template writes, except for contents, written whole or trimmed.

    The template, marked by `mark_branches`, is rendered with `messages`, a list of objects with a `role` and a
    `content`. A content is a text, or with `in_parts` a list of one part of the type `text`. The answer holds for
    renderings that do not fail and that take no branches but `passed`.
    """
    reading = _Reading(passed, in_parts)
    try:
        while True:  # until no name's kind changes: a name's kind covers everything that is assigned to it anywhere
            known = dict(reading.names)
            reading.read(template.body)
            if reading.names == known:
                return True
    except _LooksIntoTexts:
        return False


class _Reading:
    """One reading of a template: the kinds of its names, and from them those of its expressions."""

    def __init__(self, passed: Set[int], in_parts: bool) -> None:
        self._passed = passed
        self.names = {"messages": _Kind.MESSAGES}
        self._members = {
            (_Kind.MESSAGE, "content"): _Kind.PARTS if in_parts else _CONTENT,
            (_Kind.MESSAGE, "role"): _FREE,
            (_Kind.PART, "text"): _CONTENT,
            (_Kind.PART, "type"): _FREE,
        }

    def read(self, statements: Iterable[nodes.Node]) -> None:
        for statement in statements:
            match statement:
                case nodes.Output(nodes=[nodes.Call(node=nodes.Name(name=name), args=[number])]) if name == PASSED:
                    if number.value not in self._passed:
                        return
                case nodes.Output(nodes=written):
                    for each in written:
                        if not isinstance(each, nodes.TemplateData):
                            self._need(each, _FREE, _CONTENT, _TEXT)
                case nodes.If(test=test, body=body, elif_=others, else_=otherwise):
                    self._decide(test)
                    for branch in (body, others, otherwise):
                        self.read(branch)
                case nodes.For(recursive=False):
                    self._loop(statement)
                case nodes.Assign(target=target, node=value):
                    self._assign(target, self._kind(value))
                case nodes.CallBlock(body=body) if is_generation_block(statement):
                    self.read(body)
                case nodes.Continue() | nodes.Break():
                    pass
                case _:
                    raise _LooksIntoTexts

    def _loop(self, loop: nodes.For) -> None:
        member = _MEMBER_OF.get(self._kind(loop.iter))
        if member is None:
            raise _LooksIntoTexts
        self._assign(loop.target, member)
        if loop.test is not None:
            self._decide(loop.test)
        for branch in (loop.body, loop.else_):
            self.read(branch)

    def _assign(self, target: nodes.Expr, kind: _Kind) -> None:
        match target:
            case nodes.Name(name=name) if name != "loop":
                self.names[name] = _joined(self.names.get(name, kind), kind)
            case nodes.Tuple() | nodes.NSRef() if kind is _FREE:
                for name in target.find_all(nodes.Name):
                    self._assign(name, kind)
            case _:
                raise _LooksIntoTexts

    def _need(self, expression: nodes.Expr, *kinds: _Kind) -> _Kind:
        kind = self._kind(expression)
        if kind not in kinds:
            raise _LooksIntoTexts
        return kind

    def _decide(self, condition: nodes.Expr) -> None:
        """A condition must not depend on a text, not even on whether it is empty."""
        self._need(condition, _FREE, *_LISTS, *_OBJECTS)

    def _kind(self, expression: nodes.Expr | None) -> _Kind:
        match expression:
            case None | nodes.Const() | nodes.TemplateData():
                return _FREE
            case nodes.Name(name="loop"):
                raise _LooksIntoTexts  # only the attributes in `_PLACES` are known
            case nodes.Name(name=name):
                return self.names.get(name, _FREE)
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=name) if name in _PLACES:
                return _FREE
            case nodes.Getattr(node=owner, attr=name):
                return self._member(self._kind(owner), name)
            case nodes.Getitem(node=owner, arg=nodes.Const(value=str(name))):
                return self._member(self._kind(owner), name)
            case nodes.Getitem(node=owner, arg=nodes.Slice() as part):
                self._all_free(part)
                return self._need(owner, _FREE, *_LISTS)
            case nodes.Getitem(node=owner, arg=place):
                self._need(place, _FREE)
                return _MEMBER_OF[self._need(owner, _FREE, *(_LISTS if _is_number(place) else ()))]
            case nodes.Add() | nodes.Concat():
                kinds = [self._need(each, _FREE, _CONTENT, _TEXT) for each in expression.iter_child_nodes()]
                return _FREE if set(kinds) == {_FREE} else _TEXT
            case nodes.CondExpr(test=test, expr1=one, expr2=other):
                self._decide(test)
                return _joined(self._kind(one), self._kind(other))
            case nodes.And(left=one, right=other) | nodes.Or(left=one, right=other):
                self._decide(one)
                return _joined(self._kind(one), self._kind(other))
            case nodes.Not(node=condition):
                self._decide(condition)
                return _FREE
            case nodes.Compare(expr=key, ops=[nodes.Operand(op="in" | "notin", expr=owner)]):
                self._need(key, _FREE)
                self._need(owner, _FREE, *_OBJECTS)  # `in` looks at an object's keys only
                return _FREE
            case nodes.Test(node=value, name=name):
                self._all_free(expression, but=value)
                return _FREE if self._kind(value) is _FREE or name in _TESTS_OF_TYPE else _refuse()
            case nodes.Filter(node=value):
                return self._filtered(expression, self._kind(value))
            case nodes.Call(node=nodes.Getattr(node=owner, attr="strip"), args=[], kwargs=[]):
                return _TEXT if self._need(owner, _FREE, _CONTENT) is _CONTENT else _FREE
            case nodes.Operand() | nodes.Keyword() | nodes.Pair() | nodes.Call() | nodes.Compare():
                return self._all_free(expression)
            case nodes.List() | nodes.Tuple() | nodes.Dict() | nodes.UnaryExpr() | nodes.BinExpr():
                return self._all_free(expression)
        return _refuse()

    def _all_free(self, expression: nodes.Node, but: nodes.Expr | None = None) -> _Kind:
        for each in expression.iter_child_nodes():
            if each is not but:
                self._need(each, _FREE)
        return _FREE

    def _member(self, owner: _Kind, name: str) -> _Kind:
        """The kind of `owner.name` or `owner['name']`."""
        if owner is _FREE:
            return _FREE
        if found := self._members.get((owner, name)):
            return found
        of_python = list if owner in _LISTS else dict
        if owner in (_CONTENT, _TEXT) or hasattr(of_python, name) or name.startswith("_"):
            raise _LooksIntoTexts  # a method, such as `items`
        return _FREE  # undefined

    def _filtered(self, expression: nodes.Filter, kind: _Kind) -> _Kind:
        self._all_free(expression, but=expression.node)
        arguments = [*expression.args, *expression.kwargs]
        arguments += filter(None, (expression.dyn_args, expression.dyn_kwargs))
        if kind is _FREE:
            return _FREE
        match expression.name, arguments:
            case "trim", [] if kind is _CONTENT:
                return _TEXT
            case "length" | "count", [] if kind in _LISTS:
                return _FREE
            case "list", [] if kind in _LISTS:
                return kind
            case "first" | "last", [] if kind in _LISTS:
                return _MEMBER_OF[kind]
            case "selectattr" | "rejectattr", [nodes.Const(value=name), nodes.Const(value="equalto" | "eq" | "=="), _]:
                if kind in _LISTS and name == _NAMES_OF_KINDS[_MEMBER_OF[kind]]:
                    return kind
        return _refuse()


def _joined(one: _Kind, other: _Kind) -> _Kind:
    """The kind of a value that is of one kind or the other."""
    if one is other:
        return one
    return _TEXT if {one, other} <= {_FREE, _CONTENT, _TEXT} else _refuse()


def _is_number(place: nodes.Expr) -> bool:
    """Whether a subscript is a number. A name could be that of a list's method."""
    match place:
        case nodes.Const(value=int()) | nodes.Neg() | nodes.Sub() | nodes.Getattr(node=nodes.Name(name="loop")):
            return True
    return False


def _refuse() -> _Kind:
    raise _LooksIntoTexts
