"""Plans that would recompute layers keep some layers' saved tensors in host memory, as many as links carry for free."""

from dataclasses import replace

import pytest
import yaml
from spaces import make_config

from dflop.balance import LPT
from dflop.base import UserError
from dflop.costs import HOST, Link, LinkModel
from dflop.plan import Grid, Plan, leaving, plan_from_dict
from dflop.report.charts.plans import is_plan, plan_labels
from dflop.search import GroupedBatches, PlanPricer, candidates_frame, describe_choice

FEW = {
    "fixed": {"num_microbatches": 1},
    "placements": ["colocated"],
    "shardings": ["optimizer"],
    "cp_sizes": (1,),
    "device_model": "h100-80g",
}


@pytest.fixture(scope="module")
def tight(search):
    """A config in whose memory the fastest plan fits only if it recomputes."""
    roomy = search(make_config(2, 8, memory_gib=1e3, **FEW)).candidates[0]
    return make_config(2, 8, memory_gib=0.8 * max(roomy.memory_bytes.values()) / 2**30, **FEW)


def with_host_memory(config, gib):
    return replace(config, cluster=replace(config.cluster, host_memory_gib=gib))


def test_layers_are_offloaded_rather_than_recomputed(tight, search, tiny_spec):
    plain, found = search(tight), search(with_host_memory(tight, 64.0))
    assert plain.best.plan.checkpointing
    assert not any(any(grid.offloaded) for candidate in plain.candidates for grid in candidate.plan.grids)
    plan = found.best.plan
    assert any(any(grid.offloaded) for grid in plan.grids)
    assert found.best.step_s < plain.best.step_s
    assert max(found.best.memory_bytes.values()) <= tight.cluster.memory_gib * 2**30
    assert plan_from_dict(plan.to_dict()) == plan
    # A table of plans has it, and tells such plans from others.
    frame = candidates_frame(found)
    (place,) = (place for place, row in enumerate(frame.iter_rows(named=True)) if is_plan(row, plan, ["vision", "llm"]))
    assert " · host " in plan_labels(frame, frame, ["vision", "llm"])[place]
    for grid in plan.grids:
        assert (frame[f"{grid.module}_offloaded"][place] is None) == (not grid.offloaded)


@pytest.fixture
def few_values_at_a_time(monkeypatch):
    """Parts of the optimiser's state that are small beside it, as of a real model."""
    monkeypatch.setattr(leaving, "_MOST_VALUES", 64)


def test_the_optimiser_is_offloaded_where_nothing_fits_else(search, costs, tiny_spec, samples, few_values_at_a_time):
    config = make_config(2, 8, memory_gib=1e3, **FEW)
    pinned = replace(config, plan=replace(config.plan, fixed=replace(config.plan.fixed, checkpointing=True)))
    least_bytes = min(max(own.memory_bytes.values()) for own in search(pinned).candidates)
    small = replace(config, cluster=replace(config.cluster, memory_gib=0.95 * least_bytes / 2**30))
    with pytest.raises(UserError, match=r"no plan fits into `cluster.memory_gib`"):
        search(small)
    found = search(with_host_memory(small, 64.0))
    best = found.best
    assert best.plan.offloads_optimizer
    assert max(best.memory_bytes.values()) <= small.cluster.memory_gib * 2**30
    assert plan_from_dict(best.plan.to_dict()) == best.plan
    assert "the optimiser's state" in yaml.safe_load(describe_choice(found, [], small, costs))["why"]
    # What comes and goes takes its time, which nothing hides on GPUs.
    on_gpus = replace(small, cluster=replace(small.cluster, device="cuda"))
    batches = GroupedBatches(on_gpus, tiny_spec, costs, samples)
    staying, away = (
        PlanPricer(replace(best.plan, offloads_optimizer=is_away), on_gpus, tiny_spec, costs, batches, LPT)
        for is_away in (False, True)
    )
    assert away.host_bytes() > staying.host_bytes()
    assert away.mean_step_s() > staying.mean_step_s()
    with pytest.raises(UserError, match=r"no plan fits"):  # the state alone is more than the node has
        search(with_host_memory(small, 1e-9))


def test_no_more_is_offloaded_than_the_node_holds(tight, search, costs, tiny_spec, samples):
    batches = GroupedBatches(tight, tiny_spec, costs, samples)

    def host_bytes(gib: float) -> float:
        plan = search(with_host_memory(tight, gib)).best.plan
        return PlanPricer(plan, tight, tiny_spec, costs, batches, LPT).host_bytes()

    most = host_bytes(64.0)
    of_a_node = most * tight.cluster.devices_per_node / 2**30
    assert 0 < host_bytes(0.8 * of_a_node) <= 0.8 * most
    assert host_bytes(1e-6) == 0


def test_a_pinned_plan_offloads_nothing(tight, search):
    pinned = replace(tight, plan=replace(tight.plan, fixed=replace(tight.plan.fixed, checkpointing=True)))
    assert search(with_host_memory(pinned, 64.0)).best.plan == search(pinned).best.plan


def test_all_microbatches_in_flight_count(tight, costs, tiny_spec, samples):
    """Colocated encoders compute all microbatches before the LLM does; it has one at a time."""
    batches = GroupedBatches(tight, tiny_spec, costs, samples)

    def host_bytes(num_microbatches: int, **offloaded: tuple[int, ...]) -> float:
        grids = (Grid(module=name, num_ranks=2, offloaded=offloaded.get(name, ())) for name in ("vision", "llm"))
        plan = Plan(placement="colocated", grids=tuple(grids), num_microbatches=num_microbatches)
        return PlanPricer(plan, tight, tiny_spec, costs, batches, LPT).host_bytes()

    assert host_bytes(4, vision=(1,)) >= 0.99 * host_bytes(1, vision=(1,))
    assert 0 < host_bytes(4, llm=(1,)) < 0.6 * host_bytes(1, llm=(1,))


def test_where_all_fits_nothing_is_offloaded(search):
    roomy = make_config(2, 8, memory_gib=1e3, **FEW)
    assert search(with_host_memory(roomy, 64.0)).best.plan == search(roomy).best.plan


def test_the_measured_link_counts_and_not_the_data_sheets(tight, search, costs):
    """One that carries nearly nothing offloads nothing; no device is known by the name `mine`."""
    config = with_host_memory(replace(tight, cluster=replace(tight.cluster, device_model="mine")), 64.0)
    num_offloaded = []
    for bytes_per_s in (1.0, 1e12):
        links = LinkModel({(HOST, "intra", 8): Link(0.0, bytes_per_s)})
        plan = search(config, costs=replace(costs, links=links)).best.plan
        num_offloaded.append(sum(sum(grid.offloaded) for grid in plan.grids))
    assert num_offloaded[0] == 0 < num_offloaded[1]


def test_a_device_without_a_data_sheet_has_no_known_link(tight, search):
    unknown = with_host_memory(replace(tight, cluster=replace(tight.cluster, device_model="mine")), 64.0)
    with pytest.raises(UserError, match=r"there is no sheet of `cluster.device_model` 'mine': measure, name another"):
        search(unknown)
