"""From manifests to the database by the commands: rows are the manifest's own, ids are unique, rejects say why."""

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import soundfile
from click.testing import CliRunner, Result

from dflop.base import UserError
from dflop.cli import cli
from dflop.config import DataConfig, ModelConfig, SourceConfig
from dflop.models import load_model_spec
from dflop.shapes import SourceRecords, list_sources, load_samples, without_unencoded
from dflop.store import read_table

pytestmark = pytest.mark.usefixtures("in_tmp_path")

SAMPLINGS = ["all", "first:7", "end:25%", "random:40%", "end:1", "random:3"]


def talk(question: str) -> list[dict]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": "Yes."}]


def write_records(path: str, records: list) -> None:
    Path(path).write_text(json.dumps(records))


def dflop(command: str, data: dict, *arguments: str) -> Result:
    config = json.dumps({"data": data, "seed": 3})
    result = CliRunner().invoke(cli, [command, "--config", config, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_two_processes_make_of_a_shard_what_one_does():
    """Enough records for two, with bad ones among them; the last batch is not full."""
    lines = [json.dumps({"id": n, "conversations": talk(f"question {n % 97}")}) for n in range(4100)]
    lines[1234], lines[4099] = "{nope}", json.dumps({"id": "last"})
    Path("data.jsonl").write_text("\n".join(lines))
    data = {"sources": [{"path": "data.jsonl"}], "samples_per_shard": 5000}
    shard = dflop("list-shards", data).stdout.split("\t", maxsplit=1)[0]
    for workers in ("1", "2"):
        dflop("profile-shapes", data, "--shard", shard, "--out", f"{workers}.parquet", "--workers", workers)
    alone, together = (pl.read_parquet(f"{workers}.parquet") for workers in (1, 2))
    assert len(alone) == 4100
    assert alone["reason"].is_not_null().sum() == 2
    assert together.equals(alone)


def shapes_of(data: dict) -> tuple[dict[str, list[tuple]], str]:
    """Tables of the database that the commands make one after the other, and what the last one prints."""
    data = {"samples_per_shard": 8} | data
    for line in dflop("list-shards", data).stdout.splitlines():
        shard = line.split("\t")[0]
        dflop("profile-shapes", data, "--shard", shard, "--out", f"shapes/{shard}.parquet", "--workers", "1")
    output = dflop("merge-shapes", data, "--shapes", "shapes", "--out", "shapes.duckdb").output
    tables = {
        table: read_table(Path("shapes.duckdb"), table, made_by="merge-shapes").select(columns).rows()
        for table, columns in {
            "samples": ["source", "row", "sample_id"],
            "rejects": ["source", "row", "sample_id", "reason"],
            "sources": ["name", "sampling", "num_records"],
        }.items()
    }
    return tables, output


def test_rows_lead_back_to_the_records_whatever_the_sampling():
    for number in range(2):
        records = [{"id": f"r{20 * number + row}", "conversations": talk("hello")} for row in range(20)]
        for row in (0, 3, 13, 19):
            records[row] = {"id": f"r{20 * number + row}", "conversations": []}
        write_records(f"part-{number}.json", records)
    entries = [
        {"path": "part-{0..1}.json", "name": f"s{number}", "sampling": sampling}
        for number, sampling in enumerate(SAMPLINGS)
    ]
    tables, _ = shapes_of({"sources": entries, "samples_per_shard": 16})
    kept = {}
    for source in list_sources(DataConfig(sources=[SourceConfig(**entry) for entry in entries])):
        records = SourceRecords(source, 3)
        kept[source.name] = list(map(int, records.kept))
        for table in ("samples", "rejects"):
            of_source = [row for row in tables[table] if row[0] == source.name]
            assert [row[1] for row in of_source] == sorted(row[1] for row in of_source)
            for _, row, sample_id, *_ in of_source:
                assert records.read(row)["id"] == sample_id.removeprefix(f"{source.name}/")
        listed = [row[1] for table in ("samples", "rejects") for row in tables[table] if row[0] == source.name]
        assert sorted(listed) == kept[source.name]
    assert [len(rows) for rows in kept.values()] == [40, 7, 10, 16, 1, 3]
    assert tables["sources"] == [
        (f"s{number}", sampling, len(kept[f"s{number}"])) for number, sampling in enumerate(SAMPLINGS)
    ]
    assert len({sample_id for *_, sample_id in tables["samples"]}) == len(tables["samples"])


@pytest.mark.parametrize("duplicate_ids", ["reject", "keep"])
def test_the_config_says_what_becomes_of_duplicate_ids(duplicate_ids):
    write_records("a.json", [{"id": name, "conversations": talk("hello")} for name in ("x", "y", "x", "x")])
    write_records("b.json", [{"id": name, "conversations": talk("hello")} for name in ("y", "z")])
    tables, output = shapes_of({"sources": [{"path": "a.json"}, {"path": "b.json"}], "duplicate_ids": duplicate_ids})
    names = [sample_id for *_, sample_id in tables["samples"]]
    if duplicate_ids == "keep":
        assert names == ["x", "y", "x#2", "x#3", "b/y", "z"]
        assert tables["rejects"] == []
    else:
        assert names == ["x", "y", "b/y", "z"]
        assert tables["rejects"] == [("a", 2, "x", "duplicate_id"), ("a", 3, "x", "duplicate_id")]
        assert "a: 2 rejected as duplicate_id, e.g. x: an earlier record of the source has the same id" in output


@pytest.mark.parametrize("without_encoder", ["drop", "reject"])
def test_the_config_says_what_becomes_of_media_that_the_model_has_no_encoder_for(without_encoder):
    soundfile.write("a.wav", np.zeros(16_000), 16_000)
    heard = {"id": "heard", "audio": "a.wav", "conversations": talk("<audio>")}
    write_records("a.json", [heard, {"id": "read", "conversations": talk("hello")}])
    data = {"sources": [{"path": "a.json"}], "without_encoder": without_encoder}
    tables, output = shapes_of(data)
    samples, left_out = load_samples(Path("shapes.duckdb"), load_model_spec(ModelConfig()).encoders)
    assert samples.sample_id.tolist() == ["read"]
    if without_encoder == "drop":
        assert left_out == {"audio": 1}
        assert tables["rejects"] == []
    else:
        assert not left_out
        assert tables["rejects"] == [("a", 0, "heard", "no_encoder")]
        assert "the model has no encoder for audio (`data.without_encoder: reject`)" in output


def test_samples_with_sound_are_left_out_only_where_no_encoder_hears_them():
    columns = ("num_items", "kept_vision_tokens", "num_audio_windows", "kept_audio_tokens")
    samples = pl.DataFrame([(3, 300, 0, 0), (0, 0, 1, 30), (2, 200, 1, 0)], schema=columns, orient="row")
    deaf, hearing = (load_model_spec(ModelConfig(family=f)) for f in ("llava_onevision", "qwen2_5_omni_thinker"))
    kept, left_out = without_unencoded(samples, deaf.encoders)
    assert (kept.rows(), left_out) == ([(3, 300, 0, 0)], {"audio": 2})
    kept, left_out = without_unencoded(samples, hearing.encoders)
    assert (len(kept), left_out) == (3, {})
    assert without_unencoded(samples, ())[1] == {"image or video": 2, "audio": 1}


def test_a_source_that_is_named_twice_counts_twice_and_is_profiled_once():
    write_records("a.json", [{"id": f"r{row}", "conversations": talk("hello")} for row in range(20)])
    tables, _ = shapes_of({"sources": [{"path": "a.json"}, {"path": "a.json"}]})
    listed = [(source, row) for source, row, _ in tables["samples"]]
    assert listed == [(source, row) for source in ("a", "a-2") for row in range(20)]
    assert len({sample_id for *_, sample_id in tables["samples"]}) == 40
    assert len(list(Path("shapes").iterdir())) < 5


@pytest.mark.parametrize(
    ("asked", "drawn"), [({"epochs": (2.0, None)}, [20.0, 30.0]), ({"weight": (3, 1)}, [30.0, 10.0]), ({}, [40.0])]
)
def test_training_draws_sources_as_often_as_the_config_says(asked, drawn):
    """The database says it, so that plan and schedule follow it without reading the config's sources."""
    for name, count in (("small", 10), ("large", 30)):
        write_records(f"{name}.json", [{"id": n, "conversations": talk("?")} for n in range(count)])
    values = [{key: of_sources[number] for key, of_sources in asked.items()} for number in range(2)]
    shapes_of({"sources": [{"path": f"{name}.json"} | values[n] for n, name in enumerate(("small", "large"))]})
    samples, _ = load_samples(Path("shapes.duckdb"), load_model_spec(ModelConfig()).encoders)
    assert sorted(per_epoch for _, per_epoch in samples.take(np.arange(len(samples))).draws()) == sorted(drawn)
    assert samples.times_drawn().sum() == sum(drawn)


def test_a_manifest_may_have_names_of_its_own_for_a_records_keys():
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    write_records("own.json", [{"uid": "a", "chat": chat, "messages": "of another kind"}])
    tables, _ = shapes_of({"sources": [{"path": "own.json", "columns": {"messages": "chat", "id": "uid"}}]})
    assert [row[2] for row in tables["samples"]] == ["a"]


def test_an_empty_id_is_none():
    write_records("a.json", [{"id": name, "conversations": talk("hello")} for name in ("", None, "", "x", 0)])
    tables, _ = shapes_of({"sources": [{"path": "a.json"}]})
    assert [sample_id for *_, sample_id in tables["samples"]] == ["a/0", "a/1", "a/2", "x", "0"]
    assert tables["rejects"] == []


def test_a_manifest_that_is_cut_off_is_a_warning_of_its_own():
    content = json.dumps([{"id": row, "conversations": talk("hello") if row else []} for row in range(20)])
    Path("a.json").write_text(content.replace('"id": 2', '"id": nope')[:-30])
    tables, output = shapes_of({"sources": [{"path": "a.json"}]})
    assert len(tables["samples"]) == 17
    (line,) = [line for line in output.splitlines() if line.startswith("warning")]
    assert line.startswith("warning: a manifest of a is not whole, what follows is missing: a.json, byte ")
    assert "the file is cut off here" in line


def test_what_is_printed_counts_samples_and_rejects_by_source_and_reason():
    records = [{"id": row, "conversations": talk("hello " * row)} for row in range(11)]
    records[4:6] = [{"id": 4, "conversations": []}, "hello"]
    write_records("a.json", records)
    _, output = shapes_of({"sources": [{"path": "a.json"}]})
    assert "shapes.duckdb: 9 samples, 2 rejects" in output
    assert "a: 1 rejected as empty, e.g. 4: no turn of the assistant holds any text" in output
    assert "a: 1 rejected as bad_record, e.g. a/5: a record is an object, this is a text" in output
    (line,) = [line for line in output.splitlines() if line.startswith("a ")]
    assert line.split()[:3] == ["a", "text", "9"]


def test_that_the_bundled_tokenizer_counted_is_said_once():
    write_records("a.json", [{"id": row, "conversations": talk("hello")} for row in range(40)])
    _, output = shapes_of({"sources": [{"path": "a.json"}]})
    assert output.count("text was counted with the small bundled tokenizer") == 1
    shard = dflop("list-shards", {"sources": [{"path": "a.json"}]}).output.split("\t")[0]
    one = dflop("profile-shapes", {"sources": [{"path": "a.json"}]}, "--shard", shard, "--out", "one.parquet").output
    assert "tokenizer" not in one


def test_data_of_which_nothing_can_be_used_ends_the_run_with_the_reasons():
    """Under Snakemake the database goes with the failed job; the shards' files stay."""
    records = [{"image": f"{row}.jpg", "conversations": talk("<image>")} for row in range(3)]
    write_records("a.json", [*records, "hello"])
    Path("elsewhere").mkdir()
    with pytest.raises(UserError) as caught:
        shapes_of({"sources": [{"path": "a.json", "media_root": "elsewhere"}]})
    message = str(caught.value)
    assert message.startswith("none of 4 records can be used: 3 missing_media, e.g. a/0: 0.jpg is not a file under ")
    assert "; 1 bad_record, e.g. a/3: a record is an object" in message
    assert "`media_root`; shapes/*.parquet hold the reason of every record" in message
    assert len(read_table(Path("shapes.duckdb"), "rejects", made_by="merge-shapes")) == 4
