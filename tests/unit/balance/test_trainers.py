"""Costs for trainers of others: from a model and lengths, and from a manifest's shapes."""

import json

import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from click.testing import CliRunner
from torch.utils.data import SequentialSampler
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

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
    command = ["shapes", str(folder / "train.json"), "--model", str(model), "--out", str(out)]
    CliRunner().invoke(cli, command, catch_exceptions=False)
    assert [path.name for path in out.parent.iterdir()] == ["shapes.duckdb"], "files beside the database are left"
    return out


def test_a_manifests_shapes_are_costs_in_the_order_of_its_records(tmp_path, caplog):
    costs = sample_costs(write_shapes(tmp_path, [30, 10, 99, 20], wrong=2))[:, -1]
    assert list(np.diff(costs[[1, 3, 0]])) == [costs[3] - costs[1]] * 2, "ten words more each time"
    assert costs[2] == pytest.approx(costs[[0, 1, 3]].mean())
    assert "1 of 4 records were rejected" in caplog.text


@pytest.mark.parametrize(
    ("config", "message"),
    [(None, "give --model a model's folder"), ("qwen2", "model_type 'qwen2' is not supported; these are: ")],
)
def test_a_folder_of_no_model_or_of_another_kind_is_named(config, message, tmp_path):
    (tmp_path / "train.json").write_text("[]")
    if config:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": config}))
    done = CliRunner().invoke(cli, ["shapes", str(tmp_path / "train.json"), "--model", str(tmp_path)])
    assert isinstance(done.exception, UserError)
    assert message in str(done.exception)


def test_a_manifest_of_which_nothing_can_be_used_leaves_no_database(tmp_path):
    with pytest.raises(
        UserError, match=r"none of 1 records can be used: 1 placeholder_mismatch, .*\. Check --media-root$"
    ):
        write_shapes(tmp_path, [3], wrong=0)
    assert not (tmp_path / "out" / "shapes.duckdb").exists()


def trainer_of(model, data, tmp_path, kind=Trainer, **arguments) -> Trainer:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **arguments)
    return kind(model, arguments, train_dataset=data, data_collator=padded)


def padded(samples):
    ids = [torch.tensor(sample.pop("input_ids")) for sample in samples]
    return {"input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)}


TEXTS = [{"input_ids": [1] * length} for length in (1, 2, 3, 4)]


class OwnSampler(Trainer):
    """Takes the samples in order if the dataset is long, as derived trainers do by an option of theirs."""

    def _get_train_sampler(self, *args):
        return SequentialSampler(TEXTS) if len(self.train_dataset) > 4 else super()._get_train_sampler(*args)


@pytest.mark.parametrize(
    ("options", "costs", "message"),
    [
        ({"data": [{"messages": "x"}] * 4, "remove_unused_columns": False}, None, "neither a column 'length' nor"),
        ({}, [1, 2, 3], "there are 3 costs for 4 samples"),
        ({"train_sampling_strategy": "sequential"}, None, "'sequential' orders samples itself"),
        ({"kind": OwnSampler, "train_sampling_strategy": "group_by_length"}, None, "gives LengthGroupedSampler"),
        ({"kind": OwnSampler, "data": TEXTS * 2}, None, r"OwnSampler .* \(_get_train_sampler gives SequentialSampler"),
        ({}, [[1, 2]] * 4, "padded=True needs one cost a sample"),
    ],
)
def test_a_trainer_whose_samples_cannot_be_dealt_is_refused_before_it_trains(model, options, costs, message, tmp_path):
    trainer = trainer_of(model, tmp_path=tmp_path, **{"data": TEXTS} | options)
    with pytest.raises(UserError, match=message):
        balance_trainer(trainer, costs, padded=True)


def test_a_derived_trainer_that_still_draws_at_random_is_balanced(model, tmp_path):
    assert len(balance_trainer(trainer_of(model, TEXTS, tmp_path, OwnSampler)).get_train_dataloader()) == 1


def test_training_that_resumes_inside_an_epoch_has_the_rest_of_this_epoch(model, tmp_path):
    """Also with transformers 5.6, which skips batches by a loader that has no `set_epoch`."""
    trainer = balance_trainer(trainer_of(model, TEXTS * 4, tmp_path, per_device_train_batch_size=4))
    loader = trainer.callback_handler.train_dataloader = trainer.get_train_dataloader()
    loader.set_epoch(1)
    second_epoch = list(loader.batch_sampler)
    loader.set_epoch(0)
    trainer.state.epoch = 1.25
    trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert list(skip_first_batches(loader, 1).batch_sampler) == second_epoch[1:]


def test_batches_are_unequal_only_where_the_loss_is_divided_by_the_tokens_of_the_step(model, tmp_path):
    for average, equal_sizes in ((True, False), (False, True)):
        trainer = trainer_of(model, TEXTS, tmp_path, average_tokens_across_devices=average)
        assert balance_trainer(trainer).get_train_dataloader().batch_sampler.equal_sizes is equal_sizes
    assert [len(sample["input_ids"]) for sample in TEXTS] == [1, 2, 3, 4], "looking at two samples changed one"


def test_samples_of_like_length_share_steps_where_the_trainer_would_group_by_length(model, tmp_path):
    for strategy, asked, steps in (("group_by_length", None, 50), ("random", None, 1), ("random", 4, 4)):
        trainer = trainer_of(model, TEXTS, tmp_path, train_sampling_strategy=strategy)
        balanced = balance_trainer(trainer, megabatch_steps=asked)
        assert balanced.get_train_dataloader().batch_sampler.megabatch_steps == steps


def test_a_batch_that_does_not_fit_the_memory_is_made_smaller(model, tmp_path):
    trainer = balance_trainer(trainer_of(model, TEXTS, tmp_path, per_device_train_batch_size=4))
    trainer._train_batch_size = 2  # what `auto_find_batch_size` does
    assert len(trainer.get_train_dataloader()) == 2
