"""Inputs of a rank's nodes, loaded ahead in processes of their own by torch's DataLoader."""

import itertools
from collections.abc import Iterable, Iterator
from functools import partial

from torch.utils.data import DataLoader, Dataset

from dflop.config import Config
from dflop.loading.dataset import MicrobatchLoader, TrainingRecords, microbatch_loader
from dflop.plan import Plan
from dflop.shapes import list_sources
from dflop.train.feed import JobStream
from dflop.train.loader_process import RankDataset, as_it_is, begin
from dflop.train.rank_model import NodeModel, RankModel

__all__ = ["load_again_and_again", "load_ahead", "make_loader", "start_loading"]

# Microbatches that a rank's loader processes hold ready: together so many, and each of many processes these.
_PREFETCH, _OF_EACH = 8, 2


def start_loading(config: Config, plan: Plan, model: RankModel, stream: JobStream) -> Iterator:
    """The loaded inputs of the stream's jobs, in order. The first is loaded when this returns, because starting the
    loader processes takes seconds."""
    if not stream.num_forwards:
        return iter(())
    batches = iter(load_ahead(_dataset(config, plan, model), stream, config))
    first = next(batches, None)
    return iter(()) if first is None else itertools.chain([first], batches)


def load_again_and_again(config: Config, plan: Plan, model: RankModel, stream: JobStream) -> Iterable:
    """The loaded inputs of the stream's jobs, each time that the result is iterated over. Its processes stay alive."""
    return load_ahead(_dataset(config, plan, model), stream, config, stays=True) if stream.num_forwards else ()


def load_ahead(dataset: Dataset, stream: JobStream, config: Config, *, stays: bool = False) -> DataLoader:
    """A DataLoader that does not read further ahead than the scheduler works. Otherwise they would wait for each other:
    the loader for a schedule, and the scheduler for the first step to begin."""
    most_ahead = max(1, config.schedule.lookahead_steps * stream.num_forwards)
    wanted = config.train.loader_workers  # of this rank: `planned_loaders`; None only in comparisons
    num_workers = min(1 if wanted is None else wanted, most_ahead)
    ahead = min(max(_PREFETCH, _OF_EACH * num_workers), most_ahead)
    return DataLoader(
        dataset,
        sampler=stream,
        batch_size=None,
        collate_fn=as_it_is,
        num_workers=num_workers,
        multiprocessing_context="spawn" if num_workers else None,  # so that they notice when their rank dies
        prefetch_factor=ahead // num_workers if num_workers else None,
        pin_memory=config.cluster.device == "cuda",
        persistent_workers=stays and num_workers > 0,
        worker_init_fn=partial(begin, 19 if config.cluster.device == "cpu" else 5),
    )


def make_loader(
    config: Config, model: RankModel, plan: Plan, node_model: NodeModel, records: TrainingRecords
) -> MicrobatchLoader:
    """The loader of a node's microbatches. All of the node's ranks read records; its first rank decodes media for
    all."""
    decodes = node_model.node.module != "llm" and node_model.node.pp_stage == 0 and node_model.ranks.is_first
    return microbatch_loader(
        config.data,
        model.spec,
        records,
        tokenizer_folder=model.tokenizer.folder,
        module=node_model.node.module,
        num_replicas=[plan.grid(encoder.name).dp for encoder in model.spec.encoders],
        processor=model.processors[node_model.node.module] if decodes else None,
    )


def _dataset(config: Config, plan: Plan, model: RankModel) -> RankDataset:
    records = TrainingRecords(list_sources(config.data), config.seed)  # opened once for all of the rank's nodes
    return RankDataset(
        {
            node_model.node: make_loader(config, model, plan, node_model, records)
            for node_model in model.nodes
            if node_model.stage.reads_records
        }
    )
