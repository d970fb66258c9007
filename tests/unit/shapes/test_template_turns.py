"""What one rendering tells of templates that write turn by turn is what renderings of each beginning tell."""

import known_templates
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.shapes.chat_template import ChatTemplate
from dflop.shapes.record_media import RecordError
from dflop.shapes.records import Turn
from dflop.shapes.template_files import read_template
from dflop.shapes.text import BUNDLED_TOKENIZER

PROMPT = "{% if add_generation_prompt %}#assistant {% endif %}"
TURN = "#{{ message.role }} {{ message.content }}\n"
LOOP = "{% for message in messages %}" + TURN + "{% endfor %}"
KNOWN = {name: source for name, source in vars(known_templates).items() if name.isupper() and "PROMPT" not in name}
BY_TURN = {
    **{name: source for name, source in KNOWN.items() if name not in ("QWEN3_THINKING", "MISTRAL")},
    "bundled": read_template(BUNDLED_TOKENIZER).source,
    "no prompt": LOOP,
    "a prompt of another form": LOOP + "{% if add_generation_prompt %}#assistant: {% endif %}",
    "an end of spaces": LOOP + " \n " + PROMPT,
    "an end": LOOP + "{{ eos_token }}\n",
    "turns that write spaces alone": "{% for message in messages %}\n{{ message.content | trim }} {% endfor %}"
    + PROMPT,
    "the first turn": "{{ messages[0].content }}\n" + LOOP + PROMPT,
    "a turn in the middle": "{{ messages[3].content }}\n" + LOOP + PROMPT,
    "a turn in the middle, in each round": LOOP.replace("#", "{{ messages[2].content }}#", 1) + PROMPT,
    "the rest": "{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    + "{% set messages = messages[1:] %}{% endif %}"
    + LOOP
    + PROMPT,
    "from the third on": LOOP.replace("messages", "messages[1:][1:]") + PROMPT,
    "whether there are any": "{% if messages | length != 0 and messages | length > 0 %}#{% endif %}" + LOOP + PROMPT,
    "the turn before": "{% for message in messages %}{{ loop.previtem.role }}" + TURN + "{% endfor %}" + PROMPT,
    "the end of an inner loop": "{% for message in messages %}{% for c in message.content %}{{ c }}{% if loop.last %}!"
    + "{% endif %}{% if c == 'b' %}{% break %}{% endif %}{% endfor %}\n{% endfor %}"
    + PROMPT,
    "a count": "{% set n = namespace(x=0) %}{% for message in messages %}{% set n.x = n.x + 1 %}{{ n.x }}"
    + TURN
    + "{% endfor %}"
    + PROMPT,
    "turns left out": "{% for message in messages %}{% if not message.content %}{% continue %}{% endif %}"
    + TURN
    + "{% endfor %}"
    + PROMPT,
}
COUNT = "{% set n = namespace(x=0) %}{% for message in messages %}{% set n.x = n.x + 1 %}" + TURN + "{% endfor %}"
LAST = "{% if l.last %}!{% endif %}"
OTHERS = {
    "thoughts": KNOWN["QWEN3_THINKING"],
    "mistral": KNOWN["MISTRAL"],
    "the last turn": LOOP.replace("\n", "{{ loop.last }}\n") + PROMPT,
    "the next turn": LOOP.replace("\n", "{{ loop.nextitem.role }}\n") + PROMPT,
    "the loop in a macro": "{% macro m(l) %}" + LAST + "{% endmacro %}" + LOOP.replace("#", "#{{ m(loop) }}") + PROMPT,
    "the loop by another name": LOOP.replace("#", "{% set l = loop %}" + LAST) + PROMPT,
    "the loop inside of a loop": LOOP.replace("#", "{% for i in [loop.revindex] %}{{ i }}{% endfor %}") + PROMPT,
    "how many": LOOP.replace("#", "#{{ messages | length }}") + PROMPT,
    "whether there are many": "{% if messages | length > 3 %}#{% endif %}" + LOOP + PROMPT,
    "how many, in a macro": "{% macro m() %}{{ messages | length }}{% endmacro %}" + LOOP.replace("#", "{{ m() }}"),
    "the end": "{{ messages[-1].content }}" + LOOP + PROMPT,
    "turned round": "{% for message in messages[::-1] %}" + TURN + "{% endfor %}" + PROMPT,
    "a beginning": "{% for message in messages[:3] %}" + TURN + "{% endfor %}" + PROMPT,
    "twice": LOOP + LOOP + PROMPT,
    "other names": "{% set a = messages %}{% set b = a %}{{ b | length }}" + LOOP.replace("messages", "a"),
    "a name for two things": "{% set a = messages %}{% for a in [messages] %}{{ a | length }}{% endfor %}" + LOOP,
    "a name for another list": "{% set a = messages %}{% set a = a[:2] %}" + LOOP.replace("messages", "a"),
    "names in a scope": "{% with a = messages %}{{ a | length }}{% endwith %}" + LOOP + PROMPT,
    "the prompt in each round": LOOP.replace("#", PROMPT) + PROMPT,
    "the prompt before": PROMPT + LOOP,
    "an early end": LOOP.replace("#", "{% if loop.index > 3 %}{% break %}{% endif %}#") + PROMPT,
    "some turns": LOOP.replace("messages", "messages if message.content") + PROMPT,
    "a count behind the loop": COUNT + "{{ n.x }}" + PROMPT,
    "a prompt by the count": COUNT + "{% if add_generation_prompt and n.x is odd %}#assistant {% endif %}",
    "what is used up": "{% set g = 'abcdef' | map('upper') %}" + LOOP.replace("#", "{{ g | first }}") + "{{ g|first }}",
    "what goes round": "{% set c = cycler('a', 'b') %}" + LOOP.replace("#", "{{ c.next() }}") + "{{ c.next() }}",
    "no turns": LOOP.replace("{% endfor", "{% else %}none{% endfor") + PROMPT,
}  # fmt: skip

contents = st.text(st.sampled_from("ab \n#\ufdd0\u3000"), max_size=4)
contents |= st.sampled_from(["<think>a</think>", "#assistant "])
any_turns = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "assistant"]), contents), max_size=7)
alternating = st.lists(contents, max_size=9).map(lambda texts: [*zip(("user", "assistant") * 5, texts, strict=False)])
dialogues = (any_turns | alternating).map(lambda said: [Turn(*turn) for turn in said])


def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, named_tokens={"bos_token": "<s>", "eos_token": "</s>"}, special_tokens=["<|im_end|>"])


def render(template: ChatTemplate, turns: list[Turn]):
    try:
        return template.render(turns)
    except RecordError as error:
        return error.detail


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[ChatTemplate, ChatTemplate]]:
    """Templates as they are, and such that each answer is found by renderings of the turns before it."""
    made = {name: (compiled(source), compiled(source)) for name, source in (BY_TURN | OTHERS).items()}
    for _, slow in made.values():
        vars(slow)["_by_turn"] = None
    return made


@settings(max_examples=150)
@given(turns=dialogues)
def test_answers_are_where_renderings_of_each_beginning_find_them(pairs, turns):
    for name, (template, slow) in pairs.items():
        assert render(template, turns) == render(slow, turns), name


@pytest.mark.parametrize("name", BY_TURN)
def test_a_template_that_writes_turn_by_turn_is_known(name, pairs):
    assert pairs[name][0]._by_turn


@pytest.mark.parametrize("name", OTHERS)
def test_a_template_that_may_look_ahead_is_known(name, pairs):
    assert not pairs[name][0]._by_turn


@pytest.mark.parametrize("name", ["bundled", "QWEN2_VL", "QWEN3_VL", "INTERNVL", "LLAMA3", "LLAMA32", "GEMMA"])
def test_a_thousand_answers_are_found_by_three_renderings(name, pairs, monkeypatch):
    """By two more where the first answer comes before the turns that the template looks at."""
    renderings, run = [], ChatTemplate._run

    def counted(self, *args, **named):
        renderings.append(name)
        return run(self, *args, **named)

    monkeypatch.setattr(ChatTemplate, "_run", counted)
    turns = [Turn(role, f"{number} words") for number in range(1_000) for role in ("user", "assistant")]
    assert len(pairs[name][0].render(turns)[1]) == 1_000
    assert len(renderings) == (5 if name == "LLAMA32" else 3)
