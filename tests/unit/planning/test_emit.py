"""A plan in other frameworks' flags: what they can say is said rightly, and what they cannot is named."""

import re
from dataclasses import replace

import pytest

from dflop.cli import cli
from dflop.config import ModelConfig
from dflop.models import load_model_spec
from dflop.parallelism import Grid, Plan
from dflop.planning.emit import FRAMEWORKS, emit
from dflop.runtime import UserError

SPEC = load_model_spec(ModelConfig(preset="llava_ov_7b"))  # 26 layers of the encoder, 28 of the LLM
PIPELINE = Plan(
    placement="disjoint",
    grids=(Grid(module="vision", num_ranks=8), Grid(module="llm", num_ranks=56, tp=2, pp=4, rank_offset=8)),
    num_microbatches=8,
)
SHARED = Plan(
    placement="monolithic",
    grids=tuple(Grid(module=name, num_ranks=64, sharding="hybrid", shards=8) for name in ("vision", "llm")),
    num_microbatches=2,
    checkpointing=True,
)


def test_megatron_is_told_sizes_microbatches_and_the_distributed_optimiser():
    flags = emit("megatron", PIPELINE, SPEC, 512).flags
    assert flags == {
        "--tensor-model-parallel-size": "2",
        "--pipeline-model-parallel-size": "4",
        "--micro-batch-size": "9",  # 512 over 7 replicas of 8 microbatches
        "--global-batch-size": "512",
        "--sequence-parallel": None,
        "--use-distributed-optimizer": None,
    }


def test_uneven_layers_become_megatrons_layout():
    llm = replace(PIPELINE.grid("llm"), layers=(8, 8, 9, 3))
    emitted = emit("megatron", replace(PIPELINE, grids=(PIPELINE.grids[0], llm)), SPEC, 512)
    assert emitted.flags["--pipeline-model-parallel-layout"] == "Et*8|t*8|t*9|tttL"
    assert any("8+8+9+3" in sentence for sentence in emitted.beyond)


def test_chunks_become_virtual_stages_of_megatron_and_interleaving_of_torchtitan():
    chunks = replace(PIPELINE, schedule="interleaved_1f1b", num_chunks=7)
    assert chunks.num_stages("llm") == 28
    assert emit("megatron", chunks, SPEC, 512).flags["--num-virtual-stages-per-pipeline-rank"] == "7"
    flags = emit("torchtitan", chunks, SPEC, 512).flags
    assert flags["--parallelism.pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert flags["--parallelism.pipeline_parallel_layers_per_stage"] == "1"


def test_torchtitan_is_told_of_sharing_inside_nodes():
    emitted = emit("torchtitan", SHARED, SPEC, 512)
    assert emitted.flags["--parallelism.data_parallel_shard_degree"] == "8"
    assert emitted.flags["--parallelism.data_parallel_replicate_degree"] == "8"
    assert emitted.flags["--training.local_batch_size"] == "4"
    assert emitted.flags["--activation_checkpoint.mode"] == "full"
    assert not any("pipeline" in name and value != "1" for name, value in emitted.flags.items())


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("plan", [PIPELINE, SHARED, replace(PIPELINE, schedule="zb_h1")], ids=str)
def test_what_cannot_be_said_is_named(framework, plan):
    emitted = emit(framework, plan, SPEC, 512)
    said = " ".join(emitted.beyond)
    assert f"vision: tp 1, 1 stage (26 layers), {plan.grid('vision').dp} replicas" in said
    assert "BalancedBatchSampler" in said
    assert ("schedule zb_h1" in said) == (plan.schedule == "zb_h1")
    assert ("do not divide" in said) == (512 % plan.num_buckets > 0)
    # Replicas that keep whole parameters share the optimiser's state; torchtitan has no such thing.
    assert ("ZeRO-1" in said) == (framework == "torchtitan" and plan is not SHARED)


def test_the_text_is_a_shell_command_with_comments():
    text = emit("megatron", SHARED, SPEC, 512).to_text("megatron", SHARED)
    for line in text.splitlines():
        assert re.match(r"# |--[\w-]+( [\w*|]+)?( \\)?$|$", line), line
    assert "parameters shared among 8 replicas of 64" in text


def test_the_command_offers_the_frameworks_there_are_and_no_other_is_known():
    option = next(own for own in cli.commands["plan"].params if own.name == "emit")
    assert list(option.type.choices) == list(FRAMEWORKS)
    with pytest.raises(UserError, match="it must be one of megatron, torchtitan"):
        emit("deepspeed", SHARED, SPEC, 512)
