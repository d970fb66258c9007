"""The file in which a run keeps its learned corrections, so that a resumed run goes on with them.

Corrections of one cost table do not hold for another, so the file holds a digest of the costs that they belong to.
"""

import hashlib
import json
import sys
from pathlib import Path

from dflop.base import printable, set_torn_aside, written_whole
from dflop.schedule.correction import Learner
from dflop.schedule.pricer import Pricer

__all__ = ["CorrectionFile", "prices_digest", "read_learned"]


class CorrectionFile:
    """One run's file; it need not exist yet."""

    def __init__(self, path: Path, pricer: Pricer) -> None:
        self._path, self._num_steps, self._said = path, 0, False
        self._about = prices_digest(pricer)

    def read(self) -> Learner:
        """What was learned with these costs and this plan. A file for other costs or another plan is deleted."""
        about, learner = _read(self._path)
        if about != self._about:
            self._path.unlink(missing_ok=True)
            learner = Learner()
        self._num_steps = learner.num_steps
        return learner

    def write(self, learner: Learner) -> None:
        """Write what is learned now, if a step was learned since the last write or read.

        Where the file cannot be written, as on a full disk, a warning is printed once and the next call tries again.
        """
        if learner.num_steps == self._num_steps:
            return
        try:
            with written_whole(self._path) as beside:
                beside.write_text(json.dumps({"about": self._about, **learner.to_dict()}), encoding="utf-8")
        except OSError as error:
            if not self._said:
                said = f"dflop: warning: {self._path} cannot be written: {error}; tried again later"
                print(printable(said), file=sys.stderr)
            self._said = True
            return
        self._num_steps, self._said = learner.num_steps, False


def prices_digest(pricer: Pricer) -> str:
    """A digest of the cost table's times and the plan.

    The plan counts because the same microbatch takes longer or shorter depending on which modules share its device and
    how they are split.
    """
    text = repr((sorted(pricer.costs.times.items()), pricer.plan.to_dict()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_learned(path: Path) -> Learner:
    """What a run has learned; an empty `Learner` where it has no file, as with `schedule.correction: off`."""
    return _read(path)[1]


def _read(path: Path) -> tuple[str | None, Learner]:
    """A file's digest of costs and plan, and what was learned. A damaged file is moved aside with a warning."""
    if not path.exists():
        return None, Learner()
    try:
        values = json.loads(path.read_bytes())
        return values["about"], Learner.from_dict(values)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        set_torn_aside(path, f"it cannot be read ({type(error).__name__}: {error}), so corrections are learned anew")
        return None, Learner()
