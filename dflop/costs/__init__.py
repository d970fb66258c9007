"""Costs: modules are measured on a device, or their work is counted; a fitted model then predicts time and memory.

`measure`, `made_up`, `live_bytes`, `profile_rank` and `links` need torch: they run in the ranks that
`dflop profile-costs` and `dflop profile-links` start.
"""

from dflop.costs.fit import fit_costs
from dflop.costs.gradient_sync import hidden_sync_shares, sync_bytes
from dflop.costs.launch_bound import launch_bound_load
from dflop.costs.link_model import HOST, Link, LinkModel, fit_links, measured_communicator_bytes, read_links
from dflop.costs.measured import Measured, read_measured, require_parquet, write_measured
from dflop.costs.model import NO_WORKING_BYTES, CostModel
from dflop.costs.sharded import Moving, ShardedPass, sharded_passes, working_bytes
from dflop.costs.stage_kind import ALL_PARTS, KEPT_PARTS, PARTS, StageKind, stage_kinds
from dflop.costs.stage_memory import Resident, StageMemory, resident_parts
from dflop.costs.updates import update_bytes
from dflop.models.loads import Loads

# The warning about microbatches that `CostModel.is_extrapolated` marks; their number stands before it.
BEYOND_MEASURED = (
    "are larger (or smaller) than what was measured: either `costs.time_budget_s` left no room for them (one run may "
    "take a sixtieth of it), then raise it; or the data has changed since, then measure again with `snakemake "
    "--forcerun profile_costs`"
)

__all__ = [
    "ALL_PARTS",
    "BEYOND_MEASURED",
    "HOST",
    "KEPT_PARTS",
    "NO_WORKING_BYTES",
    "PARTS",
    "CostModel",
    "Link",
    "LinkModel",
    "Loads",
    "Measured",
    "Moving",
    "Resident",
    "ShardedPass",
    "StageKind",
    "StageMemory",
    "fit_costs",
    "fit_links",
    "hidden_sync_shares",
    "launch_bound_load",
    "measured_communicator_bytes",
    "read_links",
    "read_measured",
    "require_parquet",
    "resident_parts",
    "sharded_passes",
    "stage_kinds",
    "sync_bytes",
    "update_bytes",
    "working_bytes",
    "write_measured",
]
