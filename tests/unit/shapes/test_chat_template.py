"""What chat templates write of conversations, and which characters of it are learned."""

import json
from pathlib import Path

import known_templates
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from dflop.shapes.chat_template import ChatTemplate
from dflop.shapes.records import RecordError, Turn
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
