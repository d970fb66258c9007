"""Plans whose LLM replicas share long samples: found where they gain, written, read, and refused in one line."""

from dataclasses import replace

import numpy as np
import pytest
import yaml
from long_samples import samples_of
from spaces import make_config, with_memory

from dflop.base import UserError
from dflop.plan import Grid, plan_from_dict
from dflop.report.charts.plans import is_plan, modules_of, plan_labels
from dflop.report.page import plans
from dflop.schedule import BatchScheduler, GlobalBatches
from dflop.search import candidates_frame
from dflop.search.candidate import pricer_of
from dflop.shapes.reader import MediumSize
from dflop.shapes.samples import MediaSizes

MANY = {"num_microbatches": 2, "llm": {"pp": 1, "dp": 4}, "placement": "colocated"}


@pytest.fixture(scope="module")
def long_tailed(tiny_spec):
    """One text of a hundred outweighs the rest of a batch of thirty-two."""
    return samples_of(tiny_spec, [[]] * 64, [8000 if number % 32 == 5 else 50 + number for number in range(64)])


@pytest.fixture(scope="module")
def even(tiny_spec):
    return samples_of(tiny_spec, [[]] * 600, [95 + number % 10 for number in range(600)])


def scheduled_s(found, config, spec, costs, samples) -> float:
    """The mean step of the best plan's scheduled batches."""
    pricer = pricer_of(found.best.plan, config, spec, costs)
    batches = GlobalBatches(len(samples), config.train.global_batch_size, config.seed)
    scheduler = BatchScheduler(samples, pricer, batches, replace(config.schedule, policy="lpt"), 0)
    return sum(scheduler.schedule(step).step_s for step in range(2)) / 2


def test_a_sample_that_outweighs_its_batch_is_shared_and_the_scheduled_step_is_shorter(
    tiny_spec, costs, long_tailed, search
):
    sharing, plain = (make_config(4, 32, cp_sizes=sizes, memory_gib=1e3) for sizes in ((1, 2, 4, 8), (1,)))
    shared, whole = (search(config, samples=long_tailed) for config in (sharing, plain))
    assert shared.best.plan.grid("llm").cp == 4
    assert "(samples over up to 4)" in str(shared.best.plan)
    assert whole.best.plan.grid("llm").cp == 1
    assert shared.best.step_s < 0.7 * whole.best.step_s
    times = [scheduled_s(found, sharing, tiny_spec, costs, long_tailed) for found in (shared, whole)]
    assert times[0] < 0.7 * times[1]
    assert candidates_frame(shared)["llm_cp"][0] == 4
    assert set(candidates_frame(whole)["llm_cp"]) == {1}


def test_the_report_tells_plans_apart_that_differ_in_cp(long_tailed, search):
    found = search(make_config(4, 32, cp_sizes=(1, 4), memory_gib=1e3), samples=long_tailed)
    frame, plan = candidates_frame(found), found.candidates[0].plan
    modules = modules_of(frame)
    grids = tuple(replace(grid, cp=1) for grid in plan.grids)
    row = frame.row(0, named=True)
    assert is_plan(row, plan, modules)
    assert not is_plan(row, replace(plan, grids=grids), modules)
    facts = dict(plans._facts(plan, {}, memory_gib=80.0))
    assert facts["long samples"] == "over up to 4 replicas of the LLM"
    assert "long samples" not in dict(plans._facts(replace(plan, grids=grids), {}, memory_gib=80.0))
    labels = plan_labels(frame, frame, modules)
    assert [" cp4" in label for label in labels] == [cp == 4 for cp in frame["llm_cp"]]


@pytest.mark.parametrize("counts", [None, 0])
def test_samples_whose_medias_sizes_are_unknown_are_not_shared(tiny_spec, search, counts):
    """Files of older versions have items without the sizes of media, which could not be divided."""
    frames = [30 if number % 32 == 5 else 1 for number in range(64)]
    drawn = samples_of(tiny_spec, [[MediumSize(64, 48, count, 500_000, 0, 2_000_000)] for count in frames], [20] * 64)
    media = None if counts is None else MediaSizes(np.zeros((0, 6), np.int32), np.zeros(64, np.int64))
    found = search(make_config(4, 32, cp_sizes=(1, 4), memory_gib=1e3), samples=replace(drawn, media=media))
    assert {own.plan.grid("llm").cp for own in found.candidates} == {1}
    assert 4 in {own.plan.grid("llm").cp for own in search(make_config(4, 32, cp_sizes=(4,)), samples=drawn).candidates}


def test_where_samples_are_alike_nothing_changes(even, search):
    sharing, plain = (
        search(make_config(4, 512, cp_sizes=sizes, search_batches=1), samples=even) for sizes in ((1, 2, 4, 8), (1,))
    )
    assert sharing == plain


def test_where_many_samples_fill_the_memory_shares_are_priced_beside_whole_ones(tiny_spec, search):
    """None outweighs its batch."""
    long = samples_of(tiny_spec, [[]] * 64, [2000 + number % 10 for number in range(64)])
    one_by_one = MANY | {"num_microbatches": 8, "checkpointing": False}
    roomy = search(make_config(4, 32, memory_gib=1e3, fixed=one_by_one), samples=long).best
    memory_gib = 0.9 * max(roomy.memory_bytes.values()) / 2**30
    whole, shared = (
        search(make_config(4, 32, cp_sizes=sizes, memory_gib=memory_gib), samples=long) for sizes in ((1,), (1, 2, 4))
    )
    assert whole.best.plan.checkpointing
    assert set(candidates_frame(shared)["llm_cp"]) != {1}
    assert shared.best.step_s <= whole.best.step_s


def test_what_fits_only_if_it_is_shared_is_found(long_tailed, search):
    roomy = make_config(4, 32, memory_gib=1e3, fixed=MANY | {"checkpointing": False})
    needed = max(search(roomy, samples=long_tailed).best.memory_bytes.values()) / 2**30
    tight = with_memory(roomy, 0.7 * needed)
    with pytest.raises(UserError, match="no plan fits"):
        search(tight, samples=long_tailed)
    tight = replace(tight, plan=replace(tight.plan, cp_sizes=[1, 4]))
    assert search(tight, samples=long_tailed).best.plan.grid("llm").cp == 4


def test_a_pinned_cp_holds_and_one_that_no_plan_can_have_names_the_pin(even, search):
    found = search(make_config(4, 32, fixed=MANY | {"llm": {"cp": 2}}), samples=even)
    assert {own.plan.grid("llm").cp for own in found.candidates} == {2}
    with pytest.raises(UserError) as caught:
        search(make_config(4, 32, fixed={"llm": {"cp": 8}}), samples=even)
    message = str(caught.value)
    assert "\n" not in message
    assert "no plan for 4 devices has groups of 8 LLM replicas that share samples (`plan.fixed.llm.cp`" in message


def test_cp_sizes_without_1_share_where_nothing_is_long(even, search):
    found = search(make_config(4, 512, cp_sizes=[2, 4], search_batches=1), samples=even)
    assert {own.plan.grid("llm").cp for own in found.candidates} == {2}
    with pytest.raises(UserError, match=r"groups of 2 LLM replicas .*`plan\.cp_sizes`"):
        search(make_config(2, 32, num_nodes=2, cp_sizes=[2]), samples=even)


def test_a_plan_file_keeps_cp_and_one_that_cannot_be_gets_a_line(long_tailed, search):
    plan = search(make_config(4, 32, cp_sizes=[1, 4], memory_gib=1e3), samples=long_tailed).best.plan
    written = yaml.safe_load(yaml.safe_dump(plan.to_dict()))
    assert plan_from_dict(written) == plan
    for cp, wanted in {
        3: "power of two that divides dp",
        16: "power of two that divides dp",
        0: "cp",
        "x": "cp",
    }.items():
        written["grids"]["llm"]["cp"] = cp
        with pytest.raises(UserError, match=wanted) as caught:
            plan_from_dict(written)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="only the LLM has it"):
        Grid(module="vision", num_ranks=4, cp=2)
    with pytest.raises(UserError, match="one must divide the other"):
        Grid(module="llm", num_ranks=12, cp=4, sharding="hybrid", shards=6)
