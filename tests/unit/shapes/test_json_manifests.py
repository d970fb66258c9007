"""JSON lists and lines are cut into exactly the records that a whole parse gives, and damage costs one record."""

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dflop.base import UserError
from dflop.shapes.manifests import json_text
from dflop.shapes.manifests.formats import open_reader
from dflop.shapes.manifests.json_text import JsonListReader
from dflop.shapes.record_media import RecordError

pytestmark = pytest.mark.usefixtures("in_tmp_path")

properties = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])

# What a scanner could take for a bracket, a comma, a quote or the end of a string.
texts = st.text(
    st.sampled_from('[]{},:"\\ \n\té雪😀\u2028\x85\x00') | st.characters(exclude_categories=["Cs"]), max_size=6
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
spaces = st.text(" \t\r\n", max_size=3)


@st.composite
def json_lists(draw) -> tuple[str, list]:
    """A list's text, with any white space where JSON allows it, and what it holds."""
    entries = draw(st.lists(values, max_size=6))
    parts = []
    for entry in entries:
        style = {"ensure_ascii": draw(st.booleans()), "indent": draw(st.sampled_from([None, 0, 2]))}
        parts.append(draw(spaces) + json.dumps(entry, **style) + draw(spaces))
    text = f"{draw(spaces)}[{','.join(parts) if parts else draw(spaces)}]{draw(spaces)}"
    return text, entries


def scanned(path: Path, chunk_bytes: int = 8 << 20) -> list[tuple[int, int, bytes, Any]]:
    """(start, end, digest, record) of every record; the file is read `chunk_bytes` at a time."""
    reader = open_reader(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "_CHUNK_BYTES", chunk_bytes)
        patch.setattr(json_text, "_LONG_RECORD_BYTES", min(chunk_bytes, 256 << 10))
        spans = list(reader.scan())
    found = [(span.start, span.end, span.digest, reader.read(span.start, span.end)) for span in spans]
    reader.close()
    return found


def records_in(content: bytes | str, name: str = "train.json", **how: int) -> list[Any]:
    path = Path(name)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return [record for *_, record in scanned(path, **how)]


def assert_bad(record: Any, detail: str) -> None:
    assert isinstance(record, RecordError), record
    assert record.reason == "bad_record"
    assert detail in record.detail


@properties
@given(drawn=json_lists(), chunk_bytes=st.integers(1, 7) | st.just(8 << 20), mark=st.booleans())
@example(drawn=('["\\\\", "\\"]", [{"]": "[,"}]]', ["\\", '"]', [{"]": "[,"}]]), chunk_bytes=1, mark=True)
@example(drawn=("[]", []), chunk_bytes=1, mark=False)
def test_a_list_is_cut_into_exactly_its_elements(drawn, chunk_bytes, mark):
    text, expected = drawn
    content = b"\xef\xbb\xbf" * mark + text.encode()
    Path("train.json").write_bytes(content)
    found = scanned(Path("train.json"), chunk_bytes)
    assert [record for *_, record in found] == expected == json.loads(text)
    # Spans stand one comma apart, from the opening bracket to the closing one, and hold the elements' own text.
    assert [content[end : end + 1] for _, end, _, _ in found] == [b","] * (len(found) - 1) + [b"]"] * bool(found)
    assert all(later[0] == earlier[1] + 1 for earlier, later in pairwise(found))
    assert all(json.loads(content[start:end]) == record for start, end, _, record in found)


@properties
@given(entries=st.lists(values, max_size=6), data=st.data())
def test_every_line_is_a_record_and_blank_lines_are_none(entries, data):
    text = "\ufeff" if data.draw(st.booleans(), label="byte order mark") else ""
    for entry in entries:
        text += data.draw(st.sampled_from(["", "\n", " \n", "\r\n\n"]), label="before")
        text += json.dumps(entry, ensure_ascii=False) + data.draw(st.sampled_from(["\n", " \r\n"]), label="after")
    expected = entries
    if entries and isinstance(entries[0], list):  # a file that begins with a bracket is a list
        return
    assert records_in(text, "train.jsonl") == expected
    assert records_in(text.removesuffix("\n"), "train.jsonl") == expected


@properties
@given(entries=st.lists(values, min_size=2, max_size=5), chunk_bytes=st.integers(1, 9))
def test_a_record_has_the_same_digest_wherever_it_stands_and_another_where_its_bytes_differ(entries, chunk_bytes):
    def digests(content: str, name: str = "a.json") -> list[bytes]:
        Path(name).write_text(content)
        return [digest for *_, digest, _ in scanned(Path(name), chunk_bytes)]

    parts = [json.dumps(entry) for entry in entries]
    forward = digests(f"[{','.join(parts)}]")
    assert digests("[\n" + " ,\n ".join(reversed(parts)) + "\n]") == forward[::-1]
    assert digests("null\n" + "\n".join(parts), "a.jsonl")[1:] == forward
    assert len(set(forward)) == len(set(parts))


def conversation(number: int) -> dict:
    answer = ['Yes, "indeed" \\ [', "Ja }", "雪😀", "]"][number % 4]
    turns = [{"from": "human", "value": f"question {number}?"}, {"from": "gpt", "value": answer}]
    return {"id": f"é{number}", "conversations": turns}


@pytest.mark.parametrize("chunk_bytes", [7, 8 << 20])
def test_a_list_cut_off_at_any_byte_keeps_the_records_before_and_names_the_byte_where_it_ends(chunk_bytes):
    entries = [conversation(number) for number in range(4)]
    text = " [\n" + ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries) + "\n]\n"
    content = text.encode()
    ends = []  # of each record
    for entry in entries:
        encoded = json.dumps(entry, ensure_ascii=False).encode()
        ends.append(content.index(encoded) + len(encoded))
    for length in range(content.index(b"[") + 1, content.rindex(b"]") + 1):
        *whole, last = records_in(content[:length], chunk_bytes=chunk_bytes)
        assert whole == entries[: sum(end <= length for end in ends)]
        assert_bad(last, "train.json, byte ")
        at = int(last.detail.split("byte ")[1].split(":")[0].replace(",", ""))
        assert max([1, *(end for end in ends if end <= length)]) <= at <= length
    assert records_in(content[: content.rindex(b"]") + 1], chunk_bytes=chunk_bytes) == entries


@pytest.mark.parametrize(
    ("content", "at", "why"),
    [
        ('[{"id": 1, "conv', 11, "Unterminated string starting at"),
        ('[{"id": 1}, {"a": [{"b": 2}', 27, "Expecting ',' delimiter"),
        ('[{"id": 1},', 11, "Expecting value"),
        ('[{"id": 1}', 10, "Expecting value"),
        ('[{"id": 1', 9, "Expecting ',' delimiter"),
        ("[", 1, "Expecting value"),
    ],
)
def test_a_list_that_the_file_ends_in_is_said_to_be_cut_off(content, at, why):
    assert_bad(records_in(content)[-1], f"train.json, byte {at}: the file is cut off here ({why})")


def test_what_is_only_broken_is_not_said_to_be_cut_off():
    for content in ('[{"id": "1}, {"id": "2"}]', '[{"id": 1}] and more', '[{"id": 1}, ]'):
        assert not any("cut off" in str(record) for record in records_in(content))
    for content in ('{"id": 1}\n{"id": nope}', '{"id": 1}\n{"id": "2}\n'):
        assert not any("cut off" in str(record) for record in records_in(content, "train.jsonl"))


def test_a_line_cut_off_is_one_bad_record():
    first, last = records_in('{"id": 1}\n{"id": 2, "te', "train.jsonl")
    assert first == {"id": 1}
    assert_bad(last, "train.jsonl, byte 20: the file is cut off here (Unterminated string starting at)")


@pytest.mark.parametrize("chunk_bytes", [1, 5, 8 << 20])
@pytest.mark.parametrize(
    ("text", "good", "at"),
    [
        ('[{"a": 1}, {"a": 2}] , {"a": 3}]', 2, 2),
        ('[{"a": 1}, {"a": 2}] and so on', 2, 2),
        ('[{"a": 1}, {"a": 2}][{"a": 3}]', 2, 2),
        ('[{"a": 1}, {"a": 2}] {"a": 3}', 2, 2),
        ('[{"a": 1}}, {"a": 2}]', 1, 0),
        ('[{"a": 1}, nope, {"a": 2}]', 2, 1),
        ('[{"a": 1}, {"a": 2,}, {"a": 3}]', 2, 1),
        ('[{"a": 1}, {\'a\': 2}, {"a": 3}]', 2, 1),
        ('[{"a": 1}, , {"a": 3}]', 2, 1),
        ('[, {"a": 1}]', 1, 0),
        ('[{"a": 1} {"a": 2}, {"a": 3}]', 1, 0),
        ('[{"a": 1}, ]', 1, 1),
    ],
)
def test_what_is_no_json_is_one_bad_record_between_good_ones(text, good, at, chunk_bytes):
    records = records_in(text, chunk_bytes=chunk_bytes)
    assert_bad(records[at], "train.json, byte ")
    del records[at]
    assert len(records) == good
    assert all(isinstance(record, dict) for record in records)


def test_a_line_that_is_no_json_costs_no_other():
    first, broken, last = records_in('{"a": 1}\n{"a": nope}\n{"a": 3}\n', "train.jsonl")
    assert (first, last) == ({"a": 1}, {"a": 3})
    assert_bad(broken, "byte 15: not JSON, Expecting value")


@pytest.mark.parametrize("name", ["train.json", "train.jsonl"])
def test_a_record_that_is_not_utf8_is_named_with_its_byte(name):
    parts = [b'{"a": "x"}', b'{"a": "caf\xe9"}', b'{"a": "y"}']
    content = b"[" + b", ".join(parts) + b"]" if name == "train.json" else b"\n".join(parts)
    first, broken, last = records_in(content, name)
    assert (first, last) == ({"a": "x"}, {"a": "y"})
    assert_bad(broken, f"{name}, byte {content.index(0xE9)}: not UTF-8")


def test_brackets_nested_by_the_thousand_and_numbers_without_end_cost_their_record_alone():
    deep = "[" * 200_000 + "]" * 200_000
    records = records_in(f'[1, {deep}, 2, {"9" * 5000}, 3, {{"a": {deep}}}, 4, [[[[[]]]]]]')
    assert [record for record in records if not isinstance(record, RecordError)] == [1, 2, 3, 4, [[[[[]]]]]]
    for record in (records[1], records[3], records[5]):
        assert_bad(record, "train.json, byte ")


def test_long_gaps_are_read_once():
    gaps = ("}" + " " * 500_000) * 4  # squared, this would take hours
    assert_bad(records_in(f'[{{"a": 1}}, {{"messages{gaps}]')[-1], "byte 12: not JSON")


def test_a_quote_that_is_never_closed_does_not_take_the_rest_of_the_file_into_memory(monkeypatch):
    monkeypatch.setattr(json_text, "MAX_RECORD_BYTES", 50)
    good, broken = records_in('[{"a": 1}, {"a: 2}' + ", {}" * 100 + "]", chunk_bytes=8)
    assert good == {"a": 1}
    assert_bad(broken, "byte 10: 409 bytes up to the next record; is a quote or bracket not closed?")


@properties
@given(data=st.data(), chunk_bytes=st.sampled_from([16, 300, 8 << 20]))
def test_a_stray_sign_costs_the_record_it_stands_in_and_its_neighbours_at_most(data, chunk_bytes):
    entries = [conversation(number) for number in range(12)]
    indent = data.draw(st.sampled_from([None, 1]))
    text = json.dumps(entries, ensure_ascii=False, indent=indent)
    place = data.draw(st.integers(1, len(text) - 1))
    damaged = text[:place] + data.draw(st.sampled_from('"[]{}\\,:x')) + text[place:]
    found = [record for record in records_in(damaged, chunk_bytes=chunk_bytes) if record in entries]
    assert found == [entry for entry in entries if entry in found]
    assert len(found) >= 10
    assert len(records_in(damaged, chunk_bytes=chunk_bytes)) <= 14


@pytest.mark.parametrize("chunk_bytes", [32, 8 << 20])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('question 5?"', 'question "5?"'),  # the rest's strings and signs change places
        ('question 5?"', "question 5?"),
        ('question 5?"}, {', 'question 5?"}]]}, {'),  # the list seems to end
        ('question 5?"}, {', 'question 5?"}, [{'),  # and never to end
        ('"id": "é5"', '"id": "é5'),
        ('"id": "é5"', '"id": é5"}}], '),
    ],
)
def test_a_damaged_record_is_one_reject_that_names_its_byte_and_what_follows_is_kept(old, new, chunk_bytes):
    entries = [conversation(number) for number in range(60)]
    text = json.dumps(entries, ensure_ascii=False)
    assert text.count(old) == 1
    records = records_in(text.replace(old, new), chunk_bytes=chunk_bytes)
    assert [record for record in records if record in entries] == entries[:5] + entries[6:]
    assert 60 <= len(records) <= 62
    broken = next(record for record in records if isinstance(record, RecordError))
    at = int(broken.detail.split("byte ")[1].split(":")[0].replace(",", ""))
    begins = [text.encode().index(f'{{"id": "é{number}"'.encode()) for number in (5, 6)]
    assert begins[0] <= at <= begins[1] + 10


def test_two_records_without_a_comma_between_them_are_two():
    entries = [conversation(number) for number in range(4)]
    text = json.dumps(entries).replace('}, {"id": "\\u00e92"', '} {"id": "\\u00e92"')
    assert text != json.dumps(entries)
    assert records_in(text) == entries


class CountingFile(io.FileIO):
    """A file that counts the bytes that are read from it."""

    num_read = 0

    def read(self, size: int = -1) -> bytes:
        content = super().read(size)
        self.num_read += len(content)
        return content


def bytes_read(path: Path) -> int:
    """Bytes that one scan of a JSON list reads."""
    file = CountingFile(path)
    list(JsonListReader(path, file, 1).scan())
    return file.num_read


def test_damage_in_many_places_costs_each_time_the_same_few_bytes_to_read(monkeypatch):
    few = 1 << 14  # of a file of 250 kB
    monkeypatch.setattr(json_text, "_MAX_BYTES_AFTER_DAMAGE", few)
    entries = [conversation(number) for number in range(2000)]
    records = records_in(json.dumps(entries).replace("question 1", 'question "1'))
    good = [record for record in records if not isinstance(record, RecordError)]
    assert good == [entry for entry in entries if "question 1" not in str(entry)]
    num_damaged = len(entries) - len(good)
    assert num_damaged > 1000
    assert bytes_read(Path("train.json")) < num_damaged * 2 * few


def test_a_line_beyond_any_record_is_one_bad_record_and_is_not_read_whole(monkeypatch):
    monkeypatch.setattr(json_text, "MAX_RECORD_BYTES", 50)
    for num_bytes in (45, 100, 101, 102, 1000):
        records = records_in('{"a": 1}\n{"b": "' + "x" * num_bytes + '"}\n{"a": 2}\n', "train.jsonl")
        assert [record for record in records if not isinstance(record, RecordError)] == [{"a": 1}, {"a": 2}]
        assert_bad(records[1], f"byte 9: {num_bytes + 10:,} bytes up to the next record; is a quote or bracket")


@pytest.mark.parametrize("content", ["[]", "[ ]", " \n[\n]\n", b"\xef\xbb\xbf[]"])
@pytest.mark.parametrize("name", ["train.json", "train.jsonl"])
def test_an_empty_list_has_no_record(content, name):
    assert records_in(content, name) == []


def test_the_first_character_tells_a_list_from_lines_whatever_the_file_is_called():
    assert records_in('{"a": 1}\n{"a": 2}\n', "train.json") == [{"a": 1}, {"a": 2}]
    assert records_in('\n[{"a": 1},\n{"a": 2}]', "train.jsonl") == [{"a": 1}, {"a": 2}]
    assert records_in("", "train.jsonl") == []
    assert records_in(" \n", "train.jsonl") == []


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ('{\n  "a": 1\n}\n', "begins with '{'"),
        ('{"a": 1', "begins with '{'"),
        ('"records"', "begins with '\"'"),
        ("雪", "begins with '\ufffd'"),
        (b"PK\x03\x04", "begins with 'P'"),
        (b"\xef\xbb", "begins with '\ufffd'"),
    ],
)
def test_a_file_that_is_neither_a_list_nor_lines_says_how_it_begins(content, found):
    with pytest.raises(UserError) as caught:
        records_in(content)
    way_out = "it must be a JSON list of records, `[{…}, …]`, or one record a line (.jsonl)"
    assert str(caught.value) == f"the manifest train.json {found}; {way_out}"


def test_a_sound_file_is_read_once():
    entry = json.dumps({"id": 1, "conversations": [{"from": "human", "value": "word " * 80}]})
    path = Path("train.json")
    path.write_text("[" + ",\n".join([entry] * 44_000) + "]")
    size = path.stat().st_size
    assert size > 20_000_000
    assert bytes_read(path) == size - 1  # the opening bracket is known
