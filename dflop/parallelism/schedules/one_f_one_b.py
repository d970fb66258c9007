"""1F1B: one forward, one backward, as soon as the first backward can come (Narayanan et al. 2021, section 2.2.1).

Of all schedules this is the plain one: where there is nothing to order, it stands for all of them.
"""

from dflop.parallelism.schedules.schedule import Schedule

__all__ = ["SCHEDULE"]


class OneForwardOneBackward(Schedule):
    name = "1f1b"

    def ahead(self, stage: int, pp: int, num_microbatches: int, num_chunks: int) -> int:
        return pp - stage - 1


SCHEDULE = OneForwardOneBackward()
