"""The file in which a run keeps what it learned of its costs' errors, for when it is taken up again.

What was learned of one cost table says nothing of another: the file names the costs it is about.
"""

import hashlib
import json
from pathlib import Path

from dflop.pricing.correction import Learner
from dflop.pricing.pricer import Pricer
from dflop.runtime import written_whole

__all__ = ["CorrectionFile", "prices_digest", "read_learned"]


class CorrectionFile:
    """One run's file; it need not exist yet."""

    def __init__(self, path: Path, pricer: Pricer) -> None:
        self._path, self._num_steps = path, 0
        self._about = prices_digest(pricer)

    def read(self) -> Learner:
        """What was learned of these costs by this plan. A file about others is void, and deleted."""
        if self._path.exists() and json.loads(self._path.read_text(encoding="utf-8")).get("about") != self._about:
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
            beside.write_text(json.dumps({"about": self._about, **learner.to_dict()}), encoding="utf-8")


def prices_digest(pricer: Pricer) -> str:
    """Of the costs and the plan, which predictions follow from: what shares a device, and how it is cut, changes what a
    like microbatch takes."""
    text = repr((sorted(pricer.costs.times.items()), pricer.plan.to_dict()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_learned(path: Path) -> Learner:
    """What a run has learned; nothing where it has no file, as with `schedule.correction: off`."""
    return Learner.from_dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else Learner()
