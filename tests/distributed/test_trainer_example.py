"""The Trainer of the sampler's page, run as it stands there by two processes that average their gradients over gloo."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.data import BatchSampler, DistributedSampler

pytestmark = pytest.mark.serial

PAGE = Path(__file__).parents[2] / "docs/how-to/sampler.md"

NUM_RANKS, NUM_SAMPLES, BATCH_SIZE, ACCUMULATION, EPOCHS = 2, 45, 2, 2, 2

# Each rank notes the samples of every batch that its model computes.
SCRIPT = """
import json, os, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

folder, resume = sys.argv[1], sys.argv[2] == "resume"
costs = [3 + (7 * index) % 23 for index in range({num_samples})]
data = [{{"input_ids": [index + 1] * length}} for index, length in enumerate(costs)]


def collate(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.tensor([sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples])
    return {{"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100), "attention_mask": (ids > 0).long()}}


class NotedTrainer(BalancedTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        batch = [int(index) - 1 for index in inputs["input_ids"][:, 0]]
        noted.append([self.state.global_step, batch, int(num_items_in_batch)])
        return super().training_step(model, inputs, num_items_in_batch)


noted = []
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=64,
)
arguments = TrainingArguments(
    folder, use_cpu=True, per_device_train_batch_size={batch_size}, gradient_accumulation_steps={accumulation},
    num_train_epochs={epochs}, max_steps=-1, save_steps=8, save_strategy="steps", report_to=[], disable_tqdm=True,
    seed=5, dataloader_num_workers=1,
)
trainer = NotedTrainer(LlamaForCausalLM(config), arguments, train_dataset=data, data_collator=collate, costs=costs)
trainer.train(resume_from_checkpoint=f"{{folder}}/checkpoint-8" if resume else None)
with open(f"{{folder}}/rank{{arguments.process_index}}.json", "w") as file:
    json.dump({{"noted": noted, "steps": trainer.state.global_step, "padded": trainer.padded}}, file)
"""


def example() -> str:
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "Trainer" in block]
    return code


def train(folder: Path, resume: bool = False) -> list[dict]:
    """Run the example; what each rank noted."""
    script = folder / "train.py"
    sizes = {"num_samples": NUM_SAMPLES, "batch_size": BATCH_SIZE, "accumulation": ACCUMULATION, "epochs": EPOCHS}
    script.write_text(example() + SCRIPT.format(**sizes))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    done = subprocess.run(
        [sys.executable, *launcher, str(script), str(folder), "resume" if resume else "begin"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def torch_steps() -> list[list[int]]:
    """The samples of every step of all epochs, as torch's samplers would have it."""
    found = []
    for epoch in range(EPOCHS):
        batches = []
        for rank in range(NUM_RANKS):
            sampler = DistributedSampler(range(NUM_SAMPLES), NUM_RANKS, rank, seed=5)
            sampler.set_epoch(epoch)
            batches.append(list(BatchSampler(sampler, BATCH_SIZE, drop_last=False)))
        for start in range(0, len(batches[0]), ACCUMULATION):
            found.append(sorted(s for own in batches for batch in own[start : start + ACCUMULATION] for s in batch))
    return found


def noted_steps(ranks: list[dict], first: int, last: int) -> list[list[int]]:
    return [
        sorted(sample for rank in ranks for step, batch, _ in rank["noted"] if step == number for sample in batch)
        for number in range(first, last)
    ]


def test_the_example_trains_on_the_samples_of_torch_and_resumes_in_the_second_epoch(tmp_path):
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate (pip install '.[dev]')")
    ranks = train(tmp_path)
    expected = torch_steps()
    assert [rank["steps"] for rank in ranks] == [len(expected)] * NUM_RANKS
    assert all(rank["padded"] is True for rank in ranks), "the collator pads, and the trainer finds out"
    assert noted_steps(ranks, 0, len(expected)) == expected
    for number in range(len(expected)):
        counts = {count for rank in ranks for step, _, count in rank["noted"] if step == number}
        assert len(counts) == 1, "ranks divide their loss by different numbers of tokens"
    resumed = train(tmp_path, resume=True)
    assert noted_steps(resumed, 0, 8) == [[]] * 8
    assert noted_steps(resumed, 8, len(expected)) == expected[8:]
