"""ILP: CBC improves the better packing, then `search` goes on from the fastest."""

from dflop.balance.policies.policy import Policy
from dflop.balance.policies.search import POLICY as SEARCH
from dflop.balance.policies.search import Search

__all__ = ["POLICY"]


class Ilp(Search):
    name = "ilp"
    solves = True

    @property
    def without_cbc(self) -> Policy:
        return SEARCH


POLICY = Ilp()
