"""A stage of an emulated cluster: it sleeps instead of computing, and really sends its messages."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dflop.schedule import StepSchedule
from dflop.step import Program
from dflop.train.feed import samples_of

__all__ = ["EmulatedWork", "Network"]


@dataclass
class Network:
    """A rank's network, which carries parts of its gradient syncs one after the other, until `free_s` on the monotonic
    clock."""

    free_s: float = 0.0

    def carry(self, seconds: float) -> float:
        """Carry a part that takes `seconds`, after the earlier ones. Returns when it ends, on the monotonic clock."""
        self.free_s = max(self.free_s, time.monotonic()) + seconds
        return self.free_s


@dataclass
class EmulatedWork:
    """A node whose passes take the predicted seconds of the schedule, and whose gradient sync with its `replicas` takes
    `sync_s` seconds. Of these, `early_sync_s` run on the rank's `network` beside the node's last backward, and
    `late_sync_s` from the start of the step on, beside its first forward. Each pass begins when all replicas of the
    group `meets` do, which may share samples.

    Tensors have one number for each token, or for each item between an encoder's stages. With `counts`, the node counts
    its samples in `num_samples`.
    """

    program: Program
    index: int
    sync_s: float
    early_sync_s: float
    late_sync_s: float
    network: Network
    replicas: dist.ProcessGroup
    counts: bool
    meets: dist.ProcessGroup | None = None

    def begin_step(self, schedule: StepSchedule) -> None:
        self.schedule, self.num_samples = schedule, 0
        self._given_s = self.network.carry(self.late_sync_s)

    def edge_shape(self, microbatch: int, edge: int) -> tuple[int, ...] | None:
        ends = self.program.edges[edge]
        source, target = self.program.nodes[ends.source], self.program.nodes[ends.target]
        chosen = samples_of(self.schedule, source, microbatch)
        if source.module == "llm":
            sizes = self.schedule.llm_tokens
        elif source.module == target.module:
            sizes = self.schedule.num_items[:, self.schedule.encoders.index(source.module)]
        else:
            chosen &= self.schedule.llm_dp_rank == target.dp_rank
            sizes = self.schedule.kept_tokens[:, self.schedule.encoders.index(source.module)]
        size = int(sizes[chosen].sum())
        return (size, 1) if size else None

    def prepare(self, microbatch: int) -> None:
        """Nothing is loaded."""

    def forward(self, microbatch: int, received: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        if self.counts:
            share, own = self.schedule.share, samples_of(self.schedule, self.program.nodes[self.index], microbatch)
            self.num_samples += int(own.sum() if share is None else (share[own] == 0).sum())
        self._meet()
        forward_s = self.schedule.forward_s[self.index, microbatch]
        _sleep(max(forward_s, self._given_s - time.monotonic()) if microbatch == 0 else forward_s)
        return self._tensors(microbatch, forward=True)

    def backward(self, microbatch: int, received: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        self._meet()
        if microbatch == self.program.num_microbatches - 1:
            self.network.carry(self.early_sync_s)
        _sleep(self.schedule.backward_s[self.index, microbatch])
        return self._tensors(microbatch, forward=False)

    def _meet(self) -> None:
        if self.meets is not None:
            dist.barrier(self.meets)

    def sync_gradients(self) -> None:
        dist.barrier(self.replicas)
        _sleep(max(0.0, self.network.free_s - time.monotonic()) + self.sync_s - self.early_sync_s - self.late_sync_s)

    def _tensors(self, microbatch: int, *, forward: bool) -> dict[int, torch.Tensor]:
        """The tensors that a pass sends, by edge: outputs over edges from this node, or gradients over edges to it."""
        tensors = {}
        for number, edge in enumerate(self.program.edges):
            if (edge.source if forward else edge.target) != self.index:
                continue
            if (shape := self.edge_shape(microbatch, number)) is not None:
                tensors[number] = torch.zeros(shape)
        return tensors


def _sleep(seconds: float) -> None:
    """Sleep as exactly as the system can: after waking early, sleep again."""
    until = time.monotonic() + float(seconds)
    while (left := until - time.monotonic()) > 0:
        time.sleep(left)
