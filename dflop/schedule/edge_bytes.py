"""Bytes of one token (`edge_tokens`) at each stage of a plan: those sent to the next stage, those held with a
microbatch, those of gradients that are sent, and those of slots for messages."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from dflop.models import ModelSpec
from dflop.plan import PLACEMENTS, Plan
from dflop.step import CompiledPlan, stages_of
from dflop.step.compiled import AHEAD
from dflop.step.simulation_kernel import BRIDGE_IN, BRIDGE_OUT, HAS_BACKWARD

__all__ = ["EdgeBytes", "edge_bytes_of", "sent_bytes_of", "slot_bytes_of"]


class EdgeBytes(NamedTuple):
    """Bytes of one token by module, arrays [num_stages].

    `onward` go to the module's next stage (the entry of the last stage has no meaning); `held` stay on the stage from
    a microbatch's forward to its backward.
    """

    onward: Mapping[str, np.ndarray]
    held: Mapping[str, np.ndarray]


def edge_bytes_of(
    plan: Plan, spec: ModelSpec, value_bytes: int, *, has_slots: bool = False, frozen: Collection[str] = ()
) -> EdgeBytes:
    """The bytes where one value takes `value_bytes`.

    A stage of the LLM holds its inputs and outputs. These are hidden states, and with them features of encoders that
    later layers take (`ModelSpec.hidden_size_before`). The input of the first stage is features, counted as if every
    token were one. Where a later stage recomputes its first layer, the hidden states that came in are left out here:
    that layer keeps them as its input, and they count as the layer's. (On tensor-parallel ranks it keeps a copy of the
    rank's tokens, and they are not left out.) An encoder, and an LLM of one stage, hold features and their gradients.
    The features of `frozen` encoders are kept during a few more forwards (`step.instructions.kept_until`). With
    `has_slots`, the gradients that come to an encoder of one stage wait in slots (`slot_bytes_of`).
    """
    onward, held = {}, {}
    for grid in plan.grids:
        features = np.full(plan.num_stages(grid.module), float(spec.feature_size * value_bytes))
        onward[grid.module], held[grid.module] = features, 2.0 * features
        if grid.module in frozen and grid.module != "llm":
            held[grid.module] = (1 + min(AHEAD, plan.num_microbatches - 1)) * features
        elif has_slots and _waits_in_slots(plan, grid.module):
            held[grid.module] = features
    if plan.num_stages("llm") > 1:
        llm = spec.module("llm")
        first_layers = [layers.start for layers in plan.layers_of("llm", llm.num_layers)]
        sizes = np.array([*map(spec.hidden_size_before, first_layers), 0.0]) * value_bytes
        comes_in = sizes[:-1].copy()
        is_kept = np.array(plan.recomputed_of("llm", llm.num_layers)[1:]) > 0
        is_kept &= plan.grid("llm").tp == 1
        comes_in[1:] -= np.where(is_kept, np.minimum(llm.hidden_size * value_bytes, comes_in[1:]), 0.0)
        onward["llm"], held["llm"] = sizes[1:], comes_in + sizes[1:]
    return EdgeBytes(onward, held)


def sent_bytes_of(plan: Plan, order: CompiledPlan, edge_bytes: EdgeBytes) -> np.ndarray:
    """Bytes of the gradient that a stage sends, for each token at its edge or, on the LLM's first stage, for each of
    features, [num_stages]; 0 where a stage sends none."""
    is_learning = order.stages[:, HAS_BACKWARD] > 0
    found = np.zeros(len(order.stages))
    for place, stage in enumerate(stages_of(plan)):
        if stage.pp_stage > 0:
            found[place] = edge_bytes.onward[stage.module][stage.pp_stage - 1] * is_learning[place - 1]
        elif order.stages[place, BRIDGE_IN] > 0 and is_learning[order.stages[:, BRIDGE_OUT] >= 0].any():
            found[place] = edge_bytes.onward[plan.grids[0].module][-1]
    return found


def slot_bytes_of(plan: Plan, order: CompiledPlan, edge_bytes: EdgeBytes) -> np.ndarray:
    """Bytes of the slots that a GPU receives into, for each token of the module's largest microbatch, [num_stages].

    Several chunks of the LLM on one rank share all of this, and it counts for the first chunk. The features that the
    LLM receives are counted as if every token were one. An encoder copies one gradient out of its slot at a time.
    """
    found, counts = [], [count.tolist() for count in order.slot_counts]
    of_feature = float(edge_bytes.onward[plan.grids[0].module][-1])
    onward_of = {module: own.tolist() for module, own in edge_bytes.onward.items()}
    for stage in stages_of(plan):
        pp, onward = plan.grid(stage.module).pp, onward_of[stage.module]
        if stage.pp_stage >= pp:
            found.append(0.0)
            continue
        of_stage = slice(stage.group, stage.group + stage.num_groups)
        states, state_gradients, features, feature_gradients = (max(count[of_stage]) for count in counts)
        comes_in, goes_on = onward[stage.pp_stage - 1 :: pp], onward[stage.pp_stage : -1 : pp]
        if stage.pp_stage == 0:
            comes_in = onward[pp - 1 : -1 : pp]
        of_tokens = states * max(comes_in, default=0.0) + state_gradients * max(goes_on, default=0.0)
        of_tokens += features * of_feature if stage.module == "llm" else feature_gradients * of_feature
        if _waits_in_slots(plan, stage.module) and feature_gradients:
            of_tokens += of_feature
        found.append(of_tokens)
    return np.array(found)


def _waits_in_slots(plan: Plan, module: str) -> bool:
    """Whether gradients come to this module, an encoder of one stage, over a bridge."""
    return module != "llm" and plan.num_stages(module) == 1 and PLACEMENTS[plan.placement].has_bridges
