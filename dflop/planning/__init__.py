"""Planning: the search space, lower bounds, the price of a plan on regrouped batches, and the search."""

from dflop.planning.baseline import TODAY, Baseline, read_baselines
from dflop.planning.candidate import Candidate, PlanPricer
from dflop.planning.epoch import Epoch, hour_of, price_note
from dflop.planning.explain import candidates_frame, describe_choice, explain_choice, faster_baselines_note, uneven_note
from dflop.planning.finalists import FINALISTS_WITHIN, with_finalists_scheduled
from dflop.planning.grouped_batches import GroupedBatches
from dflop.planning.holding import BeyondDevice, beyond_device, leave_out_what_no_plan_holds
from dflop.planning.loading import LoadingNeed, loading_need, loading_note, planned_loaders
from dflop.planning.search import SearchResult, search_plans
from dflop.planning.space import enumerate_space, plan_of

__all__ = [
    "FINALISTS_WITHIN",
    "TODAY",
    "Baseline",
    "BeyondDevice",
    "Candidate",
    "Epoch",
    "GroupedBatches",
    "LoadingNeed",
    "PlanPricer",
    "SearchResult",
    "beyond_device",
    "candidates_frame",
    "describe_choice",
    "enumerate_space",
    "explain_choice",
    "faster_baselines_note",
    "hour_of",
    "leave_out_what_no_plan_holds",
    "loading_need",
    "loading_note",
    "plan_of",
    "planned_loaders",
    "price_note",
    "read_baselines",
    "search_plans",
    "uneven_note",
    "with_finalists_scheduled",
]
