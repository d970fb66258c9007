"""Manifests, lists of datasets and chat templates of any make are read or refused, in bounded time and memory."""

import contextlib
import io
import json
import os
import random
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzzing import damaged, fuzz

from dflop.base import UserError
from dflop.config import DataConfig, SourceConfig
from dflop.shapes import list_sources, template_limits
from dflop.shapes.chat_template import ChatTemplate
from dflop.shapes.manifests.index import ManifestFile
from dflop.shapes.record_media import RecordError
from dflop.shapes.records import Turn, parse_record

TURNS = [{"from": "human", "value": "<image>\nWhat is it, “é”?"}, {"from": "gpt", "value": "A dog. " * 20}]
RECORDS = [{"id": f"{number}", "image": f"{number}.jpg", "conversations": TURNS} for number in range(20)]


def parquet(rows: list[dict], **options) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, **options)
    return file.getvalue()


def archive(form: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as members:
        for record in RECORDS:
            for suffix, content in {"json": json.dumps(record).encode(), "jpg": b"x" * 700}.items():
                member = tarfile.TarInfo(f"{'folder/' * 20}{record['id']}.{suffix}")
                member.size = len(content)
                members.addfile(member, io.BytesIO(content))
    return file.getvalue()


MANIFESTS = {
    "json": {"list.json": json.dumps(RECORDS, indent=1).encode(), "one.json": json.dumps(RECORDS).encode()},
    "lines": {"lines.jsonl": "\n".join(map(json.dumps, RECORDS)).encode()},
    "parquet": {
        "zstd.parquet": parquet(RECORDS, compression="zstd", row_group_size=7),
        "plain.parquet": parquet(RECORDS, compression="none", use_dictionary=False),
        "media.parquet": parquet([{**record, "image": {"bytes": b"x" * 99}} for record in RECORDS]),
    },
    "tar": {"gnu.tar": archive(tarfile.GNU_FORMAT), "pax.tar": archive(tarfile.PAX_FORMAT)},
}

PARTS = [
    b'{"a":',
    b"[",
    b"]",
    b"},{",
    b'"',
    b"\\",
    b"\0",
    b"\x1b]0;x\x07",
    b'"conversations":',
    b"1e999",
    b"\n",
    b"\xff",
]


def repeated(content: bytes, rng: random.Random) -> bytes:
    """Damage; and in one file of five also a part many times over, as bombs have it."""
    content = damaged(content, rng)
    if rng.random() < 0.2:
        at = rng.randrange(len(content) + 1)
        content = content[:at] + rng.choice(PARTS) * rng.choice((1, 100, 100_000)) + content[at:]
    return content


def read_all(path: Path) -> None:
    file = ManifestFile(path)
    for row in range(len(file)):
        with contextlib.suppress(RecordError):
            parse_record(file.read(row))


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_damaged_manifest_is_read_or_refused(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fuzz(MANIFESTS[kind], read_all, UserError, tmp_path, damage=repeated, num_files=150)


LIST = """datasets:
  - json_path: a{0..3}.json
    sampling_strategy: "first:30%"
  - {json_path: "b/**/*.json", sampling_strategy: all}
"""
SIGNS = [
    "&a ",
    "*a",
    "<<: *a",
    "[",
    "{",
    "!!int ",
    "!!python/object:os.system ",
    "? ",
    "- ",
    "{0..99999999}",
    "{a,b}" * 30,
]


def of_signs(content: bytes, rng: random.Random) -> bytes:
    text = content.decode()
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(SIGNS) * rng.choice((1, 1, 2, 500)) + text[at:]
    return text.encode()


def test_a_damaged_list_of_datasets_is_read_or_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def read(path: Path) -> None:
        for source in list_sources(DataConfig(sources=[SourceConfig(path=str(path))])):
            source.files()

    for damage in (damaged, of_signs):
        fuzz({"mix.yaml": LIST.encode()}, read, UserError, tmp_path, damage=damage, num_files=150)


VALUES = ["messages", "n.x", "'a'", "9", "10 ** 5", "range(99999)", "i", "[n.x, n.x]", "{'a': n.x}", "(n.x ~ n.x)"]
CALLS = [
    *("{0} * {1}", "{0} + {1}", "{0} ~ {1}", "{0} ** {1}", "{0} % {1}", "{0} in {1}", "{0} == {1}", "({0})[:{1}]"),
    *("({0}) | join({1})", "({0}) | replace('a', {1})", "({0}) | center({1})", "({0}) | indent({1})", "({0}) | list"),
    *("{0} is in [{1}]", "[{0}, {1}] | max", "({0}) | sum", "[{0}] | select('in', [{1}]) | list", "[{0}] == [{1}]"),
    *(
        "({0}) | tojson",
        "({0}) | sort | unique | list",
        "({0}) | map('string') | join({1})",
        "({0}) | batch({1}) | list",
    ),
    *(
        "({0}) | string",
        "({0}).replace('a', {1})",
        "({0}).join({1})",
        "({0}).ljust({1})",
        "({0}).format({1})",
        "m({0})",
    ),
]
BODIES = [
    "{{{{ {0} }}}}",
    "{{% set n.x = {0} %}}",
    "{{% for i in {0} %}}{1}{{% endfor %}}",
    "{{% for i in {0} if {0} %}}{1}{{% endfor %}}",
    "{{% for i in {0} recursive %}}{1}{{{{ loop({0}) }}}}{{% endfor %}}",
    "{{% if {0} %}}{1}{{% endif %}}",
    "{{% macro m(y) %}}{1}{{{{ y }}}}{{% endmacro %}}{{{{ m({0}) }}}}",
    "{{% set y %}}{1}{{% endset %}}{{% set n.x = y %}}",
    "{{% generation %}}{1}{{% endgeneration %}}",
]


def template(content: bytes, rng: random.Random) -> bytes:
    def value(depth: int) -> str:
        if not depth or rng.random() < 0.3:
            return rng.choice(VALUES)
        return f"({rng.choice(CALLS)})".format(value(depth - 1), value(depth - 1))

    def body(depth: int) -> str:
        if not depth:
            return rng.choice(("", "text", f"{{{{ {value(2)} }}}}"))
        return "".join(rng.choice(BODIES).format(value(2), body(depth - 1)) for _ in range(rng.choice((1, 1, 2))))

    return b"{% set n = namespace(x='a') %}" + body(rng.randrange(1, 5)).encode() + content


def render(path: Path) -> None:
    ChatTemplate(path.read_text()).render([Turn("user", "What? " * 50), Turn("assistant", "That.")])


def test_a_made_up_template_renders_or_is_refused(tmp_path):
    usual = b"{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    fuzz({"chat.jinja": usual}, render, (UserError, RecordError), tmp_path, damage=template, num_files=20, most_s=60)


def test_a_conversation_of_thousands_of_turns_costs_its_record_and_not_hours():
    """Each answer is found by renderings of all turns before it, as the template may look ahead: 60,000 turns would
    take hours. Where it writes turn by turn, three renderings find them all."""
    lines = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    turns = [Turn("user", "a"), Turn("assistant", "b")]
    chat = ChatTemplate(lines + "{{ messages | length }}")
    assert len(chat.render(turns * 100)[1]) == 100
    with pytest.raises(RecordError, match=r"find its 30,000 answers, .* more than 25,000,000 steps; split the conv"):
        chat.render(turns * 30_000)
    assert len(ChatTemplate(lines).render(turns * 30_000)[1]) == 30_000


def test_a_template_that_is_slow_before_the_last_turn_alone_costs_its_record_and_not_hours(monkeypatch):
    """The whole conversation takes few steps, and each of the renderings that find its answers nearly all it may."""
    monkeypatch.setattr(template_limits, "_MOST_STEPS", 5_000)
    monkeypatch.setattr(template_limits, "MOST_STEPS_OF_ALL", 50_000)
    slow = "{% if messages | length < 60 %}{% for i in range(4_000) %}{% endfor %}{% endif %}"
    chat = ChatTemplate(slow + "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}")
    turns = [Turn("user", "a"), Turn("assistant", "b")]
    assert len(chat.render(turns * 5)[1]) == 5
    with pytest.raises(RecordError, match="to find its 30 answers"):
        chat.render(turns * 30)


# What reaches Python's internals, other files or modules from a template that is not held.
ESCAPES = [
    "''.__class__.__mro__[1].__subclasses__()",
    "messages.__class__",
    "messages['__class__'].__mro__",
    "''|attr('__class__')",
    "''|attr('__cla' ~ 'ss__')|attr('__mro__')",
    "(['']|map(attribute='__class__')|first).__mro__",
    "(['']|map('attr', '__class__')|first).__mro__",
    "([{'a': ''}]|groupby('a.__class__')|first).grouper.__mro__",
    "([{'a': ''}]|selectattr('a.__class__')|first).a",
    "'{0.__class__.__mro__}'.format('')",
    "('{0.__class__.__mro__}'|attr('format'))('')",
    "('{0.__class__}'|format)('')",
    "'{a.__class__}'.format_map({'a': ''})",
    "(['{0.__class__}']|map(attribute='format')|first)('')",
    "raise_exception.__globals__['TemplateError']",
    "strftime_now.__self__.__class__",
    "cycler.__init__.__globals__.os.popen('id').read()",
    "cycler('a').next.__func__.__globals__",
    "joiner.__init__.__globals__.os",
    "namespace.__init__.__globals__.os",
    "namespace().__init__.__globals__",
    "lipsum.__globals__['os']",
    "dict.__base__.__subclasses__()",
    "range.__class__('A', (), {})",
    "self.__init__.__globals__",
    "self._TemplateReference__context.environment",
    "loop.__class__",
    "get_flashed_messages.__globals__",
    "request.application.__globals__",
    "config.__class__.__init__.__globals__",
    "url_for.__globals__.os",
    "__import__('os').system('id')",
    "open('/etc/passwd').read()",
    "messages.append(1)",
    "messages[0].update({'role': 'x'})",
    "messages|attr('clear')()",
    "(namespace(f=''.format)).f.__self__.__class__",
]
BODIES_THAT_ESCAPE = [
    *(f"{{{{ {escape} }}}}" for escape in ESCAPES),
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as other %}",
    "{% from 'os' import system %}",
    "{% extends '/etc/passwd' %}",
    "{% for message in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "{% macro m() %}{{ caller.__init__.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{% generation %}{{ caller.__globals__ }}{% endgeneration %}",
    "{% set n = namespace() %}{% set n.__class__ = 'x' %}{{ n.__class__ }}",
    "{% set x = ''|attr('__class__') %}{{ x.__mro__ }}",
    "{{ self.b.__init__.__globals__ }}{% block b %}{% endblock %}",
]


@pytest.mark.parametrize("body", BODIES_THAT_ESCAPE)
def test_a_template_that_reaches_out_of_its_sandbox_is_refused_in_a_line(body):
    usual = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    turns = [Turn("user", "What?"), Turn("assistant", "That.")]
    assert ChatTemplate(usual).render(turns)
    with pytest.raises((UserError, RecordError)) as refused:
        ChatTemplate(body + usual).render(turns)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["pipe.json", "pipe.jsonl", "pipe.parquet", "pipe.tar", "pipe.yaml", "zeros.jsonl"])
def test_a_pipe_or_a_device_is_no_manifest(name, tmp_path):
    path = tmp_path / name
    if name.startswith("pipe"):
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match=f"{path} is no file"):
        len(ManifestFile(path)) if path.suffix != ".yaml" else list_sources(
            DataConfig(sources=[SourceConfig(path=str(path))])
        )


@pytest.mark.parametrize(
    ("values", "kind"),
    [([2**31 - 1], pa.date32()), ([2**62], pa.duration("s")), ([2**62], pa.timestamp("ms"))],
)
def test_a_value_that_python_does_not_have_costs_its_record(values, kind, tmp_path):
    columns = {"conversations": pa.array([TURNS] * 2), "when": pa.array([*values, 1], type=kind)}
    pq.write_table(pa.table(columns), tmp_path / "dates.parquet")
    manifest = ManifestFile(tmp_path / "dates.parquet")
    first, second = manifest.read(0), manifest.read(1)
    assert isinstance(first, RecordError)
    assert "dates.parquet, row 0" in first.detail
    assert second["conversations"] == TURNS
