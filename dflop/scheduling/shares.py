"""How large each microbatch should be: not equally large, for small ones fill and drain a pipeline fast.

What is ideal depends on the plan, the costs and the mean sample, not on a batch. It is searched on the simulated step
of one LLM replica and its part of the encoders, with the batch ground into equal grains that change microbatches.
"""

from dataclasses import replace

import numpy as np

from dflop.data import SampleShapes
from dflop.pipeline import Plan, compile_plan, fresh_clocks, network_of
from dflop.pipeline.compiled import DP, FIRST_NODE
from dflop.scheduling.policies import NO_CAP
from dflop.scheduling.pricing import Pricer
from dflop.scheduling.stage_costs import loads_of
from dflop.scheduling.step_search import MOVES_ONLY, descend_on_step, new_state, stage_forms

__all__ = ["ideal_shares"]

# With one grain a sample the steps of batches came out 1 to 2 % longer.
GRAINS_A_MICROBATCH = 64
# A second or so, once a run.
MOST_TRIALS = 40_000


def ideal_shares(pricer: Pricer, samples: SampleShapes, batch_size: int) -> np.ndarray:
    """Each microbatch's size as a part of the mean one, [num_microbatches], for batches of such samples."""
    plan, full, forms = pricer.plan, pricer.compiled.stages, stage_forms(pricer, NO_CAP)
    num_microbatches, llm_dp, encoder_dp = plan.num_microbatches, plan.grid("llm").dp, plan.grids[0].dp
    compiled = compile_plan(_one_replica(plan), pricer.stage_costs.frozen)
    own = compiled.stages
    num_encoders = int(own[0, DP])
    nodes = np.concatenate([there[FIRST_NODE] + np.arange(here[DP]) for here, there in zip(own, full, strict=True)])
    forms = forms._replace(
        stages=own,
        first_nodes=(0, int(own[int(forms.is_llm.argmax()), FIRST_NODE])),
        **{name: getattr(forms, name)[nodes] for name in ("weight_share", "chain_latency_s", "chain_token_s")},
        **{name: getattr(forms, name)[:num_encoders, :1].copy() for name in ("bridge_latency_s", "bridge_token_s")},
    )
    num_grains = num_microbatches * GRAINS_A_MICROBATCH
    samples_a_grain = batch_size / llm_dp / num_grains
    grain = np.array([load.mean() for load in loads_of(samples)]) * samples_a_grain
    grain[0] *= llm_dp * num_encoders / encoder_dp
    place = np.zeros((num_grains, 3), dtype=np.int64)
    place[:, 1], layer = np.arange(num_grains) % num_microbatches, np.arange(num_grains) // num_microbatches
    place[:, 2] = layer % num_encoders if forms.has_bridges else 0
    network = network_of(compiled, pricer.sync_s[nodes])
    best, _ = descend_on_step(
        forms,
        network,
        fresh_clocks(network),
        new_state(place, num_encoders, 1, compiled),
        np.tile(grain, (num_grains, 1)),
        np.full(num_grains, samples.kept_vision_tokens.mean() * samples_a_grain),
        MOST_TRIALS,
        0,
        MOVES_ONLY,
    )
    return np.bincount(best[:, 1], minlength=num_microbatches) / GRAINS_A_MICROBATCH


def _one_replica(plan: Plan) -> Plan:
    """The plan of a single LLM replica; an encoder on ranks of its own has a single one, too."""
    encoder, llm = plan.grids
    own = replace(llm, num_ranks=llm.tp * llm.pp, rank_offset=0)
    if plan.placement == "disjoint":
        encoder = replace(encoder, num_ranks=encoder.tp * encoder.pp)
        own = replace(own, rank_offset=encoder.num_ranks)
    elif plan.placement == "colocated":
        encoder = replace(encoder, num_ranks=own.num_ranks)
    else:
        encoder = replace(encoder, num_ranks=llm.tp)
    return replace(plan, grids=(encoder, own))
