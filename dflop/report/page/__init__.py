"""The page of a run: the whole report in one HTML file that needs no network.

Each section has a file that turns the run's results into numbers and sentences, by the names that the templates read.
The files `memory` and `savings` are one folder up, since charts read them, too. `build` renders the sections with the
templates in the folder `templates`, and puts the pictures of `dflop.report.charts` into them.
"""

from dflop.report.page.build import write_page

__all__ = ["write_page"]
