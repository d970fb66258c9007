"""A folder as Hugging Face's tokenizers and processors write it is read as they read it."""

import json

import pytest
from transformers import LlavaOnevisionProcessor, PreTrainedTokenizerFast

from dflop.base import UserError
from dflop.shapes.record_media import RecordError
from dflop.shapes.records import Turn
from dflop.shapes.template_files import read_named_tokens, read_template, write_template
from dflop.shapes.text import BUNDLED_TOKENIZER, ChatTokenizer


def write(folder, files: dict) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else _as_text(content).encode())


def _as_text(content: str | dict) -> str:
    return content if isinstance(content, str) else json.dumps(content)


LISTED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "listed"}]
# The files of a folder, and which template counts.
FILES = {
    "a file": ({"chat_template.jinja": "plain"}, "plain"),
    "a processor's file of old": ({"chat_template.json": {"chat_template": "legacy"}}, "legacy"),
    "the tokenizer's and a processor's": (
        {"tokenizer_config.json": {"chat_template": "of texts"}, "chat_template.json": {"chat_template": "legacy"}},
        "legacy",
    ),
    "the tokenizer's and a file": (
        {"tokenizer_config.json": {"chat_template": "of texts"}, "chat_template.jinja": "plain"},
        "plain",
    ),
    "a processor's settings": (
        {"processor_config.json": {"chat_template": "settings"}, "chat_template.jinja": "plain"},
        "settings",
    ),
    "settings without one": ({"processor_config.json": {"image_seq_length": 4}, "chat_template.jinja": "a"}, "a"),
    "a file and others by name": (
        {"chat_template.jinja": "plain", "additional_chat_templates/tool_use.jinja": "tools"},
        "plain",
    ),
    "all by name": (
        {"additional_chat_templates/default.jinja": "named", "additional_chat_templates/rag.jinja": "rag"},
        "named",
    ),
    "the tokenizer's": ({"tokenizer_config.json": {"chat_template": "of texts"}}, "of texts"),
    "the tokenizer's list": ({"tokenizer_config.json": {"chat_template": LISTED}}, "listed"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_the_template_is_the_one_that_transformers_takes(tmp_path, case):
    files, expected = FILES[case]
    write(tmp_path, files)
    assert read_template(tmp_path).source == expected
    found = LlavaOnevisionProcessor.get_processor_dict(tmp_path)[0].get("chat_template")
    if found is None:  # a processor then has its tokenizer's
        (tmp_path / "tokenizer.json").write_bytes((BUNDLED_TOKENIZER / "tokenizer.json").read_bytes())
        found = PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template
    assert (found["default"] if isinstance(found, dict) else found) == expected


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer_config.json": "{bad"}, r"tokenizer_config\.json is not valid JSON .*; copy it again"),
        ({"chat_template.json": "[]"}, r"chat_template\.json holds no JSON object; copy it again"),
        (
            {"tokenizer_config.json": {"chat_template": LISTED[:1]}},
            r"tokenizer_config\.json has no chat template called `default` \(it has: tool_use\); put the right one",
        ),
        (
            {"additional_chat_templates/rag.jinja": "rag"},
            r"additional_chat_templates has no chat template called `default` \(it has: rag\)",
        ),
        ({"tokenizer_config.json": {}}, r"has no chat template: put one into chat_template\.jinja"),
        ({"chat_template.jinja": b"\xff"}, r"chat_template\.jinja is not UTF-8 text \(.*\); copy it again"),
        (
            {"additional_chat_templates/default.jinja": b"\xff"},
            r"additional_chat_templates/default\.jinja is not UTF-8 text \(.*\); copy it again",
        ),
        ({"chat_template.json": b"\xff{}"}, r"chat_template\.json is not UTF-8 text \(.*\); copy it again"),
        (
            {"tokenizer_config.json": {"chat_template": "\ud83d"}},
            r"tokenizer_config\.json has a chat template with half a surrogate pair, which is no character; copy it",
        ),
    ],
)
def test_a_folder_without_the_right_one_is_refused_with_the_way_out(tmp_path, files, said):
    write(tmp_path, files)
    with pytest.raises(UserError, match=said):
        read_template(tmp_path)


EACH_TURN = "{% for message in messages %}<s>{{ message.role }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% generation %}a", "is not valid Jinja: .*endgenerat"),
        ("{{ 10 ** 1000000000 }}", "does not end: .* takes more than 1,000,000 steps, .*; copy it again .* or mend it"),
        ("{{ 'a' ~ {[]: 1} }}", "is not valid Jinja: unhashable type"),
        ("{{ " + 5000 * "(" + " }}", "is not valid Jinja: maximum recursion depth exceeded"),
        ("", "writes nothing of what turns say; copy it again .* or mend it"),
        (" \n", "writes nothing of what turns say; copy it again .* or mend it"),
        (EACH_TURN, "writes nothing of what turns say; copy it again .* or mend it"),
        ("{{ '\\ud83d' }}{{ messages[0].content }}", "writes half a surrogate pair, which is no character; copy it"),
    ],
    ids=["unfinished", "too large a number", "no key", "too deep", "empty", "blank", "without contents", "half a pair"],
)
def test_a_template_that_is_none_is_named_by_its_file(tmp_path, source, said):
    write(tmp_path, {"chat_template.jinja": source})
    (tmp_path / "tokenizer.json").write_bytes((BUNDLED_TOKENIZER / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match=rf"the chat template of .*chat_template\.jinja {said}"):
        ChatTokenizer(tmp_path)


def test_a_template_that_refuses_all_that_is_tried_is_taken(tmp_path):
    """What it says of each record tells why."""
    write(tmp_path, {"chat_template.jinja": "{{ raise_exception('no system turn') }}"})
    (tmp_path / "tokenizer.json").write_bytes((BUNDLED_TOKENIZER / "tokenizer.json").read_bytes())
    with pytest.raises(RecordError, match="refuses it: no system turn"):
        ChatTokenizer(tmp_path).encode([[Turn("user", "a"), Turn("assistant", "b")]])


def of_old(content: str) -> dict:
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


# Files of a tokenizer, and which names its templates know.
NAMES = {
    "texts": ({"tokenizer_config.json": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": None}}),
    "objects": ({"tokenizer_config.json": {"eos_token": {"__type": "AddedToken", **of_old("<|im_end|>")}}}),
    "a map beside": (
        {
            "tokenizer_config.json": {"eos_token": "<|im_start|>", "add_bos_token": True},
            "special_tokens_map.json": {"eos_token": of_old("<|im_end|>"), "additional_special_tokens": ["<image>"]},
        }
    ),
    "a map that is of no account": (
        {
            "tokenizer_config.json": {
                "eos_token": "<|im_start|>",
                "added_tokens_decoder": {"0": {**of_old("<|endoftext|>"), "special": True}},
            },
            "special_tokens_map.json": {"eos_token": "<|im_end|>"},
        }
    ),
    "media by name": ({"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<image>"}}}),
    "media beside": ({"tokenizer_config.json": {"image_token": "<image>", "pad_token": "<|endoftext|>"}}),
}


@pytest.mark.parametrize("case", NAMES)
def test_templates_know_special_tokens_by_the_names_that_transformers_gives_them(tmp_path, case):
    write(tmp_path, NAMES[case])
    (tmp_path / "tokenizer.json").write_bytes((BUNDLED_TOKENIZER / "tokenizer.json").read_bytes())
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert read_named_tokens(tmp_path) == theirs.special_tokens_map


def test_a_name_for_what_is_no_character_is_refused(tmp_path):
    write(tmp_path, {"tokenizer_config.json": {"bos_token": "\ud83d"}})
    with pytest.raises(UserError, match="gives `bos_token` half a surrogate pair, which is no character; copy it"):
        read_named_tokens(tmp_path)


@pytest.mark.parametrize("jinja_files", [True, False])
def test_a_folder_that_a_tokenizer_was_saved_to_has_its_templates_and_names(tmp_path, jinja_files):
    theirs = PreTrainedTokenizerFast.from_pretrained(BUNDLED_TOKENIZER)
    theirs.add_special_tokens({"bos_token": "<|im_start|>"})
    theirs.chat_template = {"default": "{{ bos_token }}{{ image_token }}", "tool_use": "tools"}
    theirs.save_pretrained(tmp_path, save_jinja_files=jinja_files)
    assert read_template(tmp_path).source == theirs.chat_template["default"]
    assert read_named_tokens(tmp_path) == theirs.special_tokens_map


def test_a_saved_tokenizer_keeps_its_templates(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    write(first, {"chat_template.jinja": "{{ messages[0].content }}", "additional_chat_templates/rag.jinja": "rag"})
    (first / "tokenizer.json").write_bytes((BUNDLED_TOKENIZER / "tokenizer.json").read_bytes())
    ChatTokenizer(first).save(second)
    assert (second / "additional_chat_templates" / "rag.jinja").read_text() == "rag"
    assert read_template(second).source == read_template(first).source


def test_files_that_give_the_template_already_are_left_as_they_are(tmp_path):
    write(tmp_path, {"processor_config.json": {"chat_template": "a"}, "chat_template.json": {"chat_template": "b"}})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write_template(tmp_path, "a")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_transformers_gives_templates_is_there(tmp_path):
    write(
        tmp_path,
        {
            "chat_template.jinja": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
            "{{ m.content }}{% endfor %}{{ ['<é>'] | tojson }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, indent=1) }}"
            "{{ tools is none }}{{ documents is none }}{{ strftime_now('%d %b %Y') }}{{ dict(a=1).a }}"
        },
    )
    (tmp_path / "tokenizer.json").write_bytes((BUNDLED_TOKENIZER / "tokenizer.json").read_bytes())
    template = ChatTokenizer(tmp_path)._template
    text, _ = template.render([Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c")])
    assert text == 'ab["<é>"]{\n "a": 2,\n "b": 1\n}TrueTrue26 Jul 20241'
