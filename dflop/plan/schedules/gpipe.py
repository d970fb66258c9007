"""GPipe: all forwards, then all backwards (Huang et al. 2019). Every microbatch is in flight at once."""

from dflop.plan.schedules.schedule import Schedule

__all__ = ["SCHEDULE"]


class GPipe(Schedule):
    name = "gpipe"

    def ahead(self, stage: int, pp: int, num_microbatches: int, num_chunks: int) -> int:
        return num_microbatches


SCHEDULE = GPipe()
