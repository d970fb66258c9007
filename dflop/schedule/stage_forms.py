"""A plan's times in the form that kernels and linear programs take: functions linear in the loads, with hinges.

Loads of a microbatch are those of `Loads`: items of an encoder, tokens, squared tokens, target tokens.
"""

from typing import NamedTuple

import numpy as np

from dflop.costs.forms import PackedTerms
from dflop.plan import PLACEMENTS
from dflop.schedule.pricer import Pricer
from dflop.step.simulation_kernel import PARTS

__all__ = ["StageForms", "stage_forms"]


class StageForms(NamedTuple):
    """The data of a plan's stages that kernels need. Times have to be multiplied by the factor of their shape bin.

    Modules are the encoders in the plan's order, then the LLM. The replicas of all encoders are numbered consecutively.
    """

    stages: np.ndarray  # as in `CompiledPlan`
    module: np.ndarray  # [num_stages]: the number of the stage's module
    first_stage: np.ndarray  # [num_modules + 1]: each module's first stage, then the number of stages
    first_replica: np.ndarray  # [num_encoders + 1]: each encoder's first replica, then the number of replicas
    forward: PackedTerms  # `StageCosts.time_forms`
    backward: PackedTerms
    factors: np.ndarray  # [num_modules, 2 (forward, backward), num_load_bins, num_segment_bins]: the corrections
    chain_latency_s: np.ndarray  # [num_nodes]
    chain_token_s: np.ndarray
    bridge_latency_s: np.ndarray  # [num_encoder_replicas, num_llm_replicas]
    bridge_token_s: np.ndarray
    num_parts: int  # the parts of each encoder's replicas, each with its own order (`walk.PARTS`)
    has_bridges: bool
    sends_text: bool


def stage_forms(pricer: Pricer) -> StageForms:
    """The forms of a pricer's plan, with its corrections."""
    plan = pricer.plan
    forward, backward = pricer.stage_costs.time_forms()
    links, corrections = pricer.transfers.forms(), pricer.corrections
    onward = pricer.edge_bytes.onward
    num_stages = [plan.num_stages(grid.module) for grid in plan.grids]
    return StageForms(
        stages=pricer.compiled.stages,
        module=np.repeat(np.arange(len(plan.grids)), num_stages),
        first_stage=np.cumsum([0, *num_stages]),
        first_replica=np.cumsum([0, *(grid.dp for grid in plan.grids[:-1])]),
        forward=forward,
        backward=backward,
        factors=np.stack([corrections.table(grid.module) for grid in plan.grids]),
        chain_latency_s=links.chain_latency_s,
        chain_token_s=links.chain_byte_s * np.array([onward[node.module][node.pp_stage] for node in pricer.nodes]),
        bridge_latency_s=links.bridge_latency_s,
        bridge_token_s=links.bridge_byte_s * pricer.feature_bytes,
        num_parts=int(pricer.compiled.stages[:, PARTS].max()),
        has_bridges=PLACEMENTS[plan.placement].has_bridges and len(plan.grids) > 1,
        sends_text=plan.num_stages("llm") > 1,
    )
