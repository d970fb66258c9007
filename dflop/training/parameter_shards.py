"""A stage whose replicas share its parameters, with torch's FSDP2 (`fully_shard`), and AdamW on the shards.

Each layer is a unit, as are an LLM's embedding and its head; what else there is belongs to the whole stage. A unit is
gathered before its forward and again before its backward, and its gradients are summed into the shards behind every
backward, so that all replicas must run as many passes, whether or not they have anything to compute.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dflop.models.precision import held_in
from dflop.models.stages import LlmStage, Stage
from dflop.models.tensor_group import Shard
from dflop.training.sharded_optimizer import Piece
from dflop.training.topology import Sharers

__all__ = ["ParameterShards", "SharedPasses"]

_LAYER = re.compile(r"\blayers?\.\d+$")


class SharedPasses(nn.Module):
    """A stage's passes, each begun and ended together by the replicas that share a copy of its parameters.

    On return, the stage's parameters are this replica's shards, on the device. They are gathered as `dtype`, whatever
    they are held in, and their gradients are summed as what they are held in.
    """

    def __init__(self, stage: Stage, sharers: Sharers, dtype: torch.dtype) -> None:
        super().__init__()
        self.stage = stage
        self._has_copies = len(sharers.ranks) > 1
        how: dict[str, Any] = {"mesh": sharers.mesh}
        if dtype != (held := held_in(dtype)):
            how["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=held, cast_forward_inputs=False)
        for unit in _units(stage):
            _with_sums(fully_shard(unit, **how))
        _with_sums(fully_shard(self, **how))

    def forward(self, compute: Callable[[], dict[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
        """Run what computes with the stage."""
        return compute()

    def sum_over_copies(self, on: bool) -> None:
        """Whether the next backward ends with sums over all copies of the parameters: the last one of a step does."""
        if self._has_copies:
            cast(FSDPModule, self).set_requires_all_reduce(on)


def _units(stage: Stage) -> list[Any]:
    """What is gathered at a time: modules, or lists of them that follow each other."""
    units: list[Any] = [module for name, module in stage.named_modules() if _LAYER.search(name) and _has_own(module)]
    if isinstance(stage, LlmStage) and not stage.hf.config.tie_word_embeddings:
        units += [stage.hf.get_input_embeddings(), stage.hf.lm_head]
    return units


def _has_own(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _with_sums(unit: FSDPModule) -> None:
    """Gradients are summed, where FSDP2 would take means; where a replica makes none, it adds zeros."""
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_reduce_scatter_unused_params(True, recurse=False)


class ParameterShards:
    """AdamW on one replica's shards; norms, biases and other vectors do not decay.

    `parameters` are the shards by name, which the stage's parameters look at, and `shards` which part of each they
    are. Of several copies of the parameters one is counted in the norm.
    """

    def __init__(
        self, named: dict[str, nn.Parameter], sharers: Sharers, rank: int, *, lr: float, weight_decay: float
    ) -> None:
        self._whole, self._is_counted = named, rank in sharers.ranks[0]
        (own_row,) = (row for row in sharers.ranks if rank in row)
        place, num_shards = own_row.index(rank), len(own_row)
        self.parameters: dict[str, nn.Parameter] = {}
        self.shards: dict[str, Shard] = {}
        for name, parameter in named.items():
            with torch.no_grad():
                own = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
            self.parameters[name] = nn.Parameter(own.detach(), requires_grad=parameter.requires_grad)
            # All but the last ones have as many rows.
            num_rows = parameter.shape[0]
            self.shards[name] = Shard(0, min(place * -(-num_rows // num_shards), num_rows), parameter.shape)
        trained = [name for name, own in self.parameters.items() if own.requires_grad and own.numel()]
        self._trained = {name: self.parameters[name] for name in trained}
        self._optimizer = _adamw(list(self._trained.values()), lr, weight_decay)

    def zero_grad(self) -> None:
        for name, own in self._trained.items():
            self._whole[name].grad = own.grad = None
        for parameter in self._whole.values():
            parameter.grad = None

    def sum_gradients(self) -> None:
        """Take the sums, which FSDP2 has made of each microbatch."""
        for name, own in self._trained.items():
            summed = self._whole[name].grad
            own.grad = torch.zeros_like(own) if summed is None else summed.to_local().to(own.dtype)

    def norm_squared(self) -> float:
        """Of this replica's shards; added up over all ranks of the stage it is the stage's."""
        norms = [torch.linalg.vector_norm(own.grad) for own in self._trained.values() if self._is_counted]
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

    def trains(self, parameter: torch.Tensor) -> bool:
        """Whether the shard is updated, and has any values."""
        return self._optimizer is not None and parameter in self._optimizer.state

    def pieces(self, parameter: torch.Tensor) -> list[Piece]:
        """The values and moments of a shard; nothing of one that is not trained, or has no values."""
        if not self.trains(parameter):
            return []
        state = self._optimizer.state[parameter]
        moments = {name: state[name].flatten() for name in ("exp_avg", "exp_avg_sq")}
        return [Piece(0, parameter.detach().flatten(), moments)]

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
