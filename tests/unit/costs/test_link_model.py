"""Links: the fit finds the latency and bandwidth that made the times, and carries gradient syncs to other rings."""

import os

import numpy as np
import polars as pl
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dflop.base import UserError
from dflop.costs import CostModel, Link, LinkModel, fit_costs, fit_links, measured_communicator_bytes, read_links
from dflop.costs.links import LinkGroup, communicator_row, groups_to_measure, sizes_up_to
from dflop.store import LINKS_SCHEMA, read_table

SIZES = sizes_up_to(64 * 2**20)
seconds = st.floats(1e-7, 1e-2)
bandwidths = st.floats(1e7, 1e12)


def measure(kind: str, scope: str, num_ranks: int, link: Link, sizes=SIZES, noise: float = 0.0) -> pl.DataFrame:
    """Three repeats of what this link would show."""
    rng = np.random.default_rng(0)
    rows = [
        (kind, scope, num_ranks, size, link.seconds(size) * float(np.exp(noise * rng.normal())), repeat)
        for repeat in range(3)
        for size in sizes
    ]
    return pl.DataFrame(rows, schema=LINKS_SCHEMA, orient="row")


def fit(*frames: pl.DataFrame) -> LinkModel:
    return LinkModel.from_rows(fit_links(pl.concat(frames)).iter_rows(named=True))


@given(latency_s=seconds, bytes_per_s=bandwidths)
def test_the_latency_and_bandwidth_that_made_the_times_are_found(latency_s, bytes_per_s):
    link = Link(latency_s, bytes_per_s)
    table = fit_links(measure("p2p", "intra", 2, link))
    found = LinkModel.from_rows(table.iter_rows(named=True)).find("p2p", "intra", 2)
    for size in SIZES:
        assert found.seconds(size) == pytest.approx(link.seconds(size), rel=1e-6)
    assert table.select("kind", "scope", "num_ranks", "num_points").rows() == [("p2p", "intra", 2, 9)]
    assert table["median_error"].item() < 1e-6


def test_short_transfers_weigh_as_much_as_long_ones():
    link = Link(1e-4, 1e9)
    noisy = measure("p2p", "intra", 2, link, noise=0.1)
    for size in SIZES:
        assert fit(noisy).find("p2p", "intra", 2).seconds(size) == pytest.approx(link.seconds(size), rel=0.2)
    assert 0.01 < fit_links(noisy)["median_error"].item() < 0.3


def test_a_communicator_is_no_link_and_its_most_bytes_count():
    links = measure("p2p", "intra", 2, Link(1e-4, 1e9))
    rows = [("communicator", scope, 16, num_bytes, 0.5, 0) for scope, num_bytes in (("intra", 10**8), ("inter", 2**28))]
    with_memory = pl.concat([links, pl.DataFrame(rows, schema=LINKS_SCHEMA, orient="row")])
    assert fit_links(with_memory).equals(fit_links(links))
    assert measured_communicator_bytes(with_memory) == 2**28
    assert measured_communicator_bytes(links) is None


def test_a_communicator_takes_what_the_device_has_less_when_it_was_used():
    free = iter([70 * 2**30, 69 * 2**30])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        # A rank alone has no next one, so the messages are left out.
        row = communicator_row("intra", torch.device("cpu"), lambda: next(free))
    finally:
        dist.destroy_process_group()
    assert row[:4] == ("communicator", "intra", 1, 2**30)


def test_a_single_slow_repeat_changes_nothing():
    clean = measure("p2p", "intra", 2, Link(1e-4, 1e9))
    disturbed = clean.with_columns(seconds=pl.when(pl.col("repeat") == 1).then(9.0).otherwise(pl.col("seconds")))
    assert fit_links(disturbed).equals(fit_links(clean))


@given(st.lists(st.floats(1e-6, 10.0), min_size=9, max_size=9))
def test_whatever_was_measured_more_bytes_never_take_less_time(measured_s):
    frame = pl.DataFrame(
        [("p2p", "inter", 2, size, taken, 0) for size, taken in zip(SIZES, measured_s, strict=True)],
        schema=LINKS_SCHEMA,
        orient="row",
    )
    times = fit(frame).find("p2p", "inter", 2).seconds(np.geomspace(1, 1e10, 50))
    assert np.isfinite(times).all()
    assert (times >= 0).all()
    assert (np.diff(times) >= 0).all()


def test_links_are_fitted_apart():
    near, far, ring = Link(1e-5, 1e11), Link(1e-4, 1e10), Link(3e-5, 5e10)
    model = fit(
        measure("p2p", "intra", 2, near), measure("p2p", "inter", 2, far), measure("gradient_sync", "intra", 2, ring)
    )
    for kind, scope, link in (("p2p", "intra", near), ("p2p", "inter", far), ("gradient_sync", "intra", ring)):
        assert model.find(kind, scope, 2).seconds(1e6) == pytest.approx(link.seconds(1e6))
    assert model.find("gradient_sync", "inter", 2) is None
    assert LinkModel().find("p2p", "intra", 2) is None


def ring(num_ranks: int, hop_s: float = 2e-5, bytes_per_s: float = 1e10) -> Link:
    """2(n - 1) hops, each of 1/n of the bytes."""
    hops = 2 * (num_ranks - 1)
    return Link(hops * hop_s, bytes_per_s * num_ranks / hops)


@given(measured=st.integers(2, 64), asked=st.integers(2, 64))
def test_a_ring_of_another_size_is_known_from_one_that_was_measured(measured, asked):
    found = LinkModel({("gradient_sync", "intra", measured): ring(measured)}).find("gradient_sync", "intra", asked)
    assert found.latency_s == pytest.approx(ring(asked).latency_s)
    assert found.bytes_per_s == pytest.approx(ring(asked).bytes_per_s)


def test_the_nearest_measured_number_of_ranks_counts():
    model = LinkModel({("gradient_sync", "intra", size): ring(size, bytes_per_s=size * 1e9) for size in (2, 8, 16)})
    for asked, nearest in ((2, 2), (3, 2), (6, 8), (8, 8), (9, 8), (12, 16), (100, 16)):
        expected = ring(asked, bytes_per_s=nearest * 1e9)
        assert model.find("gradient_sync", "intra", asked).bytes_per_s == pytest.approx(expected.bytes_per_s), asked


@pytest.mark.parametrize(
    "spoil", [lambda f: f.filter(pl.col("num_bytes") == 1024), lambda f: f.with_columns(seconds=0.0)]
)
def test_times_that_give_no_latency_and_bandwidth_are_refused(spoil):
    with pytest.raises(UserError, match=r"p2p intra of 2 ranks: \d size.* run `dflop profile-links` again"):
        fit_links(spoil(measure("p2p", "intra", 2, Link(1e-4, 1e9))))


def test_a_file_of_links_comes_back_as_it_was_an_empty_one_too(tmp_path):
    for frame in (measure("p2p", "intra", 2, Link(1e-4, 1e9)), pl.DataFrame(schema=LINKS_SCHEMA)):
        frame.write_parquet(tmp_path / "links.parquet")
        assert read_links(tmp_path / "links.parquet").equals(frame)
    assert fit_links(pl.DataFrame(schema=LINKS_SCHEMA)).is_empty()


def test_a_file_that_holds_no_links_is_refused_in_one_line(tmp_path):
    path = tmp_path / "links.parquet"
    for write, said in (
        (lambda: None, "does not exist"),
        (lambda: path.write_bytes(b""), "is not a Parquet file"),
        (lambda: path.write_text("kind,scope\np2p,intra\n"), "is not a Parquet file"),
        (lambda: pl.DataFrame({"module": ["llm"], "tp": [1]}).write_parquet(path), "has the columns module, tp"),
    ):
        write()
        with pytest.raises(UserError, match=said) as caught:
            read_links(path)
        assert "`dflop profile-links`" in str(caught.value)
        assert os.linesep not in str(caught.value)


def test_a_cost_model_brings_the_links_of_its_file_and_none_where_none_were_measured(costs, measure_as, tmp_path):
    frames = measure_as(costs)
    tables = fit_costs(frames.measurements, frames.parameters)
    path, links = tmp_path / "costs.duckdb", measure("p2p", "intra", 2, Link(1e-4, 1e9))
    frames.write(path, tables | {"links": links, "link_model": fit_links(links)})
    assert CostModel.load(path).links == fit(links)
    assert read_table(path, "links", made_by="fit-costs").equals(links)
    frames.write(path, tables)
    assert CostModel.load(path).links == LinkModel()
    assert read_table(path, "links", made_by="fit-costs").schema == LINKS_SCHEMA


@given(num_nodes=st.integers(1, 9), per_node=st.integers(1, 9))
def test_every_scope_of_a_cluster_is_measured_once_from_pairs_to_all_ranks(num_nodes, per_node):
    groups = groups_to_measure(num_nodes, per_node)
    assert len({(group.kind, group.scope, len(group.ranks)) for group in groups}) == len(groups)
    largest = {"intra": per_node, "inter": num_nodes * per_node}
    expected = {scope for scope, exists in (("intra", per_node > 1), ("inter", num_nodes > 1)) if exists}
    assert groups.pop(0) == LinkGroup("host", "intra", tuple(range(per_node)))
    assert {group.scope for group in groups} == expected
    for group in groups:
        assert group.ranks == tuple(range(group.ranks[0], group.ranks[-1] + 1))
        assert 0 <= group.ranks[0] < group.ranks[-1] < num_nodes * per_node
        nodes = {rank // per_node for rank in group.ranks}
        assert (len(nodes) == 1) == (group.scope == "intra")
        assert (
            len(group.ranks) == 2 or group.kind == "gradient_sync" or (group.kind, group.scope) == ("exchange", "intra")
        )
    for scope in expected:
        sizes = [len(group.ranks) for group in groups if (group.kind, group.scope) == ("gradient_sync", scope)]
        assert (sizes[0], sizes[-1]) == (2, largest[scope])


def test_sizes_grow_fourfold_from_a_kibibyte():
    assert [1024 * 4**power for power in range(9)] == SIZES
    assert sizes_up_to(5000) == [1024, 4096]
