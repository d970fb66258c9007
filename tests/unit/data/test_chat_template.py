"""Conversations that are put together from what others showed are those that the template itself writes."""

import known_templates
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.data.chat_template import ChatTemplate
from dflop.data.records import RecordError, Turn
from dflop.data.template_files import read_template
from dflop.data.text import BUNDLED_TOKENIZER
from dflop.runtime import UserError

TURNS = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"  # noqa: E501
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

# As released models have them: a system turn of its own, trimmed contents, both forms of a content, contents in parts,
# roles that must alternate, texts put together in names.
COPYING = {
    "bundled": read_template(BUNDLED_TOKENIZER).source,
    "chatml": TURNS + PROMPT,
    "system": "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    + TURNS
    + PROMPT,
    "trimmed": "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' %}{% if loop.index0 == 0 %}{% set content = bos_token ~ content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",  # noqa: E501
    "alternating": "{% if messages[0].role == 'system' %}{% set system = messages[0].content.strip() %}{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}{{ system }}{% for message in rest %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{% if message.role == 'user' %}{{ '[INST] ' ~ message.content.strip() ~ ' [/INST]' }}{% else %}{{ ' ' + message.content + '</s>' }}{% endif %}{% endfor %}",  # noqa: E501
    "either form": "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' or 'image' in part %}<image>{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"  # noqa: E501
    + PROMPT,
    "tools": "{% if messages[0]['role'] == 'system' %}{{ '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}{% endif %}{% for message in messages %}{% if (message.role == 'user') or (message.role == 'system' and not loop.first) or (message.role == 'assistant' and not message.tool_calls) %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% elif message.role == 'assistant' %}{{ '<|im_start|>assistant' }}{% if message.content %}{{ '\n' + message.content }}{% endif %}{% for tool_call in message.tool_calls %}{% if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}{{ tool_call.arguments | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% elif message.role == 'tool' %}{% if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{ '<|im_start|>user' }}{% endif %}{{ message.content | upper }}{% endif %}{% endfor %}"  # noqa: E501
    + PROMPT,
    "blocks": "{% for message in messages %}{{ '#' + message.role + ' ' }}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{{ '<end>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '#assistant\n' }}{% endif %}",  # noqa: E501
    "blocks around turns": "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ '#' + message.role + '\n' + message.content | trim + '<end>' }}{% endgeneration %}{% else %}{{ '#' + message.role + '\n' + message.content + '<end>' }}{% endif %}{% endfor %}",  # noqa: E501
    "blocks side by side": "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% generation %}{{ message.content | trim }}{% endgeneration %}{% endfor %}",  # noqa: E501
    "blocks before contents": "{% for message in messages %}{{ message.content }}{% if message.role == 'assistant' %}{% generation %}yes{% endgeneration %}{{ '<e' }}{% endif %}{% endfor %}",  # noqa: E501
    "trimmed and whole side by side": "{% for message in messages %}{{ message.content | trim }}{{ message.content }}#{% endfor %}",  # noqa: E501
    "media first": known_templates.LLAVA_ONEVISION,
    "media and lines first": known_templates.LLAVA_ONEVISION_CONVERTED,
    "parts": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}",  # noqa: E501
}  # fmt: skip

# What a content says decides what these write, or might, for turns of the user and the assistant.
LOOKING = {
    "compared": "{% for message in messages %}{% if message.content != '' %}{{ message.content }}#{% endif %}{% endfor %}",  # noqa: E501
    "empty": "{% for message in messages %}{% if message.content %}{{ message.content }}{% endif %}#{% endfor %}",
    "default": "{% for message in messages %}{{ message.content or 'nothing' }}#{% endfor %}",
    "searched": "{% for message in messages %}{{ 'yes' if 'a' in message.content else 'no' }}#{% endfor %}",
    "searched for": "{% for message in messages %}{{ message.content in 'abc' }}#{% endfor %}",
    "split": "{% for message in messages %}{{ message.content.split('</think>')[-1] }}#{% endfor %}",
    "stripped of a sign": "{% for message in messages %}{{ message.content.strip('a') }}#{% endfor %}",
    "trimmed with what is before": "{% for message in messages %}{{ (' ' + message.content) | trim }}#{% endfor %}",
    "trimmed twice": "{% for message in messages %}{% set c = message.content | trim %}{{ c | trim }}#{% endfor %}",
    "large": "{% for message in messages %}{{ message.content | upper }}#{% endfor %}",
    "as JSON": "{% for message in messages %}{{ message | tojson }}#{% endfor %}",
    "shown": "{{ messages }}",
    "counted": "{% for message in messages %}{{ message.content }}{{ message.content | length }}#{% endfor %}",
    "cut": "{% for message in messages %}{{ message.content[:3] }}#{% endfor %}",
    "letters": "{% for message in messages %}{% for letter in message.content %}{{ letter }}-{% endfor %}{% endfor %}",
    "formatted": "{% for message in messages %}{{ message.content % () }}#{% endfor %}",
    "through a name": "{% set ns = namespace(x='') %}{% for message in messages %}{% set ns.x = message.content %}{{ ns.x | upper }}{% endfor %}",  # noqa: E501
    "through a macro": "{% macro say(x) %}{{ x | upper }}{% endmacro %}{% for message in messages %}{{ say(message.content) }}{% endfor %}",  # noqa: E501
    "through a block": "{% for message in messages %}{% set x %}{{ message.content }}{% endset %}{{ x | upper }}{% endfor %}",  # noqa: E501
    "through an error": "{% for message in messages %}{{ raise_exception(message.content) }}{% endfor %}",
    "through pairs": "{% for message in messages %}{% for key, value in message.items() %}{{ value }}{% endfor %}{% endfor %}",  # noqa: E501
    "through the loop": "{% for message in messages %}{{ loop.previtem.content | upper }}#{% endfor %}",
    "a name that changes": "{% set x = '' %}{% for message in messages %}{% if x %}!{% endif %}{% set x = message.content %}{{ x }}{% if x %}?{% endif %}{% endfor %}",  # noqa: E501
    "one of several": "{% for message in messages if message.content %}{{ message.content }}#{% endfor %}",
    "in a block": "{% for message in messages %}{% generation %}{{ message.content | upper }}{% endgeneration %}{% endfor %}",  # noqa: E501
    "blocks in a name": "{% for message in messages %}{% set x %}{% generation %}{{ message.content }}{% endgeneration %}{% endset %}{{ x | trim }}{% endfor %}",  # noqa: E501
    "chosen by text": "{% for message in messages | selectattr('content', 'equalto', 'a') %}{{ message.content }}#{% endfor %}",  # noqa: E501
}  # fmt: skip

letters = st.text(st.sampled_from("ab \n\x1c<>#\ufdd00\ufdd1\ufdd2\ufdd3\u3000é"), max_size=6)
contents = st.lists(letters | st.sampled_from(["<image>", "<image>\n", "<end>", "nd>"]), max_size=3).map("".join)
conversations = st.lists(st.builds(Turn, st.sampled_from(["system", "user", "assistant"]), contents), max_size=5)


def outcome_of(render, turns):
    try:
        return render(turns)
    except RecordError as error:
        return error.reason, error.detail
    except TypeError as error:  # a number and a text
        return str(error)


@pytest.fixture(scope="module")
def templates() -> dict[str, ChatTemplate]:
    given = {"special_tokens": ["<end>", "<|im_end|>"], "placeholders": {"image": "<image>", "video": "<video>"}}
    return {name: ChatTemplate(source, **given) for name, source in {**COPYING, **LOOKING}.items()}


@pytest.mark.parametrize("name", [*COPYING, *LOOKING])
def test_a_template_that_looks_into_contents_is_told_from_one_that_copies_them(templates, name):
    assert known_templates.is_known_by_roles(templates[name], ["user", "assistant"]) == (name in COPYING)


@settings(max_examples=300)
@given(turns=conversations)
def test_texts_and_spans_are_those_of_the_template_itself(templates, turns):
    for template in templates.values():
        assert outcome_of(template.render, turns) == outcome_of(template.render_by_itself, turns)


@pytest.mark.parametrize(
    "body",
    [
        "{% generation %}{{ m.content }}{% generation %}!{% endgeneration %}{% endgeneration %}",
        "{% generation %}{% generation %}{{ m.content }}{% endgeneration %}{% endgeneration %}",
    ],
)
def test_the_same_is_learned_of_blocks_inside_of_blocks_whether_rendered_by_itself_or_not(body):
    prompt = "{% if add_generation_prompt %}{{ '#assistant ' }}{% endif %}"
    template = ChatTemplate(f"{{% for m in messages %}}{{{{ '#' + m.role + ' ' }}}}{body}{{% endfor %}}{prompt}")
    turns = [Turn("user", "a"), Turn("assistant", "b")]
    assert template.render(turns) == template.render_by_itself(turns)


def test_what_one_conversation_says_is_not_in_the_next(templates):
    for name in COPYING:
        for said in ("one", "", " two\n", "<image>"):
            turns = [Turn("user", said), Turn("assistant", f"{said}, and more")]
            assert templates[name].render(turns) == templates[name].render_by_itself(turns)


TEXTS = [
    "message.content",
    "message['content']",
    "messages[0].content",
    "messages[-1]['content']",
    "known",
    "part.text",
]
VALUES = [*TEXTS, "message.role", "message", "messages", "messages[1:]", "loop.index0", "loop", "'x'", "' \\n'", "bos"]
VALUES += ["message.content | trim", "messages | length", "message.content is string", "part", "none", "message.tools"]
AROUND = ["{} + {}", "{} ~ {}", "{} | trim", "{}.strip()", "{} == {}", "{} in {}", "{} and {}", "{} or {}", "not {}"]
AROUND += [
    "({} if {} else {})",
    "{} | upper",
    "{} | length",
    "{} | list",
    "{} | first",
    "{}[0]",
    "{}[{}]",
    "{} is none",
]
AROUND += [
    "{} is none",
    "{} * 2",
    "{} % 2",
    "{} | default({})",
    "[{}]",
    "[{}][0]",
    "{} | string",
    "{} | join('-')",
    "{}.content",
]
STATEMENTS = ["{{{{ {} }}}}", "{{% set known = {} %}}", "{{% set message = {} %}}", "{{% set messages = {} %}}"]


def _nested(inner):
    return st.sampled_from(AROUND).flatmap(
        lambda form: st.tuples(*[inner] * form.count("{}")).map(lambda parts: "(" + form.format(*parts) + ")")
    )


expressions = st.recursive(st.sampled_from(VALUES), _nested, max_leaves=4)


conditions = expressions | st.sampled_from(["message.role == 'user'", "loop.first", "message.tools", "messages"])


@st.composite
def sources(draw) -> str:
    """Templates of all sorts, most of them of little sense."""
    lines = []
    for _ in range(draw(st.integers(1, 4))):
        line = draw(st.sampled_from(STATEMENTS)).format(draw(expressions))
        shape = draw(st.sampled_from(["{}", "if", "for part", "else"]))
        if shape == "if":
            line = f"{{% if {draw(conditions)} %}}{line}{{% elif {draw(conditions)} %}}{{{{ {draw(expressions)} }}}}"
            line += f"{{% else %}}{{{{ {draw(expressions)} }}}}{{% endif %}}"
        elif shape == "for part":
            line = f"{{% for part in {draw(expressions)} %}}{line}{{% endfor %}}"
        elif shape == "else":
            line = f"{{% if message.content is string %}}{{{{ message.content }}}}{{% else %}}{line}{{% endif %}}"
        lines.append(line)
    say = draw(st.sampled_from(["", "{{ message.content }}#"]))
    return f"{{% for message in messages %}}{''.join(lines)}{say}{{% endfor %}}"


@settings(max_examples=400)
@given(source=sources(), turns=st.lists(conversations, min_size=2, max_size=3))
def test_whatever_a_template_does_its_texts_are_its_own(source, turns):
    try:
        template = ChatTemplate(source)
    except UserError:
        return
    for each in turns:
        assert outcome_of(template.render, each) == outcome_of(template.render_by_itself, each)
