"""AdamW: by which rates parameters are updated, and the update of the values that one replica holds.

Replicas of a stage divide its parameters in two ways: in flat buckets (`sharded_optimizer`) or by rows
(`parameter_shards`). Both give the tensors that they hold to `AdamW` here, and the pieces of each parameter to
checkpoints. Source: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["MOMENTS", "AdamW", "Piece", "Rates", "parameter_groups", "rates_of", "squared_norm"]

MOMENTS = ("exp_avg", "exp_avg_sq")


class Rates(NamedTuple):
    """By what a parameter is updated: the learning rate before its schedule, the weight decay, the share of each moment
    that a step keeps, and what is added to the denominator. The last two are torch's by default."""

    lr: float
    weight_decay: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


def rates_of(parameter: torch.Tensor, rates: Rates) -> Rates:
    """The rates of a parameter of a part that has these. Matrices and kernels have weight decay; norms, biases and
    other vectors do not."""
    return rates if parameter.ndim > 1 else rates._replace(weight_decay=0.0)


def parameter_groups(rates: Mapping[nn.Parameter, Rates]) -> list[dict[str, Any]]:
    """The groups that torch's optimisers take: one for each of the tensors' rates."""
    groups: dict[Rates, list[nn.Parameter]] = {}
    for tensor, own in rates.items():
        groups.setdefault(own, []).append(tensor)
    return [{"params": tensors, **own._asdict()} for own, tensors in groups.items()]


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a parameter's values that this replica holds, from index `start` of the flattened parameter on.

    `masters` are the values that are updated, and `moments` AdamW's two moments by name, or empty for a parameter that
    is not trained. All are [num_values].
    """

    start: int
    masters: torch.Tensor
    moments: dict[str, torch.Tensor]


class AdamW:
    """Updates tensors in place, if there are any, each by its rates.

    The moments exist from the start, so that a checkpoint can be read into them.
    """

    def __init__(self, rates: Mapping[nn.Parameter, Rates]) -> None:
        # Fused: one kernel reads and writes everything once, on a CPU in a sixth of the time.
        self._torch = torch.optim.AdamW(parameter_groups(rates), fused=True) if rates else None
        self._updated, self._lrs = list(rates), []
        if self._torch:
            self._lrs = [group["lr"] for group in self._torch.param_groups]
        for tensor in self._updated:  # as torch would make it in the first step
            self._torch.state[tensor] = {
                "step": torch.zeros((), device=tensor.device),
                **{name: torch.zeros_like(tensor.detach()) for name in MOMENTS},
            }

    @property
    def on_device(self) -> list[torch.Tensor]:
        """What of the state is always on the device: the moments."""
        return [self._torch.state[tensor][name] for tensor in self._updated for name in MOMENTS]

    def step(
        self,
        lr_factor: float,
        gradients: Mapping[nn.Parameter, torch.Tensor],
        computed: Mapping[nn.Parameter, torch.Tensor],
    ) -> None:
        """Update all tensors by these gradients, with their learning rates times `lr_factor`, and set what is
        `computed` with instead of some of them to their values."""
        if self._torch is None:
            return
        for tensor, gradient in gradients.items():
            tensor.grad = gradient
        for group, lr in zip(self._torch.param_groups, self._lrs, strict=True):
            group["lr"] = lr * lr_factor
        self._torch.step()
        with torch.no_grad():
            for tensor, values in computed.items():
                values.copy_(tensor)

    def wait(self) -> None:
        """Return when the state can be read: always."""

    def moments_of(self, tensor: nn.Parameter) -> dict[str, torch.Tensor]:
        """The two moments of a tensor's values, flattened."""
        return {name: self._torch.state[tensor][name].flatten() for name in MOMENTS}

    def go_on_from(self, num_steps: int) -> None:
        """Set the number of steps, by which the bias of the moments is corrected, after these were read from a
        checkpoint."""
        for tensor in self._updated:
            self._torch.state[tensor]["step"].fill_(num_steps)


def squared_norm(gradients: Iterable[torch.Tensor]) -> float:
    """The squared norm of all values of these gradients."""
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms))) ** 2 if norms else 0.0
