"""A plan in other frameworks' flags: what they can say is said rightly, and what they cannot is named."""

import re
from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest
import yaml
from accelerate import ParallelismConfig
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from hypothesis import given
from hypothesis import strategies as st

from dflop.cli import cli
from dflop.config import ModelConfig
from dflop.models import load_model_spec
from dflop.plan import SCHEDULES, Grid, Plan
from dflop.search.emit import FRAMEWORKS, Emitted, emit

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

# The same with long samples over up to four replicas.
LONG = replace(SHARED, grids=(SHARED.grids[0], replace(SHARED.grid("llm"), cp=4)))
# As many devices divide a sample as share parameters.
LONG_IN_A_NODE = replace(SHARED, grids=(SHARED.grids[0], replace(SHARED.grid("llm"), cp=8)))


def test_megatron_is_told_sizes_microbatches_and_the_distributed_optimiser():
    flags = emit("megatron", PIPELINE, SPEC, 512).flags
    assert flags == {
        "--tensor-model-parallel-size": "2",
        "--pipeline-model-parallel-size": "4",
        "--micro-batch-size": "9",  # 512 over 7 replicas of 8 microbatches
        "--global-batch-size": "504",  # which Megatron-LM divides by replicas and samples of a microbatch
        "--sequence-parallel": None,
        "--use-distributed-optimizer": None,
        "--overlap-grad-reduce": None,
        "--overlap-param-gather": None,
    }


def test_uneven_layers_become_megatrons_layout():
    llm = replace(PIPELINE.grid("llm"), layers=(8, 8, 9, 3))
    emitted = emit("megatron", replace(PIPELINE, grids=(PIPELINE.grids[0], llm)), SPEC, 512)
    assert emitted.flags["--pipeline-model-parallel-layout"] == "Et*8|t*8|t*9|tttL"
    assert any("8+8+9+3" in sentence for sentence in emitted.beyond)


def test_uneven_layers_become_module_names_for_torchtitan():
    llm = replace(PIPELINE.grid("llm"), layers=(2, 1, 24, 1))
    plan = replace(PIPELINE, grids=(PIPELINE.grids[0], llm))
    emitted = emit("torchtitan", plan, SPEC, 512)
    parts = emitted.flags["--parallelism.module_fqns_per_model_part"]
    assert [part.split(",") for part in parts] == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.2"],
        [f"layers.{number}" for number in range(3, 27)],
        ["layers.27", "norm", "lm_head"],
    ]
    assert "--parallelism.pipeline_parallel_layers_per_stage" not in emitted.flags
    assert " layers.2 layers.3," in emitted.to_text(FRAMEWORKS["torchtitan"], plan)  # an argument each


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
@pytest.mark.parametrize(("num_samples", "in_all"), [(512, 504), (504, 504), (3, 56)])
def test_batches_divide_as_the_frameworks_demand(framework, num_samples, in_all):
    """Megatron-LM asserts so much, torchtitan raises a ValueError."""
    emitted = emit(framework, PIPELINE, SPEC, num_samples)
    sizes = {name.rpartition(".")[2].strip("-").replace("-", "_"): value for name, value in emitted.flags.items()}
    of_replica = int(sizes["global_batch_size"]) // 7
    assert of_replica * 7 == in_all
    if framework == "megatron":
        assert of_replica == 8 * int(sizes["micro_batch_size"])
    else:
        assert of_replica == int(sizes["local_batch_size"]) == 8 * int(sizes["pipeline_parallel_microbatch_size"])
    assert any(f"{in_all} in all" in sentence for sentence in emitted.beyond) == (num_samples != in_all)


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
    assert list(emitted.flags)[-1] == "activation-checkpoint:full"  # it takes what follows as its own
    assert not any("pipeline" in name and value != "1" for name, value in emitted.flags.items())


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
@pytest.mark.parametrize("plan", [PIPELINE, SHARED, replace(PIPELINE, schedule="gpipe")], ids=str)
def test_what_cannot_be_said_is_named(framework, plan):
    emitted = emit(framework, plan, SPEC, 512)
    said = " ".join(emitted.beyond)
    assert f"vision: tp 1, 1 stage (26 layers), {plan.grid('vision').dp} replicas" in said
    assert "BalancedBatchSampler" in said
    assert "packed samples" in said
    assert ("schedule gpipe" in said) == (framework == "megatron" and plan.schedule == "gpipe")
    assert ("do not divide" in said) == (512 % plan.num_buckets > 0)


@pytest.mark.parametrize("framework", ["megatron", "megatron_bridge", "ms_swift", "torchtitan", "automodel"])
def test_devices_and_sharding_of_encoders_that_no_flag_has_are_named(framework):
    assert "the sizes above are for 56 of the plan's 64" in " ".join(emit(framework, PIPELINE, SPEC, 512).beyond)
    vision = Grid(module="vision", num_ranks=64)
    said = " ".join(emit(framework, replace(SHARED, grids=(vision, SHARED.grid("llm"))), SPEC, 512).beyond)
    kept = framework in ("megatron_bridge", "torchtitan", "automodel")
    told = "vision the optimiser's state (ZeRO-1)" + (";" if kept else ", llm parameters among 8;")
    told += f" as these {FRAMEWORKS[framework].form} have it:"
    assert f"what replicas share: {told} vision parameters among {8 if kept else 64}" in said
    same = " ".join(emit(framework, SHARED, SPEC, 512).beyond)
    assert ("replicas share" not in same) == kept
    assert "the sizes above" not in same


def test_an_encoder_on_the_llms_mesh_needs_no_loop_of_ones_own():
    said = " ".join(emit("accelerate", replace(SHARED, placement="colocated"), SPEC, 512).beyond)
    assert "on the LLM's own mesh" in said
    assert "a loop of your own;" not in said


def test_the_text_is_a_shell_command_with_comments():
    text = emit("megatron", SHARED, SPEC, 512).to_text(FRAMEWORKS["megatron"], SHARED)
    assert text.splitlines()[1] == "# as flags of Megatron-LM with Megatron Core 0.16:"
    for line in text.splitlines():
        assert re.match(r"# |--[\w-]+( [\w*|]+)?( \\)?$|$", line), line
    assert "llm parameters among 8; as these flags have it: vision parameters among 64, llm parameters among 64" in text
    assert "--no-gradient-accumulation-fusion" in text  # without which Megatron-LM refuses FSDP2


def test_the_command_offers_the_frameworks_there_are():
    option = next(own for own in cli.commands["plan"].params if own.name == "emit")
    assert list(option.type.choices) == list(FRAMEWORKS)


def recomputing(recomputed: tuple[int, ...], *, layers: tuple[int, ...] = (), pp: int = 4) -> Plan:
    """A plan that recomputes so many of the LLM's layers in each stage, interleaved where there are more than `pp`."""
    llm = replace(PIPELINE.grid("llm"), pp=pp, layers=layers, recomputed=recomputed)
    vision = replace(PIPELINE.grid("vision"), recomputed=(0,))
    num_chunks = len(recomputed) // pp
    return replace(
        PIPELINE,
        grids=(vision, llm),
        checkpointing=any(recomputed),
        schedule="interleaved_1f1b" if num_chunks > 1 else "1f1b",
        num_chunks=num_chunks,
    )


def of_megatron(flags: dict[str, str | None], layers: list[int]) -> list[int]:
    """How many layers each stage, or virtual stage, recomputes: the block method takes the first ones of each."""
    if "--recompute-granularity" not in flags:
        return [0 for _ in layers]
    assert flags["--recompute-granularity"] == "full"
    number = int(flags["--recompute-num-layers"])
    if flags["--recompute-method"] == "uniform":
        assert number == 1
        return layers
    return [sum(layer < number for layer in range(own)) for own in layers]


def of_older_torchtitan(sentences: list[str], layers: list[int], pp: int) -> tuple[int, list[int]]:
    """Of every how many layers release 0.2 recomputes one by the flags that are said, 0 for none, and how many layers
    each rank then recomputes: a process numbers the layers of all its stages from 1 on."""
    (said,) = (re.search(r"0\.2 says `([^`]+)`", sentence) for sentence in sentences if "0.2 says" in sentence)
    mode, *option = said[1].removeprefix("--activation_checkpoint.mode ").split()
    assert bool(option) == (mode == "selective")
    every = {"none": 0, "full": 1}.get(mode) if not option else int(option[1])
    return every, dealt_by_number(every, layers, pp)


def dealt_by_number(every: int, layers: list[int], pp: int) -> list[int]:
    counts = []
    for rank in range(pp):
        number, recomputed = 0, 0
        for own in layers[rank::pp]:
            for _ in range(own):
                number += 1
                recomputed += every > 0 and number % every == 0
        counts.append(recomputed)
    return counts


def said_of_recomputed(emitted: Emitted) -> dict[str, tuple[list[int], list[int]]]:
    """By module, planned and flagged numbers of layers in the sentence that says that they differ."""
    pattern = r"recomputed layers: (.*); as these (?:flags|keys) have it: (.*)"
    found = [match for sentence in emitted.beyond if (match := re.fullmatch(pattern, sentence))]
    assert len(found) <= 1
    planned, flagged = (
        {module: [int(count) for count in counts.split("+")] for module, counts in re.findall(r"(\w+) ([\d+]+)", side)}
        for side in (found[0].groups() if found else ("", ""))
    )
    return {module: (planned[module], flagged[module]) for module in planned}


@st.composite
def recomputing_plans(draw: st.DrawFn) -> Plan:
    pp = draw(st.sampled_from([1, 2, 4]))
    num_stages = pp * (draw(st.integers(1, 4)) if pp > 1 else 1)
    cuts = draw(st.lists(st.integers(1, 27), min_size=num_stages - 1, max_size=num_stages - 1, unique=True))
    ends = [0, *sorted(cuts), 28]
    layers = tuple(end - start for start, end in pairwise(ends))
    recomputed = draw(st.tuples(*(st.integers(0, own) for own in layers)))
    return recomputing(recomputed, layers=layers, pp=pp)


@given(plan=recomputing_plans())
def test_every_stage_and_rank_recomputes_what_it_needs_and_what_it_does_beyond_is_said(plan):
    llm = plan.grid("llm")
    needed, layers = list(llm.recomputed), list(llm.layers)
    emitted = emit("megatron", plan, SPEC, 512)
    flagged = of_megatron(emitted.flags, layers)
    assert all(own >= count for own, count in zip(flagged, needed, strict=True))
    assert max(flagged) == max(needed)
    assert said_of_recomputed(emitted) == ({} if flagged == needed else {"llm": (needed, flagged)})

    emitted = emit("torchtitan", plan, SPEC, 512)
    kind = "full" if any(needed) else "none"
    assert f"activation-checkpoint:{kind}" in emitted.flags
    assert said_of_recomputed(emitted) == ({"llm": (needed, layers)} if any(needed) and needed != layers else {})

    needed = [sum(needed[rank :: llm.pp]) for rank in range(llm.pp)]
    every, flagged = of_older_torchtitan(emitted.beyond, layers, llm.pp)
    assert all(own >= count for own, count in zip(flagged, needed, strict=True))
    if every > 1:
        assert any(f"recomputes {'+'.join(map(str, flagged))} layers" in sentence for sentence in emitted.beyond)
    for other in range(1, 29):  # no other option recomputes less and enough
        counts = dealt_by_number(other, layers, llm.pp)
        assert sum(counts) >= sum(flagged) or any(own < count for own, count in zip(counts, needed, strict=True))


@pytest.mark.parametrize(
    ("plan", "megatron", "every", "of_megatron", "of_torchtitan"),
    [
        (recomputing((0, 0, 0, 0)), None, 0, None, None),
        (recomputing((7, 7, 7, 7)), ("uniform", "1"), 1, None, None),
        (recomputing((3, 3, 3, 3)), ("block", "3"), 2, None, "7+7+7+7"),
        (recomputing((2, 0, 0, 0)), ("block", "2"), 3, "2+2+2+2", "7+7+7+7"),
        (recomputing((7, 4, 2, 0)), ("block", "7"), 1, "7+7+7+7", "7+7+7+7"),
        (recomputing((3, 3, 3, 1), layers=(9, 9, 9, 1)), ("block", "3"), 1, None, "9+9+9+1"),
        (recomputing((5,), pp=1), ("block", "5"), 5, None, "28"),
        (recomputing((10,), pp=1), ("block", "10"), 2, None, "28"),
        # Each rank holds 4 + 3 layers in two chunks; ranks are to recompute 3, 3, 2 and 0 of them.
        (
            recomputing((2, 2, 1, 0, 1, 1, 1, 0), layers=(4, 4, 4, 4, 3, 3, 3, 3)),
            ("block", "2"),
            2,
            "2+2+2+2+2+2+2+2",
            "4+4+4+4+3+3+3+3",
        ),
    ],
)
def test_partial_recomputing_in_either_frameworks_flags(plan, megatron, every, of_megatron, of_torchtitan):
    def flagged(emitted: Emitted) -> str | None:
        said = said_of_recomputed(emitted)
        return "+".join(map(str, said["llm"][1])) if said else None

    emitted = emit("megatron", plan, SPEC, 512)
    said = tuple(emitted.flags.get(f"--recompute-{name}") for name in ("method", "num-layers"))
    assert said == (megatron or (None, None))
    assert flagged(emitted) == of_megatron
    emitted = emit("torchtitan", plan, SPEC, 512)
    layers = [len(own) for own in plan.layers_of("llm", 28)]
    assert of_older_torchtitan(emitted.beyond, layers, plan.grid("llm").pp)[0] == every
    assert flagged(emitted) == of_torchtitan


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
def test_the_encoders_recomputed_layers_are_named(framework):
    def of_vision(plan: Plan) -> tuple[list[int], list[int]] | None:
        return said_of_recomputed(emit(framework, plan, SPEC, 512)).get("vision")

    colocated = Plan(
        placement="colocated",
        grids=(
            Grid(module="vision", num_ranks=64, recomputed=(26,)),
            Grid(module="llm", num_ranks=64, pp=4, recomputed=(0,) * 4),
        ),
        num_microbatches=8,
        checkpointing=True,
    )
    flags = emit(framework, colocated, SPEC, 512).flags
    assert not any(name.startswith("--recompute") for name in flags)
    assert "activation-checkpoint:full" not in flags
    assert of_vision(colocated) == ([26], [0])

    llm = PIPELINE.grid("llm")
    two_stages = replace(PIPELINE.grid("vision"), pp=2, recomputed=(13, 2))
    halves = replace(PIPELINE, grids=(two_stages, replace(llm, recomputed=(7,) * 4)), checkpointing=True)
    assert of_vision(halves) == ([15], [0])
    assert of_vision(SHARED) == ([26], [0])
    assert of_vision(recomputing((7, 4, 2, 0))) is None
    assert of_vision(PIPELINE) is None


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_layers_recomputed_but_for_attention_are_recomputed_as_a_whole_by_flags(framework):
    kept = replace(ONE_MODULE, grids=(ONE_MODULE.grids[0], replace(ONE_MODULE.grids[1], attention_kept=(9,))))
    emitted, whole = (emit(framework, plan, SPEC, 512) for plan in (kept, ONE_MODULE))
    assert emitted.plan == whole.plan
    assert emitted.flags == whole.flags
    (said,) = (sentence for sentence in emitted.beyond if sentence not in whole.beyond)
    form = FRAMEWORKS[framework].form
    assert said.startswith(
        f"recomputed but for attention: 9 layers of the LLM; these {form} recompute layers as a whole"
    )


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_offloaded_stays_on_the_device_by_flags(framework):
    grids = ONE_MODULE.grids[0], replace(ONE_MODULE.grids[1], offloaded=(3,))
    away = replace(ONE_MODULE, grids=grids, offloads_optimizer=True)
    emitted, kept = (emit(framework, plan, SPEC, 512) for plan in (away, ONE_MODULE))
    assert (emitted.plan, emitted.flags) == (kept.plan, kept.flags)
    form = FRAMEWORKS[framework].form
    assert [sentence for sentence in emitted.beyond if sentence not in kept.beyond] == [
        f"layers in host memory: llm 3; these {form} keep all of them on the device",
        f"the optimiser's state in host memory between steps; these {form} keep it on the device",
    ]


# ---- frameworks that read a config file, and those that share Megatron Core's names ----

WHOLE = replace(SHARED, grids=tuple(replace(grid, sharding="optimizer", shards=None) for grid in SHARED.grids))
UNEVEN = replace(PIPELINE, grids=(PIPELINE.grids[0], replace(PIPELINE.grid("llm"), layers=(8, 8, 9, 3))))
CHUNKS = replace(PIPELINE, schedule="interleaved_1f1b", num_chunks=7)
ONE_MODULE = replace(
    SHARED,
    grids=(replace(SHARED.grids[0], recomputed=(0,)), replace(SHARED.grids[1], recomputed=(28,))),
)

# The fields of the named releases, as far as these keys need them. Each is a path of the release's config classes.
CORE = {
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("sequence_parallel", "pipeline_model_parallel_layout", "context_parallel_size"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers"),
}
DDP = {
    *("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "use_megatron_fsdp"),
    "data_parallel_sharding_strategy",
}
BATCHES = {"micro_batch_size", "global_batch_size"}
DOCUMENTED = {
    "megatron_bridge": {
        *(f"model.{name}" for name in CORE),
        *(f"train.{name}" for name in BATCHES),
        *(f"ddp.{name}" for name in (*DDP, "num_distributed_optimizer_instances", "average_in_collective")),
        "model.calculate_per_token_loss",
        "checkpoint.ckpt_format",
    },
    "ms_swift": {f"--{name}" for name in (*CORE, *DDP, *BATCHES, "vit_gradient_checkpointing")},
    "automodel": {
        *("step_scheduler.global_batch_size", "step_scheduler.local_batch_size"),
        *(
            f"distributed.{name}"
            for name in ("strategy", "tp_size", "pp_size", "dp_size", "dp_replicate_size", "cp_size")
        ),
        "distributed.sequence_parallel",
        *("distributed.activation_checkpointing", "distributed.activation_checkpointing_scope"),
        "distributed.defer_fsdp_grad_sync",
        *(f"distributed.pipeline.{name}" for name in ("pp_schedule", "pp_microbatch_size", "layers_per_stage")),
        "distributed.pipeline.module_fqns_per_model_part",
    },
    "veomni": {
        *(f"train.{name}" for name in (*BATCHES, "dyn_bsz", "gradient_checkpointing.enable")),
        *(
            f"train.accelerator.{name}"
            for name in ("dp_replicate_size", "dp_shard_size", "ulysses_size", "fsdp_config.fsdp_mode")
        ),
    },
}


@pytest.mark.parametrize("framework", DOCUMENTED)
@pytest.mark.parametrize("plan", [PIPELINE, SHARED, LONG, WHOLE, UNEVEN, CHUNKS, ONE_MODULE], ids=str)
def test_keys_are_those_of_the_named_release_and_the_text_gives_them_back(framework, plan):
    about = FRAMEWORKS[framework]
    if about.refusal(plan):
        assert framework == "veomni"
        assert plan.placement == "disjoint"
        return
    emitted = emit(framework, plan, SPEC, 512)
    assert set(emitted.flags) <= DOCUMENTED[framework]
    text = emitted.to_text(about, plan)
    if about.is_config:
        assert flattened(yaml.safe_load(text)) == emitted.flags
    said = " ".join(emitted.beyond)
    assert "BalancedBatchSampler" in said
    assert ("do not divide" in said) == (512 % plan.num_buckets > 0)
    if plan.placement == "disjoint":
        assert "(disjoint)" in said


def flattened(section: dict, prefix: str = "") -> dict:
    found = {}
    for key, value in section.items():
        found |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def test_three_frameworks_on_megatron_core_get_one_layout():
    plain = emit("megatron", UNEVEN, SPEC, 512).flags
    bridge = emit("megatron_bridge", UNEVEN, SPEC, 512).flags
    swift = emit("ms_swift", UNEVEN, SPEC, 512).flags
    layout = plain["--pipeline-model-parallel-layout"]
    assert bridge["model.pipeline_model_parallel_layout"] == swift["--pipeline_model_parallel_layout"] == layout
    assert bridge["model.sequence_parallel"] is True
    assert swift["--sequence_parallel"] == "true"
    assert plain["--sequence-parallel"] is None
    assert emit("megatron_bridge", CHUNKS, SPEC, 512).flags["model.virtual_pipeline_model_parallel_size"] == 7
    assert swift["--recompute_granularity"] == "none"  # what is left out recomputes each layer's attention there


def test_sharing_inside_nodes_is_said_where_there_are_words_for_it():
    bridge = emit("megatron_bridge", SHARED, SPEC, 512).flags
    assert bridge["ddp.num_distributed_optimizer_instances"] == 8  # groups of 8 replicas
    assert emit("automodel", SHARED, SPEC, 512).flags["distributed.dp_replicate_size"] == 8
    veomni = emit("veomni", SHARED, SPEC, 512).flags
    assert (veomni["train.accelerator.dp_replicate_size"], veomni["train.accelerator.dp_shard_size"]) == (8, 8)
    swift = emit("ms_swift", SHARED, SPEC, 512).beyond
    assert any("llm parameters among 8; as these flags have it" in sentence for sentence in swift)


def test_zero_1_is_said_by_accelerate_and_becomes_fsdp_where_there_is_nothing_like_it():
    assert emit("accelerate", WHOLE, SPEC, 512).flags["deepspeed_config.zero_stage"] == 1
    for framework in ("automodel", "veomni", "torchtitan"):
        emitted = emit(framework, WHOLE, SPEC, 512)
        assert any("ZeRO-1" in sentence for sentence in emitted.beyond)
        assert {grid.sharding for grid in emitted.plan.grids} == {"parameters"}
        assert not any("ZeRO-1" in sentence for sentence in emit(framework, SHARED, SPEC, 512).beyond)
    # In pipelines FSDP2 keeps what it gathered to the last microbatch, which is the same.
    emitted = emit("torchtitan", PIPELINE, SPEC, 512)
    assert emitted.flags["--parallelism.data_parallel_shard_degree"] == "7"
    assert emitted.plan.grid("llm").sharding == "optimizer"
    assert not any("ZeRO-1" in sentence for sentence in emitted.beyond)


@pytest.mark.parametrize(
    ("framework", "vision", "llm"),
    [
        ("accelerate", 26, [28]),
        ("automodel", 26, [28]),
        ("megatron", 0, [9]),
        ("megatron_bridge", 0, [9]),
        ("ms_swift", 26, [9]),
        ("torchtitan", 0, [28]),
        ("veomni", 26, [28]),
    ],
)
def test_what_a_framework_makes_of_a_plan_has_the_encoder_on_the_llms_grid(framework, vision, llm):
    grids = (
        Grid(module="vision", num_ranks=64, tp=2, recomputed=(5,)),
        replace(SHARED.grid("llm"), recomputed=(9,)),
    )
    made = emit(framework, replace(SHARED, placement="colocated", grids=grids), SPEC, 512).plan
    assert made.placement == "monolithic"
    assert made.grid("vision").layout == made.grid("llm").layout
    has_hybrid = framework not in ("megatron", "ms_swift")
    assert [grid.sharding for grid in made.grids] == ["hybrid" if has_hybrid else "parameters"] * 2
    assert [list(made.recomputed_of(name, count)) for name, count in (("vision", 26), ("llm", 28))] == [[vision], llm]


def test_a_framework_of_one_mesh_makes_a_pipeline_of_fewer_devices():
    made = emit("megatron", replace(PIPELINE, schedule="gpipe"), SPEC, 512).plan
    assert (made.world_size, made.schedule, made.num_microbatches) == (56, "1f1b", 8)
    assert made.grid("vision").num_ranks == 14
    assert emit("torchtitan", replace(PIPELINE, schedule="gpipe"), SPEC, 512).plan.schedule == "gpipe"


@pytest.mark.parametrize("framework", ["megatron", "megatron_bridge", "ms_swift"])
def test_a_plan_that_flags_say_in_full_is_what_the_framework_makes(framework):
    plan = replace(WHOLE, checkpointing=False)
    assert emit(framework, plan, SPEC, 512).plan == plan


def test_automodel_recomputes_the_modules_that_the_plan_does():
    flags = emit("automodel", ONE_MODULE, SPEC, 512).flags
    assert flags["distributed.activation_checkpointing"] is True
    assert flags["distributed.activation_checkpointing_scope"] == ["language"]
    assert "distributed.activation_checkpointing_scope" not in emit("automodel", SHARED, SPEC, 512).flags
    # VeOmni has one switch for the whole model, and what it does beyond the plan is said.
    emitted = emit("veomni", ONE_MODULE, SPEC, 512)
    assert emitted.flags["train.gradient_checkpointing.enable"]
    assert said_of_recomputed(emitted) == {"vision": ([0], [26])}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_automodel_names_schedules_as_torch_does(schedule):
    from torch.distributed.pipelining.schedules import get_schedule_class

    plan = CHUNKS if schedule == CHUNKS.schedule else replace(PIPELINE, schedule=schedule)
    assert get_schedule_class(emit("automodel", plan, SPEC, 512).flags["distributed.pipeline.pp_schedule"])


def test_automodel_is_told_the_modules_of_uneven_stages():
    parts = emit("automodel", UNEVEN, SPEC, 512).flags["distributed.pipeline.module_fqns_per_model_part"]
    counts = [sum(".layers." in module for module in part) for part in parts]
    assert counts == [8, 8, 9, 3]
    assert "model.visual" in parts[0]
    assert parts[-1][-3:-1] == ["model.language_model.norm", "lm_head"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_plan_that_shares_long_samples_has_the_frameworks_own_degree_for_all_of_them(framework):
    about, emitted, whole = FRAMEWORKS[framework], *(emit(framework, plan, SPEC, 512) for plan in (LONG, SHARED))
    degree = emitted.flags.pop(about.cp_key)
    assert degree == (4 if about.is_config else "4")
    assert about.cp_key not in whole.flags
    (said,) = {*emitted.beyond} - {*whole.beyond} - {own for own in emitted.beyond if "gradient_accumulation" in own}
    assert f"over up to 4 replicas, and `{about.cp_key}` every sample over 4 devices" in said
    assert f"lengths must be multiples of {4 if framework == 'veomni' else 8};" in said
    assert emitted.plan == whole.plan  # which is what is priced


@pytest.mark.parametrize(
    ("framework", "sizes"),
    [
        ("torchtitan", ("--parallelism.data_parallel_replicate_degree", "--parallelism.data_parallel_shard_degree")),
        ("veomni", ("train.accelerator.dp_replicate_size", "train.accelerator.dp_shard_size")),
        ("automodel", ("distributed.dp_size",)),
    ],
)
@pytest.mark.parametrize("shards", [2, 8, 32])
def test_devices_that_divide_a_sample_count_as_one_replica(framework, sizes, shards):
    llm = replace(LONG.grid("llm"), shards=shards)
    flags = emit(framework, replace(LONG, grids=(LONG.grids[0], llm)), SPEC, 512).flags
    counts = [int(flags[name]) for name in (*sizes, FRAMEWORKS[framework].cp_key)]
    assert prod(counts) == 64
    if len(sizes) == 2:
        assert counts[1] == max(1, shards // 4)


def test_megatron_bridge_is_told_what_it_demands_where_devices_divide_samples():
    demanded = {"model.calculate_per_token_loss": True, "ddp.average_in_collective": False}
    assert demanded.items() <= emit("megatron_bridge", LONG, SPEC, 512).flags.items()
    assert not demanded.keys() & emit("megatron_bridge", SHARED, SPEC, 512).flags.keys()


def test_torchtitan_has_no_cuda_graphs_in_pipelines():
    assert "--training.disable_cuda_graphs" in emit("torchtitan", PIPELINE, SPEC, 512).flags
    assert "--training.disable_cuda_graphs" not in emit("torchtitan", SHARED, SPEC, 512).flags


@pytest.mark.parametrize("framework", ["automodel", "accelerate"])
def test_copies_whose_parameters_only_the_devices_of_a_sample_share_are_refused_and_so_all_share(framework):
    emitted = emit(framework, LONG_IN_A_NODE, SPEC, 512)
    assert not any("replicate" in name and size != 1 for name, size in emitted.flags.items())
    assert emitted.plan.grid("llm").num_shards == 64
    assert any("llm parameters among 8; as these keys have it: " in sentence for sentence in emitted.beyond)
    assert emit(framework, LONG, SPEC, 512).plan.grid("llm").num_shards == 8


@pytest.mark.parametrize("plan", [SHARED, LONG, LONG_IN_A_NODE, WHOLE], ids=str)
def test_accelerate_reads_its_config(plan, tmp_path):
    file = tmp_path / "accelerate.yaml"
    file.write_text(emit("accelerate", plan, SPEC, 512).to_text(FRAMEWORKS["accelerate"], plan))
    config = load_config_from_file(str(file))
    assert config.num_processes == 64
    known = {action.dest for action in launch_command_parser()._actions}
    assert {*config.fsdp_config, *config.deepspeed_config, *(config.parallelism_config or {})} <= known
    if plan is WHOLE:
        assert config.distributed_type == "DEEPSPEED"
        return
    sizes = {name.removeprefix("parallelism_config_"): size for name, size in config.parallelism_config.items()}
    assert ParallelismConfig(**sizes).total_size == config.num_processes


def test_frameworks_refuse_what_they_cannot_run():
    sharing = replace(WHOLE, grids=(WHOLE.grids[0], replace(WHOLE.grid("llm"), cp=2)))
    assert "its context parallelism is FSDP2's" in FRAMEWORKS["accelerate"].refusal(sharing)
    assert "at least as many microbatches as stages, 4" in FRAMEWORKS["automodel"].refusal(
        replace(PIPELINE, num_microbatches=3)
    )
    assert FRAMEWORKS["automodel"].refusal(PIPELINE) is None
    assert "modules on devices of their own" in FRAMEWORKS["veomni"].refusal(PIPELINE)
