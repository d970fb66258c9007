"""Manifests are cut into shards that tile them, stay put under edits, and are cut again only when they change."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflop.config import DataConfig, SourceConfig
from dflop.data import Source, list_shards, list_sources, read_manifest
from dflop.errors import UserError

pytestmark = pytest.mark.usefixtures("in_tmp_path")

properties = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make_records(count: int, first: int = 0) -> list[dict]:
    return [{"id": number, "text": f"record {number}"} for number in range(first, first + count)]


def write_source(records: object, name: str = "train", sampling: str = "all", suffix: str = ".json") -> Source:
    path = Path(f"{name}{suffix}")
    path.write_text(json.dumps(records))
    return Source(name=name, path=path, media_root=Path(), sampling=sampling)


def sources_of(*entries: SourceConfig) -> list[Source]:
    return list_sources(DataConfig(sources=list(entries)))


@properties
@given(num_records=st.integers(0, 300), samples_per_shard=st.integers(1, 60))
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
def test_an_insertion_anywhere_changes_few_shards(place, num_inserted):
    records = make_records(1000)
    before = {shard.digest for shard in list_shards(write_source(records), 20, seed=0)}
    records[place:place] = make_records(num_inserted, first=5000)
    after = list_shards(write_source(records), 20, seed=0)
    assert len(after) > 35
    assert sum(shard.digest not in before for shard in after) <= 8


def test_an_insertion_at_the_front_changes_the_first_shards_alone():
    before = list_shards(write_source(make_records(1000)), 20, seed=0)
    after = list_shards(write_source([{"id": "new"}, *make_records(1000)]), 20, seed=0)
    assert after[0].name != before[0].name
    assert [shard.name for shard in after[-35:]] == [shard.name for shard in before[-35:]]
    assert [shard.start for shard in after[-35:]] == [shard.start + 1 for shard in before[-35:]]


def test_the_name_holds_the_digest_of_the_records_and_nothing_else():
    first, again = (list_shards(write_source(make_records(10), "a"), 5, seed=seed) for seed in (0, 1))
    assert [shard.name for shard in first] == [shard.name for shard in again]
    reordered = [dict(reversed(record.items())) for record in make_records(10)]
    assert [shard.name for shard in list_shards(write_source(reordered, "a"), 5, seed=0)] == [s.name for s in first]
    changed = make_records(10)
    changed[-1]["text"] += "!"
    assert list_shards(write_source(changed, "a"), 5, seed=0)[-1].name != first[-1].name
    assert all(shard.name == f"a-{shard.digest[:12]}" for shard in first)


def test_shards_of_equal_records_still_have_names_of_their_own():
    shards = list_shards(write_source([{"id": 1}] * 40), 4, seed=0)
    assert len({shard.digest for shard in shards}) < len(shards)
    assert len({shard.name for shard in shards}) == len(shards)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ("all", list(range(10))),
        ("first:3", [0, 1, 2]),
        ("first:30%", [0, 1, 2]),
        ("end:2", [8, 9]),
        ("end:20%", [8, 9]),
        ("first:99", list(range(10))),
        ("first:0", []),
        ("end:0", []),
        ("end:100%", list(range(10))),
    ],
)
def test_sampling_keeps_the_first_or_the_last(sampling, kept):
    assert [record["id"] for record in read_manifest(write_source(make_records(10), sampling=sampling), 0)] == kept


def test_random_sampling_keeps_the_order_and_depends_on_the_seed_and_the_source():
    def drawn(seed: int, name: str = "train") -> list[int]:
        return [record["id"] for record in read_manifest(write_source(make_records(200), name, "random:25%"), seed)]

    assert len(drawn(0)) == 50
    assert drawn(0) == drawn(0) == sorted(set(drawn(0)))
    assert drawn(0) != drawn(1)
    assert drawn(0) != drawn(0, "other")
    assert max(drawn(0)) > 100


@pytest.mark.parametrize("sampling", ["all", "random:40%", "end:35"])
def test_a_shards_records_are_a_slice_of_what_sampling_keeps(sampling):
    source = write_source(make_records(100), sampling=sampling)
    records, shards = read_manifest(source, 3), list_shards(source, 7, 3)
    sliced = [records[shard.start : shard.start + shard.num_records] for shard in shards]
    assert [record for part in sliced for record in part] == records


def test_a_manifest_of_one_record_a_line_is_read_whatever_its_texts_hold():
    records = [{"id": 0, "text": "one\u2028two\x85three"}, {"id": 1, "text": "\x0b\x0c"}]
    path = Path("train.jsonl")
    path.write_text("\n\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n", encoding="utf-8")
    assert read_manifest(Source(name="t", path=path, media_root=Path(), sampling="all"), 0) == records


@pytest.mark.parametrize("reader", [read_manifest, lambda source, seed: list_shards(source, 10, seed)])
def test_a_manifest_that_cannot_be_used_is_named_with_the_reason(reader):
    def refusal(source: Source) -> str:
        with pytest.raises(UserError) as caught:
            reader(source, 0)
        assert str(source.path) in str(caught.value)
        return str(caught.value)

    missing = Source(name="mine", path=Path("none.json"), media_root=Path(), sampling="all")
    assert "(source `mine`) does not exist; correct `data.sources`" in refusal(missing)
    assert "holds a dict; it must be a list of records" in refusal(write_source({"id": 1}))
    source = write_source([])
    source.path.write_text("[1, 2")
    assert "is not JSON" in refusal(source)
    source.path.write_bytes(b'["caf\xe9"]')
    assert "cannot be read" in refusal(source)
    source.path.unlink()
    source.path.mkdir()
    assert "cannot be read" in refusal(source)


def test_a_media_root_that_is_no_folder_is_named_before_every_record_is_rejected():
    fields = {"name": "it", "path": write_source(make_records(3)).path, "sampling": "all"}
    with pytest.raises(UserError, match=r"the media root none \(source `it`\) is not a folder"):
        list_shards(Source(media_root=Path("none"), **fields), 10, 0)


def test_shards_come_from_the_cache_while_size_and_time_of_the_manifest_stand():
    """Proven by swapping the records behind the cache's back; the cache lies in Snakemake's folder."""
    source = write_source(make_records(40))
    shards = list_shards(source, 10, 0)
    stat = source.path.stat()
    assert list(Path(".snakemake").rglob("*.json"))
    source.path.write_text(source.path.read_text().replace("record 7", "RECORD 7"))
    os.utime(source.path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert list_shards(source, 10, 0) == shards
    os.utime(source.path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    fresh = list_shards(source, 10, 0)
    assert fresh[0].digest != shards[0].digest
    assert fresh[-1] == shards[-1]


@pytest.mark.parametrize("change", [{"sampling": "first:20"}, {"name": "other"}])
def test_the_cache_is_not_mistaken_for_that_of_another_source(change):
    source = write_source(make_records(40))
    shards = list_shards(source, 10, 0)
    fields = {"name": source.name, "path": source.path, "media_root": source.media_root, "sampling": source.sampling}
    assert list_shards(Source(**fields | change), 10, 0) != shards
    assert list_shards(source, 5, 0) != shards


def test_a_source_has_its_manifests_name_and_folder_unless_told_otherwise():
    plain, told = sources_of(
        SourceConfig(path="sets/my set.v2.json"), SourceConfig(path="b.json", name="bees", media_root="/media")
    )
    assert (plain.name, plain.media_root, plain.sampling) == ("my-set.v2", Path("sets"), "all")
    assert (told.name, told.media_root) == ("bees", Path("/media"))


def test_sources_of_the_same_name_are_numbered():
    names = [source.name for source in sources_of(*(SourceConfig(path=f"{i}/train.json") for i in range(3)))]
    assert names == ["train", "train-2", "train-3"]


def test_no_source_at_all_says_what_to_write():
    with pytest.raises(UserError, match=r"`data\.sources` is empty; name at least one manifest"):
        sources_of()
