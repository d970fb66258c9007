"""Batches of our sampler in the trainers of others: two processes that average their gradients over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.data import BatchSampler, DistributedSampler

from dflop.shapes import ChatTokenizer

pytestmark = pytest.mark.serial

NUM_RANKS, NUM_SAMPLES, BATCH_SIZE, ACCUMULATION, EPOCHS = 2, 45, 2, 2, 2

# Sample i is token i + 1, so that a batch tells which samples it holds. Each rank notes the batches it computes.
SCRIPT = f"""
import json, os, sys
import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from dflop import BalancedBatchSampler, balance_trainer

folder = sys.argv[1]
lengths = [3 + (7 * index) % 23 for index in range({NUM_SAMPLES})]
data = [{{"input_ids": [index + 1] * length}} for index, length in enumerate(lengths)]
noted, weights = [], []
NUM_SAMPLES, BATCH_SIZE, ACCUMULATION, EPOCHS = {NUM_SAMPLES}, {BATCH_SIZE}, {ACCUMULATION}, {EPOCHS}


def collate(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.tensor([sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples])
    return {{"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100), "attention_mask": (ids > 0).long()}}


def note(step, inputs):
    noted.append([step, [int(index) - 1 for index in inputs["input_ids"][:, 0]]])


def keep(name):
    with open(f"{{folder}}/{{name}}{{os.environ['RANK']}}.json", "w") as file:
        json.dump(noted, file)
    noted.clear()


def tiny_model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    ))


ARGUMENTS = dict(
    output_dir=folder, use_cpu=True, per_device_train_batch_size=BATCH_SIZE, gradient_accumulation_steps=ACCUMULATION,
    num_train_epochs=EPOCHS, save_steps=8, save_strategy="steps", report_to=[], disable_tqdm=True, seed=5,
    dataloader_num_workers=1,
)
"""

RUNS = {
    "transformers": """
class NotedTrainer(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        note(self.state.global_step, inputs)
        tokens.add((self.state.global_step, int(num_items_in_batch)))
        return super().training_step(model, inputs, num_items_in_batch)


tokens = set()
given = Dataset.from_list([sample | {"text": "not for the model"} for sample in data])
trainer = NotedTrainer(tiny_model(), TrainingArguments(**ARGUMENTS), train_dataset=given, data_collator=collate)
balance_trainer(trainer, equal_sizes=EQUAL).train(resume_from_checkpoint=RESUMED)
of_ranks = [None, None]
torch.distributed.all_gather_object(of_ranks, tokens)
assert len(dict(set().union(*of_ranks))) == len(tokens), "a step's loss is divided by different numbers of tokens"
weights.append(torch.cat([own.detach().flatten() for own in trainer.model.parameters()]))
""",
    "trl": """
from trl import SFTConfig, SFTTrainer

class NotedTrainer(SFTTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        note(self.state.global_step, inputs)
        return super().training_step(model, inputs, num_items_in_batch)


from transformers import AutoTokenizer

trainer = NotedTrainer(
    tiny_model(), SFTConfig(**ARGUMENTS, gradient_checkpointing=False, bf16=False, eos_token=None),
    train_dataset=Dataset.from_list(data), processing_class=AutoTokenizer.from_pretrained(f"{folder}/tokenizer"),
)
balance_trainer(trainer).train()
""",
    # Sample i's conversation begins with its number. A processor's part for videos would need torchvision.
    "pictures": """
from types import SimpleNamespace

from PIL import Image
from transformers import (
    PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor,
)
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from trl import SFTConfig, SFTTrainer

from dflop.shapes.text import BUNDLED_TOKENIZER

processor = object.__new__(Qwen2_5_VLProcessor)
processor.tokenizer = PreTrainedTokenizerFast.from_pretrained(BUNDLED_TOKENIZER)
marks = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
processor.tokenizer.add_special_tokens({"additional_special_tokens": marks})
start, picture, _, video = processor.tokenizer.convert_tokens_to_ids(marks)
processor.image_processor = Qwen2VLImageProcessorPil()
processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
processor.image_token, processor.image_token_id = marks[1], picture
processor.video_token, processor.video_token_id = marks[3], video
processor.chat_template = (
    "{% for part in messages[0].content %}{{ part.text if part.type == 'text' else '<|vision_start|><|image_pad|>"
    "<|vision_end|>' }}{% endfor %}"
)


def conversation(index):
    texts = [{"type": "text", "text": text} for text in (f"{index}:", "yes " * lengths[index])]
    message = {"role": "user", "content": [texts[0], {"type": "image"}, texts[1]]}
    return {"images": [Image.new("RGB", (56, 56))], "messages": [message]}


def number_of(ids):
    return int(processor.tokenizer.decode(ids).split(":")[0])


def loss(outputs, labels, num_items_in_batch=None):
    return ForCausalLMLoss(outputs.logits, labels, outputs.logits.shape[-1], num_items_in_batch)


class NotedTrainer(SFTTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        assert len(inputs["image_grid_thw"]) == len(inputs["input_ids"])
        noted.append([self.state.global_step, [number_of(ids) for ids in inputs["input_ids"]]])
        return super().training_step(model, inputs, num_items_in_batch)


model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(
    text_config=dict(
        vocab_size=len(processor.tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]},
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    ),
    vision_config=dict(
        depth=1, hidden_size=16, intermediate_size=32, num_heads=2, out_hidden_size=16, fullatt_block_indexes=[0]
    ),
    image_token_id=picture, video_token_id=video, vision_start_token_id=start,
))
trainer = NotedTrainer(
    model, SFTConfig(**ARGUMENTS | {"save_strategy": "no"}, gradient_checkpointing=False, bf16=False, max_length=None),
    train_dataset=Dataset.from_list([conversation(index) for index in range(NUM_SAMPLES)]),
    processing_class=processor, compute_loss_func=loss,
)
balance_trainer(trainer, costs=lengths).train()
""",
    "accelerate": """
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
sampler = BalancedBatchSampler(
    lengths, BATCH_SIZE, padded=True, equal_sizes=False, num_accumulation_steps=ACCUMULATION, sync="step", seed=5
)
loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
loader = prepare_data_loader(loader, accelerator.device, num_processes=1, process_index=0, put_on_device=True)
model = accelerator.prepare(tiny_model())
optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
step = 0
for epoch in (1, 0):
    loader.set_epoch(epoch)
    for batch in loader:
        with accelerator.accumulate(model):
            note(step, batch)
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        step += accelerator.sync_gradients
""",
    "lightning": """
import lightning


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = tiny_model()

    def training_step(self, batch):
        note(self.global_step, batch)
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


sampler = BalancedBatchSampler(
    lengths, BATCH_SIZE, 2, int(os.environ["RANK"]), padded=True, equal_sizes=False,
    num_accumulation_steps=ACCUMULATION, sync="step", seed=5,
)
trainer = lightning.Trainer(
    accelerator="cpu", strategy="ddp", devices=2, max_epochs=EPOCHS, accumulate_grad_batches=ACCUMULATION,
    use_distributed_sampler=False, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    default_root_dir=folder,
)
trainer.fit(Module(), DataLoader(data, batch_sampler=sampler, collate_fn=collate))
""",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[list[int]]]:
    """The samples of each step of all trainers, which run one after the other in the same two processes."""
    for name in ("accelerate", "trl", "lightning"):
        pytest.importorskip(name, reason=f"needs {name} (pip install '.[dev]')")
    folder = tmp_path_factory.mktemp("trainers")
    ChatTokenizer(None).save(folder / "tokenizer", ())
    codes = {
        name: RUNS["transformers"].replace("EQUAL", equal).replace("RESUMED", resumed)
        for name, equal, resumed in (
            ("begun", "None", "None"),
            ("resumed", "None", 'f"{folder}/checkpoint-8"'),
            ("equal", "True", "None"),
        )
    }
    codes["equal"] += "assert (weights[0] - weights[2]).abs().max() < 1e-5, 'batches of other sizes train otherwise'\n"
    codes |= {name: RUNS[name] for name in ("trl", "accelerate", "lightning", "pictures")}
    script = folder / "train.py"
    script.write_text(SCRIPT + "".join(f"{code}\nkeep({name!r})\n" for name, code in codes.items()))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    done = subprocess.run(
        [sys.executable, *launcher, str(script), str(folder)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return {name: steps_of(folder, name) for name in codes}


def steps_of(folder: Path, name: str) -> list[list[int]]:
    ranks = [json.loads((folder / f"{name}{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    if name != "equal":
        assert len({len(batch) for noted in ranks for _, batch in noted}) > 2, "batches have their usual sizes"
    return [
        sorted(sample for noted in ranks for step, batch in noted if step == number for sample in batch)
        for number in range(max(step for noted in ranks for step, _ in noted) + 1)
    ]


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


def test_the_trainer_trains_on_the_samples_of_torch_and_resumes_in_the_second_epoch(found):
    expected = torch_steps()
    assert found["begun"] == found["equal"] == expected
    assert found["resumed"] == [[]] * 8 + expected[8:]


def test_trl_with_and_without_pictures_accelerate_and_lightning_train_on_the_samples_of_torch(found):
    expected = torch_steps()
    half = len(expected) // EPOCHS
    assert found["trl"] == found["lightning"] == found["pictures"] == expected
    assert found["accelerate"] == expected[half:] + expected[:half], "accelerate began with the second epoch"
