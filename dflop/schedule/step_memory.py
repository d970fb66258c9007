"""Memory on devices for the step search: computed from the loads in its state, with the same forms as `PlanMemory`."""

from typing import NamedTuple

import numpy as np

from dflop.base.kernels import kernel
from dflop.costs.forms import PackedForms, PackedTerms, form_at, largest_at, pack_forms, pack_terms
from dflop.schedule.pricer import Pricer
from dflop.step import peak_bytes_of
from dflop.step.simulation_kernel import BRIDGE_IN, DP, FIRST_NODE, FIRST_WORKER, SPAN

__all__ = ["StepMemory", "excess_bytes", "step_memory"]


class StepMemory(NamedTuple):
    """Bytes of a microbatch in each stage as functions of its loads, and the room that workers have for them."""

    order: np.ndarray  # as in `CompiledPlan`
    kept: PackedForms
    passing: PackedTerms  # the largest term of a stage counts
    edge_bytes: np.ndarray  # [num_stages], bytes of a token at an edge (`EdgeBytes.held`)
    gradient_bytes: np.ndarray  # [num_stages], for each token that is sent (`PlanMemory.sent_bytes`)
    slot_bytes: np.ndarray  # [num_stages], for each token of the largest microbatch (`PlanMemory.slot_bytes`)
    room_bytes: np.ndarray  # [num_workers], what parameters and optimiser state leave
    kept_bytes: np.ndarray  # [num_nodes, num_microbatches], written by `excess_bytes`
    passing_bytes: np.ndarray
    sent_bytes: np.ndarray


def step_memory(pricer: Pricer) -> StepMemory:
    """The functions and limits of the stages and devices of a pricer's plan."""
    kept, passing = [], []
    for stage in pricer.stages:
        activations, forms = pricer.stage_costs.memory_forms(stage)
        kept.append(activations)
        passing.append([(form, 0.0) for form in forms])
    compiled = pricer.compiled
    cells = compiled.num_nodes, compiled.num_microbatches
    return StepMemory(
        order=compiled.order,
        kept=pack_forms(kept),
        passing=pack_terms(passing),
        edge_bytes=np.array([pricer.edge_bytes.held[stage.module][stage.pp_stage] for stage in pricer.stages]),
        gradient_bytes=pricer.memory.sent_bytes,
        slot_bytes=pricer.memory.slot_bytes(compiled),
        room_bytes=pricer.memory.tensor_limit_bytes - pricer.memory.resident_bytes,
        kept_bytes=np.zeros(cells),
        passing_bytes=np.zeros(cells),
        sent_bytes=np.zeros(cells),
    )


@kernel
def excess_bytes(memory, forms, state):
    """The bytes by which the fullest worker exceeds its room (negative where it does not), and its index."""
    stages, num_encoders = forms.stages, len(forms.first_replica) - 1
    under_way = np.zeros(len(memory.room_bytes))
    for stage in range(len(stages)):
        module = forms.module[stage]
        for replica in range(stages[stage, DP]):
            node, most_tokens = stages[stage, FIRST_NODE] + replica, 0.0
            for microbatch in range(state.count.shape[1]):
                if module == num_encoders:
                    loads, tokens = state.text[replica, microbatch], 0.0
                    if forms.sends_text:
                        tokens = loads[1]
                    elif forms.has_bridges:
                        tokens = state.received[microbatch, replica]
                else:
                    encoder_replica = forms.first_replica[module] + replica
                    loads, tokens = state.media[encoder_replica, microbatch], 0.0
                    if forms.has_bridges:
                        tokens = state.sent[microbatch, encoder_replica]
                most_tokens = max(most_tokens, tokens)
                at_edges = memory.edge_bytes[stage] * tokens
                memory.kept_bytes[node, microbatch] = form_at(memory.kept, stage, loads) + at_edges
                memory.passing_bytes[node, microbatch] = largest_at(memory.passing, stage, loads)
                if stages[stage, BRIDGE_IN] > 0:
                    tokens = state.received[microbatch, replica]
                memory.sent_bytes[node, microbatch] = memory.gradient_bytes[stage] * tokens
            first = stages[stage, FIRST_WORKER] + replica * stages[stage, SPAN]
            under_way[first : first + stages[stage, SPAN]] += memory.slot_bytes[stage] * most_tokens
    held = peak_bytes_of(
        memory.order, stages, memory.kept_bytes, memory.passing_bytes, memory.sent_bytes, len(memory.room_bytes)
    )
    held += under_way - memory.room_bytes
    fullest = held.argmax()
    return held[fullest], fullest
