"""The page of a run: everything that the report says, in one HTML file that needs no network.

Each section is a file that turns what a run left into a frozen record of numbers and sentences; `build` puts them into
the templates of the folder `templates`. Charts are drawn by the two scripts there, from numbers in the page.
"""

from dflop.reporting.page.build import PageParts, write_page

__all__ = ["PageParts", "write_page"]
