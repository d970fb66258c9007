"""Whether the collators of transformers pad, as they show it, and what is said of one that does not show it."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    default_data_collator,
)

from dflop import pads_batches
from dflop.base import UserError

WORDS = Tokenizer(WordLevel({"[PAD]": 0, "[MASK]": 1, "[UNK]": 2}, unk_token="[UNK]"))
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=WORDS, pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]")
SAMPLES = [{"input_ids": [2] * length, "attention_mask": [1] * length} for length in (5, 3)]
LABELLED = [sample | {"labels": list(sample["input_ids"])} for sample in SAMPLES]


@pytest.mark.parametrize(
    ("collator", "samples", "expected"),
    [
        (DataCollatorWithPadding(TOKENIZER), SAMPLES, True),
        (DataCollatorWithPadding(TOKENIZER, padding="max_length", max_length=8), SAMPLES, True),
        (DataCollatorWithPadding(TOKENIZER, return_tensors="np"), SAMPLES, True),
        (DataCollatorForLanguageModeling(TOKENIZER, mlm=False), SAMPLES, True),
        (DataCollatorForLanguageModeling(TOKENIZER, mlm=True), SAMPLES, True),
        (DataCollatorForSeq2Seq(TOKENIZER), LABELLED, True),
        (DataCollatorForTokenClassification(TOKENIZER), LABELLED, True),
        (default_data_collator, SAMPLES, True),
        (DataCollatorWithFlattening(), LABELLED, False),
        (DataCollatorWithFlattening(return_flash_attn_kwargs=True), LABELLED, False),
        (
            lambda samples: {"input_ids": torch.cat([torch.tensor(some["input_ids"]) for some in samples])},
            SAMPLES,
            False,
        ),
    ],
)
def test_collators_show_whether_they_pad(collator, samples, expected):
    assert pads_batches(collator, samples) is expected


def test_masking_at_random_goes_on_as_if_nobody_had_asked():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    pads_batches(DataCollatorForLanguageModeling(TOKENIZER, mlm=True), SAMPLES)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "collate", [list, lambda samples: {"pixels": torch.zeros(2, 3)}, lambda samples: {"input_ids": [[2] * 5, [2] * 3]}]
)
def test_a_collator_that_does_not_show_it_is_asked_about(collate):
    with pytest.raises(UserError, match=r"collator .* say so yourself with padded=True .* or padded=False"):
        pads_batches(collate, SAMPLES)
