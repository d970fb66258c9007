"""What any process of dflop needs: errors, files written whole, progress, devices, memory, torchrun, its workflow."""

from dflop.base.artifacts import set_torn_aside, written_whole
from dflop.base.errors import ToBeContinued, UserError, printable, way_out_of
from dflop.base.progress import progress_bar
from dflop.base.shipped import own_version, shipped_folder, start_folder

__all__ = [
    "ToBeContinued",
    "UserError",
    "own_version",
    "printable",
    "progress_bar",
    "set_torn_aside",
    "shipped_folder",
    "start_folder",
    "way_out_of",
    "written_whole",
]
