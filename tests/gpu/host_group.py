"""A process group over gloo for tensors on GPUs: NCCL refuses two ranks of one card, and gloo has no messages of GPUs.

Every operation copies its tensors to the host, carries them over gloo, and copies the results back when it is waited
for. So it tests which tensors are sent where, and streams that must wait, but not NCCL and no speed.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

__all__ = ["BACKEND", "register"]

BACKEND = "host"


def register() -> None:
    """Have `init_process_group` know the backend."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu", "cuda"])


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> "HostGroup":
    return HostGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


class _Done(dist.Work):
    """An operation of gloo, and what is copied back once it has ended."""

    def __init__(self, work: dist.Work, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._work, self._copies = work, copies

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait()
        for target, source in self._copies:
            target.copy_(source)
        self._copies = ()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()


class HostGroup(dist.ProcessGroup):
    """Ranks that exchange tensors of any device over gloo."""

    def __init__(self, gloo: dist.ProcessGroupGloo, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._gloo = gloo

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> dist.Work:
        return _Done(self._gloo.send([own.cpu() for own in tensors], rank, tag), ())

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> dist.Work:
        return self._into(tensors, lambda here: self._gloo.recv(here, rank, tag))

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        return self._into(tensors, lambda here: self._gloo.allreduce(here, opts or AllreduceOptions()))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        return self._into(tensors, lambda here: self._gloo.broadcast(here, opts or BroadcastOptions()))

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._gloo.barrier(opts or BarrierOptions())

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None):
        whole = [own for gathered in outputs for own in gathered]
        parts = [own.cpu() for own in inputs]

        def begin(here: list[torch.Tensor]) -> dist.Work:
            return self._gloo.allgather([here], parts, AllgatherOptions())

        return self._into(whole, begin)

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.allgather([list(output.view(self.size(), *own.shape).unbind())], [own])

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> dist.Work:
        here = whole.cpu().clone()
        opts = opts or ReduceScatterOptions()
        reduced = AllreduceOptions()
        is_mean = opts.reduceOp == dist.ReduceOp.AVG
        reduced.reduceOp = dist.ReduceOp.SUM if is_mean else opts.reduceOp
        work = self._gloo.allreduce([here], reduced)
        part = here.view(self.size(), *output.shape)[self.rank()]
        return _Scattered(work, [(output, part)], self.size() if is_mean else 1)

    def all_to_all_single(
        self, output: torch.Tensor, own: torch.Tensor, num_received: list[int], num_sent: list[int], opts: Any = None
    ) -> dist.Work:
        sent = own.cpu().contiguous()
        opts = opts or AllToAllOptions()
        return self._into([output], lambda here: self._gloo.alltoall_base(here[0], sent, num_received, num_sent, opts))

    # By the names before torch 2.13.
    alltoall_base = all_to_all_single
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def all_gather_single_coalesced(self, outputs: list, inputs: list, opts: Any = None) -> dist.Work:
        return _All([self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(self, outputs: list, inputs: list, opts: Any = None) -> dist.Work:
        return _All([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _into(self, tensors: list[torch.Tensor], begin: Callable[[list[torch.Tensor]], dist.Work]) -> dist.Work:
        here = [own.detach().cpu().clone().contiguous() for own in tensors]
        return _Done(begin(here), list(zip(tensors, here, strict=True)))


class _Scattered(_Done):
    """A part of a sum over all ranks, or of their mean."""

    def __init__(self, work: dist.Work, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], divisor: int) -> None:
        super().__init__(work, copies)
        self._divisor = divisor

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait()
        self._copies = [(target, source / self._divisor) for target, source in self._copies]
        return super().wait()


class _All(dist.Work):
    """Several operations as one."""

    def __init__(self, works: list[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait()
        return True
