"""The page of a run: the whole report in one HTML file that needs no network.

Each section has a file that turns the run's results into a frozen dataclass of numbers and sentences. `build` renders
these with the templates in the folder `templates`. Two scripts there draw the charts, from numbers in the page.
"""

from dflop.reporting.page.build import PageParts, write_page

__all__ = ["PageParts", "write_page"]
