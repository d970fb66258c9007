"""A group of a WebDataset archive's members is a record, its media in order, and a cut costs the last of them."""

import io
import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from dflop.base import UserError
from dflop.shapes import Source
from dflop.shapes.manifests import tar
from dflop.shapes.manifests.formats import open_reader
from dflop.shapes.manifests.tar import TarMember
from dflop.shapes.record_media import RecordError

pytestmark = pytest.mark.usefixtures("in_tmp_path")


def talk(question: str, answer: str = "Yes.") -> list[dict]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


def refusal(records_of, path: Path) -> str:
    with pytest.raises(UserError) as caught:
        records_of(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def picture(shade: int, suffix: str = "png") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (30 + shade, 20), (shade, 0, 0)).save(file, suffix)
    return file.getvalue()


def test_a_picture_with_a_text_is_a_caption(records_of, write_tar):
    path = write_tar(
        {"a/0.1": {"1.png": picture(1), ".txt": b"x"}, "b": {".jpg": picture(2, "jpeg"), ".txt": "é".encode()}}
    )
    first, second = records_of(path)
    assert first["id"] == "a/0"
    assert second["conversations"] == talk("<image>\n", "é")
    assert second["id"] == "b"
    assert [(medium.name, medium.open().read()) for medium in second["image"]] == [("b.jpg", picture(2, "jpeg"))]


def test_a_caption_with_several_media_asks_about_all(records_of, write_tar):
    (record,) = records_of(write_tar({"a": {".1.png": b"1", ".2.png": b"2", ".mp4": b"3", ".txt": b"x", ".wav": b"4"}}))
    assert record["conversations"][0]["value"] == "<image>\n<image>\n<video>\n<audio>\n"
    assert [medium.name for medium in record["image"]] == ["a.1.png", "a.2.png"]


def test_a_json_and_a_text_are_a_record_with_its_caption(records_of, write_tar):
    (unnamed,) = records_of(write_tar({"a": {".json": b'{"id": ""}'}}))
    assert unnamed["id"] == "a"
    (record,) = records_of(write_tar({"a": {".json": b'{"id": 7, "width": 30}', ".txt": b"A dog.", ".png": b"1"}}))
    assert (record["id"], record["width"]) == (7, 30)
    assert record["conversations"] == talk("<image>\n", "A dog.")


@pytest.mark.parametrize("key", ["image", "images"])
@pytest.mark.parametrize(
    ("named", "order"),
    [
        ([".b.png", ".a.png"], ["x.b.png", "x.a.png"]),
        (["b.png", "a.png"], ["x.b.png", "x.a.png"]),
        (["x.b.png", "x.a.png"], ["x.b.png", "x.a.png"]),
        (["in/x.b.png", "in/x.a.png"], ["x.b.png", "x.a.png"]),
        (["b.png"], ["x.b.png"]),
        (["b.png", "b.png"], ["x.b.png", "x.b.png"]),
        (["coco/1.jpg", "coco/2.jpg"], ["x.a.png", "x.b.png"]),
        (["b.png", "none.png"], ["x.a.png", "x.b.png"]),
        (None, ["x.a.png", "x.b.png"]),
        ([], ["x.a.png", "x.b.png"]),
        ([3, {"a": 1}], ["x.a.png", "x.b.png"]),
        ("b.png", ["x.b.png"]),
    ],
)
def test_pictures_stand_in_the_order_in_which_the_record_names_them(key, named, order, records_of, write_tar):
    record = {"conversations": talk("<image>" * len(order)), key: named}
    members = {".a.png": b"a", ".json": json.dumps(record).encode(), ".b.png": b"b"}
    (read,) = records_of(write_tar({"in/x": members}))
    assert [medium.name for medium in read["image"]] == [f"in/{name}" for name in order]
    assert [medium.open().read() for medium in read["image"]] == [name[2].encode() for name in order]


def test_folders_long_names_and_capital_suffixes_make_no_difference(profile_source):
    deep = "/".join(["a-long-folder-name"] * 9)
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT):
        with tarfile.open("train.tar", "w", format=form) as archive:
            for number in range(3):
                folder = tarfile.TarInfo(f"{deep}/{number}")
                folder.type = tarfile.DIRTYPE
                archive.addfile(folder)
                for suffix, content in {".JPG": picture(number, "jpeg"), ".Txt": b"A dog."}.items():
                    member = tarfile.TarInfo(f"{deep}/{number}/x{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        frame = profile_source(Source(name="it", path=Path("train.tar"), media_root=Path()))
        assert frame["reason"].to_list() == [None] * 3
        assert frame["sample_id"].to_list() == [f"{deep}/{number}/x" for number in range(3)]


def test_a_sample_of_an_archive_that_is_no_record_costs_no_other(records_of, write_tar):
    good = {".json": json.dumps({"id": "good"}).encode(), ".png": b"1"}
    broken = {
        "json": {".json": b'{"id": '},
        "text": {".json": b'{"id": "caf\xe9"}'},
        "caption": {".txt": b"caf\xe9", ".png": b"1"},
        "deep": {".json": b"[" * 100_000},
        "list": {".json": b"[1, 2]"},
    }
    for name, members in broken.items():
        first, record, last = records_of(write_tar({"a": good, name: members, "z": good}))
        assert first["id"] == last["id"] == "good"
        if name == "list":
            assert record == [1, 2]
        else:
            assert record.reason == "bad_record"
            assert "train.tar, byte 2,048: " in record.detail


def test_a_picture_without_any_text_is_a_record_with_nothing_to_learn(profile_source, write_tar):
    write_tar(
        {"a": {".png": picture(1)}, "b": {".cls": b"7", ".png": picture(1)}, "c": {".txt": b"x", ".png": picture(1)}}
    )
    frame = profile_source(Source(name="it", path=Path("train.tar"), media_root=Path()))
    assert frame["reason"].to_list() == ["bad_record", "bad_record", None]
    assert frame["detail"][0] == "a record needs `conversations` or `messages`"


def test_a_text_of_gigabytes_is_refused_unread(monkeypatch, records_of, write_tar):
    monkeypatch.setattr(tar, "MAX_RECORD_BYTES", 100)
    good, broken = records_of(write_tar({"a": {".json": b'{"id": 1}'}, "b": {".json": b" " * 99 + b"{}"}}))
    assert good == {"id": 1}
    assert "b.json is 101 bytes long" in broken.detail


@pytest.mark.parametrize("suffix", [".json", ".png"])
def test_a_sparse_member_costs_its_sample_and_is_not_unfolded(records_of, suffix):
    """A kilobyte of an archive may claim gigabytes of zeros."""
    with tarfile.open("train.tar", "w") as archive:
        for name in ("a", "b", "c"):
            member, content = tarfile.TarInfo(f"{name}.json"), json.dumps({"id": name}).encode()
            if name == "b":
                member, content = tarfile.TarInfo(f"b{suffix}"), b"1\n0\n1\n".ljust(512, b"\0") + b"x"
                claimed = {"major": "1", "minor": "0", "name": f"b{suffix}", "realsize": str(1 << 50)}
                member.pax_headers = {f"GNU.sparse.{key}": value for key, value in claimed.items()}
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    first, broken, last = records_of(Path("train.tar"))
    assert (first["id"], last["id"]) == ("a", "c")
    assert f"b{suffix} is sparse" in broken.detail


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"comment": "x" * 2_000_000}, "a header of 2,000,017 bytes"),
        ({"GNU.sparse.map": "0,x"}, "invalid literal"),
    ],
)
def test_an_absurd_header_costs_its_sample_and_the_one_before(records_of, header, why):
    with tarfile.open("train.tar", "w") as archive:
        for name in ("a", "b", "c"):
            member = tarfile.TarInfo(f"{name}.json")
            member.size = 2
            member.pax_headers = header if name == "c" else {}
            archive.addfile(member, io.BytesIO(b"{}"))
    first, broken = records_of(Path("train.tar"))
    assert first["id"] == "a"
    assert why in broken.detail


def test_an_archive_cut_off_anywhere_keeps_the_samples_before(media, records_of, write_tar):
    """A cut inside the header that begins a sample may cost the one before it, too: whose it was cannot be told."""
    texts = [json.dumps({"id": str(number), "pad": "x" * 300 * number}).encode() for number in range(5)]
    path = write_tar({f"{number}": {".json": text, ".png": b"x" * 700} for number, text in enumerate(texts)})
    whole = records_of(path)
    reader = open_reader(path)
    spans = list(reader.scan())
    reader.close()
    content = path.read_bytes()
    for length in range(512, len(content.rstrip(b"\0")), 64):
        path.write_bytes(content[:length])
        num_whole = sum(span.end <= length for span in spans[:-1])
        is_in_header = any(span.start < length < span.start + 512 for span in spans)
        records = records_of(path)
        certain = num_whole - is_in_header
        assert [record["id"] for record in records[:certain]] == [record["id"] for record in whole[:certain]]
        assert len(records) in (certain, certain + 1)
        if len(records) == certain:
            assert any(span.end == length for span in spans), "cut off between two samples"
        elif isinstance(records[-1], RecordError):
            assert records[-1].reason == "bad_record"
            assert "the file is cut off here" in records[-1].detail
        else:
            assert "image" not in records[-1], "cut off between two members"


@pytest.mark.parametrize("size", [-512, -1024, -(10**9), 10**9, 10**17])
def test_a_header_with_a_damaged_size_costs_what_follows_it_and_ends(records_of, write_tar, size):
    path = write_tar({"a": {".json": b'{"id": 1}'}, "b": {".json": b'{"id": 2}'}})
    member = tarfile.TarInfo("b.png")
    member.size = size
    path.write_bytes(path.read_bytes()[:2048] + member.tobuf(tarfile.GNU_FORMAT) + b"pixels" * 1000)
    first, broken = records_of(path)
    assert first == {"id": 1}
    assert broken.reason == "bad_record"
    # Newer releases of Python say of a size below zero that the header is invalid, and not where the member ends.
    assert "the file is cut off here (b.png ends at byte " in broken.detail or (
        size < 0 and "the file is cut off here (invalid offset)" in broken.detail
    )


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_however_an_archive_is_damaged_its_records_are_read_or_refused(records_of, write_tar, data):
    members = {".json": json.dumps({"id": 1}).encode(), ".png": b"x" * 600}
    content = bytearray(write_tar({f"{'n' * 120}{number}": members for number in range(3)}).read_bytes())
    for _ in range(data.draw(st.integers(1, 6), label="bytes changed")):
        block = data.draw(st.integers(0, len(content) // 512 - 1)) * 512
        content[block + data.draw(st.integers(0, 511))] = data.draw(st.sampled_from([0, 48, 128, 255]))
    for block in range(0, len(content), 512):  # headers whose sums are right get further
        if content[block + 257 : block + 262] == b"ustar":
            content[block + 148 : block + 156] = b" " * 8
            content[block + 148 : block + 156] = b"%06o\0 " % sum(content[block : block + 512])
    Path("train.tar").write_bytes(content)
    try:
        records = records_of(Path("train.tar"))
    except UserError:
        return
    assert all(isinstance(record, (dict, RecordError)) for record in records)


def test_a_compressed_archive_says_to_unpack_it(records_of):
    with tarfile.open("train.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    assert "train.tar.gz is no manifest that can be read: known are" in refusal(records_of, Path("train.tar.gz"))
    Path("train.tar.gz").rename("train.tar")
    message = refusal(records_of, Path("train.tar"))
    assert "is not a tar file that can be read" in message
    assert "compressed archives must be unpacked to plain tar first" in message
    Path("empty.tar").touch()
    assert "is not a tar file that can be read (empty file)" in refusal(records_of, Path("empty.tar"))


def test_an_archive_without_members_has_no_record(records_of, write_tar):
    assert records_of(write_tar({})) == []


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_member_reads_like_a_file_of_its_own(data):
    content = bytes(range(200))
    Path("x.tar").write_bytes(b"before" + content + b"after")
    file = TarMember("x", Path("x.tar"), 6, len(content)).open()
    expected = io.BytesIO(content)
    for _ in range(data.draw(st.integers(1, 8))):
        how = data.draw(st.sampled_from([io.SEEK_SET, io.SEEK_CUR, io.SEEK_END, None]))
        if how is None:
            count = data.draw(st.integers(-1, 300))
            assert file.read(count) == expected.read(count)
        else:
            lowest = {io.SEEK_SET: 0, io.SEEK_CUR: -expected.tell(), io.SEEK_END: -len(content)}[how]
            offset = data.draw(st.integers(lowest, 250))
            assert file.seek(offset, how) == expected.seek(offset, how)
        assert file.tell() == expected.tell()
    file.close()


def with_global_header(path: Path, attributes: dict[str, str]) -> Path:
    """The archive with a pax header before it that describes all its members."""
    header = tarfile.TarInfo.create_pax_global_header(attributes)
    path.write_bytes(header + path.read_bytes())
    return path


@pytest.mark.parametrize("attributes", [{"path": "b.json"}, {"linkpath": "c"}, {"size": "100000"}, {"mtime": "x"}, {}])
def test_what_a_header_says_of_all_members_is_not_believed(records_of, write_tar, attributes):
    """tarfile would give each of them the one name and size. Archives of git have such a header, for a comment."""
    samples = {name: {".json": b"{}", ".png": picture(shade), ".txt": b"x"} for shade, name in enumerate("ab")}
    plain = records_of(write_tar(samples))
    records = records_of(with_global_header(write_tar(samples), attributes | {"comment": "0" * 40}))
    assert [record["id"] for record in records] == ["a", "b"]
    assert [record["conversations"] for record in records] == [record["conversations"] for record in plain]
    assert [record["image"][0].open().read() for record in records] == [picture(0), picture(1)]


def test_an_archive_that_ends_in_a_header_of_all_members_is_cut_off(records_of, write_tar):
    path = write_tar({"a": {".png": picture(1), ".txt": b"x"}})
    header = tarfile.TarInfo.create_pax_global_header({"comment": "0" * 999})
    path.write_bytes(path.read_bytes()[: 4 * tarfile.BLOCKSIZE] + header[:600])
    assert isinstance(records_of(path)[-1], RecordError)
