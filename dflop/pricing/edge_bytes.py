"""What travels between stages, and what of it they hold: bytes of one token (`edge_tokens`) at each stage of a plan."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dflop.models import ModelSpec
from dflop.parallelism import Plan

__all__ = ["EdgeBytes", "edge_bytes_of"]


class EdgeBytes(NamedTuple):
    """By module, arrays [num_stages]: `onward` goes to the module's next stage (of its last one nothing is asked),
    and `held` stays with a microbatch from its forward to its backward."""

    onward: Mapping[str, np.ndarray]
    held: Mapping[str, np.ndarray]


def edge_bytes_of(plan: Plan, spec: ModelSpec, value_bytes: int) -> EdgeBytes:
    """Of values of `value_bytes`.

    A stage of the LLM holds what came in and what went out: hidden states, beside which further features travel until
    their layers have come (`ModelSpec.hidden_size_before`); what comes into the first is features, at most of every
    token. With checkpointing what came into another is what its first layer keeps, and counted there. An encoder, and
    an LLM of one stage, hold features and their gradients.
    """
    onward, held = {}, {}
    for grid in plan.grids:
        features = np.full(plan.num_stages(grid.module), float(spec.feature_size * value_bytes))
        onward[grid.module], held[grid.module] = features, 2.0 * features
    if plan.num_stages("llm") > 1:
        llm = spec.module("llm")
        first_layers = [layers.start for layers in plan.layers_of("llm", llm.num_layers)]
        sizes = np.array([*map(spec.hidden_size_before, first_layers), 0.0]) * value_bytes
        comes_in = sizes[:-1].copy()
        if plan.checkpointing:
            comes_in[1:] -= np.minimum(llm.hidden_size * value_bytes, comes_in[1:])
        onward["llm"], held["llm"] = sizes[1:], comes_in + sizes[1:]
    return EdgeBytes(onward, held)
