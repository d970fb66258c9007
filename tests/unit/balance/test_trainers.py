"""Costs for trainers of others: from a model and lengths, and from a manifest's shapes."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from dflop import balance_trainer, sample_costs
from dflop.base import UserError
from dflop.cli import cli
from dflop.models import family_of, load_runtime
from dflop.shapes import ChatTokenizer

NUM_TOKENS = 512


@pytest.fixture(scope="module")
def model():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=2, attn_implementation="eager", **sizes))


def test_tokens_count_with_the_attention_of_the_model(model, tmp_path):
    """torch counts all pairs of tokens, of which a causal mask leaves half."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model.model(torch.ones(1, NUM_TOKENS, dtype=torch.long))  # eager attention is counted, fused is not on CPUs
    flops = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    attention = sum(count for name, count in flops.items() if "bmm" in name or "attention" in name) / 2
    linear = sum(flops.values()) - 2 * attention
    path = write_shapes(tmp_path, [NUM_TOKENS])
    (tokens,), (cost,) = sample_costs(path)[:, -1], sample_costs(path, model)[:, -1]
    assert cost / tokens - 1 == pytest.approx(attention / linear * tokens / NUM_TOKENS, rel=0.02)


def write_shapes(folder, num_words: list[int], *, wrong: int | None = None):
    """`dflop shapes` of a manifest of texts of so many words, for a tiny model; record `wrong` cannot be used."""
    family, model = "llava_onevision", folder / "model"
    spec = family_of(family).make_spec("tiny", family_of(family).presets["tiny"], {})
    runtime, tokenizer = load_runtime(family), ChatTokenizer(None, spec.rules)
    ids = tokenizer.placeholder_ids, tokenizer.vocab_size(spec.media)
    runtime.make_config(spec, *ids).save_pretrained(model)
    tokenizer.save(model, spec.media)
    for make_processor in runtime.processors.values():
        make_processor(spec, None).save(model)
    records = [
        {"id": str(row), "conversations": [{"from": "human", "value": "x " * n}, {"from": "gpt", "value": "y"}]}
        for row, n in enumerate(num_words)
    ]
    if wrong is not None:
        records[wrong]["image"] = "nowhere.png"
    (folder / "train.json").write_text(json.dumps(records))
    out = folder / "out" / "shapes.duckdb"
    done = CliRunner().invoke(cli, ["shapes", str(folder / "train.json"), "--model", str(model), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert [path.name for path in out.parent.iterdir()] == ["shapes.duckdb"], "files beside the database are left"
    return out


def test_a_manifests_shapes_are_costs_in_the_order_of_its_records(tmp_path, caplog):
    costs = sample_costs(write_shapes(tmp_path, [30, 10, 99, 20], wrong=2))[:, -1]
    assert list(np.diff(costs[[1, 3, 0]])) == [costs[3] - costs[1]] * 2, "ten words more each time"
    assert costs[2] == pytest.approx(costs[[0, 1, 3]].mean())
    assert "1 of 4 records were rejected" in caplog.text


def test_a_folder_that_is_no_model_is_named(tmp_path):
    (tmp_path / "train.json").write_text("[]")
    done = CliRunner().invoke(cli, ["shapes", str(tmp_path / "train.json"), "--model", str(tmp_path)])
    assert isinstance(done.exception, UserError)
    assert "give --model a model's folder" in str(done.exception)


@pytest.mark.parametrize(
    ("data", "costs", "message"),
    [
        ([{"messages": "x"}] * 4, None, "neither a column 'length' nor `input_ids`"),
        ([{"input_ids": [1]}] * 4, [1, 2, 3], "there are 3 costs for 4 samples"),
        ((row for row in ()), None, "must have a length"),
    ],
)
def test_a_trainer_whose_samples_cannot_be_priced_is_refused(model, data, costs, message, tmp_path):
    class Given:
        args, train_dataset, data_collator = TrainingArguments(str(tmp_path), use_cpu=True), data, None

    Given.model = model
    with pytest.raises(UserError, match=message):
        balance_trainer(Given, costs, padded=True)
