"""Templates that write turn by turn: one rendering tells where each turn begins.

Such a template has one loop over the turns. A round of the loop does not see later turns, their number, or whether a
prompt follows; the text behind the loop is the same for all conversations. So a rendering of the first three of five
turns is what all five turns' rendering has for these three, and then the text behind the loop. The code is judged, not
its renderings: a template whose code has another form does not count, whatever it writes.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jinja2 import Environment, Template, nodes

__all__ = ["TURN", "TurnByTurn", "find_turn_by_turn"]

# The template variable that holds a mark. No template can use a name that begins with a digit.
TURN = "0turn"

_PROMPT = "add_generation_prompt"
# What a round may ask its loop.
_SO_FAR = ("first", "index", "index0", "previtem")
# What may stand behind the loop, with names that are never set: it keeps nothing of the turns.
_PURE = (nodes.Output, nodes.TemplateData, nodes.If, nodes.Const, nodes.Name, nodes.List, nodes.Compare, nodes.Operand)
_PURE += (nodes.Test, nodes.Not, nodes.And, nodes.Or, nodes.Concat, nodes.Add, nodes.CondExpr)
_OTHER_PARTS = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)


class TurnByTurn(NamedTuple):
    """A template that writes the mark `TURN` before each turn of its loop and behind the last. Where it looks at the
    first turns outside of the loop, it writes turn by turn only if there are `min_turns`."""

    template: Template
    min_turns: int


def find_turn_by_turn(environment: Environment, source: str) -> TurnByTurn | None:
    """A template with marks; None if its form is another."""
    tree = environment.parse(source)
    turns = _Turns(tree)
    at = [number for number, node in enumerate(tree.body) if isinstance(node, nodes.For) and turns.are(node.iter)]
    if len(at) != 1 or any(tree.find_all(_OTHER_PARTS)):
        return None
    before, loop, behind = tree.body[: at[0]], tree.body[at[0]], tree.body[at[0] + 1 :]
    if loop.recursive or loop.test or loop.else_ or _looks_ahead(loop.body) or turns.are_used_beside(loop.iter):
        return None
    if any(_is_name(node, (_PROMPT,)) for node in _within([*before, loop])):
        return None
    changing = turns.names | {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
    if not all(_is_pure(node) and not _is_name(node, changing) for node in _within(behind)):
        return None
    for body, index in ((tree.body, at[0] + 1), (loop.body, 0)):
        body.insert(index, nodes.Output([nodes.Name(TURN, "load")], lineno=loop.lineno))
    return TurnByTurn(environment.from_string(tree.set_environment(environment)), turns.min_turns)


class _Turns:
    """What holds the turns in a template, all or those from a certain one on: `names`, and their slices `x[1:]`."""

    def __init__(self, tree: nodes.Template) -> None:
        self.names, self._tree, self._known = {"messages"}, tree, set()
        for node in _at_top(tree.body):
            if isinstance(node, nodes.Assign) and isinstance(node.target, nodes.Name) and self.are(node.node):
                self.names.add(node.target.name)
                self._known |= {id(node.target), id(_sliced(node.node))}

    def are(self, node: nodes.Node) -> bool:
        return _is_name(_sliced(node), self.names)

    @property
    def min_turns(self) -> int:
        """So many that there is a turn at each index that is asked for, and at each begin of a slice."""
        parts = [node.arg for node in self._tree.find_all(nodes.Getitem) if self.are(node.node)]
        return 1 + sum(_number(part.start if isinstance(part, nodes.Slice) else part) or 0 for part in parts)

    def are_used_beside(self, iterated: nodes.Node) -> bool:
        """Whether they are used for anything else than to be named, to be `iterated`, for a first turn by its index,
        and for whether there are any."""
        known = self._known | {id(_sliced(iterated))}
        for node in self._tree.find_all((nodes.Getitem, nodes.Compare)):
            if isinstance(node, nodes.Getitem) and _number(node.arg) is not None:
                known.add(id(_sliced(node.node)))
            elif isinstance(node, nodes.Compare) and (length := _compared_with_nothing(node)):
                known.add(id(_sliced(length.node)))
        return any(id(name) not in known for name in self._tree.find_all(nodes.Name) if name.name in self.names)


def _compared_with_nothing(node: nodes.Compare) -> nodes.Filter | None:
    """The length in a comparison of a length with 0."""
    is_length = isinstance(node.expr, nodes.Filter) and node.expr.name in ("length", "count")
    return node.expr if is_length and [_number(other.expr) for other in node.ops] == [0] else None


def _looks_ahead(body: list[nodes.Node]) -> bool:
    """Whether a round of a loop asks it for more than what was so far, or ends it."""
    within = [*_within(body, inner_loops=False)]
    known = {id(node.node) for node in within if isinstance(node, nodes.Getattr) and node.attr in _SO_FAR}
    asked = {id(node) for node in within if _is_name(node, ("loop",))}
    return bool(asked - known) or any(isinstance(node, nodes.Break) for node in within)


def _is_pure(node: nodes.Node) -> bool:
    return isinstance(node, _PURE) or _is_counting(node)


def _is_name(node: nodes.Node, names: Iterable[str]) -> bool:
    return isinstance(node, nodes.Name) and node.name in names


def _is_counting(node: nodes.Node) -> bool:
    """Whether it is one of our own filters, that count steps and pass a value on."""
    return isinstance(node, nodes.Filter) and node.name[:1] == "0"


def _sliced(node: nodes.Node) -> nodes.Node:
    """What an expression takes the end of from a certain place on: `x` of `x[1:]` and of `x`."""
    while True:
        if _is_counting(node):
            node = node.node
        elif isinstance(node, nodes.Getitem) and isinstance(part := node.arg, nodes.Slice):
            if part.stop or part.step or (part.start and _number(part.start) is None):
                return node
            node = node.node
        else:
            return node


def _number(node: nodes.Node | None) -> int | None:
    """A number that stands in the template, 0 or larger."""
    return node.value if isinstance(node, nodes.Const) and type(node.value) is int else None


def _at_top(body: list[nodes.Node]) -> Iterator[nodes.Node]:
    """The nodes of a body and of its conditions."""
    for node in body:
        yield node
        if isinstance(node, nodes.If):
            yield from _at_top([*node.body, *node.elif_, *node.else_])


def _within(body: Iterable[nodes.Node], *, inner_loops: bool = True) -> Iterator[nodes.Node]:
    """All nodes of a body; without `inner_loops`, not those of the rounds of loops in it."""
    for node in body:
        yield node
        without = () if inner_loops or not isinstance(node, nodes.For) else ("body",)
        yield from _within(node.iter_child_nodes(exclude=without), inner_loops=inner_loops)
