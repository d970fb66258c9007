"""1F1B: one forward, one backward, from the first possible backward on (Narayanan et al. 2021, section 2.2.1).

This is the plain schedule, which is used where all schedules give the same order.
"""

from dflop.plan.schedules.schedule import Schedule

__all__ = ["SCHEDULE"]


class OneForwardOneBackward(Schedule):
    name = "1f1b"

    def ahead(self, stage: int, pp: int, num_microbatches: int, num_chunks: int) -> int:
        return pp - stage - 1


SCHEDULE = OneForwardOneBackward()
