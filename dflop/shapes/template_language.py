"""The language of chat templates: Jinja in a sandbox, with what transformers adds to it.

Templates may refuse a conversation (`raise_exception`), write JSON without HTML's escapes (`tojson`), leave loops
early, and mark what the assistant says: `{% generation %} … {% endgeneration %}` writes its body. If a rendering is
given `MARKS`, it writes them around that body.
"""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from dflop.shapes.template_limits import LimitedEnvironment, counted

__all__ = ["MARKS", "has_generation_blocks", "make_environment"]

# The template variable that holds two marks. A rendering that is given them writes one before and one after the body of
# each generation block. No template can use a name that begins with a digit.
MARKS = "0marks"

# The day that `strftime_now` always gives: the one that Llama 3.1's and 3.2's templates write without a clock. With the
# real day, a sample's tokens in training could differ from those that were counted.
_TODAY = datetime(2024, 7, 26)


def make_environment() -> LimitedEnvironment:
    """The Jinja environment in which templates are compiled."""
    environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols])
    environment.filters["tojson"] = counted("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment


def has_generation_blocks(template: nodes.Template) -> bool:
    """Whether a template marks what the assistant says: `{% generation %}` with its body."""
    return any(
        isinstance(block.call.node, nodes.ExtensionAttribute)
        and block.call.node.identifier == _GenerationBlocks.identifier
        for block in template.find_all(nodes.CallBlock)
    )


class _GenerationBlocks(Extension):
    """The tag `generation`. Its body has a scope of its own, as in transformers."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_write", [nodes.Name(MARKS, "load")])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _write(self, marks: Any, caller: Callable[[], str]) -> str:
        """The body, between the marks if there are any; `marks` is undefined in renderings without them."""
        return marks[0] + caller() + marks[1] if marks else caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if len(str(separators)) > 40 or (indent is not None and len(str(indent)) > 2):
        raise TemplateError("tojson with an indent or separators of hundreds of characters")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
