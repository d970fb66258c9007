"""A source names its files by a path, a pattern, or one entry of a list of datasets, and mistakes say their place."""

import glob
import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflop.base import UserError
from dflop.config import DataConfig, SourceConfig, load_config
from dflop.shapes import Source, SourceRecords, list_sources
from dflop.shapes.manifests import patterns

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def sources_of(*entries: SourceConfig) -> list[Source]:
    return list_sources(DataConfig(sources=list(entries)))


def source_of(path: str, **more) -> Source:
    (source,) = sources_of(SourceConfig(path=path, **more))
    return source


def write_records(*paths: str, count: int = 1) -> None:
    for path in paths:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps([{"id": f"{path}/{number}"} for number in range(count)]))


def ids_of(source: Source) -> list[str]:
    records = SourceRecords(source, 0)
    return [records.read(row)["id"] for row in records.kept]


def test_a_source_has_its_manifests_name_and_folder_unless_told_otherwise():
    plain, told = sources_of(
        SourceConfig(path="sets/my set.v2.json"),
        SourceConfig(path="b.json", name="bees", media_root="/media", sampling="end:3", trust_sizes=True),
    )
    assert plain == Source(name="my-set.v2", path=Path("sets/my set.v2.json"), media_root=Path("sets"))
    assert (plain.sampling, plain.trust_sizes) == ("all", False)
    assert told == Source(
        name="bees", path=Path("b.json"), media_root=Path("/media"), sampling="end:3", trust_sizes=True
    )


@pytest.mark.parametrize(
    ("path", "name", "media_root"),
    [
        ("train.json", "train", "."),
        ("/data/sets/train.v1.parquet", "train.v1", "/data/sets"),
        ("sets/saved", "saved", "sets"),
        ("_über Größe.json", "ber-Gr--e", "."),
        ("雪.json", "source", "."),
        ("sets/*.parquet", "source", "sets"),
        ("sets/part-*.parquet", "part", "sets"),
        ("sets/**/part-?.parquet", "part", "sets"),
        ("/data/{a,b}/train.json", "train", "/data"),
        ("/data/shards-{000..127}.tar", "shards--000..127", "/data"),
        ("{a/x,b/y}.json", "y", "."),
        ("set[12]/x.json", "x", "."),
    ],
)
def test_a_pattern_has_a_plain_name_and_the_folder_before_its_first_sign(path, name, media_root):
    source = source_of(path)
    assert (source.name, source.media_root) == (name, Path(media_root))
    again = load_config({"data": {"sources": [{"path": path, "name": source.name}]}})  # as the workflow's jobs get it
    assert again.data.sources[0].name == name


def test_manifests_of_the_same_name_are_called_after_their_folders_in_whatever_order_they_come():
    paths = ["x/train.json", "/sets/y/train.json", "a/z/train.json", "b/z/train.json", "other.json"]
    names = ["x-train", "y-train", "a-z-train", "b-z-train", "other"]
    for first in range(len(paths)):
        rolled = sources_of(*(SourceConfig(path=path) for path in paths[first:] + paths[:first]))
        assert [source.name for source in rolled] == names[first:] + names[:first]
    told = sources_of(SourceConfig(path="x/train.json"), SourceConfig(path="b.json", name="train"))
    assert [source.name for source in told] == ["x-train", "train"]


def test_manifests_named_twice_and_names_given_twice_are_numbered():
    names = [source.name for source in sources_of(*[SourceConfig(path="x/train.json")] * 3)]
    assert names == ["x-train", "x-train-2", "x-train-3"]
    given = sources_of(SourceConfig(path="a.json", name="it"), SourceConfig(path="b.json", name="it"))
    assert [source.name for source in given] == ["it", "it-2"]
    taken = sources_of(SourceConfig(path="train-2.json"), SourceConfig(path="train.json"), SourceConfig(path="train"))
    assert [source.name for source in taken] == ["train-2", "train", "train-3"]


def test_no_source_at_all_says_what_to_write():
    with pytest.raises(UserError, match=r"`data\.sources` is empty; name at least one manifest"):
        sources_of()


@pytest.mark.parametrize(
    ("pattern", "files"),
    [
        ("a-{1..3}.json", ["a-1.json", "a-2.json", "a-3.json"]),
        ("a-{3..1}.json", ["a-3.json", "a-2.json", "a-1.json"]),
        ("b-{008..010}.json", ["b-008.json", "b-009.json", "b-010.json"]),
        ("{b-009,a-1}.json", ["b-009.json", "a-1.json"]),
        ("a-*.json", ["a-1.json", "a-2.json", "a-3.json"]),
        ("a-?.json", ["a-1.json", "a-2.json", "a-3.json"]),
        ("a-[13].json", ["a-1.json", "a-3.json"]),
        ("deep*/**/*.json", ["deep/c.json", "deep/er/c.json", "deeper/c.json"]),
        ("odd[1].json", ["odd[1].json"]),
        ("odd{1.json", ["odd{1.json"]),
    ],
)
def test_a_pattern_stands_for_its_files_in_order(pattern, files):
    write_records(*files, "a-1.json", "a-2.json", "a-3.json", "b-10.json", "deep/c.txt")
    assert source_of(pattern).files() == [Path(file) for file in files]
    assert ids_of(source_of(pattern)) == [f"{file}/0" for file in files]


def test_one_missing_file_of_a_pattern_is_named():
    write_records("a-1.json", "a-3.json")
    with pytest.raises(UserError, match=r"the manifest a-2\.json \(source `a--1\.\.3`\) does not exist; correct"):
        source_of("a-{1..3}.json").files()


def write_list(entries: object, path: str = "mix.yaml") -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(yaml.safe_dump({"datasets": entries}))


def llava_next(records: list, strategy: str) -> list:
    """What LLaVA-NeXT's loader keeps, written as plainly as can be."""
    if strategy == "all":
        return records
    how, number = strategy.split(":")
    if "%" in number:
        number = math.ceil(Fraction(number.rstrip("%")) * len(records) / 100)
    kept = []
    for _ in range(min(int(number), len(records))):
        kept = [*kept, records[len(kept)]] if how == "first" else [records[-1 - len(kept)], *kept]
    return kept


def test_every_strategy_of_a_list_keeps_what_llava_nexts_loader_does():
    write_records("a.json", count=37)
    records = [f"a.json/{number}" for number in range(37)]
    amounts = ("1", "10", "37", "90", "1%", "10%", "33%", "99.5%", "100%")
    strategies = ["all", *(f"{how}:{amount}" for how in ("first", "end", "random") for amount in amounts)]
    write_list([{"json_path": "a.json", "sampling_strategy": strategy} for strategy in strategies])
    sources = sources_of(SourceConfig(path="mix.yaml"))
    assert [source.sampling for source in sources] == strategies
    assert len({source.name for source in sources}) == len(sources)
    for source, strategy in zip(sources, strategies, strict=True):
        kept, expected = ids_of(source), llava_next(records, strategy)
        if strategy.startswith("random"):
            assert len(kept) == len(expected), strategy
            assert kept == [record for record in records if record in set(kept)], strategy
        else:
            assert kept == expected, strategy


@pytest.mark.parametrize(
    ("sampling", "kept"), [("all", [0, 1, 2]), ("end:5", [7, 8, 9]), ("first:2", [0, 1]), ("random:50%", None)]
)
def test_of_each_source_at_most_max_samples_are_kept(sampling, kept):
    write_records("a.json", count=10)
    entry = SourceConfig(path="a.json", sampling=sampling)
    (few,), (all_of_them,) = (list_sources(DataConfig(sources=[entry], max_samples=most)) for most in (3, None))
    assert few.key != all_of_them.key
    if kept is None:
        assert set(ids_of(few)) < set(ids_of(all_of_them))
        assert len(ids_of(few)) == 3
    else:
        assert ids_of(few) == [f"a.json/{number}" for number in kept]


def test_an_entry_without_a_strategy_keeps_all():
    write_records("a.json", count=3)
    write_list([{"json_path": "a.json"}])
    assert len(ids_of(sources_of(SourceConfig(path="mix.yaml"))[0])) == 3


def test_paths_in_a_list_start_at_the_working_folder_or_else_at_the_list():
    write_records("sets/only-there.json", "sets/both.json", "both.json", "only-here.json", "sets/part-1.json")
    paths = ["only-there.json", "both.json", "only-here.json", str(Path("both.json").absolute()), "part-{1..1}.json"]
    write_list([{"json_path": path} for path in [*paths, "part-*.json", "none.json"]], "sets/mix.yaml")
    sources = sources_of(SourceConfig(path="sets/mix.yaml"))
    assert [ids_of(source) for source in sources[:-1]] == [
        ["sets/only-there.json/0"],
        ["both.json/0"],
        ["only-here.json/0"],
        ["both.json/0"],
        ["sets/part-1.json/0"],
        ["sets/part-1.json/0"],
    ]
    assert [str(source.media_root) for source in sources[:3]] == ["sets", ".", "."]
    with pytest.raises(UserError, match=r"the manifest none\.json \(source `none`\) does not exist"):
        sources[-1].files()


def test_what_is_said_of_a_list_holds_for_its_entries():
    write_list([{"json_path": "a.json"}, {"json_path": "b/a.json"}])
    first, second = sources_of(SourceConfig(path="mix.yaml", name="mix", media_root="media", trust_sizes=True))
    assert [first.name, second.name] == ["mix-a", "mix-b-a"]
    assert {first.media_root, second.media_root} == {Path("media")}
    assert first.trust_sizes
    assert second.trust_sizes


def test_thousands_of_entries_of_one_name_are_told_apart_by_numbers():
    write_list([{"json_path": "a.json"} for _ in range(5000)])
    names = [source.name for source in sources_of(SourceConfig(path="mix.yaml"))]
    assert names == ["a", *(f"a-{number}" for number in range(2, 5001))]


def test_a_list_takes_no_sampling_of_its_own():
    write_list([{"json_path": "a.json"}])
    with pytest.raises(UserError, match=r"the source mix\.yaml is a list of datasets.*remove `sampling: first:3`"):
        sources_of(SourceConfig(path="mix.yaml", sampling="first:3"))
    with pytest.raises(UserError, match=r"mix\.yaml is a list of datasets, and its `weight: 2` would be that of each"):
        sources_of(SourceConfig(path="mix.yaml", weight=2))


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("a.json", "datasets[1]` is 'a.json'; it must hold `json_path`, a manifest's path"),
        ({}, "datasets[1]` is {}; it must hold `json_path`"),
        ({"json_path": ["a"]}, "datasets[1]` is {'json_path': ['a']}; it must hold `json_path`"),
        ({"path": "a.json"}, "it must hold `json_path`"),
        (
            {"json_path": "a.json", "sampling": "all"},
            "datasets[1].sampling` is unknown; an entry holds `json_path` and",
        ),
        ({"json_path": "a.json", 3: 4}, "datasets[1].3` is unknown"),
        ({"json_path": "a.json", "sampling_strategy": "some"}, "datasets[1].sampling_strategy` is 'some'; it must be"),
        ({"json_path": "a.json", "sampling_strategy": "first:-1"}, "is 'first:-1'; it must be all, first:30%"),
        ({"json_path": "a.json", "sampling_strategy": "first"}, "is 'first'; it must be"),
        ({"json_path": "a.json", "sampling_strategy": "first:0"}, "is 'first:0'; it must be"),
        ({"json_path": "a.json", "sampling_strategy": None}, "is 'null'; it must be"),
        ({"json_path": "a.json", "sampling_strategy": 100}, "is '100'; it must be"),
    ],
)
def test_each_malformed_entry_of_a_list_is_refused_by_its_place(entry, complaint):
    write_list([{"json_path": "a.json"}, entry])
    with pytest.raises(UserError) as caught:
        sources_of(SourceConfig(path="mix.yaml"))
    assert str(caught.value).startswith("mix.yaml: `datasets[1]")
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "content", ["", "[]", "datasets:", "datasets: []", "datasets: {a: b}", "sources: [a]", "hello"]
)
def test_a_file_that_lists_no_datasets_says_what_it_must_hold(content):
    Path("mix.yaml").write_text(content)
    with pytest.raises(UserError, match=r"mix\.yaml must hold `datasets:`, a list of entries with `json_path`"):
        sources_of(SourceConfig(path="mix.yaml"))


def test_a_list_that_cannot_be_read_is_named_with_the_reason():
    with pytest.raises(UserError, match=r"the list of datasets mix\.yml does not exist; correct `data\.sources`"):
        sources_of(SourceConfig(path="mix.yml"))
    for content in (b"datasets: [", b"caf\xe9: 1", b"[" * 10_000, b" " * 2_000_000):
        Path("mix.yml").write_bytes(content)
        with pytest.raises(UserError, match=r"the list of datasets mix\.yml cannot be read: ") as caught:
            sources_of(SourceConfig(path="mix.yml"))
        assert "\n" not in str(caught.value)


def test_a_list_with_aliases_is_refused():
    """Nine lines of nine aliases each would unfold to 400 million values."""
    lines = [
        "a0: &a0 [x]",
        *(f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 9)}]" for number in range(1, 9)),
    ]
    Path("mix.yaml").write_text("\n".join([*lines, "datasets: [*a8]"]))
    with pytest.raises(UserError, match=r'mix\.yaml cannot be read: write `\*a0` out in "<unicode string>", line 2'):
        sources_of(SourceConfig(path="mix.yaml"))


@pytest.mark.parametrize(
    "path",
    [
        "x{0..99999999}.json",
        "x{-99999999..0..2}{a,b}.json",
        "{a..z}{a..z}{a..z}{a..z}.json",
        "{" + "{a,b}" * 30 + ",c}.json",
    ],
)
def test_a_pattern_that_stands_for_too_many_names_is_refused(path):
    with pytest.raises(UserError, match=r"stands for more than 100,000 names; correct `data\.sources`"):
        source_of(path).files()


def test_a_pattern_that_leads_through_too_many_folders_is_refused(monkeypatch):
    write_records("sets/a/x.json", "sets/b/x.json", "sets/b/.hidden/x.json")
    assert source_of("sets/**/x.json").files() == [Path("sets/a/x.json"), Path("sets/b/x.json")]
    monkeypatch.setattr(patterns, "_MAX_LOOKED_AT", 3)
    with pytest.raises(UserError, match=r"the pattern sets/\*\*/x\.json leads to more than 3 files; name the folder"):
        source_of("sets/**/x.json").files()


names = st.sampled_from(["a", "b.json", ".c", "*", "**", "?", "[ab]*", "*.json", "..", "d"])


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(names, max_size=3))
def test_wildcards_match_what_pythons_glob_matches(in_tmp_path, monkeypatch, parts):
    here = in_tmp_path / "x/y/z"  # so deep that `..` leads to nothing but these files
    here.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(here)
    for path in ("a/b.json", "a/a/b.json", "a/.c/a", ".c/b.json", "d"):
        if not Path(path).exists():
            write_records(path)
    Path("a/link").unlink(missing_ok=True)
    Path("a/link").symlink_to("../.c")
    pattern = "/".join([*parts, "*.json"])
    found = {Path(path) for path in glob.glob(pattern, recursive=True)}
    for start in ("", f"{Path.cwd()}/"):
        ((_, matches),) = patterns.matches_of(Path(start + pattern))
        assert set(matches) == {start / path if start else path for path in found}


def test_a_config_may_hold_llava_nexts_list_itself():
    theirs = {
        "data": {"datasets": [{"json_path": "a.json", "sampling_strategy": "first:30%"}, {"json_path": "b.json"}]}
    }
    ours = {"data": {"sources": [{"path": "a.json", "sampling": "first:30%"}, {"path": "b.json"}]}}
    assert load_config(theirs) == load_config(ours)
    assert load_config({"data": {"sources": theirs["data"]["datasets"]}}) == load_config(ours)
    assert load_config(ours, {"data": {"datasets": [{"json_path": "c.json"}]}}).data.sources[0].path == "c.json"
    with pytest.raises(UserError, match=r"`data\.sources\[0\]\.sampling` is 'some'; it must be all, first:30%"):
        load_config({"data": {"datasets": [{"json_path": "a.json", "sampling_strategy": "some"}]}})
    with pytest.raises(UserError, match=r"unknown key `data\.sources\[0\]\.json`"):
        load_config({"data": {"datasets": [{"json": "a.json"}]}})
