"""What a node computes in a step: its stage's forward and backward for each microbatch.

The executor in `pipeline.run` says when; these classes hold the stage, the microbatches' inputs and what
backward needs of forward. The loss is summed over target tokens; the trainer divides by their global
number, so that how a batch is cut changes nothing.
"""

import time
from collections.abc import Iterator

import numpy as np
import torch

from dflop.data.loading import LoadedVisual
from dflop.models.microbatch import TextBatch, VisualBatch
from dflop.pipeline import Program
from dflop.scheduling import StepSchedule
from dflop.training.feed import samples_of
from dflop.training.rank_model import NodeModel

__all__ = ["LlmWork", "VisionWork", "make_work"]


class _Work:
    """Common to encoders and the LLM: the step's schedule, the loader, the sum of gradients over replicas.

    The works of a rank share its `loader`, which gives their inputs in the order of the rank's forwards.
    """

    def __init__(
        self, own: NodeModel, program: Program, loader: Iterator, autocast: torch.autocast, hidden_size: int
    ) -> None:
        self.stage, self.program, self.node_index, self.node = own.stage, program, own.index, own.node
        self._loader, self._autocast, self._hidden_size = loader, autocast, hidden_size
        self._optimizer = own.optimizer
        self.device = next(own.stage.parameters()).device
        self.unreadable: list[str] = []

    def begin_step(self, schedule: StepSchedule) -> None:
        """Forget the last step."""
        self.schedule = schedule
        self.data_wait_s = 0.0
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._inputs: dict[int, object] = {}
        self._outputs: dict[int, dict[int, torch.Tensor]] = {}
        self._leaves: dict[int, dict[int, torch.Tensor]] = {}
        self._optimizer.zero_grad()

    def prepare(self, microbatch: int) -> None:
        started = time.monotonic()
        self._inputs[microbatch] = self._receive_input(next(self._loader))
        self.data_wait_s += time.monotonic() - started

    def edge_shape(self, microbatch: int, edge: int) -> tuple[int, ...] | None:
        source = self.program.nodes[self.program.edges[edge].source]
        target = self.program.nodes[self.program.edges[edge].target]
        if source.module == "llm":
            tokens = self.schedule.llm_tokens[samples_of(self.schedule, target, microbatch)].sum()
            return (1, int(tokens), self._hidden_size)
        both = samples_of(self.schedule, source, microbatch) & (self.schedule.llm_dp_rank == target.dp_rank)
        tokens = int(self.schedule.kept_tokens[both, self.schedule.encoders.index(source.module)].sum())
        return (tokens, self._hidden_size) if tokens else None

    def sync_gradients(self) -> None:
        self._optimizer.sum_gradients()

    def _outgoing(self) -> list[int]:
        return [number for number, edge in enumerate(self.program.edges) if edge.source == self.node_index]

    def _incoming(self) -> list[int]:
        return [number for number, edge in enumerate(self.program.edges) if edge.target == self.node_index]


class VisionWork(_Work):
    """Media in, visual tokens out, one tensor for each LLM replica that awaits some."""

    def _receive_input(self, loaded: LoadedVisual) -> VisualBatch:
        self.unreadable += loaded.unreadable
        batch = loaded.batch
        dtype = next(self.stage.parameters()).dtype
        return VisualBatch(
            items=batch.items.to(self.device, dtype, non_blocking=True),
            media=batch.media,
            kept_tokens=batch.kept_tokens,
        )

    def forward(self, microbatch: int, received: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        batch = self._inputs.pop(microbatch)
        if not len(batch.items):
            return {}
        with self._autocast:
            features = self.stage(batch)
        chosen = samples_of(self.schedule, self.node, microbatch)
        llm_rank = self.schedule.llm_dp_rank[chosen]
        outputs = {}
        for edge in self._outgoing():
            if self.edge_shape(microbatch, edge) is None:
                continue
            target = self.program.nodes[self.program.edges[edge].target]
            outputs[edge] = torch.cat([features[place] for place in np.flatnonzero(llm_rank == target.dp_rank)])
        self._outputs[microbatch] = outputs
        return {edge: output.detach() for edge, output in outputs.items()}

    def backward(self, microbatch: int, received: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        outputs = self._outputs.pop(microbatch, {})
        if outputs:
            gradients = [received[edge].to(output.dtype) for edge, output in outputs.items()]
            torch.autograd.backward(list(outputs.values()), gradients)
        return {}


class LlmWork(_Work):
    """Text and visual tokens, or the previous stage's hidden states, in; hidden states or the loss out."""

    def _receive_input(self, batch: TextBatch) -> TextBatch:
        return batch.to(self.device)

    def forward(self, microbatch: int, received: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        batch = self._inputs.pop(microbatch)
        leaves = {edge: tensor.requires_grad_() for edge, tensor in received.items()}
        with self._autocast:
            if self.stage.is_first:
                hidden = self.stage.embed(batch, self._features(batch, leaves))
            else:
                (leaf,) = leaves.values()
                hidden = leaf.to(next(self.stage.parameters()).dtype)
            output = self.stage(hidden, batch)
        self._leaves[microbatch] = leaves
        outgoing = self._outgoing()
        if self.stage.is_last:
            self.loss += output.detach()
            self._outputs[microbatch] = {-1: output}
            return {}
        self._outputs[microbatch] = dict.fromkeys(outgoing, output)
        return dict.fromkeys(outgoing, output.detach())

    def backward(self, microbatch: int, received: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        ((edge, output),) = self._outputs.pop(microbatch).items()
        if output.requires_grad:
            output.backward(None if edge < 0 else received[edge].to(output.dtype))
        return {edge: leaf.grad for edge, leaf in self._leaves.pop(microbatch).items()}

    def _features(self, batch: TextBatch, leaves: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """What each encoder replica sent, in the replicas' order; nothing where it had no sample."""
        by_encoder = {
            self.program.nodes[self.program.edges[edge].source].dp_rank: leaves.get(edge) for edge in self._incoming()
        }
        nothing = torch.zeros(0, self._hidden_size, device=self.device)
        return [
            nothing if by_encoder.get(rank) is None else by_encoder[rank] for rank in range(len(batch.visual_positions))
        ]


def make_work(own: NodeModel, **arguments: object) -> VisionWork | LlmWork:
    """The work of a node; `arguments` as the works take them."""
    return (LlmWork if own.node.module == "llm" else VisionWork)(own, **arguments)
