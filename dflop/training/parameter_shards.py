"""A stage whose replicas share its parameters, with torch's FSDP2 (`fully_shard`), and AdamW on the shards.

The stage is gathered by units (`Stage.units`): before a unit's forward and again before its backward. Its gradients are
summed into the shards behind every backward, so that all replicas must run as many passes, whether or not they have
anything to compute. Of a stage that tensor-parallel ranks divide, those in the same place of their groups share their
part: plain tensors, as everywhere.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dflop.models.precision import compute_in, held_in
from dflop.models.stages import Stage
from dflop.models.tensor_group import rows_of
from dflop.training.sharded_optimizer import Piece
from dflop.training.topology import Sharers

__all__ = ["ParameterShards", "SharedPasses", "Units"]


class Units:
    """Shares a stage's units out among the replicas that share its parameters, in place and one at a time: whole, a
    stage may be too large for a rank.

    A unit's parameters are then this replica's shards, on the device. They are gathered as `dtype`, and their gradients
    are summed as what parameters are held in. Those that are not trained are held in `dtype`, too.
    """

    def __init__(self, sharers: Sharers, dtype: torch.dtype, *, is_trained: bool) -> None:
        self.has_copies, self._is_trained, self._dtype = len(sharers.ranks) > 1, is_trained, dtype
        self._how: dict[str, Any] = {"mesh": sharers.mesh}
        if dtype != (held := held_in(dtype)):
            self._how["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=held, cast_forward_inputs=False
            )

    def share(self, unit: nn.Module) -> None:
        """Share what of a unit is not shared out yet."""
        unit.requires_grad_(self._is_trained)
        if not self._is_trained:
            compute_in(unit, self._dtype)
        shared = fully_shard(unit, **self._how)
        # Gradients are summed, where FSDP2 would take means; where a replica makes none, it adds zeros.
        shared.set_gradient_divide_factor(1.0)
        shared.set_force_sum_reduction_for_comms(True)
        shared.set_reduce_scatter_unused_params(True, recurse=False)


class SharedPasses(nn.Module):
    """A stage's passes, each begun and ended together by the replicas that share a copy of its parameters.

    What of the stage is in none of its units becomes the last one.
    """

    def __init__(self, stage: Stage, units: Units) -> None:
        super().__init__()
        self.stage, self._has_copies = stage, units.has_copies
        units.share(self)

    def forward(self, compute: Callable[[], dict[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
        """Run what computes with the stage."""
        return compute()

    def sum_over_copies(self, on: bool) -> None:
        """Whether the next backward ends with sums over all copies of the parameters: the last one of a step does."""
        if self._has_copies:
            cast(FSDPModule, self).set_requires_all_reduce(on)


class ParameterShards:
    """AdamW on one replica's shards of the stage's parameters; norms, biases and other vectors do not decay.

    A shard is a run of a parameter's rows. Of several copies of the parameters one is counted in the norm; what other
    ranks hold as well, apart from replicas, is `counted_elsewhere`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        sharers: Sharers,
        rank: int,
        *,
        lr: float,
        weight_decay: float,
        counted_elsewhere: Collection[nn.Parameter] = (),
    ) -> None:
        self._is_counted, self._elsewhere = rank in sharers.ranks[0], set(counted_elsewhere)
        # What is updated: the shard that a parameter looks at.
        self._trained: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in parameters:
            with torch.no_grad():
                _, own = rows_of(parameter)
            if parameter.requires_grad and own.numel():
                self._trained[parameter] = nn.Parameter(own)
        self._whole = list(parameters)
        self._optimizer = _adamw(list(self._trained.values()), lr, weight_decay)

    def zero_grad(self) -> None:
        for parameter in self._whole:
            parameter.grad = None
        for own in self._trained.values():
            own.grad = None

    def sum_gradients(self) -> None:
        """Take the sums, which FSDP2 has made of each microbatch."""
        for parameter, own in self._trained.items():
            if parameter.grad is None:
                own.grad = torch.zeros_like(own)
            else:
                _, summed = rows_of(parameter.grad)
                own.grad = summed.to(own.dtype)

    def norm_squared(self) -> float:
        """Of this replica's shards; added up over all ranks of the stage it is the stage's."""
        counted = [own for parameter, own in self._trained.items() if parameter not in self._elsewhere]
        norms = [torch.linalg.vector_norm(own.grad) for own in counted if self._is_counted]
        return float(torch.linalg.vector_norm(torch.stack(norms))) ** 2 if norms else 0.0

    def step(self, lr: float, scale: float) -> None:
        """Update the shards with their gradients times `scale`."""
        if self._optimizer is None:
            return
        for own in self._trained.values():
            own.grad.mul_(scale)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()

    def pieces(self, parameter: nn.Parameter) -> list[Piece]:
        """This replica's shard, where it has any values; with moments where it is trained."""
        first_row, own = rows_of(parameter.detach())
        if not own.numel():
            return []
        moments = {}
        if parameter in self._trained:
            state = self._optimizer.state[self._trained[parameter]]
            moments = {name: state[name].flatten() for name in ("exp_avg", "exp_avg_sq")}
        return [Piece(first_row * math.prod(parameter.shape[1:]), own.flatten(), moments)]

    def go_on_from(self, num_steps: int) -> None:
        """Take up moments that were read from a checkpoint of so many steps."""
        for own in self._trained.values():
            self._optimizer.state[own]["step"].fill_(num_steps)


def _adamw(trained: Sequence[nn.Parameter], lr: float, weight_decay: float) -> torch.optim.AdamW | None:
    kinds = [
        {"params": own, "weight_decay": decay}
        for own, decay in (
            ([one for one in trained if one.ndim > 1], weight_decay),
            ([one for one in trained if one.ndim <= 1], 0.0),
        )
        if own
    ]
    if not kinds:
        return None
    optimizer = torch.optim.AdamW(kinds, lr=lr, fused=True)
    for own in trained:
        # As AdamW would make it in its first step; a checkpoint is read into it before.
        optimizer.state[own] = {
            "step": torch.zeros((), device=own.device),
            "exp_avg": torch.zeros_like(own.detach()),
            "exp_avg_sq": torch.zeros_like(own.detach()),
        }
    return optimizer
