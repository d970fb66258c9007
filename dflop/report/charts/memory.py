"""What the fullest device of each kind holds, by category, and what a device has."""

import polars as pl

from dflop.report.facts import Facts
from dflop.report.picture import Panel, Picture, hover, kind, layer, names, number, rows
from dflop.report.style import PARTS, colour

__all__ = ["draw"]


def draw(facts: Facts) -> Picture:
    memory = facts.memory
    labels = [f"{bar.label} · {bar.num_devices} devices" if bar.num_devices > 1 else bar.label for bar in memory.bars]
    parts = list(memory.bars[0].parts)
    table = pl.DataFrame(
        [
            {"device": label, "part": name, "place": place, "gib": bar.parts[name]}
            for label, bar in zip(labels, memory.bars, strict=True)
            for place, name in enumerate(parts)
        ]
    )
    note = f"The fullest device of each kind, in step {facts.shown.step} as scheduled; dashed: what a device has."
    if memory.num_kinds > len(memory.bars):
        note += f" The fullest {len(memory.bars)} of {memory.num_kinds} kinds are drawn."
    colours = kind("part", dict(zip(parts, PARTS, strict=False)))
    x = number("gib", "GiB", stack="zero", axis={"grid": False, "format": "~g"})
    said = hover(device="", part="", gib=".3~g")
    bars = layer("bar", data=rows(table), x=x, y=names("device"), order=number("place"), color=colours, tooltip=said)
    look = {"color": colour("ink"), "strokeWidth": 2, "strokeDash": [5, 4]}
    limit = layer("rule", look=look, data={"values": [{"limit": memory.limit_gib}]}, x=number("limit"))
    panel = Panel(title="Predicted memory of a device", view={"layer": [bars, limit]}, height=34 * len(labels))
    return Picture(section="memory", finding=memory.finding, note=note, panels=[panel])
