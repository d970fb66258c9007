"""AdamW: which parameters have weight decay, and the update of the values that one replica holds.

Replicas of a stage divide its parameters in two ways: in flat buckets (`sharded_optimizer`) or by rows
(`parameter_shards`). Both give the tensors that they hold to `AdamW` here, and the pieces of each parameter to
checkpoints. Source: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["AdamW", "Piece", "has_weight_decay", "parameter_groups", "squared_norm"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


def has_weight_decay(parameter: torch.Tensor) -> bool:
    """Whether a parameter has weight decay: matrices and kernels have it; norms, biases and other vectors do not."""
    return parameter.ndim > 1


def parameter_groups(decays: Mapping[nn.Parameter, bool], weight_decay: float) -> list[dict[str, Any]]:
    """The groups that torch's optimisers take: the tensors with `weight_decay`, then those without. `decays` says of
    each tensor whether it has weight decay. A group without tensors is left out."""
    groups = [
        {"params": [parameter for parameter, decayed in decays.items() if decayed], "weight_decay": weight_decay},
        {"params": [parameter for parameter, decayed in decays.items() if not decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


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
    """Updates tensors in place, if there are any. `decays` says of each whether it has weight decay.

    The moments exist from the start, so that a checkpoint can be read into them.
    """

    def __init__(self, decays: Mapping[nn.Parameter, bool], weight_decay: float) -> None:
        groups = parameter_groups(decays, weight_decay)
        # Fused: one kernel reads and writes everything once, on a CPU in a sixth of the time.
        self._torch = torch.optim.AdamW(groups, fused=True) if groups else None
        self._updated = list(decays)
        for tensor in self._updated:  # as torch would make it in the first step
            self._torch.state[tensor] = {
                "step": torch.zeros((), device=tensor.device),
                **{name: torch.zeros_like(tensor.detach()) for name in _MOMENTS},
            }

    def step(self, lr: float) -> None:
        """Update all tensors by their `grad`."""
        if self._torch is None:
            return
        for group in self._torch.param_groups:
            group["lr"] = lr
        self._torch.step()

    def moments_of(self, tensor: nn.Parameter) -> dict[str, torch.Tensor]:
        """The two moments of a tensor's values, flattened."""
        return {name: self._torch.state[tensor][name].flatten() for name in _MOMENTS}

    def go_on_from(self, num_steps: int) -> None:
        """Set the number of steps, by which the bias of the moments is corrected, after these were read from a
        checkpoint."""
        for tensor in self._updated:
            self._torch.state[tensor]["step"].fill_(num_steps)


def squared_norm(gradients: Iterable[torch.Tensor]) -> float:
    """The squared norm of all values of these gradients."""
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms))) ** 2 if norms else 0.0
