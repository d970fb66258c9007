"""Planning: the search space, the price of a plan on scheduled batches, and the search."""

from dflop.planning.search import Candidate, candidates_frame, describe_choice, search_plans
from dflop.planning.space import enumerate_plans

__all__ = ["Candidate", "candidates_frame", "describe_choice", "enumerate_plans", "search_plans"]
