"""The report's charts, one in each file: `draw` makes a picture from the facts of a report, or None if it lacks them.

A chart's picture becomes `report/<its file's name>.svg`, and stands on the page in the section that it names. To add a
chart, add a file.
"""

from dflop.base.tables import found_in_files
from dflop.report.facts import Facts
from dflop.report.picture import Picture

__all__ = ["draw_all"]


def draw_all(facts: Facts) -> dict[str, Picture]:
    """The pictures by the names of their charts."""
    charts = found_in_files("dflop.report.charts", "draw")
    drawn = {name: draw(facts) for name, draw in charts.items()}
    return {name: picture for name, picture in drawn.items() if picture}
