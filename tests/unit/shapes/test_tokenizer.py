import json
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import dflop.shapes.tokenizer
from dflop.demo import conversation_texts
from dflop.shapes.tokenizer.make import SPECIAL_TOKENS, VOCAB_SIZE, write_tokenizer

FOLDER = Path(dflop.shapes.tokenizer.__file__).parent
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def hf_tokenizer(tmp_path_factory):
    """Loaded from a copy that holds only the tokenizer's own files, as a user's checkpoint would."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(FOLDER / name, folder / name)
    return AutoTokenizer.from_pretrained(folder)


@given(st.text())
@example("  tabs\tand\r\n\r\n  spaces  \n")
@example("e\u0301 is not \u00e9; 水, \U0001f600 and \x00 are text too")
def test_any_text_survives_the_round_trip(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_a_special_token_is_one_id_wherever_it_stands(token):
    token_id = TOKENIZER.token_to_id(token)
    assert TOKENIZER.encode(token).ids == [token_id]
    assert TOKENIZER.encode(f"a{token}{token}\nb").ids.count(token_id) == 2


def test_digits_are_tokens_of_their_own():
    assert TOKENIZER.encode("10482").tokens == list("10482")


def test_the_demo_is_shorter_in_tokens_than_in_letters():
    texts = list(conversation_texts(50, seed=123))
    num_tokens = sum(len(encoding.ids) for encoding in TOKENIZER.encode_batch(texts))
    assert num_tokens < sum(map(len, texts)) / 3


def test_the_files_stay_small():
    assert TOKENIZER.get_vocab_size() == VOCAB_SIZE
    assert (FOLDER / "tokenizer.json").stat().st_size < 100_000


def test_training_it_again_gives_the_shipped_files(tmp_path):
    write_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        made, shipped = (json.loads((folder / name).read_text(encoding="utf-8")) for folder in (tmp_path, FOLDER))
        assert made == shipped, f"{name} is stale: run `python -m dflop.shapes.tokenizer.make`"


def test_auto_tokenizer_loads_it_with_its_special_tokens(hf_tokenizer):
    assert len(hf_tokenizer) == VOCAB_SIZE
    assert (hf_tokenizer.eos_token, hf_tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert hf_tokenizer.image_token_id == TOKENIZER.token_to_id("<image>")
    text = "<|im_start|>user\n<image>\nWhich figure is this?<|im_end|>\n"
    assert hf_tokenizer(text).input_ids == TOKENIZER.encode(text).ids
    assert (
        hf_tokenizer.decode(hf_tokenizer(text).input_ids, skip_special_tokens=True) == "user\n\nWhich figure is this?\n"
    )


def test_the_chat_template_reads_texts_and_parts_alike(hf_tokenizer):
    parts = [{"type": "image"}, {"type": "text", "text": "\nWhat colour?"}]
    for content in ("<image>\nWhat colour?", parts):
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "Red."}]
        assert hf_tokenizer.apply_chat_template(messages, tokenize=False) == (
            "<|im_start|>user\n<image>\nWhat colour?<|im_end|>\n<|im_start|>assistant\nRed.<|im_end|>\n"
        )
    assert hf_tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\n<image>\nWhat colour?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_chat_template_refuses_a_part_it_cannot_place(hf_tokenizer):
    with pytest.raises(Exception, match="not point_cloud"):
        hf_tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "point_cloud"}]}], tokenize=False)
