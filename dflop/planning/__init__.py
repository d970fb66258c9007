"""Planning: the search space, lower bounds, the price of a plan on regrouped batches, the search, and baselines."""

from dflop.planning.baselines import (
    PIPELINES,
    TODAY,
    Baseline,
    plan_by_published_rule,
    price_baselines,
    read_baselines,
    require_todays_layout,
    search_todays_layout,
    whole_on_every_device,
)
from dflop.planning.candidate import Candidate, PlanPricer
from dflop.planning.epoch import Epoch, hour_of, price_note
from dflop.planning.explain import candidates_frame, describe_choice, explain_choice, faster_baselines_note, uneven_note
from dflop.planning.finalists import FINALISTS_WITHIN, with_finalists_scheduled
from dflop.planning.grouped_batches import GroupedBatches, like_lengths
from dflop.planning.holding import BeyondDevice, beyond_device, leave_out_what_no_plan_holds
from dflop.planning.loading import LoadingNeed, loading_need, loading_note, planned_loaders
from dflop.planning.search import SearchResult, search_plans
from dflop.planning.space import enumerate_space, plan_of

__all__ = [
    "FINALISTS_WITHIN",
    "PIPELINES",
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
    "like_lengths",
    "loading_need",
    "loading_note",
    "plan_by_published_rule",
    "plan_of",
    "planned_loaders",
    "price_baselines",
    "price_note",
    "read_baselines",
    "require_todays_layout",
    "search_plans",
    "search_todays_layout",
    "uneven_note",
    "whole_on_every_device",
    "with_finalists_scheduled",
]
