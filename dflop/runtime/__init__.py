"""What any process of dflop needs: errors for users, whole files, progress, devices, memory, torchrun."""

from dflop.runtime.artifacts import set_torn_aside, written_whole
from dflop.runtime.errors import ToBeContinued, UserError, way_out_of
from dflop.runtime.progress import progress_bar

__all__ = ["ToBeContinued", "UserError", "progress_bar", "set_torn_aside", "way_out_of", "written_whole"]
