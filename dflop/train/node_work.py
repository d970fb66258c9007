"""What a node computes in a step: its stage's forward and backward for each microbatch.

The executor in `step.run` calls these classes. They hold the stage, the microbatches' inputs, and what backward
needs from forward. The loss is summed over target tokens, and the trainer divides by their global number, so that the
result does not depend on how a batch is cut into microbatches. Both kinds of work stand in this file beside what they
share, which makes it a little longer than most.
"""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dflop.config import Config
from dflop.loading.dataset import LoadedMedia, segments_of
from dflop.models import ModelSpec, load_runtime
from dflop.models.microbatch import EncoderBatch, MediaProcessor, TextBatch
from dflop.models.shared_samples import joined_to
from dflop.plan import Plan
from dflop.plan.trained import TrainedSet
from dflop.schedule import StepSchedule
from dflop.step import Program
from dflop.train.feed import sample_group, samples_of
from dflop.train.rank_model import NodeModel, RankModel
from dflop.train.undecodable import Undecodable, without_targets_of

__all__ = ["TRAINING", "EncoderWork", "LlmWork", "blank_batch", "make_works"]


# The key of the loss among outputs, which otherwise have the number of their edge.
_LOSS = -1
# The name of the sequence of batches that are trained on.
TRAINING = "training"


class _Work(ABC):
    """What encoders and the LLM share: the step's schedule, the loader, and what is kept between forward and backward.

    All works of a rank share its `loader`, which gives their inputs in the order of the rank's forwards.
    """

    def __init__(
        self,
        node_model: NodeModel,
        program: Program,
        loader: Iterator,
        feature_size: int,
        trained: TrainedSet,
        undecodable: Undecodable,
    ) -> None:
        self.stage, self.node_index, self.node = node_model.stage, node_model.index, node_model.node
        self.program = program
        self._loader, self._feature_size = loader, feature_size
        self._undecodable = undecodable
        self._node_model = node_model
        self.device = next(node_model.stage.parameters()).device
        self._dtype = node_model.dtype
        self.unreadable: list[str] = []
        self._outgoing = [number for number, edge in enumerate(program.edges) if edge.source == node_model.index]
        self._incoming = [number for number, edge in enumerate(program.edges) if edge.target == node_model.index]
        # The incoming edges over which a gradient is sent back. A frozen source without a backward needs none.
        self._owed = {
            number for number in self._incoming if trained.has_backward(program.nodes[program.edges[number].source])
        }
        # Those of them whose tensors have a gradient: of a chain, where something before this stage is trained.
        has_gradient = trained.gives_gradients_to(self.node.module, self.stage.layers.start)
        self._learned = {
            number
            for number in self._owed
            if program.nodes[program.edges[number].source].module != self.node.module or has_gradient
        }
        self._num_replicas = Counter(node.module for node in program.nodes if node.pp_stage == 0)
        # The nodes that run the same passes as this one: the replicas that shard its parameters.
        self._together = [node_model.node]
        if node_model.shared:
            self._together = [node for node in program.nodes if node.module == node_model.node.module]

    def read_from(self, loader: Iterator) -> Iterator:
        """Take inputs from this loader from now on; returns the former loader."""
        before, self._loader = self._loader, loader
        return before

    def begin_step(self, schedule: StepSchedule, batches: str = TRAINING) -> None:
        """Begin a step, and drop what is left of the last one. `batches` names the sequence of batches that the
        schedule's step is an index of."""
        self.schedule, self._batch = schedule, f"{batches}/{schedule.step}"
        if batches == TRAINING:  # all ranks have ended the step before, and evaluation
            self._undecodable.forget()
        self.data_wait_s = 0.0
        self.num_undecodable = self.num_dropped_targets = 0
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._inputs: dict[int, EncoderBatch | TextBatch] = {}
        # By microbatch and edge, what went out and what came in.
        self._outputs: dict[int, dict[int, torch.Tensor]] = {}
        self._leaves: dict[int, dict[int, torch.Tensor]] = {}
        self._num_backwards = sum(map(self._runs, range(self.program.num_microbatches)))
        self._node_model.zero_grad()

    def prepare(self, microbatch: int) -> None:
        """Load the input of a microbatch."""
        if not self.stage.reads_records:
            self._inputs[microbatch] = self._without_records(microbatch)
            return
        started = time.monotonic()
        self._inputs[microbatch] = self._receive_input(microbatch, self._next_loaded())
        self.data_wait_s += time.monotonic() - started

    def _next_loaded(self) -> object:
        """What the loaders hand over next. By this function other ranks see what this one waits for (`peers`)."""
        return next(self._loader)

    def edge_shape(self, microbatch: int, edge: int) -> tuple[int, ...] | None:
        """The shape of the tensor that goes over an edge for a microbatch; None if there is nothing to send."""
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
        """Compute a microbatch's forward from what was received; returns what is to be sent. Both are by edge."""
        leaves = {
            edge: tensor.detach().requires_grad_(edge in self._learned and tensor.is_floating_point())
            for edge, tensor in received.items()
        }
        batch = self._inputs.pop(microbatch)
        outputs = (
            self._node_model.run(lambda: self._compute(microbatch, batch, leaves)) if self._runs(microbatch) else {}
        )
        if any(output.requires_grad for output in outputs.values()):
            self._outputs[microbatch], self._leaves[microbatch] = outputs, leaves
        return {edge: output.detach() for edge, output in outputs.items() if edge != _LOSS}

    def backward(self, microbatch: int, received: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Compute a microbatch's backward from the received gradients; returns those to be sent. Both are by edge."""
        outputs, leaves = self._outputs.pop(microbatch, {}), self._leaves.pop(microbatch, {})
        wanted = {edge: output for edge, output in outputs.items() if output.requires_grad}
        gradients = [None if edge == _LOSS else received[edge].to(output.dtype) for edge, output in wanted.items()]
        self._num_backwards -= self._runs(microbatch)
        if self._node_model.shared:
            self._node_model.shared.sum_over_copies(self._num_backwards == 0)
        with self._node_model.summing(microbatch == self.program.num_microbatches - 1):
            if wanted:
                torch.autograd.backward(list(wanted.values()), gradients)
        owed = {edge: leaf.grad for edge, leaf in leaves.items() if leaf.grad is not None}
        # The source of an input waits for a gradient, even if the loss does not depend on that input.
        for edge in self._owed - owed.keys():
            if (shape := self.edge_shape(microbatch, edge)) is not None:
                owed[edge] = torch.zeros(shape, dtype=self._dtype, device=self.device)
        return owed

    def _runs(self, microbatch: int) -> bool:
        """Whether the stage runs for a microbatch. Replicas that shard parameters run the same passes."""
        return True

    def sync_gradients(self) -> None:
        """Sum the step's gradients over replicas."""
        self._node_model.sum_gradients()

    @abstractmethod
    def _receive_input(self, microbatch: int, loaded: object) -> EncoderBatch | TextBatch:
        """The loader's result as the stage's input, on the device."""

    @abstractmethod
    def _without_records(self, microbatch: int) -> EncoderBatch | TextBatch:
        """The input of a stage that reads no records, from the schedule alone."""

    @abstractmethod
    def _hidden_shape(self, chosen: np.ndarray, layer: int) -> tuple[int, ...] | None:
        """The shape of these samples' hidden states between two stages, of which the second begins with this layer;
        None if there are none."""

    @abstractmethod
    def _compute(
        self, microbatch: int, batch: EncoderBatch | TextBatch, leaves: dict[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """What goes over each outgoing edge. The LLM's last stage gives the loss, under `_LOSS`."""


class EncoderWork(_Work):
    """A stage of an encoder. The last one sends features, as one tensor to each LLM replica that needs some."""

    def __init__(self, node_model: NodeModel, processor: MediaProcessor, blank: EncoderBatch, **common: Any) -> None:
        """`blank` is a batch of one item, for passes in which a replica takes part without samples of its own."""
        super().__init__(node_model, **common)
        self._processor, self._blank = processor, blank.to(self.device, self._dtype)

    def _receive_input(self, microbatch: int, loaded: LoadedMedia) -> EncoderBatch:
        self.unreadable += loaded.unreadable
        chosen = np.flatnonzero(samples_of(self.schedule, self.node, microbatch))
        if self.stage.is_first and self._node_model.ranks.is_first and len(chosen):  # it has decoded
            undecodable = chosen[list(loaded.undecodable)].tolist()
            self._undecodable.tell(self._batch, microbatch, self.node, undecodable)
        return self._with_items(loaded.batch.to(self.device, self._dtype))

    def _with_items(self, batch: EncoderBatch) -> EncoderBatch:
        """The batch with its items on all ranks of the node: the first rank decodes, and sends them to the others."""
        ranks, num_items = self._node_model.ranks, sum(medium.num_items for media in batch.media for medium in media)
        if ranks.size == 1 or not self.stage.is_first or not num_items:
            return batch
        items = batch.items
        if not ranks.is_first:
            items = torch.empty((num_items, *self._processor.item_shape), dtype=self._dtype, device=self.device)
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
            # Other replicas gather parameters and sum gradients: take part with gradients of zero, and send nothing.
            hidden = self.stage.encode(self.stage.embed(self._blank), self._blank)
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
        if not outputs:  # truncation has left nothing of these media; others that share parameters have a backward
            return {_LOSS: 0.0 * sum(own.sum() for own in made)}
        return outputs


def blank_batch(spec: ModelSpec, module: str) -> EncoderBatch:
    """A batch of one sample with one item of zeros."""
    runtime = load_runtime(spec.family)
    made_up = runtime.make_up_media(spec, module, 1)
    media = tuple((medium,) for medium in made_up.media)
    items = torch.zeros((1, *made_up.item_shape))
    return runtime.encoder_batch(spec, module, items=items, media=media, kept_tokens=(1,) * len(media))


class LlmWork(_Work):
    """A stage of the LLM: from text and encoders' features, or from hidden states, to hidden states or the loss."""

    def _receive_input(self, microbatch: int, loaded: TextBatch) -> TextBatch:
        return joined_to(loaded.to(self.device), self._node_model.samples)

    def _without_records(self, microbatch: int) -> TextBatch:
        """A batch with only the ends of samples, and each token's position in its sample."""
        schedule, chosen = self.schedule, samples_of(self.schedule, self.node, microbatch)
        group = sample_group(schedule, self.node, microbatch, self.program.cp["llm"])
        position_ids, segment_ends = segments_of(schedule.sample_tokens[chosen].tolist(), group)
        nothing = torch.zeros(0, dtype=torch.int64)
        batch = TextBatch(
            token_ids=nothing,
            position_ids=position_ids,
            segment_ends=segment_ends,
            feature_positions=(),
            target_positions=nothing,
            target_ids=nothing,
        )
        batch = (batch.pin_memory() if self.device.type == "cuda" else batch).to(self.device)
        return joined_to(batch, self._node_model.samples)

    def _hidden_shape(self, chosen: np.ndarray, layer: int) -> tuple[int, ...] | None:
        return self.stage.hidden_shape(int(self.schedule.llm_tokens[chosen].sum()), layer)

    def _compute(self, microbatch: int, batch: TextBatch, leaves: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        if self.stage.is_first:
            hidden = self.stage.embed(batch, self._features(batch, leaves))
        else:
            (leaf,) = leaves.values()
            hidden = leaf.to(self._dtype)
        meets = self._node_model.shared or batch.segment_ends.keys is not None
        if meets and self._learned and not hidden.requires_grad:
            hidden.requires_grad_()  # other replicas have a backward, for their encoders, so this one must have it, too
        if self.stage.is_last:
            batch = self._learnable(microbatch, batch)
        output = self.stage(hidden, batch)
        if self.stage.is_last:
            if self._node_model.ranks.is_first:  # all ranks of the node have the same loss, which counts once
                self.loss += output.detach()
            return {_LOSS: output}
        return dict.fromkeys(self._outgoing, output)

    def _learnable(self, microbatch: int, batch: TextBatch) -> TextBatch:
        """The microbatch without the targets of samples whose media could not be decoded."""
        chosen = samples_of(self.schedule, self.node, microbatch)
        encoded, shared = chosen.copy(), [rows for rows in self.schedule.shared_samples() if chosen[rows].any()]
        for rows in shared:
            encoded[rows] = True  # where a part of a sample cannot be decoded, no part of it is learned
        decoders = [
            node
            for node in self.program.nodes
            if node.module != "llm"
            and node.pp_stage == 0
            and (samples_of(self.schedule, node, microbatch) & encoded).any()
        ]
        if not decoders:
            return batch
        undecodable = self._undecodable.of(self._batch, microbatch, decoders)
        undecodable |= {row for rows in shared if undecodable.intersection(rows) for row in rows}
        segments = [place for place, sample in enumerate(np.flatnonzero(chosen).tolist()) if sample in undecodable]
        if not segments:
            return batch
        learnable = without_targets_of(batch, segments)
        if self._node_model.ranks.is_first:
            share = self.schedule.share
            own = np.flatnonzero(chosen)[segments]
            self.num_undecodable += len(segments) if share is None else int((share[own] == 0).sum())
            self.num_dropped_targets += len(batch.target_ids) - len(learnable.target_ids)
        return learnable

    def _features(self, batch: TextBatch, leaves: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """The features of each encoder's replicas, in the order of `feature_positions`; empty if none were sent."""
        sent = {}
        for edge, leaf in leaves.items():
            source = self.program.nodes[self.program.edges[edge].source]
            sent[source.module, source.dp_rank] = leaf
        nothing = torch.zeros(0, self._feature_size, dtype=self._dtype, device=self.device)
        if batch.shared_features is not None:  # what other replicas send has gradients, whatever came here
            nothing.requires_grad_(bool(self._learned))
        features = [
            sent.get((encoder, replica), nothing)
            for encoder in self.schedule.encoders
            for replica in range(self._num_replicas[encoder])
        ]
        assert batch.shared_features is not None or len(features) == len(batch.feature_positions)
        return features


def make_works(
    config: Config, plan: Plan, model: RankModel, program: Program, loader: Iterator, store: dist.Store
) -> dict[int, EncoderWork | LlmWork]:
    """The work of each of a rank's nodes, by the node's index; through `store` ranks report undecodable samples."""
    undecodable = Undecodable(store)
    works: dict[int, EncoderWork | LlmWork] = {}
    for node_model in model.nodes:
        common: dict[str, Any] = {
            "program": program,
            "loader": loader,
            "feature_size": model.spec.feature_size,
            "trained": config.model.trained,
            "undecodable": undecodable,
        }
        if node_model.node.module == "llm":
            works[node_model.index] = LlmWork(node_model, **common)
        else:
            works[node_model.index] = EncoderWork(
                node_model,
                model.processors[node_model.node.module],
                blank_batch(model.spec, node_model.node.module),
                **common,
            )
    return works
