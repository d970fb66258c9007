"""ZB-H1: weight gradients are deferred, and fill the time that would be idle while a pipeline drains (Qi et al. 2023).

Each stage defers them by its index in the chain, so that all stages hold as many microbatches as the first one.
"""

from dflop.plan.schedules.schedule import Schedule

__all__ = ["SCHEDULE"]


class ZeroBubbleH1(Schedule):
    name = "zb_h1"
    splits_backward = True

    def ahead(self, stage: int, pp: int, num_microbatches: int, num_chunks: int) -> int:
        return pp - stage - 1

    def weight_delay(self, place: int) -> int:
        return place


SCHEDULE = ZeroBubbleH1()
