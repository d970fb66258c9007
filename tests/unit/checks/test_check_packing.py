"""The check of anybody's packing: right packing passes, and each known mistake is found and named."""

import re

import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from dflop.base import UserError
from dflop.checks.packing import check_packing
from dflop.cli import cli

IMAGE, START = 5, 4
GRID = torch.tensor([[1, 4, 4]])  # patches; merged to four tokens


@pytest.fixture(scope="module")
def text_model():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=2, **sizes))


@pytest.fixture(scope="module")
def vision_model():
    torch.manual_seed(0)
    text = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=text | {"vocab_size": 32, "num_hidden_layers": 2, "rope_parameters": rope},
            vision_config=vision,
            image_token_id=IMAGE,
            video_token_id=6,
            vision_start_token_id=START,
        )
    )


TEXTS = [torch.randint(7, 32, (length,), generator=torch.Generator().manual_seed(length)) for length in (5, 9, 3)]


def packed_texts(samples, *, positions="restart", mask=False, first_target=False):
    labels = [ids.clone() for ids in samples]
    for own in labels:
        own[0] = own[0] if first_target else -100
    batch = {"input_ids": torch.cat(samples)[None], "labels": torch.cat(labels)[None]}
    if positions == "restart":
        batch["position_ids"] = torch.cat([torch.arange(len(ids)) for ids in samples])[None]
    if mask:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch


def test_right_packing_of_texts_passes(text_model):
    checked = check_packing(text_model, packed_texts, TEXTS)
    assert checked.faults == []
    assert [sample.sees for sample in checked.samples] == [[], [], []]


@pytest.mark.parametrize(
    ("options", "faults"),
    [
        ({"positions": "run on"}, ["positions run on: those of sample 2 begin at 14, not at 0", "nothing tells"]),
        ({"mask": True}, ["see each other .* because of the attention_mask"]),
        ({"first_target": True}, ["16 tokens are learned from, alone 14"]),
    ],
)
def test_a_mistake_with_texts_is_named(text_model, options, faults):
    checked = check_packing(text_model, lambda samples: packed_texts(samples, **options), TEXTS)
    assert len(checked.faults) == len(faults), checked.faults
    for found, expected in zip(checked.faults, faults, strict=True):
        assert re.search(expected, found), found


PICTURES = [(2, True), (4, False), (3, True)]  # words, and whether there is a picture


def packed_pictures(model, samples, *, mistake=None):
    ids, positions, pixels = [], [], []
    for words, has_picture in samples:
        own = torch.arange(7, 7 + words)
        if has_picture:
            own = torch.cat([torch.tensor([START] + [IMAGE] * 4), own])
            pixels.append(torch.randn(16, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(words)))
        types = (own == IMAGE).int()[None]
        axes, _ = model.model.get_rope_index(
            own[None], mm_token_type_ids=types, image_grid_thw=GRID if has_picture else None
        )
        text = torch.arange(len(own))[None, None]
        ids.append(own)
        positions.append(torch.cat([text, text.expand(3, 1, -1) if mistake == "one axis" else axes]))
    if mistake == "lost":
        pixels = pixels[:1]
    batch = {"input_ids": torch.cat(ids)[None], "position_ids": torch.cat(positions, dim=-1)}
    batch["labels"] = batch["input_ids"].clone()
    starts = [sum(map(len, ids[:number])) for number in range(len(ids))]
    batch["labels"][0, starts] = -100
    if mistake == "no text row":
        batch["position_ids"] = batch["position_ids"][1:]
    if pixels:
        batch |= {"pixel_values": torch.cat(pixels), "image_grid_thw": GRID.repeat(len(pixels), 1)}
    return batch


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        (None, None),
        ("one axis", r"positions have one dimension where the model's have 3 \(mRoPE\)"),
        ("no text row", "samples see each other .* nothing tells the attention"),
        ("lost", "pictures are lost: packed, `image_grid_thw` has 1 rows, the samples alone have 2"),
    ],
)
def test_a_mistake_with_pictures_is_named(vision_model, mistake, expected):
    def collate(samples):
        return packed_pictures(vision_model, samples, mistake=mistake if len(samples) > 1 else None)

    checked = check_packing(vision_model, collate, PICTURES)
    if expected is None:
        assert checked.faults == []
    else:
        assert re.search(expected, checked.faults[0]), checked.faults


def test_a_collator_that_pads_is_refused(text_model):
    def pad(samples):
        ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
        return {"input_ids": ids, "labels": ids}

    with pytest.raises(UserError, match=r"a batch of \[3, 9\] of 3 samples: it pads them"):
        check_packing(text_model, pad, TEXTS)
    with pytest.raises(UserError, match="must make a mapping"):
        check_packing(text_model, lambda samples: None, TEXTS)


def test_the_command_says_what_is_wrong_with_a_collator_of_ones_own(text_model, tmp_path, monkeypatch):
    text_model.config.save_pretrained(tmp_path / "model")
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "samples = [torch.arange(3, 9), torch.arange(5, 20)]\n"
        "def right(samples):\n"
        "    ids = torch.cat(samples)[None]\n"
        "    positions = torch.cat([torch.arange(len(own)) for own in samples])[None]\n"
        "    return {'input_ids': ids, 'position_ids': positions, 'labels': ids.where(positions > 0, -100)}\n"
        "def wrong(samples):\n"
        "    return right(samples) | {'attention_mask': torch.ones(1, sum(map(len, samples)), dtype=int)}\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["check-packing", "model", "--dataset", "mine:samples", "--collator"]
    right, wrong, absent = (CliRunner().invoke(cli, [*command, f"mine:{name}"]) for name in ("right", "wrong", "none"))
    assert right.exit_code == 0, right.output
    assert "Packed samples are computed as alone" in right.output
    assert "because of the attention_mask" in str(wrong.exception)
    assert "mine:none cannot be imported" in str(absent.exception)
