"""Replicas that share parameters or samples wait for each other in every layer: how long their passes last."""

import numpy as np

from dflop.plan import Plan
from dflop.step import stages_of

__all__ = ["lasting_s"]


def lasting_s(plan: Plan, seconds: np.ndarray) -> np.ndarray:
    """Each node's seconds, [..., num_nodes, num_microbatches], raised to those of the slowest replica that it
    meets in every layer."""
    lasting = np.array(seconds)
    for stage in stages_of(plan):
        num_meeting = plan.grid(stage.module).num_meeting
        of_stage = lasting[..., stage.first_node : stage.first_node + stage.dp, :]
        groups = of_stage.reshape(*of_stage.shape[:-2], -1, num_meeting, of_stage.shape[-1])
        of_stage[:] = np.broadcast_to(groups.max(axis=-2, keepdims=True), groups.shape).reshape(of_stage.shape)
    return lasting
