"""What a chat template may do: so many steps a rendering, and a conversation, the same numbers on every machine.

A template comes with its model and may loop, repeat and join as it likes. Its steps are counted, because a limit of
time would let profiling and training disagree. A step is a round of a loop, a call, an operation, an entry of a list,
or 64 characters that are worked on. What makes long texts out of short ones is paid for before it is done.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import wraps
from itertools import chain
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

__all__ = ["MOST_STEPS_OF_ALL", "STEPS", "LimitedEnvironment", "Steps", "TooManySteps", "counted"]

# Of all renderings of a conversation together, which takes 10 to 50 seconds.
MOST_STEPS_OF_ALL = 25_000_000

# The template variable that holds the steps that are left. No template can use a name that begins with a digit.
STEPS = "0steps"
_PAID, _TICK, _JOIN, _UNFOLDED = "0paid", "0tick", "0join", "0unfolded"
_MOST_STEPS = 1_000_000
_CHARACTERS_A_STEP = 64
# Filters that look at few entries of what they are given, or at each entry with a filter or test that is paid for.
_OF_ENTRIES = ("map", "select", "reject", "selectattr", "rejectattr", "list", "items", "reverse")
# Filters that work on whole entries: what is given bit by bit is taken first.
_OF_WHOLE = ("join", "sum", "min", "max")
# Tests that look at no more than a value's type or name.
_CHEAP_TESTS = ("defined", "undefined", "none", "boolean", "true", "false", "string", "number", "integer", "float")
_CHEAP_TESTS += ("mapping", "sequence", "iterable", "callable", "filter", "test", "sameas", "escaped")
_CHEAP = ("length", "count", "first", "last", "default", "d", "safe", "int", "float", "abs", "attr")
# Filters for web pages, and one that draws at random.
_REMOVED = ("random", "urlize", "xmlattr", "wordwrap", "pprint", "striptags")
# Methods that may make much of little, beside those that `_grown` prices.
_REFUSED_METHODS = ("translate", "encode", "to_bytes", "fromkeys")
_COLLECTIONS = (list, tuple, set, frozenset, *map(type, ({}.keys(), {}.values(), {}.items())))
# A width of thousands in a format, or one that is given as an argument. A name in a format may hold anything.
_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)|\{[^{}]*\d{4}|\{[^{}]+\{")
_NAMED, _WIDE_BESIDE_NAMES = "%(", re.compile(r"\d{4}|\*")


class TooManySteps(TemplateError):
    """A template that does not end, or makes more than a conversation's text needs."""


class Steps:
    """The steps that are left: `left` of one rendering, and in all of the renderings after it."""

    def __init__(self) -> None:
        self.left, self._left_behind = 0, MOST_STEPS_OF_ALL

    def begin(self, num_characters: int) -> None:
        """Begin a rendering of so many characters of a conversation."""
        self._left_behind += self.left
        self.left = min(_MOST_STEPS + 10 * num_characters, self._left_behind)
        self._left_behind -= self.left

    @property
    def taken(self) -> int:
        """In all renderings."""
        return MOST_STEPS_OF_ALL - self._left_behind - self.left

    @property
    def are_all_taken(self) -> bool:
        return self.taken > MOST_STEPS_OF_ALL

    def pay(self, steps: int) -> None:
        """Take so many steps.

        Raises:
            TooManySteps: when fewer are left.
        """
        self.left -= steps
        if self.left < 0:
            raise TooManySteps(f"it takes more than {_MOST_STEPS:,} steps, as if it did not end")

    def pay_for(self, value: Any) -> None:
        """Pay for a value as it would be written: a list that holds another one twice has that twice."""
        if type(value) is str:
            self.pay(1 + len(value) // _CHARACTERS_A_STEP)
            return
        waiting = [value]
        while waiting:
            one = waiting.pop()
            self.pay(1 + _length(one) // _CHARACTERS_A_STEP)
            if isinstance(one, dict):
                waiting += one.keys()
                waiting += one.values()
            elif isinstance(one, _COLLECTIONS):
                waiting += one


class _PlainNamespace(Namespace):
    """Jinja's `namespace`, which does not write what it holds: that could be itself, many times over."""

    def __repr__(self) -> str:
        return "<Namespace>"


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose renderings pay for what they do from `STEPS`, a variable that each must be given."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_paid_whole, **options)
        for name in _REMOVED:
            del self.filters[name]
        for name in set(self.filters) - set(_CHEAP):
            self.filters[name] = counted(name, self.filters[name])
        for name in set(self.tests) - set(_CHEAP_TESTS):
            self.tests[name] = _counted_test(self.tests[name])
        self.filters |= {_PAID: _paid, _TICK: _tick, _JOIN: _join, _UNFOLDED: _paid_whole}
        del self.globals["lipsum"]
        self.globals["namespace"] = _PlainNamespace

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Counting().visit(super()._parse(source, name, filename))
        return tree.set_environment(self)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _REFUSED_METHODS and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Jinja would write nothing and go on."""
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            wrapped.formatted = value.__self__
        return wrapped

    def call(self, context: Context, function: Any, *args: Any, **named: Any) -> Any:
        steps = context.parent[STEPS]
        steps.pay(1)
        for value in chain(args, named.values()):
            steps.pay_for(value)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            steps.pay(_grown(function.__name__, owner, args, named))
        elif isinstance(owner, Sized):
            steps.pay(len(owner) // _CHARACTERS_A_STEP)
        elif isinstance(formatted := getattr(function, "formatted", None), str):
            steps.pay(_grown("format", formatted, args, named))
        return super().call(context, function, *args, **named)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        steps = context.parent[STEPS]
        if operator == "+":
            if type(left) is type(right) is str:
                steps.pay(1 + (len(left) + len(right)) // _CHARACTERS_A_STEP)
                return left + right
            steps.pay(1 + (_length(left) + _length(right)) // _CHARACTERS_A_STEP)
        elif operator == "%" and isinstance(left, str):
            steps.pay_for(right)
            steps.pay(_grown("format", left, (right,), {}))
        elif operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(one, (str, list, tuple)) and isinstance(times, int):
                    before = steps.left
                    steps.pay_for(one)
                    steps.pay((before - steps.left) * max(times - 1, 0) + len(one) * max(times, 0) // 64)
            steps.pay(1 + (_num_bits(left) + _num_bits(right)) // 64)
        elif operator == "**":
            steps.pay(1 + _num_bits(left) * (abs(right) if isinstance(right, int) else 1) // 64)
        return super().call_binop(context, operator, left, right)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict, range)) else _num_bits(value) // 8


def _num_bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _grown(name: str, text: str, args: Iterable[Any], named: Mapping[str, Any]) -> int:
    """The steps for what a method or filter makes of a text, over those for the text and the arguments."""
    given = [*args, *named.values()]
    texts = [value for value in given if isinstance(value, str)]
    numbers = [abs(value) for value in given if isinstance(value, int)]
    most = max([*map(len, texts), *numbers], default=0)
    if name == "replace":
        old, new = (*texts, "", "")[:2]
        made = text.count(old) * len(new)
    elif name == "format":
        if _WIDE.search(text) or (_NAMED in text and _WIDE_BESIDE_NAMES.search(text)):
            raise TemplateError(f"a width of thousands in {text[:40]!r}")
        made = (text.count("%") + text.count("{")) * max(map(len, map(str, given)), default=0)
    elif name == "join":
        made = len(text) * sum(map(_length, given))
    elif name in ("expandtabs", "indent"):
        made = (1 + len(text)) * most
    else:
        made = max(numbers, default=0)
    return (len(text) + made) // _CHARACTERS_A_STEP


def counted(name: str, run: Callable) -> Callable:
    """A filter that is paid for; what it gives bit by bit is paid for as it is taken."""
    passed = getattr(run, "jinja_pass_arg", None)
    is_of_entries = name in _OF_ENTRIES

    @pass_context
    @wraps(run)
    def run_counted(context: Context, value: Any, *args: Any, **named: Any) -> Any:
        steps = context.parent[STEPS]
        if name in _OF_WHOLE and isinstance(value, Iterator):
            value = list(value)
        if name == "sum" and isinstance(named.get("start", (*args, 0, 0)[1]), _COLLECTIONS):
            raise TemplateError("a sum of lists")
        if is_of_entries and not isinstance(value, str):
            steps.pay(1 + _length(value))
        else:
            steps.pay_for(value)
        for argument in chain(args, named.values()):
            steps.pay_for(argument)
        if isinstance(value, str):
            steps.pay(_grown(name, value, args, named))
        elif numbers := [abs(number) for number in (*args, *named.values()) if isinstance(number, int)]:
            steps.pay(max(numbers))
        if name == "join":
            steps.pay(_length(value) * max(map(_length, (*args, *named.values())), default=0) // 64)
        given = {
            None: (),
            "context": (context,),
            "eval_context": (context.eval_ctx,),
            "environment": (context.environment,),
        }[passed and passed.name]
        result = run(*given, value, *args, **named)
        return _as_taken(steps, result) if isinstance(result, Iterator) else result

    return run_counted


def _counted_test(run: Callable) -> Callable:
    """A test that is paid for, as `select` calls it, too."""

    @pass_context
    @wraps(run)
    def run_counted(context: Context, value: Any, *args: Any) -> Any:
        for one in (value, *args):
            context.parent[STEPS].pay_for(one)
        return run(value, *args)

    return run_counted


def _as_taken(steps: Steps, values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        steps.pay(1)
        yield value


@pass_context
def _paid(context: Context, value: Any) -> Any:
    context.parent[STEPS].pay(1 + _length(value) // _CHARACTERS_A_STEP)
    return value


@pass_context
def _paid_whole(context: Context, value: Any) -> Any:
    context.parent[STEPS].pay_for(value)
    return value


@pass_context
def _tick(context: Context, steps: int) -> bool:
    context.parent[STEPS].pay(steps)
    return True


@pass_context
def _join(context: Context, values: list[Any]) -> str:
    context.parent[STEPS].pay_for(values)
    return "".join(map(str, values))


class _Counting(NodeTransformer):
    """Puts the counting into a template: at the begin of each body that may run again, and around what is joined."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        if node.test is not None:
            node.test = nodes.And(_ticking(1), node.test)
        return self.visit_Macro(node)

    def visit_Macro(self, node: Any) -> Any:
        self.generic_visit(node)
        num_characters = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        tick = _ticking(1 + num_characters // _CHARACTERS_A_STEP)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    visit_CallBlock = visit_Block = visit_FilterBlock = visit_AssignBlock = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), _JOIN)

    def visit_List(self, node: Any) -> nodes.Filter:
        self.generic_visit(node)
        is_constant = all(isinstance(item, nodes.Const) for item in node.items)
        return node if is_constant or getattr(node, "ctx", "load") == "store" else _filtered(node, _UNFOLDED)

    visit_Tuple = visit_Dict = visit_List

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        for operand in node.ops:
            if not isinstance(operand.expr, nodes.Const):
                operand.expr = _filtered(operand.expr, _UNFOLDED)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, _PAID)
        return node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


def _ticking(steps: int) -> nodes.Filter:
    return _filtered(nodes.Const(steps), _TICK)
