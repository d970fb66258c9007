"""The file in which a run keeps what it learned of its costs' errors, for when it is taken up again.

What was learned of one cost table says nothing of another: the file names the costs it is about.
"""

import hashlib
import json
from pathlib import Path

from dflop.artifacts import written_whole
from dflop.costs import CostModel
from dflop.scheduling.correction import Learner

__all__ = ["CorrectionFile", "read_learned"]


class CorrectionFile:
    """One run's file; it need not exist yet."""

    def __init__(self, path: Path, costs: CostModel) -> None:
        self._path, self._num_steps = path, 0
        self._costs = hashlib.sha256(repr(sorted(costs.times.items())).encode()).hexdigest()[:16]

    def read(self) -> Learner:
        """What was learned of these costs. A file about other costs is void, and deleted."""
        if self._path.exists() and json.loads(self._path.read_text(encoding="utf-8"))["costs"] != self._costs:
            self._path.unlink()
        learner = read_learned(self._path)
        self._num_steps = learner.num_steps
        return learner

    def write(self, learner: Learner) -> None:
        """Keep what is known now, where that is more than the file has."""
        if learner.num_steps == self._num_steps:
            return
        self._num_steps = learner.num_steps
        with written_whole(self._path) as beside:
            beside.write_text(json.dumps({"costs": self._costs, **learner.to_dict()}), encoding="utf-8")


def read_learned(path: Path) -> Learner:
    """What a run has learned; nothing where it has no file, as with `schedule.correction: off`."""
    return Learner.from_dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else Learner()
