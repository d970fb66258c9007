"""Balanced batches for the Hugging Face Trainer and those derived from it (TRL's), and costs to balance by.

Only what the trainer's own methods import is needed beside torch; `shapes.duckdb` needs duckdb.
"""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, RandomSampler

from dflop.balance.collators import pads_batches
from dflop.balance.sampler import BalancedBatchSampler
from dflop.base import UserError

__all__ = ["balance_trainer", "sample_costs"]

logger = logging.getLogger(__name__)

# So many of a rank's steps the Trainer sorts by length at once, where it groups by length; they are dealt to all ranks.
_TRAINERS_MEGABATCH = 50


def balance_trainer(
    trainer: Any,
    costs: Any = None,
    *,
    padded: bool | None = None,
    equal_sizes: bool | None = None,
    megabatch_steps: int | None = None,
    sample_bytes: Any = None,
    max_batch_bytes: int | None = None,
) -> Any:
    """Make a trainer deal the samples of every step evenly to its ranks; returns the trainer.

        trainer = balance_trainer(Trainer(model, args, train_dataset=dataset, data_collator=collator))
        trainer.train()

    Steps hold the samples that the Trainer would give them without, by its seed (but for an epoch's last step, which
    the Trainer fills up with more repeated samples); see `BalancedBatchSampler`, to which the arguments are handed.
    Ranks wait in each microbatch under FSDP and DeepSpeed, else once a step. With
    `train_sampling_strategy="group_by_length"` samples of like cost share a step, out of as many as the Trainer sorts.

    Args:
        trainer: a `transformers.Trainer` or one derived from it that keeps its samplers, such as TRL's `SFTTrainer`,
            not yet trained.
        costs: of each sample, in dataset order, as `BalancedBatchSampler` takes them; or the path of a
            `shapes.duckdb` (`dflop shapes`). By default lengths are read from the dataset (its column
            `args.length_column_name`, else its `input_ids`), and attention is added for this model (`sample_costs`).
        padded: whether the collator pads; by default two samples are collated to see it.
        equal_sizes: whether all batches hold the same number of samples. By default they do not, where the loss is
            divided by the tokens of the whole step (causal language models, or a `compute_loss_func`, with
            `average_tokens_across_devices`); with a mean over each batch, samples of small batches would weigh more.
        megabatch_steps: of how many steps' samples those of like cost share a step; by default as above, else 1.

    Raises:
        UserError: the dataset tells no lengths, there are not as many costs as samples, or the trainer deals samples in
            a way of its own.
    """
    args = trainer.args
    _check_that_samples_are_dealt_plainly(trainer)
    dataset, collator = _with_the_models_columns(trainer)
    if padded is None:
        padded = pads_batches(collator, dataset)
    if costs is None:
        costs = _with_attention(_lengths(trainer.train_dataset, args.length_column_name), trainer.model)
    elif isinstance(costs, str | Path):
        costs = sample_costs(costs, trainer.model)
        costs = costs[:, -1:] if padded else costs  # what is padded is the LLM's sequence
    if len(costs) != len(dataset):
        raise UserError(
            f"there are {len(costs)} costs for {len(dataset)} samples of the train_dataset; give one for each"
        )
    if megabatch_steps is None:
        is_grouped = getattr(args, "train_sampling_strategy", "random") == "group_by_length"
        megabatch_steps = max(1, round(_TRAINERS_MEGABATCH / args.world_size)) if is_grouped else 1
    waits = getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False)

    def make_sampler() -> BalancedBatchSampler:
        return BalancedBatchSampler(
            costs,
            trainer._train_batch_size,  # which `auto_find_batch_size` makes smaller
            num_replicas=args.world_size,
            rank=args.process_index,
            num_accumulation_steps=args.gradient_accumulation_steps,
            seed=args.seed if args.data_seed is None else args.data_seed,
            drop_last=args.dataloader_drop_last,
            padded=padded,
            sync="microbatch" if waits else "step",
            equal_sizes=not _divides_by_the_steps_tokens(trainer) if equal_sizes is None else equal_sizes,
            megabatch_steps=megabatch_steps,
            sample_bytes=sample_bytes,
            max_batch_bytes=max_batch_bytes,
        )

    def get_train_dataloader() -> DataLoader:
        from transformers.trainer_utils import seed_worker

        sampler = make_sampler()
        loader = DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            worker_init_fn=partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
        )
        loader.set_epoch = sampler.set_epoch  # the Trainer calls it at the start of every epoch
        return loader  # as it is: accelerator.prepare would shard the batches a second time

    make_sampler()  # what cannot be is said now, not when training begins
    trainer.get_train_dataloader = get_train_dataloader
    _set_epoch_on_resume(trainer)
    return trainer


def _check_that_samples_are_dealt_plainly(trainer: Any) -> None:
    """Refuse a trainer whose ranks, order or batches are more than random shares of a dataset."""
    from transformers import Trainer

    name = type(trainer).__name__
    if not hasattr(trainer.train_dataset, "__len__"):
        raise UserError("the trainer's train_dataset must have a length; a stream of samples cannot be dealt evenly")
    if type(trainer).get_train_dataloader is not Trainer.get_train_dataloader:
        raise UserError(f"{name} deals samples in a way of its own (get_train_dataloader), which balancing would undo")
    strategy = getattr(trainer.args, "train_sampling_strategy", "random")
    # The Trainer's own sorting by length is replaced; that of a derived trainer may be anything.
    is_sorted = strategy == "group_by_length" and type(trainer)._get_train_sampler is Trainer._get_train_sampler
    if strategy not in ("random", "group_by_length"):
        raise UserError(
            f"train_sampling_strategy={strategy!r} orders samples itself; leave it at 'random' or 'group_by_length'"
        )
    if not is_sorted and type(sampler := trainer._get_train_sampler()) is not RandomSampler:
        raise UserError(
            f"{name} deals samples in a way of its own (_get_train_sampler gives {type(sampler).__name__}, not "
            "RandomSampler), which balancing would undo"
        )
    for method, parallelism in (("get_tp_size", "tensor"), ("get_cp_size", "context"), ("get_sp_size", "sequence")):
        if (size := getattr(trainer, method, lambda: 1)()) > 1:
            raise UserError(f"{parallelism} parallelism over {size} ranks, which share a batch, is not supported")


def _set_epoch_on_resume(trainer: Any) -> None:
    """Set the epoch when training begins: transformers 5.6 no longer does where it skips batches of a resumed epoch."""
    from transformers import TrainerCallback

    class ResumedEpoch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **others: Any) -> None:
            train_dataloader.batch_sampler.set_epoch(int(state.epoch or 0))

    trainer.add_callback(ResumedEpoch)


def _divides_by_the_steps_tokens(trainer: Any) -> bool:
    """Whether each target token weighs the same, whatever batch it is in."""
    if not trainer.args.average_tokens_across_devices or getattr(trainer, "loss_is_scaled_for_ga", None) is False:
        return False
    if getattr(trainer, "compute_loss_func", None) is not None:
        return True
    model = trainer.model
    is_causal = getattr(model, "loss_type", None) in ("ForCausalLM", "ForConditionalGeneration")
    return is_causal and not getattr(model.config, "is_encoder_decoder", False) and trainer.model_accepts_loss_kwargs


def sample_costs(shapes: str | Path, model: Any = None) -> np.ndarray:
    """Costs of a dataset's records in each module, float64 `[num_records, num_modules]`, from a `shapes.duckdb`.

    Columns: items of the encoders that the dataset uses, vision before audio, then the LLM's tokens n, with `model` (a
    transformers model) as `n + n * n / c` for the attention: c tokens attend as long as their layers' matrices take
    (65,000 tokens for a layer of Qwen2-7B, under a causal mask). Weights of 4 bits and experts are not told apart: give
    costs of your own there. Rows are the records of the manifests in the order in which `data.sources` or
    `dflop shapes` name them. A record that was rejected has the mean of the others, with a warning.

    Raises:
        UserError: the file is no shapes.duckdb, or holds no sample.
    """
    import polars as pl

    from dflop.store import read_table

    path = Path(shapes)
    samples, rejects, sources = (
        read_table(path, name, made_by="shapes MANIFEST --model DIR") for name in ("samples", "rejects", "sources")
    )
    if not len(samples):
        raise UserError(f"{path} holds no sample")
    columns = [name for name in ("num_items", "num_audio_windows") if samples[name].sum()] + ["llm_tokens"]
    place = pl.DataFrame({"source": sources["name"], "place": range(len(sources))})
    rows = pl.concat(
        [samples.select("source", "row", *columns), rejects.select("source", "row")], how="diagonal_relaxed"
    )
    rows = rows.join(place, on="source").sort("place", "row")
    costs = rows.select(pl.col(columns).cast(pl.Float64).fill_null(pl.col(columns).mean())).to_numpy().copy()
    if model is not None:
        costs[:, -1] = _with_attention(costs[:, -1], model)
    if len(rejects):
        logger.warning(
            "%s: %d of %d records were rejected when they were profiled; each counts as the mean of the others",
            path,
            len(rejects),
            len(rows),
        )
    return costs


def _with_attention(lengths: np.ndarray, model: Any) -> np.ndarray:
    """`n + n * n / c` for `n` tokens in this model's decoder; `n` for a model that tells no such layers."""
    lengths = lengths.astype(np.float64)
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        return lengths
    config = model.config.get_text_config()
    depth = getattr(config, "num_hidden_layers", None)
    layers = [module for module in model.modules() if type(module).__name__ == "ModuleList" and len(module) == depth]
    parameters = max(map(_num_parameters, layers), default=0) / (depth or 1)
    if not parameters:
        return lengths
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # A token's matrices take 2 * parameters FLOPs, its attention 2 * 2 * n / 2 * width under a causal mask.
    return lengths + lengths**2 * config.num_attention_heads * head_size / parameters


def _num_parameters(module: Any) -> int:
    """Where DeepSpeed holds them elsewhere, it says how many there are."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())


def _lengths(dataset: Any, column: str) -> np.ndarray:
    names = getattr(dataset, "column_names", None) or []
    if column in names:
        lengths = np.asarray(dataset[column][:])  # at once, not row by row
        if lengths.dtype.kind not in "iuf":
            raise UserError(f"the dataset's column {column!r} holds no lengths; name one by args.length_column_name")
        return lengths
    if "input_ids" in names:
        return np.array([len(ids) for ids in dataset["input_ids"]])
    first = dataset[0]
    if not (isinstance(first, Mapping) and "input_ids" in first):
        raise UserError(
            f"the train_dataset has neither a column {column!r} nor `input_ids`, so its samples tell no length; give "
            "costs, e.g. costs=[…] or costs='shapes.duckdb' (`dflop shapes MANIFEST --model DIR` makes it)"
        )
    return np.array([len(dataset[index]["input_ids"]) for index in range(len(dataset))])


def _with_the_models_columns(trainer: Any) -> tuple[Any, Any]:
    """The dataset and the collator without columns that the model does not take, as the Trainer does it."""
    dataset, collator = trainer.train_dataset, trainer.data_collator
    if hasattr(dataset, "column_names"):
        return trainer._remove_unused_columns(dataset, description="training"), collator
    return dataset, trainer._get_collator_with_removed_columns(collator, description="training")
