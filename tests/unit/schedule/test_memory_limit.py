"""Samples that no device can hold are left out by name; what a plan may hold is what whole assignments say."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_plans import make_plan

from dflop.base import UserError
from dflop.config import ClusterConfig
from dflop.plan import Plan
from dflop.plan.trained import TrainedSet
from dflop.schedule import Assignment, Pricer, alone_bytes, describe_left_out, leave_out_too_large
from dflop.step import communicator_bytes

properties = settings(max_examples=60)
ROOMY = ClusterConfig(num_nodes=4, devices_per_node=8, memory_gib=64.0, intra_node_gbps=100.0, inter_node_gbps=50.0)

any_plans = st.builds(
    lambda placement, schedule, pp, dp: make_plan(placement, schedule[0], max(pp, schedule[1]), dp, 4, schedule[1]),
    st.sampled_from(["disjoint", "colocated", "monolithic"]),
    st.sampled_from([("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)]),
    st.sampled_from([1, 2]),
    st.integers(1, 3),
)
devices = st.sampled_from(["cpu", "cuda"])


@pytest.fixture(scope="module")
def make_pricer(costs, tiny_spec):
    def make(plan: Plan, memory_gib: float = 64.0, frozen: tuple[str, ...] = (), device: str = "cpu", **more) -> Pricer:
        model = dataclasses.replace(costs, overhead_bytes=1e8, allocator_share=0.1, communicator_bytes=1e7)
        cluster = dataclasses.replace(ROOMY, memory_gib=memory_gib, device=device)
        return Pricer(plan, model, tiny_spec, cluster, trained=TrainedSet(frozen), **more)

    return make


def test_communicators_take_memory_of_gpus_alone(make_pricer, tiny_spec):
    plan = make_plan("disjoint", "1f1b", 2, 2, 4, 1)
    on_cpus, on_gpus = (make_pricer(plan, device=device).memory.held_bytes(np.zeros(1)) for device in ("cpu", "cuda"))
    held_bytes = communicator_bytes(plan, 1e7, is_tied=tiny_spec.has_tied_head)
    assert held_bytes > 1e7
    assert on_gpus - on_cpus == pytest.approx(held_bytes)


@properties
@given(plan=any_plans, frozen=st.sampled_from([(), ("vision",), ("llm",)]), device=devices, seed=st.integers(0, 1000))
def test_a_sample_alone_takes_what_a_batch_of_it_alone_does_wherever_that_takes_least(
    make_pricer, draw_samples, plan, frozen, device, seed
):
    """The oracle prices a batch of one sample for every replica that may compute it."""
    pricer, shapes = make_pricer(plan, frozen=frozen, device=device), draw_samples(6, seed)
    for index, own_bytes in enumerate(alone_bytes(pricer, shapes)):
        one = shapes.take(np.array([index]))
        encoders = [0] if plan.placement == "monolithic" else range(plan.grids[0].dp)
        needs = []
        for encoder in encoders:
            places = (np.array([value]) for value in (0, plan.num_microbatches - 1, [encoder]))
            assignment = Assignment(**dict(zip(("llm_dp_rank", "microbatch", "encoder_rank"), places, strict=True)))
            needs.append(max(pricer.memory_bytes(one, assignment).values()))
        assert own_bytes == pytest.approx(min(needs), rel=1e-9)


@properties
@given(plan=any_plans, seed=st.integers(0, 1000))
def test_no_assignment_of_a_batch_takes_less_than_one_of_its_samples_alone(make_pricer, draw_samples, plan, seed):
    pricer, shapes = make_pricer(plan), draw_samples(24, seed)
    rng = np.random.default_rng(seed)
    assignment = pricer.assign(
        shapes, rng.integers(plan.grid("llm").dp, size=24), rng.integers(plan.num_microbatches, size=24)
    )
    needed = max(pricer.memory_bytes(shapes, assignment).values())
    assert alone_bytes(pricer, shapes).max() <= needed * (1 + 1e-9)


def with_a_giant(shapes, index=7, num_tokens=200_000):
    tokens = shapes.llm_tokens.copy()
    tokens[index] = num_tokens
    return dataclasses.replace(shapes, llm_tokens=tokens)


def test_a_sample_beyond_every_bucket_is_left_out_with_its_name_its_need_and_the_way_out(make_pricer, draw_samples):
    samples = with_a_giant(draw_samples(80))
    pricer = make_pricer(make_plan(), memory_gib=1.0)
    kept, left_out = leave_out_too_large(pricer, samples)
    assert kept.sample_id.tolist() == [name for name in samples.sample_id if name != "s7"]
    (row,) = left_out.rows(named=True)
    assert (row["source"], row["row"], row["sample_id"], row["reason"]) == ("drawn", 7, "s7", "too_large")
    assert row["predicted_bytes"] == alone_bytes(pricer, samples)[7] > row["limit_bytes"] == 2**30
    (line,) = describe_left_out(left_out)
    needed_gib = row["predicted_bytes"] / 2**30
    assert line.startswith(
        f"left out: drawn row 7: sample 's7' with 200000 LLM tokens and {samples.num_items[7, 0]} items"
    )
    assert f"takes {needed_gib:.4g} GiB" in line
    assert "`cluster.memory_gib` is 1; use devices with as much, more replicas a sample" in line


def test_a_plan_that_splits_the_model_further_holds_the_sample(make_pricer, draw_samples):
    samples = with_a_giant(draw_samples(80))
    needed = [float(alone_bytes(make_pricer(make_plan(pp=pp)), samples)[7]) for pp in (1, 2, 4)]
    assert needed == sorted(needed, reverse=True)
    kept, left_out = leave_out_too_large(make_pricer(make_plan(pp=4), needed[2] * 1.01 / 2**30), samples)
    assert kept is samples
    assert left_out.is_empty()
    assert describe_left_out(left_out) == []


def test_of_many_the_largest_are_named_and_the_rest_counted(make_pricer, draw_samples):
    samples = draw_samples(80)
    for place in range(5):
        samples = with_a_giant(samples, place, 200_000 + place)
    lines = describe_left_out(leave_out_too_large(make_pricer(make_plan(), 1.0), samples)[1])
    assert ["'s4'" in lines[0], "'s3'" in lines[1], "'s2'" in lines[2]] == [True] * 3
    assert lines[3:] == ["left out: 2 more samples that take too much memory"]


def test_when_a_good_part_of_the_data_is_too_large_the_devices_are_too_small(make_pricer, draw_samples):
    samples = draw_samples(80)
    for place in range(9):
        samples = with_a_giant(samples, place, 200_000 + place)
    with pytest.raises(
        UserError, match=r"9 of 80 samples do not fit into .* = 1 .*'s8' with 200008 .* no more than 10%"
    ):
        leave_out_too_large(make_pricer(make_plan(), 1.0), samples)


@pytest.mark.parametrize("placement", ["disjoint", "colocated"])
def test_devices_that_cannot_hold_the_model_are_to_blame_not_the_samples(make_pricer, draw_samples, placement):
    with pytest.raises(UserError, match=r"the parameters, gradients and optimiser state of vision take 0\.\d+ GiB"):
        leave_out_too_large(make_pricer(make_plan(placement), 0.094), draw_samples(8))
