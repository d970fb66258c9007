"""A lower bound of a batch's step: the linear program of `schedule.microbatch_sizes`, solved for one batch."""

import numpy as np

from dflop.schedule import Pricer
from dflop.schedule.microbatch_sizes import _loads, _StepProgram
from dflop.shapes import SampleShapes


def relaxed_step_s(pricer: Pricer, shapes: SampleShapes) -> float:
    """The step time in seconds of a batch if samples could be split arbitrarily and all replicas did the same.

    No schedule is faster where all samples have media and each encoder on ranks of its own has one replica: times are
    convex, so giving each LLM replica the mean of the work of all is allowed, too, and is no slower. Several encoder
    replicas might gain a little by unequal work. 512 samples in 16 microbatches take about half a second.
    """
    step = _StepProgram(pricer, _loads(pricer, shapes), np.ones(len(shapes)))
    solution = step.program.minimise((step.end, 1.0))
    assert solution is not None, "any assignment of the samples is a solution"
    return float(solution[step.end]) * step.unit_s
