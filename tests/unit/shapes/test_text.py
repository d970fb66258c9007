"""Learned tokens are the assistant's and no other, and templates that cannot tell them are refused."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dflop.base import UserError
from dflop.config import ModelConfig, load_config
from dflop.models import ShapeRules, load_model_spec
from dflop.shapes.reader import ShapeReader, expand_text
from dflop.shapes.record_media import RecordError
from dflop.shapes.records import Turn, parse_record
from dflop.shapes.text import BUNDLED_TOKENIZER, ChatTokenizer, TokenizedText

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""  # noqa: E501

# As multimodal processors have it: content is a list of parts, text and placeholders.
IN_PARTS = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}{{ '<' + part['type'] + '>' }}{% endif %}{% endfor %}{{ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""  # noqa: E501

# Any text that is not itself a special token.
contents = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), min_size=1, max_size=30)
pieces = st.lists(contents | st.sampled_from(["<image>", "<video>"]), min_size=1, max_size=4).map("".join)


@st.composite
def dialogues(draw) -> list[Turn]:
    turns = [Turn("system", draw(contents))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        turns += [Turn("user", draw(pieces)), Turn("assistant", draw(contents))]
    return turns


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    """The bundled tokenizer without our code around it."""
    return Tokenizer.from_file(str(BUNDLED_TOKENIZER / "tokenizer.json"))


def make_folder(path, *, template: str = CHATML, **settings):
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_bytes((BUNDLED_TOKENIZER / "tokenizer.json").read_bytes())
    (path / "chat_template.jinja").write_text(template)
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def learned_texts(plain: Tokenizer, text: TokenizedText) -> list[str]:
    """The runs of target tokens as text, special tokens included."""
    bounds = np.flatnonzero(np.diff(np.concatenate([[0], text.is_target, [0]])))
    return [
        plain.decode(text.token_ids[start:end].tolist(), skip_special_tokens=False)
        for start, end in bounds.reshape(-1, 2)
    ]


@settings(max_examples=80)
@given(turns=dialogues())
def test_the_targets_are_each_answer_with_its_end_of_turn(tokenizer, plain, turns):
    (text,) = tokenizer.encode([turns])
    answers = [f"{turn.content}<|im_end|>" for turn in turns if turn.role == "assistant"]
    assert learned_texts(plain, text) == answers


@settings(max_examples=80)
@given(turns=dialogues())
def test_the_tokens_are_those_of_the_rendered_text_with_one_placeholder_a_medium(tokenizer, plain, turns):
    (text,) = tokenizer.encode([turns])
    rendered = "".join(f"<|im_start|>{turn.role}\n{turn.content}<|im_end|>\n" for turn in turns)
    assert plain.decode(text.token_ids.tolist(), skip_special_tokens=False) == rendered
    ids = {tokenizer.placeholder_ids[kind]: f"<{kind}>" for kind in ("image", "video")}
    assert [ids[token] for token in text.token_ids[text.placeholders]] == re.findall("<image>|<video>", rendered)


def test_many_conversations_at_once_are_those_one_by_one(tokenizer):
    dialogues = [[Turn("user", "a" * length), Turn("assistant", "b" * (40 - length))] for length in (1, 20, 39)]
    for text, turns in zip(tokenizer.encode(dialogues), dialogues, strict=True):
        (alone,) = tokenizer.encode([turns])
        np.testing.assert_array_equal(text.token_ids, alone.token_ids)
        np.testing.assert_array_equal(text.is_target, alone.is_target)
    assert tokenizer.encode([]) == []


# Words, white space, line ends and special tokens, side by side in any order.
signs = ["the", "The", "don't", "I'LL", "12345", "...", "<image>", "<video>", "<|im_end|>", "<"]
characters = ["e\u0301", "\u0301", "雪", "한국", "\U0001f600"]
white_space = [" ", "  ", "\n", "\n\n", "\r\n", "\t", " \n", "\u00a0", "\u3000", "\x1c"]
scraps = st.lists(st.sampled_from([*signs, *characters, *white_space]) | st.text(max_size=3), min_size=1).map("".join)


def with_digits_in_threes(made: dict) -> None:
    """As Llama 3 cuts numbers."""
    cut = made["pre_tokenizer"]["pretokenizers"][0]["pattern"]
    cut["Regex"] = cut["Regex"].replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def with_nfc(made: dict) -> None:
    """As Qwen's."""
    made["normalizer"] = {"type": "NFC"}


def with_spaces_of_their_own(made: dict) -> None:
    """A pattern that nothing is known of."""
    made["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r" |[^ ]+"


def with_greedy_placeholders(made: dict) -> None:
    """Special tokens that take the white space behind them."""
    for token in made["added_tokens"]:
        token["rstrip"] = True


def changed(folder, change) -> ChatTokenizer:
    make_folder(folder)
    file = folder / "tokenizer.json"
    made = json.loads(file.read_text(encoding="utf-8"))
    change(made)
    file.write_text(json.dumps(made), encoding="utf-8")
    return ChatTokenizer(folder)


@pytest.fixture(scope="module")
def of_each_kind(tmp_path_factory, tokenizer):
    changes = (with_digits_in_threes, with_nfc, with_spaces_of_their_own, with_greedy_placeholders)
    return [tokenizer, *(changed(tmp_path_factory.mktemp(change.__name__), change) for change in changes)]


def test_texts_are_counted_by_words_where_the_tokenizer_allows_it(of_each_kind):
    turns = [Turn("user", "What is it?"), Turn("assistant", "A word.")]
    rendered = [of_each_kind[0]._template.render(turns)]
    counted = [
        tokenizer._counter is not None and tokenizer._counter.count(rendered) != [None] for tokenizer in of_each_kind
    ]
    assert counted == [True, True, True, False, False]


def test_a_span_that_ends_before_it_begins_is_not_counted_by_words(tokenizer):
    counter = tokenizer._counter
    assert counter.count([("<image>\nyes\nno", [(12, 8)])]) == [None]
    assert counter.count([("<image>\nyes\nno", [(8, 12)])]) != [None]


@settings(max_examples=300)
@given(contents=st.lists(scraps, min_size=2, max_size=6))
def test_tokens_are_counted_as_they_are_made(of_each_kind, contents):
    turns = [Turn(("user", "assistant")[number % 2], content) for number, content in enumerate(contents)]
    for tokenizer in of_each_kind:
        (text,), (counts,) = tokenizer.encode([turns]), tokenizer.count([turns])
        made = (len(text.token_ids), text.is_target.sum(), len(text.placeholders))
        assert (counts.num_tokens, counts.num_targets, counts.num_placeholders) == made


def test_words_that_were_counted_before_count_alike_and_long_ones_too(tokenizer):
    words = " ".join(f"{'long' * number} word{number}" for number in range(30))
    turns = [Turn("user", f"<image> {words}"), Turn("assistant", f"\n {words} {words}")]
    again = [tokenizer.count([turns, list(turns)]) for _ in range(2)]
    assert len({*again[0], *again[1]}) == 1
    assert again[0][0].num_tokens == len(tokenizer.encode([turns])[0].token_ids)


@settings(max_examples=40)
@given(turns=dialogues())
def test_a_template_over_parts_gives_the_same_tokens(tmp_path_factory, tokenizer, turns):
    in_parts = ChatTokenizer(make_folder(tmp_path_factory.getbasetemp() / "parts", template=IN_PARTS))
    (text,), (expected,) = in_parts.encode([turns]), tokenizer.encode([turns])
    np.testing.assert_array_equal(text.token_ids, expected.token_ids)
    np.testing.assert_array_equal(text.is_target, expected.is_target)


def test_the_tokenizers_own_truncation_and_padding_are_switched_off(tmp_path):
    folder = make_folder(tmp_path / "short")
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    settings["padding"] = {
        "strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<pad>",
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    turns = [Turn("user", "a word or two"), Turn("assistant", "many more words than eight tokens could ever hold")]
    text = ChatTokenizer(folder).encode([turns])[0]
    np.testing.assert_array_equal(text.token_ids, ChatTokenizer().encode([turns])[0].token_ids)


def test_placeholders_that_a_tokenizer_lacks_are_added_at_its_end(tmp_path):
    folder = make_folder(tmp_path / "without")
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["content"] != "<video>"]
    settings["model"]["vocab"].pop("<video>", None)
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    before = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    without = ChatTokenizer(folder)
    assert without.vocab_size() == before + 1
    (text,) = without.encode([[Turn("user", "<video>"), Turn("assistant", "b")]])
    assert len(text.placeholders) == 1


@pytest.fixture(scope="module")
def internvl() -> ShapeRules:
    """A family whose texts need three tokens that few tokenizers have."""
    return load_model_spec(ModelConfig(family="internvl")).rules


def test_the_tokens_that_a_family_needs_are_added_where_the_tokenizer_lacks_them(tokenizer, internvl):
    family = ChatTokenizer(None, internvl)
    size = tokenizer.vocab_size()
    assert family.vocab_size() == size + 3
    assert family.placeholder_ids == tokenizer.placeholder_ids | {"image": size, "video": size}
    turns = [Turn("user", "a <img><IMG_CONTEXT></img> b"), Turn("assistant", "c")]
    (text,), (plain,) = family.encode([turns]), tokenizer.encode([turns])
    assert len(text.placeholders) == 1
    around = text.token_ids[text.placeholders[0] - 1 : text.placeholders[0] + 2]
    assert around.tolist() == [size + 1, size, size + 2]
    assert len(text.token_ids) < len(plain.token_ids)


def test_a_saved_tokenizer_has_the_tokens_that_were_added_and_any_other_is_copied(tmp_path, tokenizer, internvl):
    family = ChatTokenizer(None, internvl)
    for name, saved in (("plain", tokenizer), ("family", family)):
        (tmp_path / name).mkdir()
        saved.save(tmp_path / name)
    file = "tokenizer.json"
    assert (tmp_path / "plain" / file).read_bytes() == (tokenizer.folder / file).read_bytes()
    turns = [Turn("user", "a <img><IMG_CONTEXT></img> b"), Turn("assistant", "c")]
    again = ChatTokenizer(tmp_path / "family")
    assert again.encode([turns])[0].token_ids.tolist() == family.encode([turns])[0].token_ids.tolist()
    # What is there is not added again, and what stands for media of other kinds makes no model larger.
    assert ChatTokenizer(tmp_path / "family", internvl).vocab_size() == family.vocab_size()


def test_a_model_needs_no_ids_for_placeholders_that_its_texts_never_hold(tmp_path, internvl):
    """As in the released checkpoints, whose `<video>` lies behind the embedding's last row."""
    folder = make_folder(tmp_path / "released")
    family = ChatTokenizer(None, internvl)
    family.save(folder)
    file = folder / "tokenizer.json"
    settings = json.loads(file.read_text().replace("<video>", "<unused-1>").replace("<audio>", "<unused-2>"))
    last = {"id": family.vocab_size(), "content": "<video>"}
    settings["added_tokens"].append(settings["added_tokens"][0] | last)
    file.write_text(json.dumps(settings))
    assert Tokenizer.from_file(str(file)).token_to_id("<video>") == family.vocab_size()
    released = ChatTokenizer(folder, internvl)
    assert released.vocab_size(("image", "video")) == family.vocab_size()
    assert released.placeholder_ids["audio"] > last["id"]


def test_a_text_that_holds_what_stands_for_media_is_refused(internvl):
    reader = ShapeReader(internvl, load_config({}).data)
    said = [{"from": "human", "value": "What is <IMG_CONTEXT>?"}, {"from": "gpt", "value": "A token."}]
    with pytest.raises(RecordError, match="its text holds <IMG_CONTEXT>, which stands for media") as caught:
        reader.place_media(parse_record({"id": "a", "conversations": said}), [])
    assert caught.value.reason == "placeholder_mismatch"


def test_a_folder_that_is_no_tokenizer_says_how_to_write_one(tmp_path):
    with pytest.raises(UserError, match=r"is not a tokenizer directory: it has no tokenizer\.json; write one with"):
        ChatTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{bad")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer \(key must be .*\); write it again with"):
        ChatTokenizer(tmp_path)


def test_a_template_may_change_what_is_before_an_answer_when_others_follow(tmp_path, plain):
    """The answers are found by themselves, and learned as they stand in the whole."""
    mine = ChatTokenizer(make_folder(tmp_path / "counting", template="{{ messages|length }}" + CHATML))
    (text,) = mine.encode([[Turn("user", "a"), Turn("assistant", " b "), Turn("user", "b"), Turn("assistant", "a")]])
    assert learned_texts(plain, text) == [" b <|im_end|>", "a<|im_end|>"]


def test_a_conversation_that_the_template_rewrites_is_refused_and_no_other(tmp_path):
    said_twice = CHATML.replace("message['content']", "message['content'] * 2")
    template = "{% if messages|length > 2 %}{{ messages|length }}{% endif %}" + said_twice
    mine = ChatTokenizer(make_folder(tmp_path / "twice", template=template))
    with pytest.raises(RecordError, match="changes turn 2 when others follow") as caught:
        mine.encode([[Turn("user", "a"), Turn("assistant", "bc"), Turn("user", "c"), Turn("assistant", "d")]])
    assert caught.value.reason == "bad_record"
    assert mine.encode([[Turn("user", "a"), Turn("assistant", "bc")]])[0].is_target.any()


def test_a_template_runs_in_a_sandbox(tmp_path):
    template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(RecordError, match="unsafe"):
        ChatTokenizer(make_folder(tmp_path / "wild", template=template)).encode([[Turn("assistant", "b")]])


def test_a_conversation_at_which_a_tokenizer_gives_up_is_refused_and_no_other(tmp_path):
    """Its library panics where a pattern tries more than ten million ways, e.g. after 11 MB of spaces in Qwen's."""
    folder = make_folder(tmp_path / "slow")
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(a+)+$b|."
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    slow = ChatTokenizer(folder)
    for read in (slow.encode, slow.count):
        with pytest.raises(RecordError, match=r"the tokenizer gives up: .*retry-limit"):
            read([[Turn("user", "a" * 40), Turn("assistant", "b")]])
        assert read([[Turn("user", "ac"), Turn("assistant", "b")]])


def test_a_tokenizer_that_begins_every_text_with_a_token_does_not_do_so_here(tmp_path):
    """The template writes all of the special tokens; whatever the tokenizer adds by itself would come twice."""
    folder = make_folder(tmp_path / "beginning")
    settings = json.loads((folder / "tokenizer.json").read_text())
    start = next(token for token in settings["added_tokens"] if token["content"] == "<|im_start|>")
    pieces = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    settings["post_processor"] = {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [start["id"]], "tokens": ["<|im_start|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a").ids[0] == start["id"]
    turns = [Turn("user", "a"), Turn("assistant", "b")]
    text = ChatTokenizer(folder).encode([turns])[0]
    np.testing.assert_array_equal(text.token_ids, ChatTokenizer().encode([turns])[0].token_ids)


@given(data=st.data(), num_tokens=st.integers(1, 30), limit=st.integers(1, 80))
def test_expanding_repeats_placeholders_and_cuts_at_the_end(data, num_tokens, limit):
    ids = np.array(data.draw(st.lists(st.integers(0, 9), min_size=num_tokens, max_size=num_tokens)))
    is_target = np.array(data.draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)))
    placeholders = np.array(sorted(data.draw(st.sets(st.integers(0, num_tokens - 1), max_size=4))), dtype=int)
    counts = data.draw(
        st.lists(st.integers(1, 12) | st.just(10**15), min_size=len(placeholders), max_size=len(placeholders))
    )
    count_of = dict(zip(placeholders.tolist(), counts, strict=True))
    slow = [
        (token, learned)
        for position, (token, learned) in enumerate(zip(ids.tolist(), is_target.tolist(), strict=True))
        for _ in range(min(count_of.get(position, 1), 100))
    ][:limit]
    token_ids, mask = expand_text(TokenizedText(ids, is_target, placeholders), counts, limit)
    assert list(zip(token_ids.tolist(), mask.tolist(), strict=True)) == slow
