"""Templates of well-known models give the tokens that transformers gives, and the assistant's are learned."""

import json
from dataclasses import dataclass
from datetime import datetime
from types import SimpleNamespace

import known_templates
import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from dflop.config import ModelConfig
from dflop.models import load_model_spec
from dflop.shapes.record_media import RecordError
from dflop.shapes.records import Turn
from dflop.shapes.text import BUNDLED_TOKENIZER, ChatTokenizer, TokenizedText

QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
LLAMA_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


@dataclass(frozen=True)
class Known:
    """A template, the family that it is for, how texts hold media, and the token that ends an answer."""

    template: str
    family: str = "llava_onevision"
    image: str = "<image>"
    video: str = "<video>"
    end: str = "<|im_end|>"
    tokens: tuple[str, ...] = ()
    bos: str | None = None
    in_parts: bool = False
    behind_media: str = "\n"  # what the template itself writes between media and a text
    has_system: bool = True
    begin: str = ""  # what is learned before an answer


QWEN_MEDIA = {f"{kind}": f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")}
LLAMA = {"end": "<|eot_id|>", "tokens": tuple(LLAMA_TOKENS), "bos": "<|begin_of_text|>"}
KNOWN = {
    "llava_onevision": Known(known_templates.LLAVA_ONEVISION, in_parts=True, begin="\n"),
    "llava_onevision converted": Known(known_templates.LLAVA_ONEVISION_CONVERTED, in_parts=True),
    "qwen2_vl": Known(known_templates.QWEN2_VL, "qwen2_5_vl", **QWEN_MEDIA, tokens=tuple(QWEN_TOKENS), behind_media=""),
    "qwen3_vl": Known(known_templates.QWEN3_VL, "qwen3_vl", **QWEN_MEDIA, tokens=tuple(QWEN_TOKENS), behind_media=""),
    "qwen3 thinking": Known(known_templates.QWEN3_THINKING),
    "internvl": Known(known_templates.INTERNVL, "internvl", "<IMG_CONTEXT>", tokens=("<IMG_CONTEXT>",)),
    "llama3": Known(known_templates.LLAMA3, **LLAMA),
    "llama3.2": Known(known_templates.LLAMA32, **LLAMA),
    "mistral": Known(known_templates.MISTRAL, end="</s>", tokens=("<s>", "</s>", "[INST]", "[/INST]"), bos="<s>"),
    "gemma": Known(
        known_templates.GEMMA,
        end="<end_of_turn>",
        tokens=("<bos>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        has_system=False,
    ),
    "chatml with generation": Known(known_templates.CHATML_GENERATION),
}
WITH_BLOCKS = ["llava_onevision", "llava_onevision converted", "chatml with generation"]

# (role, kinds of media before the text, the text)
CONVERSATIONS = {
    "text": [("user", "", "What is it?"), ("assistant", "", "A word.")],
    "image": [("user", "i", "What is it?"), ("assistant", "", "A red square.")],
    "two images": [("user", "ii", "Which is red?"), ("assistant", "", "The second.")],
    "video": [("user", "v", "What happens?"), ("assistant", "", "It moves, then it stops.")],
    "several turns": [
        ("system", "", "Be brief."),
        ("user", "i", "What is it?"),
        ("assistant", "", "A square."),
        ("user", "", "Of what colour?"),
        ("assistant", "", "Red, as it seems: 雪."),
        ("user", "i", "And this?"),
        ("assistant", "", "Blue."),
    ],
    "spaces": [
        ("user", "", "  Two  \n"),
        ("assistant", "", "\n Yes \n"),
        ("user", "", "No?\n\n"),
        ("assistant", "", "a"),
    ],
}


def folder_of(known: Known, folder):
    """A tokenizer folder as `save_pretrained` writes it."""
    theirs = PreTrainedTokenizerFast.from_pretrained(BUNDLED_TOKENIZER)
    named = {"eos_token": known.end} | ({"bos_token": known.bos} if known.bos else {})
    theirs.add_special_tokens(named | {"additional_special_tokens": [*known.tokens]})
    theirs.chat_template = known.template
    theirs.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: folder_of(known, tmp_path_factory.mktemp("known")) for name, known in KNOWN.items()}


@pytest.fixture(scope="module")
def tokenizers(folders):
    rules = {known.family: load_model_spec(ModelConfig(family=known.family)).rules for known in KNOWN.values()}
    return {name: ChatTokenizer(folders[name], rules[known.family]) for name, known in KNOWN.items()}


@pytest.fixture(autouse=True)
def one_day(monkeypatch):
    """Transformers tells templates the day of today; ours is always the same."""
    day = SimpleNamespace(now=lambda: datetime(2024, 7, 26))
    monkeypatch.setattr(chat_template_utils, "datetime", day)


def spoken(name: str, conversation: str) -> list:
    turns = CONVERSATIONS[conversation]
    return turns if KNOWN[name].has_system else [turn for turn in turns if turn[0] != "system"]


def as_turns(name: str, conversation: str) -> list[Turn]:
    """As records have it once media are in their texts: each on a line of its own before the text."""
    known = KNOWN[name]
    media = {"i": known.image, "v": known.video}
    return [
        Turn(role, "".join(media[kind] + "\n" for kind in kinds) + text)
        for role, kinds, text in spoken(name, conversation)
    ]


def as_messages(name: str, conversation: str) -> list[dict]:
    """As users of transformers write the same."""
    known = KNOWN[name]
    kinds_of = {"i": "image", "v": "video"}
    messages = []
    for role, kinds, text in spoken(name, conversation):
        parts = []
        for kind in kinds:
            parts.append({"type": kinds_of[kind]})
            if not known.behind_media:
                parts.append({"type": "text", "text": "\n"})
        messages.append({"role": role, "content": [*parts, {"type": "text", "text": text}]})
    return messages


def learned_texts(folder, text: TokenizedText) -> list[str]:
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bounds = np.flatnonzero(np.diff(np.concatenate([[0], text.is_target, [0]])))
    return [
        plain.decode(text.token_ids[start:end].tolist(), skip_special_tokens=False)
        for start, end in bounds.reshape(-1, 2)
    ]


def ids_of(theirs: PreTrainedTokenizerFast, messages: list[dict]) -> list[int]:
    return theirs.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]


TAKES_PARTS = ["llava_onevision", "llava_onevision converted", "qwen2_vl", "qwen3_vl", "internvl"]


@pytest.mark.parametrize("name", TAKES_PARTS)
def test_messages_of_texts_and_media_give_transformers_tokens(folders, tokenizers, name):
    theirs = PreTrainedTokenizerFast.from_pretrained(folders[name])
    for conversation in CONVERSATIONS:
        (text,) = tokenizers[name].encode([as_turns(name, conversation)])
        assert text.token_ids.tolist() == ids_of(theirs, as_messages(name, conversation)), conversation
        if (name, conversation) != ("internvl", "video"):  # for a clip, a record's text has frames by then
            num_media = sum(len(kinds) for _, kinds, _ in spoken(name, conversation))
            assert len(text.placeholders) == num_media, conversation


@pytest.mark.parametrize("name", [name for name, known in KNOWN.items() if not known.in_parts])
def test_messages_of_texts_give_transformers_tokens(folders, tokenizers, name):
    theirs = PreTrainedTokenizerFast.from_pretrained(folders[name])
    for conversation in CONVERSATIONS:
        turns = as_turns(name, conversation)
        (text,) = tokenizers[name].encode([turns])
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        assert text.token_ids.tolist() == ids_of(theirs, messages), conversation


@pytest.mark.parametrize("name", KNOWN)
def test_the_answers_are_learned_with_their_end(folders, tokenizers, name):
    for conversation in CONVERSATIONS:
        (text,) = tokenizers[name].encode([as_turns(name, conversation)])
        answers = [said for role, _, said in spoken(name, conversation) if role == "assistant"]
        learned = learned_texts(folders[name], text)
        if name == "qwen3 thinking":  # the last answer begins with its thoughts, which are none
            learned[-1] = learned[-1].removeprefix("<think>\n\n</think>\n\n")
        for answer, span in zip(answers, learned, strict=True):
            assert span.endswith(KNOWN[name].end), conversation
            assert span.removesuffix(KNOWN[name].end).strip() == answer.strip(), conversation


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_generation_blocks_are_learned_as_transformers_masks_them_and_the_end_besides(folders, tokenizers, name):
    theirs = PreTrainedTokenizerFast.from_pretrained(folders[name])
    for conversation in CONVERSATIONS:
        messages = as_messages(name, conversation)
        if not KNOWN[name].in_parts:
            messages = [{"role": turn.role, "content": turn.content} for turn in as_turns(name, conversation)]
        made = theirs.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        mask = np.array(made["assistant_masks"], dtype=bool)
        ends = np.array(made["input_ids"]) == theirs.eos_token_id
        behind = ends & np.concatenate([[False], mask[:-1]])
        (text,) = tokenizers[name].encode([as_turns(name, conversation)])
        np.testing.assert_array_equal(text.is_target, mask | behind, conversation)
        num_answers = sum(role == "assistant" for role, _, _ in spoken(name, conversation))
        assert (ends & text.is_target).sum() == num_answers, conversation


def test_thoughts_of_earlier_answers_are_left_out_and_what_was_said_is_learned(folders, tokenizers):
    turns = [
        Turn("user", "One?"),
        Turn("assistant", "<think>\nHm.\n</think>\n\nYes."),
        Turn("user", "Two?"),
        Turn("assistant", "<think>\nHm, hm.\n</think>\n\nNo."),
    ]
    (text,) = tokenizers["qwen3 thinking"].encode([turns])
    last = "<think>\nHm, hm.\n</think>\n\nNo.<|im_end|>"
    assert learned_texts(folders["qwen3 thinking"], text) == ["Yes.<|im_end|>", last]
    turns[1] = Turn("assistant", "<think>\nHm.\n</think>\n\n")  # and then nothing
    (text,) = tokenizers["qwen3 thinking"].encode([turns])
    assert learned_texts(folders["qwen3 thinking"], text) == ["<|im_end|>", last]


def test_a_space_behind_the_role_that_the_prompt_has_not_changes_no_targets_without_blocks(folders, tmp_path):
    """As a released template of LLaVA-OneVision would be without its generation blocks."""
    without = known_templates.LLAVA_ONEVISION.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    folder = folder_of(Known(without), tmp_path)
    turns = as_turns("llava_onevision", "several turns")
    (text,) = ChatTokenizer(folder).encode([turns])
    assert learned_texts(folder, text) == [f"{turn.content}<|im_end|>" for turn in turns if turn.role == "assistant"]


def test_a_refusal_tells_what_to_do_about_a_token_without_a_name(folders, tmp_path):
    for file in folders["llama3"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = tmp_path / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    del settings["bos_token"]
    config.write_text(json.dumps(settings))
    with pytest.raises(
        RecordError, match=r"'bos_token' is undefined; give `bos_token` a text in tokenizer_config\.json"
    ):
        ChatTokenizer(tmp_path).encode([[Turn("user", "a"), Turn("assistant", "b")]])
