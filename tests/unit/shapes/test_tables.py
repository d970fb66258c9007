"""A row of a Parquet file or of a saved Hugging Face dataset is a record, and damage costs the rows it lies in."""

import resource
import sys
from contextlib import contextmanager
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflop.base import UserError
from dflop.shapes import Source
from dflop.shapes.manifests import scan
from dflop.shapes.manifests.formats import open_reader
from dflop.shapes.manifests.index import ManifestFile

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def refusal(records_of, path: Path) -> str:
    with pytest.raises(UserError) as caught:
        records_of(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_parquet_row_is_a_record_whatever_its_row_group(records_of):
    rows = [{"id": number, "image": None if number % 3 else f"{number}.png", "none": None} for number in range(23)]
    pq.write_table(pa.Table.from_pylist(rows), "train.parquet", row_group_size=5)
    assert records_of(Path("train.parquet")) == rows
    pq.write_table(pa.Table.from_pylist(rows).slice(0, 0), "train.parquet")
    assert records_of(Path("train.parquet")) == []


def test_a_message_whose_parts_have_every_column_is_read(profile_source, media):
    """As a table has it: nulls where a part has no text or no picture."""
    content = [{"type": "image", "text": None}, {"type": "text", "text": "what?"}]
    answer = [{"type": "text", "text": "Blue."}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    rows = [{"id": "a", "images": [(media / "wide.png").read_bytes()], "messages": messages}]
    pq.write_table(pa.Table.from_pylist(rows), "train.parquet")
    frame = profile_source(Source(name="it", path=Path("train.parquet"), media_root=media))
    assert frame["detail"].to_list() == [None]
    assert frame["num_images"].to_list() == [1]


def test_a_row_group_of_any_size_is_read_a_few_rows_at_a_time(records_of):
    rows = [{"id": number, "image": bytes([number]) * 2_000_000} for number in range(60)]
    pq.write_table(pa.Table.from_pylist(rows), "train.parquet", use_dictionary=False, write_batch_size=1)
    assert pq.ParquetFile("train.parquet").metadata.num_row_groups == 1
    reader = open_reader(Path("train.parquet"))
    before, most = pa.total_allocated_bytes(), 0
    for number in (*range(60), 3, 50):
        assert reader.read(number, number + 1) == rows[number]
        most = max(most, pa.total_allocated_bytes() - before)
    reader.close()
    assert most < 60_000_000
    assert pa.total_allocated_bytes() - before < 1_000_000


def test_a_parquet_text_that_is_not_utf8_costs_its_row_alone(records_of):
    texts = pa.array([b"fine", b"caf\xe9", b"good"]).view(pa.binary())
    column = pa.Array.from_buffers(pa.string(), 3, texts.buffers())
    pq.write_table(pa.table({"id": column}), "train.parquet")
    first, broken, last = records_of(Path("train.parquet"))
    assert (first, last) == ({"id": "fine"}, {"id": "good"})
    assert (broken.reason, broken.detail.split(":")[0]) == ("bad_record", "train.parquet, row 1")


def test_a_damaged_row_group_costs_its_rows_and_no_other(records_of):
    table = pa.table({"id": [f"record {number}" for number in range(30)]})
    pq.write_table(table, "train.parquet", row_group_size=10, use_dictionary=False)
    place = pq.ParquetFile("train.parquet").metadata.row_group(1).column(0).data_page_offset
    content = bytearray(Path("train.parquet").read_bytes())
    content[place : place + 40] = b"\xff" * 40
    Path("train.parquet").write_bytes(content)
    records = records_of(Path("train.parquet"))
    assert records[:10] + records[20:] == table.to_pylist()[:10] + table.to_pylist()[20:]
    assert {record.reason for record in records[10:20]} == {"bad_record"}
    assert {record.detail.split(":")[0] for record in records[10:20]} == {"train.parquet, row group 1"}


def test_what_is_no_parquet_file_is_refused(records_of):
    pq.write_table(pa.table({"id": [1, 2]}), "train.parquet")
    whole = Path("train.parquet").read_bytes()
    for content in (b"", b"[]", whole[: len(whole) // 2], whole[:-1]):
        Path("train.parquet").write_bytes(content)
        assert "is not a Parquet file that can be read" in refusal(records_of, Path("train.parquet"))


def small_dataset() -> datasets.Dataset:
    return datasets.Dataset.from_list([{"id": number} for number in range(600)])


def test_a_saved_dataset_is_read_row_by_row(records_of):
    small_dataset().save_to_disk("train")
    assert records_of(Path("train")) == [{"id": number} for number in range(600)]


def test_a_saved_dict_of_datasets_names_its_splits(records_of):
    splits = datasets.DatasetDict({"train": small_dataset(), "val": small_dataset()})
    splits.save_to_disk("all")
    assert refusal(records_of, Path("all")) == "all holds several splits (train, val); name one: all/<split>"
    assert len(records_of(Path("all/val"))) == 600


def test_a_folder_that_no_dataset_was_saved_in_says_what_to_name(records_of):
    Path("train").mkdir()
    pq.write_table(pa.table({"id": [1, 2]}), "train/a.parquet")
    assert "name the files in it, for example train/*.parquet" in refusal(records_of, Path("train"))


def test_a_saved_dataset_whose_files_are_gone_is_refused(records_of):
    small_dataset().save_to_disk("train")
    for file in Path("train").glob("*.arrow"):
        file.unlink()
    message = refusal(records_of, Path("train"))
    assert "the dataset train cannot be read: " in message
    assert "\n" not in message


@pytest.fixture
def read_indexed(tmp_path, monkeypatch):
    """`read_indexed(path)`: the records of a manifest's file as the commands read them, or why they cannot."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def read(path: str) -> list:
        file = ManifestFile(Path(path))
        return [file.read(row) for row in range(len(file))]

    return read


@pytest.fixture
def scanner_ends_by(tmp_path, monkeypatch):
    """`scanner_ends_by(signal)`: a context in which the process that scans tables is ended by a signal."""

    @contextmanager
    def ends_by(name: str):
        if scan._table_scanner is not None:
            scan._table_scanner.kill()
            scan._table_scanner.wait()
        ends = tmp_path / "ends"
        ends.write_text(f"#!/bin/sh\nkill -{name} $$\n")
        ends.chmod(0o755)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(ends))
            yield

    return ends_by


def repeated(value: object, times: int) -> pa.Array:
    """A value that a table stores once."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * times, pa.int32()), pa.array([value]))


@pytest.mark.parametrize(
    ("column", "options"),
    [
        (lambda: repeated("a" * 40_000_000, 200), {}),
        pytest.param(lambda: repeated(b"a" * 40_000_000, 200), {}, marks=pytest.mark.exhaustive),
        pytest.param(
            lambda: pa.ListArray.from_arrays(pa.array([0, 120], pa.int32()), repeated("a" * 10_000_000, 120)),
            {},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            lambda: pa.chunked_array([pa.array(["a" * 60_000_000])] * 20),
            {"use_dictionary": False, "data_page_size": 2_000_000_000, "write_statistics": False},
            marks=pytest.mark.exhaustive,
        ),
        (lambda: pa.nulls(1_000_000, pa.int32()), {}),
    ],
    ids=["texts", "media", "texts of a row", "a page", "rows"],
)
def test_a_small_table_that_unpacks_to_gigabytes_is_refused(read_indexed, column, options):
    pq.write_table(pa.table({"id": column()}), "train.parquet", compression="zstd", **options)
    assert Path("train.parquet").stat().st_size < 100_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (refused,) = read_indexed("train.parquet")
    assert "train.parquet cannot be read: it is damaged, unpacks to far more than its size, or" in refused.detail
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_a_table_that_ends_the_process_that_scans_it_is_refused_and_others_are_read(read_indexed, scanner_ends_by):
    for name in ("bad", "good", "other"):
        pq.write_table(pa.table({"id": [name]}), f"{name}.parquet")
    assert read_indexed("good.parquet") == [{"id": "good"}]
    with scanner_ends_by("SEGV"):
        (refused,) = read_indexed("bad.parquet")
    assert "bad.parquet cannot be read: it is damaged" in refused.detail
    assert read_indexed("other.parquet") == [{"id": "other"}]


def test_a_table_is_not_refused_when_somebody_else_ends_the_process_that_scans_it(read_indexed, scanner_ends_by):
    pq.write_table(pa.table({"id": ["good"]}), "good.parquet")
    with (
        scanner_ends_by("KILL"),
        pytest.raises(UserError, match=r"that read .*good\.parquet was ended by SIGKILL: start again"),
    ):
        read_indexed("good.parquet")
    assert read_indexed("good.parquet") == [{"id": "good"}]


def test_media_of_a_large_page_are_read(read_indexed):
    media = [np.random.default_rng(number).bytes(1 << 20) for number in range(300)]
    pq.write_table(pa.table({"image": media}), "train.parquet", use_dictionary=False, data_page_size=1 << 30)
    assert [row["image"] for row in read_indexed("train.parquet")] == media


def test_a_row_with_too_much_text_costs_that_row_alone(read_indexed):
    pq.write_table(pa.table({"id": ["a", "b" * (33 << 20), "c"]}), "train.parquet")
    first, broken, last = read_indexed("train.parquet")
    assert (first, last) == ({"id": "a"}, {"id": "c"})
    assert broken.detail == "train.parquet, row 1: over 33,554,432 bytes of text"


@pytest.mark.parametrize(
    ("column", "type_said"),
    [
        (pa.array([[2**62]], pa.list_(pa.timestamp("us"))), "timestamp[us]"),
        (pa.array([{"at": [0]}], pa.struct([("at", pa.list_(pa.timestamp("us", tz="Mars/One")))])), "tz=Mars/One"),
        (pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"]), "struct<a: int64, a: int64>"),
    ],
    ids=["a time in a list", "a time zone in a list in a struct", "two fields of one name"],
)
def test_a_value_that_python_cannot_hold_is_named_by_its_column_and_type(records_of, column, type_said):
    """pyarrow says of an unknown time zone that a package must be installed."""
    pq.write_table(pa.table({"id": ["a"], "when": column}), "train.parquet")
    (error,) = records_of(Path("train.parquet"))
    assert error.reason == "bad_record"
    assert "train.parquet, row 0: Python cannot hold the value of column when (" in error.detail
    assert type_said in error.detail
