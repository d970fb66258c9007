"""How long a step of the baselines takes, over this plan's, with the range of that ratio over single batches."""

import polars as pl

from dflop.report.facts import Facts
from dflop.report.picture import Panel, Picture, as_given, hover, layer, names, number, rows
from dflop.report.style import colour

__all__ = ["draw"]


def draw(facts: Facts) -> Picture | None:
    savings = facts.savings
    able = [other for other in savings.others if other.why_not is None] if savings else []
    if not able:
        return None
    labels = ["this plan", *(f"{other.name} · {other.ratio:.2f}x" for other in able)]
    table = pl.DataFrame(
        {
            "row": [str(place) for place in range(len(labels))],
            "name": labels,
            "ratio": [1.0, *(other.ratio for other in able)],
            "least": [None, *(other.least for other in able)],
            "most": [None, *(other.most for other in able)],
            "colour": [colour("llm"), *[colour("bar")] * len(able)],
        }
    )
    x = number("ratio", "step time over this plan's, predicted", axis={"grid": False, "format": "~g"})
    said = hover(name="", ratio=".2f", least=".2f", most=".2f")
    range_look = {"color": colour("ink"), "strokeWidth": 2, "yOffset": 8, "y2Offset": 8}
    is_known = {"transform": [{"filter": "isValid(datum.least)"}]}
    layers = [
        layer("bar", look={"height": 12, "yOffset": 8}, x=x, color=as_given("colour"), tooltip=said),
        layer("rule", look=range_look, x=number("least"), x2="most") | is_known,
        layer("text", look={"align": "left", "dy": -9}, x={"value": 0}, text="name", tooltip=said),
    ]
    note = "All have the fastest plan of their kind that fits, on the same batches."
    if able[0].least is not None:
        note += " The thin line reaches from the batch with the least ratio to the one with the most."
    view = {"data": rows(table), "encoding": {"y": names("row", axis=None)}, "layer": layers}
    panel = Panel(title="Instead of this plan", view=view, height=42 * len(labels))
    return Picture(section="savings", finding=savings.finding, note=note, panels=[panel])
