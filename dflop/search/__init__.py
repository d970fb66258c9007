"""Search: the space of plans, lower bounds, the price of a plan on regrouped batches, and the search itself."""

from dflop.search.baseline import TODAY, Baseline, read_baselines
from dflop.search.best_first import FINALISTS_PERCENT, SearchResult
from dflop.search.candidate import Candidate, PlanPricer, pricer_of
from dflop.search.cp_sizes import check_fixed, search_plans
from dflop.search.epoch import Epoch, hour_of, price_note
from dflop.search.explain import candidates_frame, describe_choice, explain_choice, faster_baselines_note, uneven_note
from dflop.search.final_choice import with_finalists_scheduled
from dflop.search.grouped_batches import GroupedBatches
from dflop.search.loader_processes import loading_need, loading_note, planned_loaders
from dflop.search.space import enumerate_space, plan_of
from dflop.search.too_large_samples import leave_out_what_no_plan_holds

__all__ = [
    "FINALISTS_PERCENT",
    "TODAY",
    "Baseline",
    "Candidate",
    "Epoch",
    "GroupedBatches",
    "PlanPricer",
    "SearchResult",
    "candidates_frame",
    "check_fixed",
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
    "pricer_of",
    "read_baselines",
    "search_plans",
    "uneven_note",
    "with_finalists_scheduled",
]
