"""The kit for a GPU: `python -m tests.gpu` (`make test-gpu`) runs checks that only a GPU can decide, on one card.

It needs no test framework and no network. `checks.py` lists the checks; each is a function in the file that it names,
and runs in a process of its own. Figures and limits go to a file, a line of JSON a check.
"""

import sys
from pathlib import Path

# What these checks share with other tests lies there, in modules that need no test framework.
for _folder in (Path(__file__).parents[1], Path(__file__).parents[1] / "distributed"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))
