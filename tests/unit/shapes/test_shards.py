"""Shards tile a source, stay put under edits, and are cut again only when their records (or media) change."""

import json
import math
import os
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dflop.base import UserError
from dflop.shapes import Shard, Source, SourceRecords, list_shards
from dflop.shapes.record_media import RecordError

pytestmark = pytest.mark.usefixtures("in_tmp_path")

properties = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])

CACHE = Path(".cache/dflop")


def make_records(count: int, first: int = 0) -> list[dict]:
    return [{"id": number, "text": f"record {number}"} for number in range(first, first + count)]


def write_source(records: object, name: str = "train", sampling: str = "all") -> Source:
    path = Path(f"{name}.json")
    path.write_text(json.dumps(records))
    return Source(name=name, path=path, media_root=Path(), sampling=sampling)


def kept_ids(source: Source, seed: int = 0) -> list[int]:
    records = SourceRecords(source, seed)
    return [records.read(row)["id"] for row in records.kept]


def names_of(shards: list[Shard]) -> list[str]:
    return [shard.name for shard in shards]


@properties
@given(num_records=st.integers(1, 300), samples_per_shard=st.integers(1, 60))
def test_shards_tile_the_manifest(num_records, samples_per_shard):
    shards = list_shards(write_source(make_records(num_records)), samples_per_shard, seed=0)
    ends = np.cumsum([0, *(shard.num_records for shard in shards)])
    assert [*(shard.start for shard in shards), num_records] == ends.tolist()
    assert len({shard.name for shard in shards}) == len(shards)
    for shard in shards[:-1]:
        assert max(1, samples_per_shard // 2) <= shard.num_records <= 2 * samples_per_shard


def test_shards_are_about_as_large_as_asked():
    shards = list_shards(write_source(make_records(5000)), 50, seed=0)
    assert 0.7 * 100 <= len(shards) <= 1.4 * 100


@properties
@given(place=st.integers(0, 1000), num_inserted=st.integers(1, 3))
@example(place=0, num_inserted=1)
@example(place=1000, num_inserted=1)
def test_an_insertion_anywhere_changes_few_shards(place, num_inserted):
    records = make_records(1000)
    before = {shard.digest for shard in list_shards(write_source(records), 20, seed=0)}
    records[place:place] = make_records(num_inserted, first=5000)
    after = list_shards(write_source(records), 20, seed=0)
    assert len(after) > 35
    assert sum(shard.digest not in before for shard in after) <= 8


def test_a_name_follows_from_the_records_bytes_and_not_from_the_seed_or_the_sources_name():
    first, again = (list_shards(write_source(make_records(10), "a"), 5, seed=seed) for seed in (0, 1))
    assert names_of(first) == names_of(again)
    spread = "[\n" + " ,\n".join(json.dumps(record) for record in make_records(10)) + "\n]\n"
    Path("a.json").write_text(spread)
    source = Source(name="a", path=Path("a.json"), media_root=Path())
    assert names_of(list_shards(source, 5, seed=0)) == names_of(first)
    assert names_of(list_shards(replace(source, name="b"), 5, seed=0)) == names_of(first)
    changed = make_records(10)
    changed[-1]["text"] += "!"
    assert list_shards(write_source(changed, "a"), 5, seed=0)[-1].name != first[-1].name
    reformatted = [dict(reversed(record.items())) for record in make_records(10)]
    assert list_shards(write_source(reformatted, "a"), 5, seed=0)[0].name != first[0].name


def test_a_name_follows_from_its_own_sources_path_and_settings():
    write_source(make_records(10), "a")
    Path("x").mkdir()
    Path("x/a.json").write_bytes(Path("a.json").read_bytes())
    source = Source(name="a", path=Path("a.json"), media_root=Path())
    others = (
        {"path": Path("x/a.json")},
        {"media_root": Path("x")},
        {"sampling": "first:100%"},
        {"trust_sizes": True},
    )
    listed = [names_of(list_shards(replace(source, **other), 5, seed=0)) for other in ({}, *others)]
    assert len(set(map(tuple, listed))) == 5
    assert all(name.startswith("x-a-") for name in listed[1])


def test_shards_of_equal_records_still_have_names_of_their_own():
    shards = list_shards(write_source([{"id": 1}] * 40), 4, seed=0)
    assert len({shard.digest for shard in shards}) < len(shards)
    assert len({shard.name for shard in shards}) == len(shards)


@properties
@given(
    num_records=st.integers(1, 60),
    how=st.sampled_from(["first", "end", "random"]),
    amount=st.integers(0, 120) | st.sampled_from(["0.5", "33.3", "99.99", "7", "29"]),
    is_percent=st.booleans(),
)
@example(num_records=50, how="first", amount=7, is_percent=True)
@example(num_records=60, how="end", amount=55, is_percent=True)
def test_sampling_keeps_as_many_as_llava_nexts_loader_does(num_records, how, amount, is_percent):
    amount = str(amount) if is_percent else str(math.floor(float(amount)))
    source = write_source(make_records(num_records), sampling=f"{how}:{amount}{'%' * is_percent}")
    count = math.ceil(Fraction(amount) * num_records / 100) if is_percent else int(amount)
    everything = list(range(num_records))
    expected = everything[:count] if how == "first" else everything[::-1][:count][::-1]
    kept = kept_ids(source)
    if how == "random":
        assert len(kept) == len(expected)
        assert kept == sorted(set(kept))
    else:
        assert kept == expected


def test_random_sampling_keeps_the_order_and_depends_on_the_seed_and_the_source():
    def drawn(seed: int, name: str = "train") -> list[int]:
        return kept_ids(write_source(make_records(200), name, "random:25%"), seed)

    assert len(drawn(0)) == 50
    assert drawn(0) == drawn(0) == sorted(set(drawn(0)))
    assert drawn(0) != drawn(1)
    assert drawn(0) != drawn(0, "other")
    assert drawn(0) == kept_ids(replace(write_source(make_records(200), sampling="random:25%"), name="another"), 0)
    assert max(drawn(0)) > 100


@properties
@given(
    place=st.integers(0, 1000),
    change=st.sampled_from(["insert", "remove", "edit"]),
    amount=st.sampled_from(["500", "50%"]),
)
@example(place=0, change="insert", amount="50%")
@example(place=1000, change="insert", amount="500")
def test_an_edit_changes_few_of_the_records_that_are_drawn_and_few_of_their_shards(place, change, amount):
    records = make_records(1000)
    source = write_source(records, sampling=f"random:{amount}")
    before, drawn = {shard.name for shard in list_shards(source, 20, 0)}, set(kept_ids(source))
    records[place : place + (change != "insert")] = [] if change == "remove" else make_records(1, first=5000)
    source = write_source(records, sampling=f"random:{amount}")
    after = list_shards(source, 20, 0)
    assert len(kept_ids(source)) == (500 if amount == "500" else math.ceil(len(records) / 2))
    assert len(drawn ^ set(kept_ids(source))) <= 2
    assert len(after) > 15
    assert sum(shard.name not in before for shard in after) <= 6


def test_equal_records_are_drawn_one_by_one():
    records = make_records(40) * 5
    drawn = kept_ids(write_source(records, sampling="random:100"))
    assert len(drawn) == 100
    assert len({drawn.count(number) for number in range(40)}) > 2
    assert sorted(kept_ids(write_source(sorted(records, key=str), sampling="random:100"))) == sorted(drawn)


@properties
@given(num_records=st.integers(1, 100), smaller=st.integers(1, 100), larger=st.integers(1, 100))
def test_a_smaller_draw_is_part_of_a_larger_one(num_records, smaller, larger):
    smaller, larger = sorted((smaller, larger))
    records = make_records(num_records)
    few, many = (kept_ids(write_source(records, sampling=f"random:{count}")) for count in (smaller, larger))
    assert set(few) <= set(many)


def test_every_record_is_drawn_as_often_as_any_other():
    source = write_source(make_records(40), sampling="random:25%")
    times = np.bincount([number for seed in range(400) for number in kept_ids(source, seed)], minlength=40)
    assert times.sum() == 4000
    assert times.min() > 60  # 100 expected, 8.7 the standard deviation
    assert times.max() < 140


def test_the_seed_changes_the_shards_of_random_sampling_alone():
    records = make_records(100)
    for sampling, is_same in (("random:40%", False), ("first:40%", True), ("all", True)):
        one, two = (list_shards(write_source(records, sampling=sampling), 10, seed) for seed in (1, 2))
        assert (one == two) is is_same


@pytest.mark.parametrize("sampling", ["all", "random:40%", "end:35", "first:11"])
def test_a_shards_records_are_a_slice_of_what_sampling_keeps(sampling):
    source = write_source(make_records(100), sampling=sampling)
    records, shards = SourceRecords(source, 3), list_shards(source, 7, 3)
    kept = [records.read(row) for row in records.kept]
    assert [record for shard in shards for record in records.read_shard(shard)] == kept
    for shard in shards:
        whole = list(records.read_shard(shard))
        parts = [list(records.read_shard(shard, start, start + 3)) for start in range(0, shard.num_records, 3)]
        assert [record for part in parts for record in part] == whole
        assert len(whole) == shard.num_records


@properties
@given(data=st.data())
def test_cuts_and_digests_are_those_of_the_kept_records_whatever_is_left_out_between(data):
    """A source that keeps some records has the shards of a manifest that holds no others."""
    sampling = data.draw(st.sampled_from(["first:60%", "end:41", "random:50%"]))
    source = write_source(make_records(data.draw(st.integers(1, 120))), sampling=sampling)
    shards = list_shards(source, 6, 0)
    records = SourceRecords(source, 0)
    alone = write_source([records.read(row) for row in records.kept], "alone")
    assert [(shard.start, shard.digest) for shard in shards] == [
        (shard.start, shard.digest) for shard in list_shards(replace(alone, name=source.name), 6, 0)
    ]


def write_files(*sizes: int) -> Source:
    """A source of several files with so many records each, numbered through."""
    first = 0
    for number, size in enumerate(sizes):
        write_source(make_records(size, first), f"part-{number}")
        first += size
    pattern = f"part-{{0..{len(sizes) - 1}}}.json"
    return Source(name="train", path=Path(pattern), media_root=Path())


def test_rows_run_through_all_files_in_order():
    records = SourceRecords(write_files(3, 0, 4), 0)
    assert len(records) == 7
    assert [records.read(row)["id"] for row in range(7)] == list(range(7))
    for row in (7, -1):
        with pytest.raises(IndexError, match=rf"has 7 records, none at row {row}"):
            records.read(row)


@properties
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any), sampling=st.sampled_from(["all", "end:70%"])
)
def test_shards_know_nothing_of_the_files_between_their_records(sizes, sampling):
    many = replace(write_files(*sizes), sampling=sampling)
    one = write_source(make_records(sum(sizes)), sampling=sampling)
    assert [(shard.start, shard.digest) for shard in list_shards(many, 7, 0)] == [
        (shard.start, shard.digest) for shard in list_shards(one, 7, 0)
    ]
    records = SourceRecords(many, 0)
    ids = [record["id"] for shard in list_shards(many, 7, 0) for record in records.read_shard(shard)]
    assert ids == kept_ids(one)


def test_adding_a_file_changes_the_shards_at_its_edges_alone():
    before = names_of(list_shards(write_files(200, 200), 20, 0))
    assert len(set(names_of(list_shards(write_files(200, 200, 10), 20, 0))) - set(before)) <= 2
    write_source(make_records(10, 5000), "part-00")
    source = Source(name="train", path=Path("part-{00,0,1}.json"), media_root=Path())
    after = names_of(list_shards(source, 20, 0))
    assert len(set(after) - set(before)) <= 5
    assert after[-12:] == before[-12:]


@pytest.mark.parametrize("reader", [lambda source: SourceRecords(source, 0).kept, lambda s: list_shards(s, 10, 0)])
def test_a_manifest_that_cannot_be_used_is_named_with_the_reason(reader):
    def refusal(source: Source) -> str:
        with pytest.raises(UserError) as caught:
            reader(source)
        assert str(source.path) in str(caught.value)
        return str(caught.value)

    missing = Source(name="mine", path=Path("none.json"), media_root=Path())
    assert "(source `mine`) does not exist; correct `data.sources`" in refusal(missing)
    assert "must be a JSON list of records" in refusal(write_source("hello"))
    source = write_source([])
    source.path.write_bytes(b"\x1f\x8b compressed")
    assert "must be a JSON list of records" in refusal(source)
    source.path.unlink()
    source.path.mkdir()
    assert "is a folder, but not one that `Dataset.save_to_disk` wrote" in refusal(source)
    table = Source(name="it", path=Path("table.csv"), media_root=Path())
    table.path.touch()
    assert "is no manifest that can be read: known are .json, .jsonl, .parquet" in refusal(table)


def test_a_file_that_cannot_be_read_costs_its_own_records_alone(write_tar):
    for number in range(3):
        write_tar({f"{number}-{row}": {".json": b'{"id": 1}'} for row in range(4)}, f"part-{number}.tar")
    Path("part-1.tar").write_bytes(b"")
    source = Source(name="it", path=Path("part-*.tar"), media_root=Path())
    assert sum(shard.num_records for shard in list_shards(source, 10, 0)) == 9
    records = SourceRecords(source, 0)
    broken = [record for record in map(records.read, range(9)) if isinstance(record, RecordError)]
    assert [error.reason for error in broken] == ["bad_record"]
    assert "the manifest part-1.tar is not a tar file that can be read (empty file)" in broken[0].detail
    for number in (0, 2):
        Path(f"part-{number}.tar").write_bytes(b"")
    with pytest.raises(UserError, match=r"the manifest part-0\.tar is not a tar file that can be read"):
        list_shards(source, 10, 0)


def test_a_source_without_a_record_is_refused_before_any_job():
    with pytest.raises(UserError, match=r"the manifest it\.json \(source `it`\) holds no record; fill it, or"):
        list_shards(write_source([], "it"), 10, 0)


def test_a_media_root_that_is_no_folder_is_named_before_every_record_is_rejected():
    source = replace(write_source(make_records(3), "it"), media_root=Path("none"))
    with pytest.raises(UserError, match=r"the media root none \(source `it`\) is not a folder"):
        list_shards(source, 10, 0)


def test_shards_come_from_the_cache_while_size_and_time_of_the_manifest_stand():
    """Proven by swapping the records behind the cache's back."""
    source = write_source(make_records(40))
    shards = list_shards(source, 10, 0)
    stat = source.path.stat()
    assert list(CACHE.glob("shards-*.json"))
    source.path.write_text(source.path.read_text().replace("record 7", "RECORD 7"))
    os.utime(source.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert list_shards(source, 10, 0) == shards
    os.utime(source.path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    fresh = list_shards(source, 10, 0)
    assert fresh[0].digest != shards[0].digest
    assert fresh[-1] == shards[-1]


def test_a_command_run_by_hand_leaves_nothing_where_it_was_run_and_a_workflow_keeps_all_in_one_folder(monkeypatch):
    source = write_source(make_records(4))
    before = set(Path().iterdir())
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("elsewhere").absolute()))
    list_shards(source, 10, 0)
    assert set(Path().iterdir()) == before | {Path("elsewhere")}
    assert list(Path("elsewhere/dflop").glob("records-*.bin"))
    Path(".snakemake").mkdir()
    list_shards(source, 10, 0)
    assert list(Path(".snakemake/dflop").glob("records-*.bin"))


def test_where_neither_folder_can_be_written_the_temporary_one_serves(monkeypatch):
    Path("occupied").write_text("no folder")
    Path("passing").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path("occupied").absolute()))
    monkeypatch.setattr("tempfile.tempdir", str(Path("passing").absolute()))
    list_shards(write_source(make_records(4)), 10, 0)
    assert list(Path("passing").glob("dflop-*/records-*.bin"))


@pytest.mark.parametrize("change", [{"sampling": "first:20"}, {"trust_sizes": True}])
def test_the_cache_is_not_mistaken_for_that_of_another_source(change):
    source = write_source(make_records(40))
    shards = list_shards(source, 10, 0)
    assert list_shards(replace(source, **change), 10, 0) != shards
    assert list_shards(source, 5, 0) != shards
    assert list_shards(source, 10, 0) == shards


def test_a_changed_manifests_index_takes_the_old_ones_place_and_leaves_others_alone():
    def indexes() -> set[Path]:
        return set(CACHE.glob("records-*.bin"))

    list_shards(write_source(make_records(40)), 10, 0)
    (first,) = indexes()
    assert first.stat().st_size == (40 + 1) * 32
    list_shards(write_source(make_records(30), "other"), 10, 0)
    (other,) = indexes() - {first}
    for count in (41, 42, 43):
        assert len(SourceRecords(write_source(make_records(count)), 0)) == count
        (index,) = indexes() - {other}
        assert index.stat().st_size == (count + 1) * 32
    assert not first.exists()


def test_what_is_kept_of_a_manifest_goes_when_the_manifest_changes(watched):
    list_shards(write_source(make_records(5), "other"), 5, 0)
    for text in (" 7", " seven", " siebzehn"):
        watched.path.write_text(watched.path.read_text().replace(" 7", text))
        shards = list_shards(watched, 5, 0, watch_media=True)
        assert list_shards(watched, 5, 0, watch_media=True) == shards
        assert len(list(CACHE.glob("media-*"))) == len({shard.digest for shard in shards}) == len(shards)
        assert len(list(CACHE.glob("shards-*"))) == len(list(CACHE.glob("records-*"))) == 2


@pytest.mark.parametrize("kept", ["records-*.bin", "shards-*.json"])
@pytest.mark.parametrize("damage", [b"", b"[{}]", 64, 65, 640])
def test_what_is_kept_of_a_manifest_is_made_anew_if_it_is_damaged(kept, damage):
    source = write_source(make_records(40))
    shards = list_shards(source, 10, 0)
    (path,) = CACHE.glob(kept)
    path.write_bytes(path.read_bytes()[:damage] if isinstance(damage, int) else damage)
    if kept == "records-*.bin":
        assert len(SourceRecords(source, 0)) == 40
    assert list_shards(source, 10, 0) == shards


def test_an_index_is_made_once_for_all_who_ask():
    source = write_source(make_records(40))
    list_shards(source, 10, 0)
    (index,) = CACHE.glob("records-*.bin")
    before = index.stat().st_mtime_ns
    list_shards(replace(source, name="another", sampling="end:50%"), 7, 3)
    assert [record["id"] for record in map(SourceRecords(source, 1).read, (39, 0))] == [39, 0]
    assert index.stat().st_mtime_ns == before


@pytest.fixture
def watched() -> Source:
    """40 records with a picture each, but that the last one shows the first one's again."""
    Path("media").mkdir()
    records = [{"conversations": turns_about(number), "image": f"{number % 39}.png"} for number in range(40)]
    for number in range(39):
        Path(f"media/{number}.png").write_bytes(b"picture")
    return replace(write_source(records), media_root=Path("media"))


def turns_about(number: int) -> list[dict]:
    return [{"from": "human", "value": f"<image> {number}"}, {"from": "gpt", "value": "Yes."}]


def changed(source: Source, before: list[Shard], **how) -> list[int]:
    """Which shards have other names than before; all lie where they lay."""
    after = list_shards(source, 5, 0, watch_media=True, **how)
    assert [(shard.start, shard.num_records) for shard in after] == [(s.start, s.num_records) for s in before]
    return [number for number, (old, new) in enumerate(zip(before, after, strict=True)) if old.name != new.name]


def shard_of(shards: list[Shard], row: int) -> int:
    return next(number for number, shard in enumerate(shards) if row < shard.start + shard.num_records)


def test_a_touched_medium_changes_just_the_shards_that_show_it(watched):
    shards = list_shards(watched, 5, 0, watch_media=True)
    assert len(shards) > 4
    assert changed(watched, shards) == []
    stat = Path("media/17.png").stat()
    os.utime("media/17.png", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert changed(watched, shards) == [shard_of(shards, 17)]
    os.utime("media/17.png", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert changed(watched, shards) == []
    Path("media/0.png").write_bytes(b"another picture")
    assert changed(watched, shards) == [0, len(shards) - 1]


def test_a_medium_that_goes_or_comes_counts_as_changed(watched):
    Path("media/20.png").unlink()
    shards = list_shards(watched, 5, 0, watch_media=True)
    Path("media/20.png").write_bytes(b"picture")
    assert changed(watched, shards) == [shard_of(shards, 20)]
    Path("media/20.png").unlink()
    assert changed(watched, shards) == []
    Path("media/30.png").unlink()
    assert changed(watched, shards) == [shard_of(shards, 30)]


def test_who_does_not_look_again_takes_what_was_found_last(watched):
    shards = list_shards(watched, 5, 0, watch_media=True)
    Path("media/17.png").write_bytes(b"another picture")
    assert changed(watched, shards, look_again=False) == []
    found = list_shards(watched, 5, 0, watch_media=True)
    assert found != shards
    assert list_shards(watched, 5, 0, watch_media=True, look_again=False) == found
    watched.path.write_text(watched.path.read_text().replace(" 7", " seven"))  # new records are looked at in any case
    fresh = list_shards(watched, 5, 0, watch_media=True, look_again=False)
    assert fresh[shard_of(found, 7)].name != found[shard_of(found, 7)].name
    assert fresh[shard_of(found, 17)].name == found[shard_of(found, 17)].name


def test_media_that_are_not_watched_change_nothing(watched):
    shards = list_shards(watched, 5, 0)
    Path("media/17.png").write_bytes(b"another picture")
    assert list_shards(watched, 5, 0) == shards
    assert not set(names_of(shards)) & set(names_of(list_shards(watched, 5, 0, watch_media=True)))


def test_records_without_paths_are_watched_too(watched):
    """Broken ones, media inside the manifest, paths that no file can have: no reason to stop."""
    records = [
        {"conversations": turns_about(1), "image": "nul\0.png"},
        {"conversations": turns_about(2), "image": "../train.json"},
        {"conversations": turns_about(3), "image": "a" * 5000},
        {"conversations": "hello", "image": "1.png"},
        None,
    ]
    source = replace(write_source(records), media_root=Path("media"))
    shards = list_shards(source, 5, 0, watch_media=True)
    assert sum(shard.num_records for shard in shards) == 5
    table = {"conversations": [turns_about(4)], "image": [{"bytes": b"picture", "path": None}]}
    pl.DataFrame(table).write_parquet("train.parquet")
    (shard,) = list_shards(replace(source, path=Path("train.parquet")), 5, 0, watch_media=True)
    assert shard.num_records == 1
