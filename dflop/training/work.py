"""What a node computes in a step: its stage's forward and backward for each microbatch.

The executor in `pipeline.run` says when; these classes hold the stage, the microbatches' inputs and what
backward needs of forward. The loss is summed over target tokens; the trainer divides by their global
number, so that how a batch is cut changes nothing.
"""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dflop.config import Config
from dflop.data.loading import LoadedMedia, segments_of
from dflop.models import ModelSpec, load_runtime
from dflop.models.deferral import Deferral
from dflop.models.microbatch import EncoderBatch, MediaProcessor, TextBatch
from dflop.parallelism import Plan
from dflop.pipeline import Program
from dflop.pipeline.orders import has_backward, splits_backward
from dflop.scheduling import StepSchedule
from dflop.training.feed import samples_of
from dflop.training.rank_model import NodeModel, RankModel
from dflop.training.undecodable import Undecodable, without_targets_of

__all__ = ["EncoderWork", "LlmWork", "make_works"]


# What stands for the loss among the edges that outputs go over.
_LOSS = -1


class _Work(ABC):
    """Common to encoders and the LLM: the step's schedule, the loader, what is kept between forward and backward.

    The works of a rank share its `loader`, which gives their inputs in the order of the rank's forwards.
    """

    def __init__(
        self,
        own: NodeModel,
        program: Program,
        loader: Iterator,
        feature_size: int,
        frozen: Collection[str],
        splits_backward: bool,
        undecodable: Undecodable,
    ) -> None:
        self.stage, self.program, self.node_index, self.node = own.stage, program, own.index, own.node
        self._loader, self._feature_size = loader, feature_size
        self._undecodable = undecodable
        self._own = own
        self.device = next(own.stage.parameters()).device
        self._dtype = own.dtype
        self.unreadable: list[str] = []
        self._outgoing = [number for number, edge in enumerate(program.edges) if edge.source == own.index]
        self._incoming = [number for number, edge in enumerate(program.edges) if edge.target == own.index]
        # Who made what comes in computes no backward where it is frozen, so it is owed no gradient.
        self._owed = {
            number
            for number in self._incoming
            if has_backward(program.nodes[program.edges[number].source].module, frozen)
        }
        self._num_replicas = Counter(node.module for node in program.nodes if node.pp_stage == 0)
        # Who runs the same passes as this node: replicas that share its parameters.
        self._together = [own.node]
        if own.shared:
            self._together = [node for node in program.nodes if node.module == own.node.module]
        self._deferral = Deferral(own.stage) if splits_backward else None

    def read_from(self, loader: Iterator) -> Iterator:
        """From now on inputs come from this loader; returns the one before."""
        before, self._loader = self._loader, loader
        return before

    def begin_step(self, schedule: StepSchedule, batches: str = "training") -> None:
        """Forget the last step; `batches` says which batches the schedule's step counts."""
        self.schedule, self._batch = schedule, f"{batches}/{schedule.step}"
        self.data_wait_s = 0.0
        self.num_undecodable = self.num_dropped_targets = 0
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._inputs: dict[int, EncoderBatch | TextBatch] = {}
        # What went out and what came in, by microbatch and edge, and the weights' gradients that were put off.
        self._outputs: dict[int, dict[int, torch.Tensor]] = {}
        self._leaves: dict[int, dict[int, torch.Tensor]] = {}
        self._put_off: dict[int, list] = {}
        self._num_backwards = sum(map(self._runs, range(self.program.num_microbatches)))
        self._own.zero_grad()

    def prepare(self, microbatch: int) -> None:
        if not self.stage.reads_records:
            self._inputs[microbatch] = self._without_records(microbatch)
            return
        started = time.monotonic()
        self._inputs[microbatch] = self._receive_input(microbatch, next(self._loader))
        self.data_wait_s += time.monotonic() - started

    def edge_shape(self, microbatch: int, edge: int) -> tuple[int, ...] | None:
        source = self.program.nodes[self.program.edges[edge].source]
        target = self.program.nodes[self.program.edges[edge].target]
        chosen = samples_of(self.schedule, source, microbatch)
        if source.module == target.module:
            layers = self.stage.layers
            return self._hidden_shape(chosen, layers.stop if edge in self._outgoing else layers.start)
        chosen &= self.schedule.llm_dp_rank == target.dp_rank
        tokens = int(self.schedule.kept_tokens[chosen, self.schedule.encoders.index(source.module)].sum())
        return (tokens, self._feature_size) if tokens else None

    def forward(self, microbatch: int, received: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        leaves = {
            edge: tensor.detach().requires_grad_(edge in self._owed and tensor.is_floating_point())
            for edge, tensor in received.items()
        }
        batch = self._inputs.pop(microbatch)
        outputs = self._own.run(lambda: self._compute(microbatch, batch, leaves)) if self._runs(microbatch) else {}
        if any(output.requires_grad for output in outputs.values()):
            self._outputs[microbatch], self._leaves[microbatch] = outputs, leaves
        return {edge: output.detach() for edge, output in outputs.items() if edge != _LOSS}

    def backward(self, microbatch: int, received: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        outputs, leaves = self._outputs.pop(microbatch, {}), self._leaves.pop(microbatch, {})
        wanted = {edge: output for edge, output in outputs.items() if output.requires_grad}
        gradients = [None if edge == _LOSS else received[edge].to(output.dtype) for edge, output in wanted.items()]
        self._num_backwards -= self._runs(microbatch)
        if self._own.shared:
            self._own.shared.sum_over_copies(self._num_backwards == 0)
        if wanted:
            torch.autograd.backward(list(wanted.values()), gradients)
        owed = {edge: leaf.grad for edge, leaf in leaves.items() if leaf.grad is not None}
        # Who made what came in waits for a gradient, also where nothing of it reached the loss.
        for edge in self._owed - owed.keys():
            if (shape := self.edge_shape(microbatch, edge)) is not None:
                owed[edge] = torch.zeros(shape, dtype=self._dtype, device=self.device)
        return owed

    def backward_input(self, microbatch: int, received: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        assert self._deferral is not None, "the plan's schedule does not split the backward"
        with self._deferral.collecting() as put_off:
            owed = self.backward(microbatch, received)
        self._put_off[microbatch] = put_off
        return owed

    def backward_weight(self, microbatch: int) -> None:
        assert self._deferral is not None, "the plan's schedule does not split the backward"
        self._deferral.compute(self._put_off.pop(microbatch))

    def _runs(self, microbatch: int) -> bool:
        """Whether there is anything to compute; replicas that share parameters run the same passes."""
        return True

    def sync_gradients(self) -> None:
        self._own.sum_gradients()

    @abstractmethod
    def _receive_input(self, microbatch: int, loaded: object) -> EncoderBatch | TextBatch:
        """What the loader gave, on the device."""

    @abstractmethod
    def _without_records(self, microbatch: int) -> EncoderBatch | TextBatch:
        """What a stage in the middle knows of a microbatch from the schedule alone."""

    @abstractmethod
    def _hidden_shape(self, chosen: np.ndarray, layer: int) -> tuple[int, ...] | None:
        """Shape of these samples' hidden states between two stages, of which the second begins with this layer; None
        where there are none."""

    @abstractmethod
    def _compute(
        self, microbatch: int, batch: EncoderBatch | TextBatch, leaves: dict[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """What goes over each outgoing edge; the last stage gives the loss, under `_LOSS`."""


class EncoderWork(_Work):
    """Media in, their tokens' features out, one tensor for each LLM replica that awaits some."""

    def __init__(self, own: NodeModel, processor: MediaProcessor, blank: EncoderBatch, **common: Any) -> None:
        """`blank` is a batch of one item, for passes that a replica takes part in without any of its own."""
        super().__init__(own, **common)
        self._processor, self._blank = processor, blank

    def _receive_input(self, microbatch: int, loaded: LoadedMedia) -> EncoderBatch:
        self.unreadable += loaded.unreadable
        if loaded.undecodable:
            chosen = np.flatnonzero(samples_of(self.schedule, self.node, microbatch))
            self._undecodable.tell(self._batch, microbatch, chosen[list(loaded.undecodable)].tolist())
        return self._with_items(loaded.batch.to(self.device, self._dtype))

    def _with_items(self, batch: EncoderBatch) -> EncoderBatch:
        """The batch as all ranks of the node have it, of which the first one decodes."""
        ranks, num_items = self._own.ranks, sum(medium.num_items for media in batch.media for medium in media)
        if ranks.size == 1 or not self.stage.is_first or not num_items:
            return batch
        items = batch.items
        if not ranks.is_first:
            items = torch.empty((num_items, *self._processor.item_shape), dtype=self._dtype, device=self.device)
        items = items.contiguous()  # whatever order of its axes a processor leaves: memory is sent as it lies
        dist.broadcast(items, src=ranks.ranks[0], group=ranks.group)
        return replace(batch, items=items)

    def _without_records(self, microbatch: int) -> EncoderBatch:
        return EncoderBatch(items=None, media=(), kept_tokens=())

    def _runs(self, microbatch: int) -> bool:
        return any(samples_of(self.schedule, node, microbatch).any() for node in self._together)

    def _hidden_shape(self, chosen: np.ndarray, layer: int) -> tuple[int, ...] | None:
        num_items = int(self.schedule.num_items[chosen, self.schedule.encoders.index(self.node.module)].sum())
        return self.stage.hidden_shape(num_items, layer) if num_items else None

    def _compute(
        self, microbatch: int, batch: EncoderBatch, leaves: dict[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        chosen = samples_of(self.schedule, self.node, microbatch)
        if not chosen.any():
            # Others gather parameters for theirs, and sum gradients: zeros from here, which nothing is sent of.
            blank = self._blank.to(self.device, self._dtype)
            hidden = self.stage.encode(self.stage.embed(blank), blank)
            return {_LOSS: 0.0 * hidden[-1].sum()}
        if self.stage.is_first:
            made = self.stage(batch)
        else:
            (leaf,) = leaves.values()
            made = self.stage(batch, leaf.to(self._dtype))
        if not self.stage.is_last:
            return dict.fromkeys(self._outgoing, made)
        llm_rank = self.schedule.llm_dp_rank[chosen]
        outputs = {}
        for edge in self._outgoing:
            if self.edge_shape(microbatch, edge) is not None:
                target = self.program.nodes[self.program.edges[edge].target]
                outputs[edge] = torch.cat([made[place] for place in np.flatnonzero(llm_rank == target.dp_rank)])
        return outputs


def _blank(spec: ModelSpec, module: str) -> EncoderBatch:
    """One item of zeros."""
    made_up = load_runtime(spec.family).make_up_media(spec, module, 1)
    media = tuple((medium,) for medium in made_up.media)
    return EncoderBatch(items=torch.zeros((1, *made_up.item_shape)), media=media, kept_tokens=(1,) * len(media))


class LlmWork(_Work):
    """Text and the encoders' features, or the previous stage's hidden states, in; hidden states or the loss out."""

    def _receive_input(self, microbatch: int, loaded: TextBatch) -> TextBatch:
        return loaded.to(self.device)

    def _without_records(self, microbatch: int) -> TextBatch:
        """Where each sample ends, and each token's place in its sample."""
        chosen = samples_of(self.schedule, self.node, microbatch)
        position_ids, segment_ends = segments_of(self.schedule.llm_tokens[chosen].tolist())
        nothing = torch.zeros(0, dtype=torch.int64)
        return TextBatch(
            token_ids=nothing,
            position_ids=position_ids,
            segment_ends=segment_ends,
            feature_positions=(),
            target_positions=nothing,
            target_ids=nothing,
        ).to(self.device)

    def _hidden_shape(self, chosen: np.ndarray, layer: int) -> tuple[int, ...] | None:
        return self.stage.hidden_shape(int(self.schedule.llm_tokens[chosen].sum()), layer)

    def _compute(self, microbatch: int, batch: TextBatch, leaves: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        if self.stage.is_first:
            hidden = self.stage.embed(batch, self._features(batch, leaves))
        else:
            (leaf,) = leaves.values()
            hidden = leaf.to(self._dtype)
        if self._own.shared and self._owed and not hidden.requires_grad:
            hidden.requires_grad_()  # others have a backward for their encoders' sake, and no one alone
        if self.stage.is_last:
            batch = self._learnable(microbatch, batch)
        output = self.stage(hidden, batch)
        if self.stage.is_last:
            if self._own.ranks.is_first:  # all of the node's ranks know it, and it counts once
                self.loss += output.detach()
            return {_LOSS: output}
        return dict.fromkeys(self._outgoing, output)

    def _learnable(self, microbatch: int, batch: TextBatch) -> TextBatch:
        """The microbatch without the targets of samples that could not be decoded."""
        chosen = np.flatnonzero(samples_of(self.schedule, self.node, microbatch))
        if not self.schedule.num_items[chosen].any():
            return batch
        undecodable = self._undecodable.of(self._batch, microbatch)
        segments = [place for place, sample in enumerate(chosen.tolist()) if sample in undecodable]
        if not segments:
            return batch
        learnable = without_targets_of(batch, segments)
        if self._own.ranks.is_first:
            self.num_undecodable += len(segments)
            self.num_dropped_targets += len(batch.target_ids) - len(learnable.target_ids)
        return learnable

    def _features(self, batch: TextBatch, leaves: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """What each encoder's replicas sent, as `feature_positions` has them; nothing where they had no sample."""
        sent = {}
        for edge, leaf in leaves.items():
            source = self.program.nodes[self.program.edges[edge].source]
            sent[source.module, source.dp_rank] = leaf
        nothing = torch.zeros(0, self._feature_size, device=self.device)
        features = [
            sent.get((encoder, replica), nothing)
            for encoder in self.schedule.encoders
            for replica in range(self._num_replicas[encoder])
        ]
        assert len(features) == len(batch.feature_positions)
        return features


def make_works(
    config: Config, plan: Plan, model: RankModel, program: Program, loader: Iterator, store: dist.Store
) -> dict[int, EncoderWork | LlmWork]:
    """The work of each of a rank's nodes; they share the loader, and the store in which ranks tell each other of
    samples."""
    undecodable = Undecodable(store)
    works: dict[int, EncoderWork | LlmWork] = {}
    for own in model.nodes:
        common: dict[str, Any] = {
            "program": program,
            "loader": loader,
            "feature_size": model.spec.feature_size,
            "frozen": config.model.freeze,
            "undecodable": undecodable,
            "splits_backward": splits_backward(plan, own.node.module),
        }
        if own.node.module == "llm":
            works[own.index] = LlmWork(own, **common)
        else:
            works[own.index] = EncoderWork(
                own, model.processors[own.node.module], _blank(model.spec, own.node.module), **common
            )
    return works
