"""Bytes of one token (`edge_tokens`) at each stage of a plan: those sent to the next stage, and those held."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dflop.models import ModelSpec
from dflop.plan import Plan

__all__ = ["EdgeBytes", "edge_bytes_of"]


class EdgeBytes(NamedTuple):
    """Bytes of one token by module, arrays [num_stages].

    `onward` go to the module's next stage (the entry of the last stage has no meaning); `held` stay on the stage from
    a microbatch's forward to its backward.
    """

    onward: Mapping[str, np.ndarray]
    held: Mapping[str, np.ndarray]


def edge_bytes_of(plan: Plan, spec: ModelSpec, value_bytes: int) -> EdgeBytes:
    """The bytes where one value takes `value_bytes`.

    A stage of the LLM holds its inputs and outputs. These are hidden states, and with them features of encoders that
    later layers take (`ModelSpec.hidden_size_before`). The input of the first stage is features, counted as if every
    token were one. Where a later stage recomputes its first layer, the hidden states that came in are left out here:
    that layer keeps them as its input, and they count as the layer's. An encoder, and an LLM of one stage, hold
    features and their gradients.
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
        is_kept = np.array(plan.recomputed_of("llm", llm.num_layers)[1:]) > 0
        comes_in[1:] -= np.where(is_kept, np.minimum(llm.hidden_size * value_bytes, comes_in[1:]), 0.0)
        onward["llm"], held["llm"] = sizes[1:], comes_in + sizes[1:]
    return EdgeBytes(onward, held)
