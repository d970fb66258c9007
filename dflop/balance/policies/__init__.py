"""Policies: the ways to group the samples of a global batch into buckets, by their names in the config.

The scheduler groups by `schedule.policy`, the search of plans by a policy's quick form, and a compared system by the
policy in its file. A new policy is one more file in this folder, named as the policy, with its object as POLICY.
"""

from dflop.balance.policies.by_length import POLICY as BY_LENGTH
from dflop.balance.policies.lpt import POLICY as LPT
from dflop.balance.policies.lpt import drawn_in_turns
from dflop.balance.policies.policy import DrawnBatch, Packing, Policy
from dflop.balance.policies.random import POLICY as RANDOM
from dflop.base.tables import table_of

__all__ = ["BY_LENGTH", "LPT", "POLICIES", "RANDOM", "DrawnBatch", "Packing", "Policy", "drawn_in_turns"]

POLICIES: dict[str, Policy] = table_of("dflop.balance.policies", "POLICY")
