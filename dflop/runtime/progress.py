"""Progress of long work: a bar on a terminal, in a log file a line every now and then."""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["progress_bar"]


def progress_bar(**arguments: Any) -> "tqdm":
    """tqdm's bar, imported when it is wanted."""
    from tqdm import tqdm

    return tqdm(mininterval=0.2 if sys.stderr.isatty() else 20, **arguments)
