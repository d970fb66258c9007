"""The page of a run: the whole report in one HTML file that needs no network.

Each section has a file that turns the run's results into a frozen dataclass of numbers and sentences. `build` renders
these with the templates in the folder `templates`, and puts the pictures of `dflop.report.charts` into them.
"""

from dflop.report.page.build import write_page

__all__ = ["write_page"]
