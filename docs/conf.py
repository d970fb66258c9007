"""How the pages are built: `make docs`. Warnings are errors there, so that no link leads nowhere."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

project = "dflop"
author = "the dflop authors"
copyright = "the dflop authors, Apache-2.0"
release = version = version_of("dflop")

extensions = ["myst_parser", "sphinx_click"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["generated", "_build"]
nitpicky = True
# Commands' help says code in single backticks.
default_role = "literal"

# Headings can be linked to as on GitHub, where the pages can be read as well.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
html_title = "dflop"
html_static_path = ["_static"]
html_css_files = ["wide_tables.css"]
html_show_sphinx = False


def setup(app) -> None:
    """Make what the pages show of the code: tables and figures."""
    import made_from_code

    app.connect("builder-inited", lambda _: made_from_code.make(HERE / "generated"))
    for part in ("description", "options"):
        app.connect(f"sphinx-click-process-{part}", escape_asterisks)


def escape_asterisks(app, context, lines: list[str]) -> None:
    """In a command's help they are names of files, such as *.json."""
    lines[:] = [line.replace("*", r"\*") if ".. option" not in line else line for line in lines]
