"""Plain training loops as users write them: torch's DDP or FSDP2 around the same stages, with the same loaders and
AdamW."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler

from dflop.base import UserError
from dflop.base.torch_versions import reduce_unused, with_unused
from dflop.checks.one_process import job_of
from dflop.checks.side_by_side.sides import Side
from dflop.config import Config, ModelConfig
from dflop.loading.dataset import MicrobatchJob, MicrobatchLoader, TrainingRecords
from dflop.models import load_model_spec
from dflop.models.microbatch import EncoderBatch, SegmentEnds, TextBatch
from dflop.models.precision import COMPUTES_IN
from dflop.models.stages import EncoderStage, LlmStage, Stage
from dflop.models.tensor_group import ALONE
from dflop.plan import Grid, Plan
from dflop.plan.trained import TrainedSet
from dflop.schedule import StepSchedule
from dflop.shapes import list_sources
from dflop.step import make_program
from dflop.train.adamw import Rates, parameter_groups, rates_of
from dflop.train.data_loader import load_ahead, make_loader
from dflop.train.node_work import blank_batch
from dflop.train.rank_model import RankModel, build_rank_model

__all__ = ["plain_side"]


def plain_side(
    config: Config,
    schedules: Sequence[StepSchedule],
    num_microbatches: int,
    device: torch.device,
    *,
    on_the_fly: bool,
    padded: bool = False,
    shards: bool = False,
) -> Side:
    """Plain data parallelism over the samples of these steps. torch's DistributedSampler divides them among the ranks,
    and each rank's share is cut into `num_microbatches`; every rank must call this.

    A rank with only texts encodes a blank item, so that all ranks use the same parameters: DDP need not look for unused
    ones, and FSDP2 gathers the same layers. With `shards`, FSDP2 is applied to each layer and to the whole model. What
    is trained is as in the config, but adapters (`model.lora`) are those of the package peft.
    `padded` makes each sample as long as the longest in its microbatch. The model must have one encoder.
    """
    model, plan = _whole_model(config, device)
    (encoder,) = model.spec.encoders
    whole = _Whole(
        *(node.stage for node in model.nodes),
        blank_batch(model.spec, encoder.name),
        model.spec.feature_size,
    )
    ddp = _in_shards(whole, device) if shards else DistributedDataParallel(whole)
    rates = Rates(config.train.lr, config.train.weight_decay, tuple(config.train.betas), config.train.eps)
    rates = {parameter: rates_of(parameter, rates) for parameter in ddp.parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(parameter_groups(rates), fused=True)
    jobs = _Jobs(schedules, num_microbatches)
    records = TrainingRecords(list_sources(config.data), config.seed)
    dataset = _MediaAndText(*(make_loader(config, model, plan, node, records) for node in model.nodes), padded)
    loader = iter(load_ahead(dataset, jobs, config))
    dtype = COMPUTES_IN[config.train.precision]

    def load(step: int) -> Iterator:
        return loader if on_the_fly else iter([next(loader) for _ in range(num_microbatches)])

    def train(loaded: Iterator) -> None:
        optimizer.zero_grad()
        num_targets = torch.zeros((), device=device)
        for number in range(num_microbatches):
            media, text = next(loaded)
            num_targets += len(text.target_ids)
            with nullcontext() if shards or number + 1 == num_microbatches else ddp.no_sync():
                ddp(media.to(device, dtype), text.to(device)).backward()
        dist.all_reduce(num_targets)
        for parameter in ddp.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(dist.get_world_size() / num_targets)
        nn.utils.clip_grad_norm_(ddp.parameters(), config.train.grad_clip)
        optimizer.step()

    return Side(load, train)


def _whole_model(config: Config, device: torch.device) -> tuple[RankModel, Plan]:
    """A rank's model with the whole encoder and the whole LLM as one stage each, and the plan for that."""
    grids = tuple(Grid(module=module.name, num_ranks=1) for module in load_model_spec(config.model).modules)
    plan = Plan(placement="monolithic", grids=grids, num_microbatches=1)
    alone = dist.new_subgroups(group_size=1)[0]
    nodes = range(len(grids))
    place = SimpleNamespace(
        nodes=tuple(nodes),
        program=make_program(plan),
        device=device,
        tensor=dict.fromkeys(nodes, ALONE),
        replicas=dict.fromkeys(nodes, alone),
        tied={},
        samples={},
    )
    lora, dtype = config.model.lora, COMPUTES_IN[config.train.precision]
    if lora:  # what peft adapts is frozen
        without = replace(config.model, lora=None, freeze=[*config.model.freeze, *_without_adapters(config.model)])
        model = build_rank_model(replace(config, model=without), plan, place, dtype)
        for node in model.nodes:
            _adapt_with_peft(node.stage, config.model.trained)
    else:
        model = build_rank_model(config, plan, place, dtype)
    for node in model.nodes:  # parameters are views of the flat buckets of an optimiser that is not used here
        for parameter in node.stage.parameters():
            parameter.data, parameter.grad = parameter.data.clone(), None
    return model, plan


def _without_adapters(model: ModelConfig) -> list[str]:
    """Names of what adapters take the place of: the layers of their modules, and an LLM's ends that are not named."""
    return [f"{name}.layers" for name in model.lora.modules] + ([] if model.train else list(model.lora.modules))


def _adapt_with_peft(stage: Stage, trained: TrainedSet) -> None:
    """Put peft's own adapters into the stage's linear layers that `model.lora` adapts."""
    if not trained.adapts(stage.module):
        return
    try:
        import peft
    except ModuleNotFoundError:
        raise UserError(
            "the rows of plain PyTorch take their adapters from peft, which is not here: pip install peft"
        ) from None
    lora = trained.lora
    inside = [
        name
        for layer in stage.layer_names
        for name, own in stage.hf.get_submodule(layer).named_modules(prefix=layer)
        if isinstance(own, nn.Linear)
    ]
    names = [name for name in inside if any(fnmatchcase(name, pattern) for pattern in lora.targets)]
    settings = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, use_rslora=lora.rslora, target_modules=names
    )
    own = {parameter for parameter in stage.parameters() if parameter.requires_grad}
    peft.inject_adapter_in_model(settings, stage.hf)
    for parameter in own:  # peft has frozen all that is not its own
        parameter.requires_grad_(True)


class _Whole(nn.Module):
    """The encoder and the LLM as one module, as a user would write it: it returns the summed loss of a rank's packed
    samples. For texts without media it encodes the `blank` item, and does not use the result."""

    def __init__(self, encoder: EncoderStage, llm: LlmStage, blank: EncoderBatch, feature_size: int) -> None:
        super().__init__()
        self.encoder, self.llm, self.blank, self.feature_size = encoder, llm, blank, feature_size
        trained = [own for own in encoder.parameters() if own.requires_grad]
        self.encodes_always = bool(trained)
        # Such as LLaVA's newline, which clips do not have.
        self.vectors = [own for own in trained if own.ndim == 1]

    def forward(self, media: EncoderBatch, text: TextBatch) -> torch.Tensor:
        like = next(self.encoder.parameters())
        features, unused = [], 0.0
        if len(media.items):
            features = self.encoder(media)
        elif self.encodes_always:
            unused = sum(made.sum() for made in self.encoder(self.blank.to(like.device, like.dtype)))
        if self.encodes_always:
            unused = 0.0 * (unused + sum(own.sum() for own in self.vectors))
        nothing = like.new_zeros((0, self.feature_size))
        loss = self.llm(self.llm.embed(text, [torch.cat([nothing, *features])]), text) + unused
        return with_unused(self, loss) if isinstance(self, FSDPModule) else loss


def _in_shards(whole: _Whole, device: torch.device) -> nn.Module:
    """Apply FSDP2 to each layer, to the embedding and head, and to the rest, as in FSDP2's tutorials."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for stage in (whole.encoder, whole.llm):
        for name in stage.units:
            fully_shard(stage.hf.get_submodule(name), mesh=mesh)
    reduce_unused(fully_shard(whole, mesh=mesh))
    return whole


@dataclass
class _Jobs:
    """The jobs of this rank's microbatches, step after step, in the place of training's `JobStream`."""

    schedules: Sequence[StepSchedule]
    num_forwards: int

    def __iter__(self) -> Iterator[MicrobatchJob]:
        for step, schedule in enumerate(self.schedules):
            batch = schedule.whole_samples()
            share = np.array(list(DistributedSampler(range(len(batch)), shuffle=True, seed=step)))
            for part in np.array_split(share, self.num_forwards):
                yield job_of(batch.take(part))


@dataclass
class _MediaAndText(Dataset):
    """Loads a rank's media and text of one microbatch."""

    media: MicrobatchLoader
    text: MicrobatchLoader
    padded: bool

    def __getitem__(self, job: MicrobatchJob) -> tuple[EncoderBatch, TextBatch]:
        with_media = [place for place, sizes in enumerate(job.media) if sizes]
        loaded = self.media[_only(job, with_media)].batch
        # Samples without media are left out of the encoder's batch, and so have no features.
        text = self.text[job]
        return loaded, _padded(text) if self.padded else text


def _only(job: MicrobatchJob, places: list[int]) -> MicrobatchJob:
    of_samples = ("samples", "media", "kept_tokens", "llm_tokens", "encoder_rank")
    return MicrobatchJob(**{name: tuple(getattr(job, name)[place] for place in places) for name in of_samples})


def _padded(text: TextBatch) -> TextBatch:
    """The microbatch with each sample padded to the longest; nothing is learned from the padding."""
    lengths = text.segment_ends.bounds.diff().tolist()
    longest = max(lengths)
    place = torch.cat([number * longest + torch.arange(length) for number, length in enumerate(lengths)])
    token_ids = torch.zeros(longest * len(lengths), dtype=torch.int64)
    token_ids[place] = text.token_ids
    return replace(
        text,
        token_ids=token_ids,
        position_ids=torch.arange(longest).repeat(len(lengths)),
        segment_ends=SegmentEnds([longest * (number + 1) for number in range(len(lengths))]),
        feature_positions=tuple(place[positions] for positions in text.feature_positions),
        target_positions=place[text.target_positions],
    )
