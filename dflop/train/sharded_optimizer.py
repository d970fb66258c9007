"""AdamW whose moments are divided among a stage's replicas (ZeRO-1).

Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", 2020, stage 1.
Parameters and gradients of a stage are in flat buckets, of which every replica owns an equal share. Gradients are
reduce-scattered to their owners, the owners update, and the updated values are all-gathered: together as many bytes as
an all-reduce. The sum of a bucket begins as soon as its gradients are complete, beside the rest of the step's last
backward (Li et al., "PyTorch distributed: experiences on accelerating data parallel training", 2020, section 3.2.3).
If parameters have less precision than fp32, their gradients are fp32, and the owner of a share updates fp32 masters of
it (Micikevicius et al., "Mixed precision training", 2018, section 3.1).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from dflop.base.collectives import all_gather_flat, reduce_scatter_flat
from dflop.models.precision import set_values
from dflop.train.adamw import Piece, Rates, squared_norm
from dflop.train.host_buffer import host_zeros
from dflop.train.offloaded_adamw import make_adamw

__all__ = ["ShardedAdamW"]

# A ring has a step for each replica, which takes as long whatever the size: among many replicas buckets are larger, as
# Megatron-LM's are.
_BUCKET_BYTES, _BUCKET_BYTES_A_REPLICA = 64 * 2**20, 4 * 10**6
# Parameters begin at multiples of this number of values, so that kernels have aligned operands.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Flat values and gradients. This replica owns the slice `own` of them, and `masters` are its values; they are a
    view of `values`, or separate if these have another dtype, and then in host memory if the optimiser is offloaded.
    `is_counted`: whether they count in the gradient norm."""

    values: torch.Tensor
    masters: torch.Tensor
    gradients: torch.Tensor
    owned: slice
    is_counted: bool


class _Run(NamedTuple):
    """A range of a bucket's masters that is updated as one tensor, from index `start` of the bucket on."""

    start: int
    masters: nn.Parameter
    rates: Rates


class ShardedAdamW:
    """AdamW over the parameters that require gradients, each with its `rates`.

    Parameters become views of the buckets, and so do their gradients, which exist from then on. Parameters are given in
    the masters' dtype, and are converted to `computed_in`. Their order is about that in which forward uses them. All
    `replicas` must have equal parameters. Parameters in `whole` are the same on all `tensor_ranks`: the rank that
    `counts_whole` counts them in the gradient norm, and of the gradients of those in `partial` each rank computes a
    part. The gradients of those in `complete_later` get a part behind the last backward. Those in `needed_first` are
    sent back first after an update, and may be waited for before the others. With `offloads`, moments and masters wait
    in host memory between steps.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        replicas: dist.ProcessGroup,
        *,
        rates: Mapping[nn.Parameter, Rates],
        computed_in: torch.dtype | None = None,
        whole: Collection[nn.Parameter] = (),
        counts_whole: bool = True,
        partial: Collection[nn.Parameter] = (),
        tensor_ranks: dist.ProcessGroup | None = None,
        complete_later: Collection[nn.Parameter] = (),
        needed_first: Collection[nn.Parameter] = (),
        offloads: bool = False,
        bucket_bytes: int | None = None,
    ) -> None:
        self._replicas, self._tensor_ranks, self._offloads = replicas, tensor_ranks, offloads
        self._num_replicas, self._replica = dist.get_world_size(replicas), dist.get_rank(replicas)
        bucket_bytes = bucket_bytes or max(_BUCKET_BYTES, _BUCKET_BYTES_A_REPLICA * self._num_replicas)
        trained, self._rates = [tensor for tensor in parameters if tensor.requires_grad], rates
        # For each parameter its bucket, and where it begins there.
        self._places: dict[nn.Parameter, tuple[int, int]] = {}
        self._buckets: list[_Bucket] = []
        later, partial, whole = set(complete_later), set(partial), set(whole)
        # Backward completes the last bucket first. The first buckets are complete when it ends: a tied embedding's,
        # which gets more later, and those of norms of all layers, which are whole on all tensor-parallel ranks. Of
        # these all ranks have the same buckets.
        for group in (later, partial, whole - later - partial, set(trained) - later - partial - whole):
            for bucket in _in_buckets([tensor for tensor in trained if tensor in group], bucket_bytes):
                self._buckets.append(self._make_bucket(bucket, computed_in, counts_whole or bucket[0] not in whole))
        self._num_later = len({self._places[tensor][0] for tensor in trained if tensor in later})
        self._partial = sorted({self._places[tensor][0] for tensor in trained if tensor in partial})
        # While the last backward runs: by bucket, the parameters whose gradients are not complete.
        self._incomplete: list[set[nn.Parameter]] = []
        # Buckets whose sums have begun, counted from the last one, and the sums that are waited for.
        self._num_begun, self._sums = 0, []
        # The buckets in the order in which their values are sent back, and those whose values are under way.
        first = {self._places[tensor][0] for tensor in needed_first if tensor in self._places}
        self._gather_order = sorted(range(len(self._buckets)), key=lambda number: number not in first)
        self._gathers: dict[int, dist.Work] = {}
        if self._num_replicas > 1:
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(self._note_complete)
        # By bucket, the ranges of the own share that are updated: one for each of its parameters' rates.
        self._runs = [self._make_runs(number) for number in range(len(self._buckets))]
        of_runs = {run.masters: run.rates for runs in self._runs for run in runs}
        # What parameters are computed with, where it is not the masters themselves.
        self._computed = {
            run.masters: bucket.values[run.start : run.start + len(run.masters)]
            for bucket, runs in zip(self._buckets, self._runs, strict=True)
            for run in runs
            if bucket.values.dtype != bucket.masters.dtype
        }
        device = self._buckets[0].values.device if of_runs else torch.device("cpu")
        self._adamw = make_adamw(of_runs, device, offloads=offloads, has_masters=bool(self._computed))

    def zero_grad(self) -> None:
        for bucket in self._buckets:
            bucket.gradients.zero_()

    @contextmanager
    def summing(self) -> Iterator[None]:
        """A context of the step's last backward. Sums begin as their buckets are complete; those of all others but the
        ones with `complete_later` begin at its end. All replicas must enter it at the same place among the collectives
        of their group."""
        if self._num_replicas == 1:
            yield
            return
        self._incomplete = [set() for _ in self._buckets]
        for parameter, (number, _) in self._places.items():
            self._incomplete[number].add(parameter)
        yield
        self._incomplete = []
        self._begin_sums(len(self._buckets) - self._num_later)

    def _note_complete(self, parameter: nn.Parameter) -> None:
        """Note that a backward has completed a parameter's gradient. This counts in the step's last backward."""
        if not self._incomplete:
            return
        number, _ = self._places[parameter]
        self._incomplete[number].discard(parameter)
        if self._incomplete[number]:
            return
        num_complete = self._num_begun
        while num_complete < len(self._buckets) - self._num_later and not self._incomplete[-1 - num_complete]:
            num_complete += 1
        self._begin_sums(num_complete)

    def _begin_sums(self, num_buckets: int) -> None:
        """Begin the sums of the last `num_buckets` buckets. Their order is the same on all replicas."""
        while self._num_begun < num_buckets:
            self._num_begun += 1
            bucket = self._buckets[-self._num_begun]
            self._sums.append(reduce_scatter_flat(bucket.gradients[bucket.owned], bucket.gradients, self._replicas))

    def sum_gradients(self) -> None:
        """Sum the gradients over the replicas, and partial ones over the tensor-parallel ranks. Afterwards each replica
        has the sums of its own share only."""
        if self._num_replicas > 1:
            self._begin_sums(len(self._buckets))
            for work in self._sums:
                work.wait()
        self._num_begun, self._sums = 0, []
        for bucket in (self._buckets[number] for number in self._partial):
            dist.all_reduce(bucket.gradients[bucket.owned], group=self._tensor_ranks)

    def norm_squared(self) -> float:
        """The squared norm of the sums that this replica owns and counts. The sum over all ranks of the stage is the
        stage's."""
        return squared_norm(bucket.gradients[bucket.owned] for bucket in self._buckets if bucket.is_counted)

    def step(self, lr_factor: float, scale: float) -> None:
        """Update the own share with its gradients times `scale`, by learning rates times `lr_factor`, and begin to send
        the result to all replicas. Nobody may read parameters before `wait_for_parameters`."""
        self.wait_for_parameters()
        gradients = {
            masters: bucket.gradients[start : start + len(masters)].mul_(scale)
            for bucket, runs in zip(self._buckets, self._runs, strict=True)
            for start, masters, _ in runs
        }
        self._adamw.step(lr_factor, gradients, self._computed)
        self._begin_gathers()

    def wait_for_parameters(self, parameters: Collection[nn.Parameter] | None = None) -> None:
        """Wait until these parameters have their updated values, by default all. Others than this optimiser's always
        have."""
        if not self._gathers:
            return
        wanted = self._places if parameters is None else parameters
        for number in {self._places[parameter][0] for parameter in wanted if parameter in self._places}:
            if work := self._gathers.pop(number, None):
                work.wait()

    @property
    def state_on_device(self) -> list[torch.Tensor]:
        """The moments and masters, or what is always on the device of them."""
        masters = [] if self._offloads else [run.masters for runs in self._runs for run in runs]
        return [*masters, *self._adamw.on_device]

    def pieces(self, parameter: nn.Parameter) -> list[Piece]:
        """The pieces of a parameter that this replica updates; a parameter that is not trained is one whole piece."""
        if parameter not in self._places:
            return [Piece(0, parameter.detach().flatten(), {})]
        number, begin = self._places[parameter]
        end = begin + parameter.numel()
        pieces = []
        for start, masters, _ in self._runs[number]:
            first, last = max(begin, start), min(end, start + len(masters))
            if first < last:
                held = slice(first - start, last - start)
                moments = {name: moment[held] for name, moment in self._adamw.moments_of(masters).items()}
                pieces.append(Piece(first - begin, masters.detach()[held], moments))
        return pieces

    def go_on_from(self, num_steps: int) -> None:
        """Go on after masters and moments were read from a checkpoint of `num_steps` steps; every replica must call
        this."""
        self._adamw.go_on_from(num_steps)
        with torch.no_grad():
            for masters, values in self._computed.items():
                values.copy_(masters)
        self._begin_gathers()
        self.wait_for_parameters()

    @torch.no_grad()
    def whole_masters(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """The whole masters of each trained parameter, gathered bucket by bucket; every replica must call this."""
        self._adamw.wait()
        for number, bucket in enumerate(self._buckets):
            own = masters = bucket.masters.to(bucket.values.device)
            if self._num_replicas > 1:
                masters = own.new_empty(len(bucket.values))
                all_gather_flat(masters, own, self._replicas).wait()
            for parameter, (at, begin) in self._places.items():
                if at == number:
                    yield parameter, masters[begin : begin + parameter.numel()].view_as(parameter)

    @torch.no_grad()
    def _begin_gathers(self) -> None:
        """Begin to send the updated values to every replica."""
        for number in self._gather_order:
            bucket = self._buckets[number]
            if self._num_replicas > 1:
                self._gathers[number] = all_gather_flat(bucket.values, bucket.values[bucket.owned], self._replicas)

    @torch.no_grad()
    def _make_bucket(
        self, parameters: list[nn.Parameter], computed_in: torch.dtype | None, is_counted: bool
    ) -> _Bucket:
        size = 0
        parameters = sorted(parameters, key=self._rates.__getitem__, reverse=True)  # equal rates are one run
        for parameter in parameters:
            self._places[parameter] = len(self._buckets), size
            size += _aligned(parameter.numel(), _ALIGNMENT)
        share = _aligned(-(-size // self._num_replicas), _ALIGNMENT)
        owned = slice(share * self._replica, share * (self._replica + 1))
        first = parameters[0].detach()
        values = first.new_zeros(share * self._num_replicas, dtype=computed_in or first.dtype)
        masters = values[owned]
        if values.dtype != first.dtype and self._offloads:
            masters = host_zeros(share, first)
        elif values.dtype != first.dtype:
            masters = first.new_zeros(share)
        gradients = first.new_zeros(len(values))
        for parameter in parameters:
            _, begin = self._places[parameter]
            end = begin + parameter.numel()
            flat = parameter.detach().flatten()
            values[begin:end] = flat
            start, stop = max(begin, owned.start), min(end, owned.stop)
            if start < stop:
                masters[start - owned.start : stop - owned.start] = flat[start - begin : stop - begin]
            set_values(parameter, values[begin:end].view_as(parameter))
            parameter.grad = gradients[begin:end].view_as(parameter)
        return _Bucket(values, masters, gradients, owned, is_counted)

    def _make_runs(self, number: int) -> list[_Run]:
        """The parts of a bucket's own share with equal rates, which each are one range of it."""
        bucket, starts = self._buckets[number], {}
        for parameter, (at, begin) in self._places.items():
            if at == number:
                starts.setdefault(self._rates[parameter], begin)
        begins = [0, *list(starts.values())[1:], len(bucket.values)]
        runs = []
        for rates, begin, end in zip(starts, begins[:-1], begins[1:], strict=True):
            start, stop = max(begin, bucket.owned.start), min(end, bucket.owned.stop)
            if start < stop:
                masters = bucket.masters[start - bucket.owned.start : stop - bucket.owned.start]
                runs.append(_Run(start, nn.Parameter(masters), rates))
        return runs


def _in_buckets(parameters: Sequence[nn.Parameter], most_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Groups of consecutive parameters of at most `most_bytes` together; a larger parameter is a group of its own."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and sum(other.nbytes for other in bucket) + parameter.nbytes > most_bytes:
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to
