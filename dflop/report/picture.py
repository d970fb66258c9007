"""Pictures: Vega-Lite views from which both a file and the page's interactive picture are made.

A picture has panels, each of them one view in Vega-Lite's language, that fills the width it is given. A file shows its
panels side by side, below what they show and how they are read; the page draws the same views with Vega's JavaScript.
Colours are variables of the page (`style.colour`), which a file replaces by those of a light page.
"""

import functools
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import polars as pl

from dflop.base import written_whole
from dflop.report.style import PALETTE, colour

__all__ = [
    "Panel",
    "Picture",
    "as_given",
    "hover",
    "kind",
    "layer",
    "log_axis",
    "names",
    "number",
    "page_view",
    "rows",
    "script",
    "write_picture",
]

_WIDTH, _GAP, _EDGE = 1200, 24, 16
_FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
# `room` is the width in pixels that a panel has.
_CONFIG = {
    "aria": False,
    "background": None,
    "font": _FONT,
    "view": {"stroke": None},
    "axis": dict.fromkeys(("domainColor", "tickColor"), colour("raw"))
    | {"labelColor": colour("ink"), "titleColor": colour("muted"), "gridColor": colour("line")}
    | {"titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 11},
    "axisY": {"labelLimit": {"expr": "room * 0.34"}},
    "axisX": {"labelOverlap": True, "tickCount": {"expr": "max(2, floor(room / 110))"}},
    "legend": {"orient": "top", "offset": 8, "columns": {"expr": "max(1, floor(room / 165))"}}
    | {"labelColor": colour("ink"), "labelFontSize": 11, "labelLimit": 300, "symbolSize": 110, "symbolStrokeWidth": 1.5}
    | dict.fromkeys(("symbolBaseFillColor", "symbolBaseStrokeColor"), colour("muted")),
    "text": {"fontSize": 11, "color": colour("ink"), "limit": {"expr": "room - 20"}},
    "bar": {"color": colour("bar")},
    "rule": {"color": colour("muted")},
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Panel:
    """One view. `height` is that of its data in pixels, `share` its part of a file's width beside its neighbours'.

    A panel that `is_table` is drawn in files alone, because the page has a table with the same content.
    """

    title: str
    view: dict[str, Any]
    height: int
    share: float = 1.0
    is_table: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Picture:
    """`finding` says in a sentence what the panels show, `note` how to read them. The page shows the picture at the end
    of its section `section`; in a file, `columns` panels stand beside each other."""

    section: str
    finding: str
    note: str
    panels: Sequence[Panel]
    columns: int = 1


def rows(frame: pl.DataFrame) -> dict[str, Any]:
    """A table as a view's data. Characters that no picture may hold are written as `?`."""
    texts = [name for name, dtype in frame.schema.items() if dtype == pl.String]
    frame = frame.with_columns(pl.col(texts).str.replace_all(r"\p{C}", "?"))
    numbers = {name: "number" for name in frame.columns if name not in texts}
    return {"values": frame.write_csv(float_precision=7), "format": {"type": "csv", "parse": numbers}}


def number(field: str, title: str | None = None, **more: Any) -> dict[str, Any]:
    """The encoding of a column of numbers."""
    return {"field": field, "type": "quantitative", "title": title} | more


def kind(field: str, marks: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The encoding of a column of names, each with its mark: a colour, a shape or a dash."""
    scale = {"domain": list(marks), "range": list(marks.values())}
    return {"field": field, "type": "nominal", "title": None, "sort": None, "scale": scale} | more


def names(field: str, **more: Any) -> dict[str, Any]:
    """The encoding of a column of names as rows, in their order."""
    axis = {"axis": {"domain": False, "ticks": False}}
    return {"field": field, "type": "nominal", "title": None, "sort": None} | axis | more


def as_given(field: str) -> dict[str, Any]:
    """The encoding of a column that holds colours."""
    return {"field": field, "type": "nominal", "scale": None}


def hover(**formats: str) -> list[dict[str, Any]]:
    """The text beside a mark under the mouse: its columns, with the format of a number (",.0f") or "" for text."""
    return [
        {"field": name, "title": name.replace("_", " ")} | ({"type": "quantitative", "format": form} if form else {})
        for name, form in formats.items()
    ]


def log_axis(low: float, high: float, zero_at: float | None = None) -> dict[str, Any]:
    """A logarithmic axis with ticks at 1, 2, 5, 10 …; it has no zero, so the tick of 0 stands at `zero_at`."""
    factors = (1,) if high / low > 100 else (1, 2, 5)
    ticks = [factor * 10.0**power for power in range(-7, 12) for factor in factors]
    shown = [tick for tick in ticks if low <= tick <= high and (tick >= 1 or not zero_at)]
    text = f"datum.value == {zero_at} ? '0' : " if zero_at else ""
    return {
        "scale": {"type": "log", "domain": [low, high], "nice": False},
        "axis": {"values": [zero_at, *shown] if zero_at else shown, "labelExpr": text + "format(datum.value, ',~g')"},
    }


def layer(mark: str, *, look: dict[str, Any] | None = None, data: Any = None, **channels: Any) -> dict[str, Any]:
    """One mark for each row of the data, or of the view's data if none is given. `look` has the mark's other
    properties; a channel is an encoding or the name of a column."""
    encoding = {name: {"field": channel} if isinstance(channel, str) else channel for name, channel in channels.items()}
    made = {"mark": {"type": mark} | (look or {}), "encoding": encoding}
    return made if data is None else made | {"data": data}


def page_view(panel: Panel) -> dict[str, Any]:
    """The panel's whole specification. The page fills in `room`."""
    return {
        "width": "container",
        "height": panel.height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": 2,
        "config": _CONFIG,
        **panel.view,
        "params": [{"name": "room", "value": _WIDTH}, *panel.view.get("params", ())],
    }


@functools.cache
def script() -> str:
    """Vega, Vega-Lite and Vega-Embed in one JavaScript that fetches nothing; its global name is `vegaEmbed`."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def write_picture(picture: Picture, path: Path) -> None:
    """Write the picture as an SVG with real text; the same picture gives the same bytes."""
    inner = _WIDTH - 2 * _EDGE
    parts, top = [], _EDGE
    for text, size, weight, name in ((picture.finding, 16, "bold", "ink"), (picture.note, 12, "normal", "muted")):
        lines, top = _lines(text, inner, size, weight, name, _EDGE, top)
        parts += lines
    top += _GAP / 2
    for first in range(0, len(picture.panels), picture.columns):
        panels = picture.panels[first : first + picture.columns]
        room = inner - _GAP * (len(panels) - 1)
        left, bottom, shares = _EDGE, top, sum(panel.share for panel in panels)
        for panel in panels:
            width = room * panel.share / shares
            lines, below = _lines(panel.title, width, 13, "bold", "ink", left, top)
            drawn, height = _drawn(panel, round(width))
            parts += [*lines, f'<svg x="{left:.0f}" y="{below + 4:.0f}" {drawn}']
            left, bottom = left + width + _GAP, max(bottom, below + 4 + height)
        top = bottom + _GAP
    size = f'width="{_WIDTH}" height="{top:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_WIDTH} {top:.0f}" font-family="{_FONT}">'
    text = "\n".join(['<?xml version="1.0" encoding="utf-8"?>', head, f'<rect {size} fill="var(--page)"/>', *parts])
    with written_whole(path) as beside:
        beside.write_text(_in_light(_renumbered(text)) + "\n</svg>\n", encoding="utf-8")


def _lines(
    text: str, width: float, size: int, weight: str, name: str, left: float, top: float
) -> tuple[list[str], float]:
    """The text in lines of at most `width` pixels, and the height in the picture at which the last line ends."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    drawn = []
    for line in textwrap.wrap(text, max(10, int(width / ((0.53 if weight == "bold" else 0.47) * size)))):
        top += 1.3 * size
        style = f'font-size="{size}" font-weight="{weight}" fill="{colour(name)}"'
        drawn.append(f'<text x="{left:.0f}" y="{top - 0.3 * size:.1f}" {style}>{escape(line)}</text>')
    return drawn, top


def _drawn(panel: Panel, width: int) -> tuple[str, float]:
    """The rest of the panel's <svg> element after its place, and its height."""
    import vl_convert

    view = page_view(panel) | {"width": width}
    view["params"] = [{"name": "room", "value": width}, *view["params"][1:]]
    text = vl_convert.vegalite_to_svg(view)
    return text.removeprefix("<svg "), float(re.search(r' height="([\d.]+)"', text)[1])


def _renumbered(text: str) -> str:
    """The same SVG with the names of its clips counted from the first on; the converter counts on from call to call."""
    names: dict[str, str] = {}
    return re.sub(
        r"(?<=id=\")clip\d+|(?<=url\(#)clip\d+", lambda found: names.setdefault(found[0], f"clip{len(names)}"), text
    )


def _in_light(text: str) -> str:
    return re.sub(r"var\(--([\w-]+)\)", lambda found: PALETTE[found[1]][0] if found[1] in PALETTE else found[0], text)
