import subprocess
import sys
from itertools import chain, combinations, pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from dflop import BalancedBatchSampler
from dflop.balance import balanced_cells
from dflop.balance.replicas import ByteLimit, DoesNotFit, cell_loads, unbalanced_cells, waiting_loads
from dflop.balance.unequal import unequal_cells
from dflop.base import UserError


def sampler_of(costs, batch_size, num_replicas, rank, *, padded=False, **options) -> BalancedBatchSampler:
    return BalancedBatchSampler(costs, batch_size, num_replicas, rank, padded=padded, **options)


def ranks(costs, batch_size, num_replicas, **options) -> list[BalancedBatchSampler]:
    return [sampler_of(costs, batch_size, num_replicas, rank, **options) for rank in range(num_replicas)]


def torch_ranks(num_samples, batch_size, num_replicas, *, epoch=0, shuffle=True, seed=0, drop_last=False):
    """What torch gives every rank: `batches[rank][number]`."""
    batches = []
    for rank in range(num_replicas):
        sampler = DistributedSampler(range(num_samples), num_replicas, rank, shuffle, seed, drop_last)
        sampler.set_epoch(epoch)
        batches.append(list(BatchSampler(sampler, batch_size, drop_last)))
    return batches


def samples_of(batches: list[list[list[int]]], begin: int = 0, end: int | None = None) -> list[int]:
    """The samples of these batches of all ranks, sorted."""
    return sorted(sample for rank_batches in batches for batch in rank_batches[begin:end] for sample in batch)


def steps(batches: list[list[list[int]]], num_accumulation_steps: int) -> list[list[int]]:
    starts = range(0, len(batches[0]), num_accumulation_steps)
    return [samples_of(batches, start, start + num_accumulation_steps) for start in starts]


def drawn_costs(num_samples: int, num_columns: int = 1, seed: int = 0) -> np.ndarray:
    """Skewed, with zeros and a few giants."""
    rng = np.random.default_rng(seed)
    costs = rng.lognormal(5, 1, (num_samples, num_columns)) * (rng.random((num_samples, num_columns)) > 0.2)
    return np.where(rng.random((num_samples, 1)) < 0.02, 50_000.0, costs)


layouts = st.fixed_dictionaries(
    {
        "num_samples": st.integers(1, 150),
        "batch_size": st.integers(1, 5),
        "num_replicas": st.integers(1, 6),
        "num_accumulation_steps": st.integers(1, 4),
        "seed": st.integers(0, 3),
        "epoch": st.integers(0, 3),
        "drop_last": st.booleans(),
        "shuffle": st.booleans(),
        "num_columns": st.integers(1, 3),
        "padded": st.booleans(),
        "sync": st.sampled_from(["microbatch", "step"]),
        "equal_sizes": st.booleans(),
    }
).map(lambda drawn: drawn | {"num_columns": 1 if drawn["padded"] else drawn["num_columns"]})


@given(layouts)
def test_every_step_holds_the_samples_that_torch_would_give_it_in_as_many_batches(layout):
    num_samples, batch_size, num_replicas = layout["num_samples"], layout["batch_size"], layout["num_replicas"]
    order = {name: layout[name] for name in ("seed", "drop_last", "shuffle")}
    theirs = torch_ranks(num_samples, batch_size, num_replicas, epoch=layout["epoch"], **order)
    division = {name: layout[name] for name in ("num_accumulation_steps", "padded", "sync", "equal_sizes")}
    costs = drawn_costs(num_samples, layout["num_columns"])
    if not theirs[0]:
        with pytest.raises(UserError, match="do not fill one batch"):
            sampler_of(costs, batch_size, num_replicas, 0, **order, **division)
        return
    samplers = ranks(costs, batch_size, num_replicas, **order, **division)
    for sampler in samplers:
        sampler.set_epoch(layout["epoch"])
    ours = [list(sampler) for sampler in samplers]
    assert all(batch for batches in ours for batch in batches)
    if layout["equal_sizes"]:
        assert [list(map(len, batches)) for batches in ours] == [list(map(len, batches)) for batches in theirs]
    assert [len(sampler) for sampler in samplers] == [len(batches) for batches in theirs]
    assert steps(ours, layout["num_accumulation_steps"]) == steps(theirs, layout["num_accumulation_steps"])
    if not layout["drop_last"] and num_samples % num_replicas == 0:
        assert samples_of(ours) == list(range(num_samples))


@given(layouts)
def test_the_unbalanced_cells_are_those_of_torch(layout):
    num_samples, num_replicas = layout["num_samples"] * layout["num_replicas"], layout["num_replicas"]
    cell = unbalanced_cells(num_samples, num_replicas, layout["batch_size"])
    for rank, batches in enumerate(torch_ranks(num_samples, layout["batch_size"], num_replicas, shuffle=False)):
        for number, batch in enumerate(batches):
            assert np.flatnonzero(cell == number * num_replicas + rank).tolist() == batch


def step_loads(batches, costs, padded: bool) -> np.ndarray:
    """Cost of every batch of all ranks, `[num_microbatches, num_replicas, num_columns]`, slowly."""
    return np.array(
        [
            [len(batch) * costs[batch].max(0) if padded else costs[batch].sum(0) for batch in rank_batches]
            for rank_batches in batches
        ]
    ).swapaxes(0, 1)


@given(layouts)
def test_ranks_never_wait_longer_than_with_torch(layout):
    """Each column counts in proportion to its sum, the scale on which the assignment is worked out."""
    num_samples = layout["num_samples"] * layout["num_replicas"]
    padded, batch_size, num_replicas = layout["padded"], layout["batch_size"], layout["num_replicas"]
    costs = drawn_costs(num_samples, layout["num_columns"], layout["seed"])
    accumulation, sync = layout["num_accumulation_steps"], layout["sync"]
    options = {"num_accumulation_steps": accumulation, "padded": padded, "sync": sync}
    options["equal_sizes"] = layout["equal_sizes"]
    samplers = ranks(costs, batch_size, num_replicas, **options)
    ours, theirs = [list(sampler) for sampler in samplers], torch_ranks(num_samples, batch_size, num_replicas)
    for start in range(0, len(ours[0]), accumulation):
        loads = [
            step_loads([rank_batches[start : start + accumulation] for rank_batches in side], costs, padded)
            for side in (ours, theirs)
        ]
        samples = samples_of(ours, start, start + accumulation)
        sums = np.maximum(costs[samples].sum(axis=0), 1e-300)
        ours_cost, torch_cost = (waiting_loads(load / sums, sync) for load in loads)
        assert ours_cost <= torch_cost + 1e-9


@pytest.mark.parametrize("sync", ["microbatch", "step"])
@pytest.mark.parametrize(("num_replicas", "batch_size", "accumulation"), [(4, 8, 1), (8, 4, 4), (16, 8, 2)])
def test_many_samples_of_moderate_sizes_end_within_three_percent_of_even(num_replicas, batch_size, accumulation, sync):
    costs = np.random.default_rng(1).lognormal(5, 0.7, (num_replicas * batch_size * accumulation, 1))
    cell = balanced_cells(costs, num_replicas, batch_size, sync=sync)
    even = costs.sum() / num_replicas
    assert waiting_loads(cell_loads(costs, cell, num_replicas), sync) < 1.03 * even


def best_step(costs: np.ndarray, padded: bool) -> float:
    """The least that two ranks with two batches of two can need where they wait once a step, by trying everything."""
    best = np.inf
    for order in permutations(range(8)):
        batches = costs[list(order)].reshape(2, 2, 2)  # rank, microbatch, sample
        loads = 2 * batches.max(axis=2) if padded else batches.sum(axis=2)
        best = min(best, loads.sum(axis=1).max())
    return best


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_wait_once_a_step_are_as_fast_as_can_be(padded, seed):
    costs = np.random.default_rng(seed).lognormal(5, 1, 8)
    cell = balanced_cells(costs[:, None], 2, 2, padded=padded, sync="step")
    found = waiting_loads(cell_loads(costs[:, None], cell, 2, padded=padded), "step")
    assert found <= 1.02 * best_step(costs, padded)


@given(st.lists(st.integers(1, 40), min_size=4, max_size=9), st.integers(2, 4))
def test_padded_batches_of_any_sizes_are_the_best_there_are(lengths, num_replicas):
    """Against every way to cut the lengths, longest first: no other batches have a smaller largest one."""
    lengths = sorted(lengths, reverse=True)[: len(lengths) // num_replicas * num_replicas]
    cell = unequal_cells(np.array(lengths)[:, None], num_replicas, len(lengths) // num_replicas, padded=True)
    found = cell_loads(np.array(lengths)[:, None], cell, num_replicas, padded=True).max()
    best = min(
        max((end - begin) * lengths[begin] for begin, end in pairwise((0, *cuts, len(lengths))))
        for cuts in combinations(range(1, len(lengths)), num_replicas - 1)
    )
    assert found <= best * (1 + 1e-9)


@given(st.lists(st.integers(1, 40), min_size=4, max_size=8))
def test_padded_steps_of_any_sizes_come_near_the_best_there_are(lengths):
    """Two ranks of two batches, against every way to cut the lengths and to pair the batches."""
    lengths = sorted(lengths, reverse=True)[: len(lengths) // 4 * 4]
    costs = np.array(lengths)[:, None]
    cell = unequal_cells(costs, 2, len(lengths) // 4, padded=True, sync="step")
    found = waiting_loads(cell_loads(costs, cell, 2, padded=True), "step")
    best = np.inf
    for cuts in combinations(range(1, len(lengths)), 3):
        loads = [(end - begin) * lengths[begin] for begin, end in pairwise((0, *cuts, len(lengths)))]
        best = min(best, *(max(loads[0] + loads[k], sum(loads) - loads[0] - loads[k]) for k in (1, 2, 3)))
    assert found <= 1.15 * best


@pytest.mark.parametrize("sync", ["microbatch", "step"])
def test_padded_batches_of_any_sizes_are_evener_than_equal_ones_where_lengths_differ_much(sync):
    costs = np.random.default_rng(2).lognormal(6, 1.2, (16 * 4 * 2, 1))
    needed = [
        waiting_loads(cell_loads(costs, cells(costs, 16, 4, padded=True, sync=sync), 16, padded=True), sync)
        for cells in (unequal_cells, balanced_cells)
    ]
    assert needed[0] <= 0.85 * needed[1]


def test_a_padded_batch_of_few_samples_keeps_a_limit_of_bytes_that_equal_batches_exceed():
    held = np.array([8] + [1] * 15)
    options = {"padded": True, "sample_bytes": held, "max_batch_bytes": 8}
    ours = [list(sampler) for sampler in ranks(held, 4, 4, equal_sizes=False, **options)]
    assert max(len(batch) * held[batch].max() for batches in ours for batch in batches) <= 8
    assert samples_of(ours) == list(range(16))
    with pytest.raises(UserError, match=r"sample 0 has 8 bytes, 4 times that .* or equal_sizes=False"):
        sampler_of(held, 4, 4, 0, **options)


@pytest.mark.parametrize("padded", [False, True])
def test_batches_that_no_sizes_can_keep_within_the_limit_are_told(padded):
    held = np.full(8, 5)
    sampler = sampler_of(held, 2, 2, 0, padded=padded, equal_sizes=False, sample_bytes=held, max_batch_bytes=9)
    with pytest.raises(UserError, match=r"no way was found .* step 0"):
        list(sampler)


@pytest.mark.parametrize("padded", [False, True])
def test_each_way_of_waiting_has_an_assignment_of_its_own_that_is_better_for_it(padded):
    costs = np.random.default_rng(2).lognormal(6, 1.2, (16 * 2 * 4, 1))
    cells = {sync: balanced_cells(costs, 16, 2, padded=padded, sync=sync) for sync in ("microbatch", "step")}
    for sync, other in (("microbatch", "step"), ("step", "microbatch")):
        suited, unsuited = (
            waiting_loads(cell_loads(costs, cells[name], 16, padded=padded), sync) for name in (sync, other)
        )
        assert suited < unsuited


@pytest.mark.parametrize("sync", ["microbatch", "step"])
def test_a_limit_of_bytes_is_kept_and_costs_stay_even(sync):
    """Costs and bytes are unrelated here, so that without the limit the even batches exceed it."""
    rng = np.random.default_rng(0)
    costs, held = rng.lognormal(5, 1, (128, 1)), rng.integers(1, 1000, 128)
    free = balanced_cells(costs, 4, 8, sync=sync)
    limited = balanced_cells(costs, 4, 8, sync=sync, limit=ByteLimit(sample_bytes=held, max_bytes=4300))
    most = [cell_loads(held[:, None], cell, 4).max() for cell in (free, limited)]
    assert most[0] > 4300 >= most[1]
    needed = [waiting_loads(cell_loads(costs, cell, 4), sync) for cell in (free, limited)]
    assert needed[1] < 1.02 * needed[0]


@pytest.mark.parametrize("sync", ["microbatch", "step"])
def test_with_a_limit_steps_still_hold_the_samples_of_torch(sync):
    held = np.random.default_rng(0).integers(1, 1000, 250)
    options = {"num_accumulation_steps": 4, "sync": sync, "sample_bytes": held, "max_batch_bytes": 5000}
    batches = [list(sampler) for sampler in ranks(drawn_costs(250), 8, 4, **options)]
    assert step_loads([rank_batches[:-1] for rank_batches in batches], held[:, None], False).max() <= 5000
    assert steps(batches, 4) == steps(torch_ranks(250, 8, 4), 4)


@given(
    st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(0, 50), st.sampled_from(["microbatch", "step"])
)
def test_a_limit_that_can_be_kept_is_kept(batch_size, num_replicas, accumulation, seed, sync):
    """The limit is a fifth above the largest batch of some assignment; costs are the bytes themselves."""
    rng = np.random.default_rng(seed)
    num_samples = batch_size * num_replicas * accumulation
    held = (1000 * rng.lognormal(0, 0.7, num_samples)).astype(np.int64) + 1
    there = balanced_cells(held[:, None], num_replicas, batch_size)
    most = int(1.2 * cell_loads(held[:, None], there, num_replicas).max())
    limit = ByteLimit(sample_bytes=held, max_bytes=most)
    cell = balanced_cells(rng.random((num_samples, 1)), num_replicas, batch_size, sync=sync, limit=limit)
    assert cell_loads(held[:, None], cell, num_replicas).max() <= most


def test_a_limit_that_nothing_can_keep_is_told_from_one_that_can():
    limit = ByteLimit(sample_bytes=np.array([5, 5, 5, 1]), max_bytes=9)
    with pytest.raises(DoesNotFit):
        balanced_cells(np.ones((4, 1)), 2, 2, limit=limit)


def test_while_a_giant_is_computed_the_other_ranks_have_the_large_samples():
    costs = np.array([1000.0] + [100.0] * 11 + [10.0] * 20)[:, None]
    loads = cell_loads(costs, balanced_cells(costs, 4, 2), 4)[:, :, 0]
    with_giant, *others = loads
    assert with_giant.max() == 1010
    assert min(with_giant) >= 200
    assert all(load.max() <= 200 for load in others)


def test_modules_of_unlike_units_are_balanced_at_once():
    rng = np.random.default_rng(0)
    crops, tokens = rng.integers(1, 38, 256), rng.integers(100, 8000, 256)
    costs = np.stack([crops, tokens], axis=1)
    loads = cell_loads(costs, balanced_cells(costs, 8, 8), 8)
    assert (loads.max(axis=(0, 1)) < 1.1 * loads.mean(axis=(0, 1))).all()


def test_padded_batches_hold_samples_of_like_length():
    lengths = np.random.default_rng(0).permutation(np.repeat([10, 20, 30, 40], 8))
    for sampler in ranks(lengths, 4, 2, num_accumulation_steps=4, padded=True):
        assert all(len(set(lengths[batch])) == 1 for batch in sampler)


@pytest.mark.parametrize(
    "costs", [[3, 1, 2, 5], (3, 1, 2, 5), np.array([3, 1, 2, 5]), torch.tensor([3.0, 1, 2, 5], dtype=torch.bfloat16)]
)
def test_costs_may_come_in_any_container(costs):
    assert list(sampler_of(costs, 2, 2, 0)) == list(sampler_of([3, 1, 2, 5], 2, 2, 0))


def test_a_column_of_a_hugging_face_dataset_is_read_at_once():
    datasets = pytest.importorskip("datasets")
    column = datasets.Dataset.from_dict({"length": [3, 1, 2, 5]})["length"]
    assert list(sampler_of(column, 2, 2, 0)) == list(sampler_of([3, 1, 2, 5], 2, 2, 0))


def test_a_memory_mapped_table_of_costs_stays_on_disk(tmp_path):
    np.save(tmp_path / "costs.npy", np.arange(100, dtype=np.int32))
    costs = np.load(tmp_path / "costs.npy", mmap_mode="r")
    assert np.shares_memory(sampler_of(costs, 2, 2, 0)._costs, costs)


def test_a_loader_with_workers_gives_the_batches_in_order():
    sampler = sampler_of(drawn_costs(64), 4, 2, 1, num_accumulation_steps=2)
    loader = DataLoader(list(range(64)), batch_sampler=sampler, num_workers=2)
    assert len(loader) == 8
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        assert [batch.tolist() for batch in loader] == list(sampler)


def consume(sampler: BalancedBatchSampler, num_batches: int) -> list[list[int]]:
    iterator = iter(sampler)
    return [next(iterator) for _ in range(num_batches)]


@given(st.integers(0, 13), st.integers(0, 2))
def test_a_resumed_epoch_goes_on_with_the_next_batch(num_batches, epoch):
    options = {"num_accumulation_steps": 3, "seed": 7}
    whole, first, second = (sampler_of(drawn_costs(101), 2, 4, 1, **options) for _ in range(3))
    whole.set_epoch(epoch)
    first.set_epoch(epoch)
    begun = consume(first, num_batches)
    state = first.state_dict()
    second.load_state_dict(state)
    assert second.state_dict() == state
    second.set_epoch(epoch)
    assert begun + list(second) == list(whole)
    second.set_epoch(epoch + 1)
    whole.set_epoch(epoch + 1)
    assert list(second) == list(whole)


@pytest.mark.parametrize(("batch_size", "num_replicas", "accumulation"), [(8, 1, 2), (1, 16, 1), (4, 2, 2), (2, 2, 4)])
def test_another_number_of_ranks_goes_on_with_the_same_steps(batch_size, num_replicas, accumulation):
    costs = drawn_costs(160)
    before = sampler_of(costs, 2, 4, 0, num_accumulation_steps=2)
    consume(before, 6)
    after = ranks(costs, batch_size, num_replicas, num_accumulation_steps=accumulation)
    for sampler in after:
        sampler.load_state_dict(before.state_dict())
    expected = steps(torch_ranks(160, 2, 4), 2)[3:]
    assert steps([list(sampler) for sampler in after], accumulation) == expected


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("num_columns", [1, 2])
def test_samples_of_like_cost_share_a_step_out_of_those_of_several_steps(num_columns, drop_last):
    costs, layout = drawn_costs(150, num_columns), {"num_accumulation_steps": 2, "drop_last": drop_last}
    plain = steps([list(own) for own in ranks(costs, 2, 2, **layout)], 2)
    sampler = ranks(costs, 2, 2, megabatch_steps=4, **layout)
    grouped = steps([list(own) for own in sampler], 2)
    assert [len(own) for own in grouped] == [len(own) for own in plain]
    orders = set()
    for begin in range(0, len(plain), 4):
        some = [step for step in grouped[begin : begin + 4] if len(step) == 8]
        assert grouped[begin + len(some) : begin + 4] == plain[begin + len(some) : begin + 4]  # an incomplete one
        drawn = sorted(chain.from_iterable(some))
        assert drawn == sorted(chain.from_iterable(plain[begin : begin + len(some)]))
        weights = (costs / costs[drawn].sum(axis=0)).sum(axis=1)
        places = sorted(range(len(some)), key=lambda place: weights[some[place]].max())
        for low, high in pairwise(places):
            assert weights[some[low]].max() <= weights[some[high]].min() * (1 + 1e-9)
        orders.add(tuple(places))
    assert len(orders) > 2  # the dearest step is not always the last
    for own in sampler:
        own.set_epoch(1)
    assert steps([list(own) for own in sampler], 2) != grouped


def test_padded_batches_of_two_ranks_are_padded_little_by_sharing_steps_with_their_like():
    costs = np.random.default_rng(0).lognormal(6, 1, 4096)
    plain, grouped = ([list(own) for own in ranks(costs, 8, 2, padded=True, megabatch_steps=n)] for n in (1, 25))
    padded = [sum(len(batch) * costs[batch].max() for own in some for batch in own) for some in (plain, grouped)]
    assert padded[1] < 0.6 * padded[0]


def test_all_ranks_hold_the_same_state():
    samplers = ranks(drawn_costs(64), 2, 4, num_accumulation_steps=2)
    for sampler in samplers:
        consume(sampler, 3)
    assert len({str(sampler.state_dict()) for sampler in samplers}) == 1


def test_a_finished_epoch_does_not_take_back_the_next_one():
    first, second = (sampler_of(drawn_costs(32), 2, 2, 0) for _ in range(2))
    list(first)
    second.set_epoch(1)
    second.load_state_dict(first.state_dict())
    first.set_epoch(1)
    assert list(second) == list(first)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_batches", [0, 5, 8])
def test_a_stateful_loader_resumes_where_training_was_and_not_where_it_prefetched(num_workers, num_batches):
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata (pip install '.[dev]')")

    def loader():
        sampler = sampler_of(drawn_costs(64), 4, 2, 1, num_accumulation_steps=2)
        data = list(range(64))
        return sampler, stateful.StatefulDataLoader(data, batch_sampler=sampler, num_workers=num_workers)

    sampler, first = loader()
    iterator = iter(first)
    begun = [next(iterator).tolist() for _ in range(num_batches)]
    state = first.state_dict()
    _, second = loader()
    second.load_state_dict(state)
    assert begun + [batch.tolist() for batch in second] == list(sampler)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_whose_epoch_ended_goes_on_with_the_epoch_that_is_set(num_workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata (pip install '.[dev]')")
    samplers = [sampler_of(drawn_costs(64), 4, 2, 1) for _ in range(2)]
    first, second = (
        stateful.StatefulDataLoader(list(range(64)), batch_sampler=sampler, num_workers=num_workers)
        for sampler in samplers
    )
    list(first)
    second.load_state_dict(first.state_dict())
    for sampler in samplers:
        sampler.set_epoch(1)
    assert [batch.tolist() for batch in second] == [batch.tolist() for batch in first]


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"costs": [1.0, NAN, 2.0, 3.0]}, r"costs: sample 1 has nan, .*\(1 of 4 samples"),
        ({"costs": [1.0, 2.0, INFINITE, 3.0]}, "sample 2 has inf"),
        ({"costs": [[1, 2], [3, -4], [1, 1], [1, 1]]}, "sample 1 has 3, -4"),
        ({"costs": []}, r"at least one sample's; these are float64 of shape \[0\]"),
        ({"costs": [[1, 2], [3]]}, "same number of columns"),
        ({"costs": ["a", "b"]}, "costs must be numbers"),
        ({"costs": np.ones((2, 2, 2))}, r"shape \[2, 2, 2\]"),
        ({"costs": [[1, 2]] * 4, "padded": True}, "one cost a sample, its length, not 2"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"batch_size": 1.5}, "batch_size=1.5 must be a whole number"),
        ({"num_replicas": 0}, "num_replicas=0 must be at least 1"),
        ({"rank": 2}, "rank=2 is not among the ranks 0 to 1 of num_replicas=2"),
        ({"rank": -1}, "rank=-1 is not among"),
        ({"num_accumulation_steps": 0}, "num_accumulation_steps=0 must be"),
        ({"megabatch_steps": 0}, "megabatch_steps=0 must be"),
        ({"drop_last": True, "batch_size": 3}, "4 samples do not fill one batch of 3 .* use batch_size <= 2"),
        ({"drop_last": True, "num_replicas": 8}, "use num_replicas <= 4, or drop_last=False"),
        ({"num_replicas": None}, "init_process_group"),
        ({"sync": "epoch"}, "sync='epoch' must be one of 'microbatch', 'step'"),
        ({"max_batch_bytes": 7}, "give both or neither"),
        ({"sample_bytes": [1, 2, 3], "max_batch_bytes": 7}, "one number for each of 4 samples"),
        ({"sample_bytes": [1, 9, 8, 3], "max_batch_bytes": 7}, r"sample 1 has 9 bytes, more than .*=7 \(2 of 4"),
        ({"sample_bytes": [1, 4, 2, 3], "max_batch_bytes": 7, "padded": True}, "sample 1 .* 2 times that in a padded"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(wrong, message):
    right = {"costs": [1, 2, 3, 4], "batch_size": 2, "num_replicas": 2, "rank": 0}
    with pytest.raises(UserError, match=message) as caught:
        sampler_of(**right | wrong)
    assert "\n" not in str(caught.value)


def test_whether_batches_are_padded_must_be_said():
    with pytest.raises(TypeError, match="padded"):
        BalancedBatchSampler([1, 2, 3, 4], 2, 2, 0)


@pytest.mark.parametrize("largest", [6, 7])
def test_an_epoch_in_which_a_sample_fits_into_no_batch_does_not_begin(largest):
    """With the smallest other sample of its step, the largest has 8 or 9 bytes; 8 are allowed."""
    held = np.full(64, 2)
    held[17] = largest
    sampler = sampler_of(np.ones(64), 2, 4, 0, sample_bytes=held, max_batch_bytes=8)
    if largest == 6:
        assert len(list(sampler)) == 8
    else:
        with pytest.raises(UserError, match=r"sample 17 has 7 bytes; with the smallest 1 of its step .* has 9 bytes"):
            iter(sampler)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"seed": 1}, "the state is of seed=1, but this sampler has seed=0"),
        ({"num_samples": 63}, "num_samples=63, but this sampler has num_samples=64"),
        ({"samples_per_step": 32}, "samples_per_step=32, but this sampler has samples_per_step=16"),
        ({"megabatch_steps": 4}, "megabatch_steps=4, but this sampler has megabatch_steps=1"),
        ({"num_replicas": 4}, r"after 1 of 2 batches of a step, dealt with num_replicas=4 \(now 2\)"),
        ({"num_steps": -1}, "num_steps=-1 must be at least 0"),
    ],
)
def test_a_state_of_something_else_is_refused(state, message):
    sampler = sampler_of(drawn_costs(64), 4, 2, 0, num_accumulation_steps=2)
    consume(sampler, 3)
    with pytest.raises(UserError, match=message):
        sampler.load_state_dict(sampler.state_dict() | state)


@pytest.mark.parametrize("state", [{}, None, {"epoch": 3}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(UserError, match=r"not a state of BalancedBatchSampler: it lacks .*num_steps"):
        sampler_of(drawn_costs(64), 4, 2, 0).load_state_dict(state)


def test_costs_of_nothing_are_dealt_all_the_same():
    batches = [list(sampler) for sampler in ranks(np.zeros((12, 2)), 2, 3)]
    assert samples_of(batches) == list(range(12))


def test_the_sampler_brings_no_database_no_solver_and_no_model_library():
    script = (
        "import sys; from dflop import BalancedBatchSampler as B;"
        "assert len(list(B([3, 1, 2, 5], 2, 2, 0, padded=False))) == 1;"
        "loaded = {name.split('.')[0] for name in sys.modules};"
        "print(*sorted(loaded & {'duckdb', 'mip', 'transformers', 'polars', 'pyarrow', 'pydantic', 'vl_convert'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
