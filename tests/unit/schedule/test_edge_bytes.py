"""What is priced between stages of the LLM is what they send, further features that travel with it included."""

import math
from dataclasses import replace

import pytest

from dflop.config import ClusterConfig, ModelConfig
from dflop.costs import LinkModel
from dflop.models import family_names, load_model_spec, load_runtime
from dflop.plan import Grid, Plan
from dflop.schedule.edge_bytes import edge_bytes_of
from dflop.schedule.transfers import Transfers

NUM_TOKENS = 40
CLUSTER = ClusterConfig(num_nodes=1, devices_per_node=8, memory_gib=4.0, intra_node_gbps=8.0, inter_node_gbps=8.0)
VALUE_BYTES = 4


@pytest.mark.parametrize("family", family_names())
def test_bytes_between_stages_are_those_that_the_stages_send(family, tokenizer):
    spec, runtime = load_model_spec(ModelConfig(family=family, preset="tiny")), load_runtime(family)
    names = [own.name for own in spec.encoders]
    pp = spec.module("llm").num_layers
    grids = [Grid(module=name, num_ranks=1, rank_offset=place) for place, name in enumerate(names)]
    grids.append(Grid(module="llm", num_ranks=pp, pp=pp, rank_offset=len(names)))
    plan = Plan(placement="disjoint", grids=tuple(grids), num_microbatches=1)
    edge_bytes = edge_bytes_of(plan, spec, VALUE_BYTES)
    config = runtime.make_config(spec, dict.fromkeys(("image", "video", "audio"), 5), 1000)
    sent = []
    for layers in plan.layers_of("llm", pp)[1:]:
        stage = runtime.build_stage(config, "llm", layers=layers, seed=0)
        sent.append(math.prod(stage.hidden_shape(NUM_TOKENS, layers.start)) * VALUE_BYTES)
    assert (edge_bytes.onward["llm"][:-1] * NUM_TOKENS).tolist() == sent
    # What came in stays, and what went out.
    came = [spec.feature_size * VALUE_BYTES * NUM_TOKENS, *sent]
    assert (edge_bytes.held["llm"] * NUM_TOKENS).tolist() == [sum(both) for both in zip(came, [*sent, 0], strict=True)]
    # Of what came in, layers that are recomputed keep the hidden states as their own input.
    again = edge_bytes_of(replace(plan, checkpointing=True), spec, VALUE_BYTES).held["llm"]
    hidden_bytes = spec.module("llm").hidden_size * VALUE_BYTES
    assert (edge_bytes.held["llm"] - again).tolist() == [0.0, *[hidden_bytes] * len(sent)]
    tokens = {grid.module: NUM_TOKENS * (edge_bytes.onward[grid.module][:1, None] * 0 + 1) for grid in plan.grids}
    chain_s = Transfers(plan, LinkModel(), CLUSTER).chain_s(tokens, edge_bytes)[len(names) :, 0]
    assert chain_s.tolist() == pytest.approx([size / 1e9 for size in sent] + [0.0])
    assert (len(set(sent)) > 1) == (spec.num_deepstack > 0)
