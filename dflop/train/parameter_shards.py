"""A stage whose replicas shard its parameters, with torch's FSDP2 (`fully_shard`), and AdamW on the shards.

The stage is gathered by units (`Stage.units`): before a unit's forward and again before its backward. Gradients are
summed into the shards after every backward, so that all replicas must run the same number of passes, whether or not
they have anything to compute. If tensor-parallel ranks divide the stage, the ranks with the same place in their
tensor-parallel groups shard their part, which is made of plain tensors as everywhere.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dflop.base.torch_versions import reduce_unused, with_unused
from dflop.models.precision import compute_in, held_in
from dflop.models.stages import Stage
from dflop.models.tensor_group import rows_of
from dflop.plan.trained import TrainedSet
from dflop.train.adamw import Piece, Rates, squared_norm
from dflop.train.offloaded_adamw import make_adamw
from dflop.train.topology import Sharers

__all__ = ["ParameterShards", "SharedPasses", "Units"]


class Units:
    """Shards a stage's units over replicas, in place and one at a time, because the whole stage may not fit on a rank.

    A unit's parameters are then this replica's shards, on the device, in the dtype `held_in(dtype)`, in which gradients
    are summed, too. They are gathered as `dtype`. Parameters that are not trained are held in `dtype`.
    """

    def __init__(self, sharers: Sharers, dtype: torch.dtype) -> None:
        self.has_copies, self.dtype = len(sharers.ranks) > 1, dtype
        self._how: dict[str, Any] = {"mesh": sharers.mesh}
        if dtype != (held := held_in(dtype)):
            self._how["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=held, cast_forward_inputs=False
            )

    def share(self, unit: nn.Module, trained: AbstractSet[nn.Parameter]) -> None:
        """Shard those parameters of a unit that are not sharded yet. Of the unit these are trained."""
        for parameter in unit.parameters():
            parameter.requires_grad_(parameter in trained)
        compute_in(unit, self.dtype, but=trained)
        shared = fully_shard(unit, **self._how)
        # Sum gradients, where FSDP2 would take means. A replica without gradients adds zeros.
        shared.set_gradient_divide_factor(1.0)
        shared.set_force_sum_reduction_for_comms(True)
        reduce_unused(shared)


class SharedPasses(nn.Module):
    """A stage's passes, which the replicas that share a copy of its parameters begin and end together.

    The parameters that are in none of the stage's units become one more unit. In each backward, the unit before the one
    that computes is gathered. FSDP2 alone would do so in a backward that follows its own forward, but not where several
    forwards come before their backwards.
    """

    def __init__(self, stage: Stage, units: Units, trained: TrainedSet, num_still: int = 0) -> None:
        """The first `num_still` layers have no backward."""
        super().__init__()
        self.stage, self._has_copies = stage, units.has_copies
        units.share(self, stage.those(trained.includes))
        still = {stage.hf.get_submodule(name) for name in stage.layer_names[:num_still]}
        if stage.module == "llm" and stage.is_first and not stage.hf.get_input_embeddings().weight.requires_grad:
            still.add(stage.hf.get_input_embeddings())
        in_order = [unit for unit in stage.modules() if isinstance(unit, FSDPModule) and unit not in still]
        # The first one "gathers" itself: without any, FSDP2 would gather one that is still.
        for before, unit in pairwise([*in_order[:1], *in_order, cast(FSDPModule, self)]):
            unit.set_modules_to_backward_prefetch([before])

    def run(self, compute: Callable[[], dict[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
        """Run `compute`, which uses the stage."""
        outputs = self(compute)
        if not torch.is_grad_enabled():
            # FSDP2 keeps the last unit gathered until a backward. None comes, and an update may.
            cast(FSDPModule, self).reshard()
        return outputs

    def forward(self, compute: Callable[[], dict[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
        """What `run` calls, between the hooks of FSDP2."""
        outputs = compute()
        learned = next((edge for edge, output in outputs.items() if output.requires_grad), None)
        return outputs if learned is None else outputs | {learned: with_unused(self, outputs[learned])}

    def sum_over_copies(self, on: bool) -> None:
        """Set whether the next backward sums gradients over all copies of the parameters, as the last one of a step
        must."""
        if self._has_copies:
            cast(FSDPModule, self).set_requires_all_reduce(on)


class ParameterShards:
    """AdamW on one replica's shards of the stage's parameters, each with its `rates`.

    A shard is a range of a parameter's rows. If there are several copies of the parameters, only the first counts in
    the gradient norm. Parameters in `whole` are the same on all `tensor_ranks`: the rank that `counts_whole` counts
    them, and of the gradients of those in `partial` each rank computes a part. With `offloads`, moments wait in host
    memory between steps.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        sharers: Sharers,
        rank: int,
        *,
        rates: Mapping[nn.Parameter, Rates],
        whole: Collection[nn.Parameter] = (),
        counts_whole: bool = True,
        partial: Collection[nn.Parameter] = (),
        tensor_ranks: dist.ProcessGroup | None = None,
        offloads: bool = False,
    ) -> None:
        self._is_counted, self._elsewhere = rank in sharers.ranks[0], set() if counts_whole else set(whole)
        # The shard of each trained parameter, which is updated in place.
        self._trained: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in parameters:
            with torch.no_grad():
                _, shard = rows_of(parameter)
            if parameter.requires_grad and shard.numel():
                self._trained[parameter] = nn.Parameter(shard)
        self._parameters, self._tensor_ranks = list(parameters), tensor_ranks
        self._partial = [self._trained[parameter] for parameter in partial if parameter in self._trained]
        of_shards = {shard: rates[parameter] for parameter, shard in self._trained.items()}
        device = next((shard.device for shard in of_shards), torch.device("cpu"))
        self._adamw = make_adamw(of_shards, device, offloads=offloads, has_masters=False)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        for shard in self._trained.values():
            shard.grad = None

    def sum_gradients(self) -> None:
        """Take the summed gradients from FSDP2, which has already reduced those of each microbatch. Partial ones are
        summed over the tensor-parallel ranks."""
        for parameter, shard in self._trained.items():
            if parameter.grad is None:
                shard.grad = torch.zeros_like(shard)
            else:
                _, summed = rows_of(parameter.grad)
                shard.grad = summed.to(shard.dtype)
        if self._partial:
            together = torch.cat([shard.grad.flatten() for shard in self._partial])
            dist.all_reduce(together, group=self._tensor_ranks)
            for shard, summed in zip(
                self._partial, together.split([own.numel() for own in self._partial]), strict=True
            ):
                shard.grad.copy_(summed.view_as(shard))

    def norm_squared(self) -> float:
        """The squared gradient norm of this replica's shards. The sum over all ranks of the stage is the stage's."""
        counted = [shard.grad for parameter, shard in self._trained.items() if parameter not in self._elsewhere]
        return squared_norm(counted if self._is_counted else ())

    def step(self, lr_factor: float, scale: float) -> None:
        """Update the shards with their gradients times `scale`, by learning rates times `lr_factor`."""
        gradients = {shard: shard.grad.mul_(scale) for shard in self._trained.values()}
        self._adamw.step(lr_factor, gradients, {})

    @property
    def state_on_device(self) -> list[torch.Tensor]:
        """The moments, or what is always on the device of them."""
        return self._adamw.on_device

    def pieces(self, parameter: nn.Parameter) -> list[Piece]:
        """This replica's shard of a parameter, with its moments if it is trained; empty if the shard has no values."""
        first_row, shard = rows_of(parameter.detach())
        if not shard.numel():
            return []
        moments = self._adamw.moments_of(self._trained[parameter]) if parameter in self._trained else {}
        return [Piece(first_row * math.prod(parameter.shape[1:]), shard.flatten(), moments)]

    def go_on_from(self, num_steps: int) -> None:
        """Go on after the moments were read from a checkpoint of `num_steps` steps."""
        self._adamw.go_on_from(num_steps)
