"""What chat templates write of conversations, and which characters of it are learned."""

import json
from pathlib import Path

import known_templates
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from dflop.base import UserError
from dflop.shapes import template_limits
from dflop.shapes.chat_template import ChatTemplate
from dflop.shapes.record_media import RecordError
from dflop.shapes.records import Turn
from dflop.shapes.template_files import read_template
from dflop.shapes.text import BUNDLED_TOKENIZER

# Texts with their learned spans in brackets, or why a conversation is refused: `{conversation: {template: text}}`.
EXPECTED = json.loads((Path(__file__).parent / "learned_spans.json").read_text(encoding="utf-8"))

TURNS = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"  # noqa: E501

# Released templates, and others with what released ones have: contents in parts, roles that must alternate, texts put
# together in names, blocks of all sorts.
TEMPLATES = {
    "bundled": read_template(BUNDLED_TOKENIZER).source,
    "llava_onevision": known_templates.LLAVA_ONEVISION,
    "llava_onevision converted": known_templates.LLAVA_ONEVISION_CONVERTED,
    "qwen3 thinking": known_templates.QWEN3_THINKING,
    "llama3": known_templates.LLAMA3,
    "mistral": known_templates.MISTRAL,
    "no end": "{% for message in messages %}{{ message.role + ': ' + message.content }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",  # noqa: E501
    "no prompt": TURNS,
    "split": "{% for message in messages %}{{ message.content.split('</think>')[-1] }}#{% endfor %}",
    "trimmed, and the prompt is another": "{% for message in messages %}{{ '#' + message.role + ' ' + message.content | trim + '<end>' }}{% endfor %}{% if add_generation_prompt %}{{ '#assistant:' }}{% endif %}",  # noqa: E501
    "the last one only": "{{ messages[-1].content }}",
    "blocks around turns": "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ '#' + message.role + '\n' + message.content | trim + '<end>' }}{% endgeneration %}{% else %}{{ '#' + message.role + '\n' + message.content + '<end>' }}{% endif %}{% endfor %}",  # noqa: E501
    "blocks, and an end of the whole": "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% if loop.last %}{{ '<end>' }}{% endif %}{% endfor %}",  # noqa: E501
    "blocks side by side": "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% generation %}{{ message.content | trim }}{% endgeneration %}{% endfor %}",  # noqa: E501
    "blocks before contents": "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}{% generation %}yes{% endgeneration %}{{ '<end>' }}{% endif %}{% endfor %}",  # noqa: E501
    "blocks in a name": "{% for message in messages %}{% set x %}{% generation %}{{ message.content }}{% endgeneration %}{% endset %}{{ x | trim }}{% endfor %}",  # noqa: E501
    "blocks inside of blocks": "{% for message in messages %}{{ '#' + message.role + ' ' }}{% generation %}{{ message.content }}{% generation %}!{% endgeneration %}{% endgeneration %}{% endfor %}{% if add_generation_prompt %}{{ '#assistant ' }}{% endif %}",  # noqa: E501
    "blocks of the thought and the answer": "{% for message in messages %}{{ message.role + ' ' }}{% if message.role == 'assistant' %}{% set parts = message.content.split('</think>') %}{% for part in parts %}{% generation %}{{ part }}{% endgeneration %}{{ '<|im_end|>' }}{% endfor %}{% else %}{{ message.content }}{% endif %}{% endfor %}",  # noqa: E501
}  # fmt: skip

CONVERSATIONS = {
    "two turns": [("user", "What is it?"), ("assistant", "A word.")],
    "a system turn": [
        ("system", "Be brief."),
        ("user", "One?"),
        ("assistant", "1"),
        ("user", "Two?"),
        ("assistant", "2"),
    ],
    "white space": [("user", "  Two  \n"), ("assistant", "\n Yes \n"), ("user", "\n"), ("assistant", " \u3000é\x1c")],
    "empty answers": [("user", "One?"), ("assistant", ""), ("user", "One?"), ("assistant", "")],
    "media": [
        ("user", "<image>\n<image>\nWhich <image>?"),
        ("assistant", "1"),
        ("user", "<video>\n"),
        ("assistant", "2"),
    ],
    "thoughts": [
        ("user", "A"),
        ("assistant", "<think>\nHm.\n</think>\n\nB"),
        ("user", "C"),
        ("assistant", "<think>\nO\n</think>\n\nD"),
    ],
    "the user comes last": [("user", "One?"), ("assistant", "1"), ("user", "Two?")],
    "two answers in a row": [("user", "One?"), ("assistant", "1"), ("assistant", "1")],
    "the assistant begins": [("assistant", "Hello."), ("user", "Hello."), ("assistant", "Hello.")],
    "signs": [
        ("user", "<|im_start|>assistant\n"),
        ("assistant", "a<|im_end|>\n<end>"),
        ("user", "\ufdd00\ufdd1"),
        ("assistant", "{{ 1 }}"),
    ],
}

letters = st.text(st.sampled_from("ab \n\x1c<>#\ufdd0\ufdd1\ufdd2\u3000é"), max_size=6)
contents = st.lists(letters | st.sampled_from(["<end>", "nd>", "<|im_end|>", "</think>"]), max_size=3).map("".join)
dialogues = st.lists(st.tuples(contents, contents), min_size=1, max_size=3).map(
    lambda pairs: [Turn(*said) for pair in pairs for said in zip(("user", "assistant"), pair, strict=True)]
)


@pytest.fixture(scope="module")
def templates() -> dict[str, ChatTemplate]:
    given = {"special_tokens": ["<end>", "<|im_end|>"], "placeholders": {"image": "<image>", "video": "<video>"}}
    given["named_tokens"] = {"bos_token": "<s>", "eos_token": "</s>"}
    return {name: ChatTemplate(source, **given) for name, source in TEMPLATES.items()}


def in_brackets(template: ChatTemplate, turns: list[Turn]) -> str:
    """The text with brackets around what is learned. A span may end before it begins."""
    try:
        text, spans = template.render(turns)
    except RecordError as error:
        return f"refused: {error.detail}"
    edges = [edge for span in spans for edge in span]
    for number, edge in sorted(enumerate(edges), key=lambda pair: (pair[1], pair[0]), reverse=True):
        text = text[:edge] + "⟦⟧"[number % 2] + text[edge:]
    return text


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_texts_and_what_is_learned_of_them(templates, conversation):
    turns = [Turn(*said) for said in CONVERSATIONS[conversation]]
    assert {name: in_brackets(template, turns) for name, template in templates.items()} == EXPECTED[conversation]


@settings(max_examples=50)
@given(turns=dialogues)
def test_texts_are_those_that_transformers_renders(templates, turns):
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    for name in set(TEMPLATES) - {"llava_onevision", "llava_onevision converted"}:  # these take contents in parts
        (text,), _ = render_jinja_template(
            conversations=[messages], chat_template=TEMPLATES[name], bos_token="<s>", eos_token="</s>"
        )
        try:
            assert templates[name].render(turns)[0] == text
        except RecordError:
            assert name == "the last one only"


@settings(max_examples=50)
@given(turns=dialogues)
def test_each_answer_is_learned_whole_if_the_template_writes_it(templates, turns):
    for name in ("bundled", "llava_onevision", "llama3", "mistral", "no end", "no prompt", "blocks around turns"):
        text, spans = templates[name].render(turns)
        answers = [turn.content.strip() for turn in turns if turn.role == "assistant"]
        learned = [text[start:end] for start, end in spans]
        assert [answer in span for answer, span in zip(answers, learned, strict=True)] == [True] * len(answers)


def test_a_text_of_all_characters_that_could_mark_blocks_is_refused(templates):
    turns = [Turn("user", "".join(map(chr, range(0xFDD0, 0xFDF0)))), Turn("assistant", "b")]
    with pytest.raises(RecordError, match="its text holds nearly all of U\\+FDD0 to U\\+FDEF"):
        templates["blocks around turns"].render(turns)
    assert templates["bundled"].render(turns)[1]


AS_USUAL = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
ROUNDS = "{% for i in range(40) %}"
NUMBERS = "{% set a = range(100000) | list %}"
ENDLESS = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "rounds that are skipped": "{% for i in range(99999) %}{% for j in range(99999) if 0 %}{% endfor %}{% endfor %}",
    "a text many times": "{{ 'a' * 10 ** 10 }}",
    "a list many times": "{{ [messages] * 10 ** 9 }}",
    "a number without end": "{{ 9 ** (9 ** 9) }}",
    "a text doubled": "{% set n = namespace(x='a') %}" + ROUNDS + "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "a text added": "{% set n = namespace(x='a') %}" + ROUNDS + "{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "a list in lists": "{% set n = namespace(x=[1]) %}" + ROUNDS + "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "a block in itself": "{% set n = namespace(x='a') %}"
    + ROUNDS
    + "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "padding": "{{ 'a' | center(8000000000) }}",
    "padding by a method": "{{ 'a'.ljust(8000000000) }}",
    "tabs": "{{ ('\t' * 100000).expandtabs(100000) }}",
    "indents": "{{ ('\n' * 100000) | indent(100000) }}",
    "replacements": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "a filter's replacements": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "joints": "{{ ('a' * 1000000) | join('b' * 100000) }}",
    "a method's joints": "{{ ('b' * 100000).join(['a'] * 100000) }}",
    "fields": "{{ ('{0}' * 30000).format('a' * 100000) }}",
    "a row of a table": "{{ [1] | batch(1000000000, 'x') | list }}",
    "tests": NUMBERS + "{% for i in range(1500) %}{% if -1 is in a %}{% endif %}{% endfor %}",
    "a filter's tests": NUMBERS + "{{ range(100000, 101000) | select('in', a) | list }}",
    "lists in lists": NUMBERS + "{% for i in range(1500) %}{% if [a] == [a + []] %}{% endif %}{% endfor %}",
    "the largest of lists": NUMBERS + "{% for i in range(1500) %}{{ [[a], [a]] | max | length }}{% endfor %}",
    "digits": "{{ 2.5 | round(1000000000, 'ceil') }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end_is_refused_at_once(name):
    with pytest.raises(UserError, match=r"does not end: .* takes more than 1,000,000 steps"):
        ChatTemplate(ENDLESS[name] + AS_USUAL)


@pytest.mark.parametrize(
    "code",
    [
        "'%5000000000d' % 1",
        "'%(a(b))5000000000d' % {'a(b)': 1}",
        "'%*d' % (5000000000, 1)",
        "'{:5000000000}'.format(1)",
        "'{:{}}'.format(1, 5000000000)",
    ],
)
def test_a_template_that_pads_beyond_reason_refuses_its_conversations(code):
    template = ChatTemplate("{{ " + code + " }}" + AS_USUAL)
    with pytest.raises(RecordError, match="a width of thousands in"):
        template.render([Turn("user", "a"), Turn("assistant", "b")])


def test_lists_are_not_added_up():
    template = ChatTemplate("{{ [[1], [2]] | sum(start=[]) }}" + AS_USUAL)
    with pytest.raises(RecordError, match="a sum of lists"):
        template.render([Turn("user", "a"), Turn("assistant", "b")])


def test_a_conversation_for_which_the_template_does_not_end_is_refused_and_others_are_not():
    endless = "{% if 'x' in messages[0].content %}" + ENDLESS["loops in loops"] + "{% endif %}"
    template = ChatTemplate(endless + AS_USUAL)
    with pytest.raises(RecordError, match="takes too long for it"):
        template.render([Turn("user", "x"), Turn("assistant", "b")])
    assert template.render([Turn("user", "a"), Turn("assistant", "b")])[0] == "user: a\nassistant: b\n"


def test_a_long_conversation_takes_far_fewer_steps_than_there_are(templates, monkeypatch):
    monkeypatch.setattr(template_limits, "_MOST_STEPS", 100_000)
    turns = [Turn(role, "word " * 200) for _ in range(250) for role in ("user", "assistant")]
    for name in ("bundled", "qwen3 thinking", "llama3", "mistral"):
        templates[name]._run(templates[name]._messages(turns))


@pytest.mark.parametrize("name", [name for name in vars(known_templates) if name.isupper() and "PROMPT" not in name])
def test_five_hundred_answers_are_found_within_the_steps(name, monkeypatch):
    """Steps grow with the square of the answers at most: a tenth of the answers has a hundredth of the steps."""
    monkeypatch.setattr(template_limits, "MOST_STEPS_OF_ALL", template_limits.MOST_STEPS_OF_ALL // 100)
    template = ChatTemplate(getattr(known_templates, name), named_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    turns = [Turn(role, f"{number:3} " + "words " * 33) for number in range(50) for role in ("user", "assistant")]
    assert len(template.render(turns)[1]) == 50


def test_texts_may_be_formatted():
    code = "{{ '%s, %02d, {}' % ('2024', 3) }} {{ 'of 2024: {} {{}}'.format(messages | length) }} "
    text, _ = ChatTemplate(code + AS_USUAL).render([Turn("user", "a"), Turn("assistant", "b")])
    assert text.startswith("2024, 03, {} of 2024: 2 {} user: a")
