"""LoRA: linear layers with a low-rank product beside their weights, which alone is trained.

A linear layer with the weight W, [num_outputs, num_inputs], gets two matrices: `lora_A`, [rank, num_inputs], drawn as a
linear layer of its own, and `lora_B`, [num_outputs, rank], zeros. To its output s·B·A·x is added (Hu et al., "LoRA:
low-rank adaptation of large language models", 2021, section 4). Names, starting values and results are those of the
package `peft`.

If tensor-parallel ranks divide W by outputs, they divide B likewise, and each has all of A and a part of its gradient;
if they divide W by inputs, they divide A, and each has all of B (in an LLM with a part of its gradient).
"""

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn import functional

from dflop.base import UserError
from dflop.models.stages import Stage
from dflop.models.tensor_group import Shard, TensorGroup
from dflop.models.tensor_parallel import RowLinear, columns_of
from dflop.plan.trained import Lora

__all__ = ["adapt_layer", "check_targets", "low_rank_product"]


def check_targets(lora: Lora, stages: Mapping[str, Stage]) -> None:
    """Check that each of `lora.targets` matches a linear layer of one of these stages, which are whole modules, by
    their names; and that each module has a layer that is matched.

    Raises:
        UserError: naming the first pattern that matches none, and what else it matches; or the first such module.
    """
    of_modules = {
        module: [pair for layer in stage.layer_names for pair in _named_within(stage, layer)]
        for module, stage in stages.items()
    }
    inside = [pair for pairs in of_modules.values() for pair in pairs]
    for number, pattern in enumerate(lora.targets):
        matched = [(name, own) for name, own in inside if fnmatchcase(name, pattern)]
        if any(isinstance(own, nn.Linear) for _, own in matched):
            continue
        if matched:
            name, own = matched[0]
            found = f"matches {name}, a {type(own).__name__}, and no linear layer"
        else:
            found = f"matches nothing in the layers of {' and '.join(lora.modules)}"
        linear = sorted({name.rpartition(".")[2] for name, own in inside if isinstance(own, nn.Linear)})
        raise UserError(
            f"`model.lora.targets[{number}]` is {pattern!r}, which {found}; it is a pattern for names such as "
            f"'*.{linear[0]}', and they have the linear layers {', '.join(linear)}"
        )
    for module, pairs in of_modules.items():
        linear = [name for name, own in pairs if isinstance(own, nn.Linear)]
        if not any(fnmatchcase(name, pattern) for name in linear for pattern in lora.targets):
            last = sorted({name.rpartition(".")[2] for name in linear})
            raise UserError(
                f"`model.lora.targets` match no linear layer of {module}, which is in `model.lora.modules`; it has "
                f"{', '.join(last)}: add a pattern for one of them, or take {module} out"
            )


def adapt_layer(stage: Stage, layer: str, lora: Lora, ranks: TensorGroup, seed: int, *, is_empty: bool) -> None:
    """Add adapters to the linear layers in a stage's layer, named `layer` in `stage.hf`, that match `lora.targets`.

    The layer is complete, and divided among the tensor-parallel `ranks`. Matrices are drawn from `seed` and their names
    alone, so that every layout begins with the same; with `is_empty` they have no values.
    """
    for name, own in list(_named_within(stage, layer)):
        if isinstance(own, nn.Linear | RowLinear) and any(fnmatchcase(name, pattern) for pattern in lora.targets):
            _adapt(stage, name, own, lora, ranks, None if is_empty else seed)


def low_rank_product(lora: Lora, lora_a: torch.Tensor, lora_b: torch.Tensor) -> torch.Tensor:
    """What the matrices of a linear layer's adapter add to its weight, [num_outputs, num_inputs]."""
    return lora.scaling * (lora_b @ lora_a)


def _named_within(stage: Stage, layer: str) -> Iterable[tuple[str, nn.Module]]:
    return stage.hf.get_submodule(layer).named_modules(prefix=layer)


def _adapt(
    stage: Stage, name: str, linear: nn.Linear | RowLinear, lora: Lora, ranks: TensorGroup, seed: int | None
) -> None:
    """Add the adapter of one linear layer; without a `seed` its matrices have no values."""
    weight, shard = linear.weight, stage.shards.get(f"{name}.weight")
    num_outputs, num_inputs = shard.whole if shard else weight.shape
    first, second = _without_drawing(num_inputs, lora.rank, weight), _without_drawing(lora.rank, num_outputs, weight)
    if seed is not None:
        with torch.no_grad():
            first.weight.copy_(_drawn(f"{name}.lora_A", lora.rank, num_inputs, seed))
            second.weight.zero_()
    if shard and shard.dim == 0:
        start = ranks.part(num_outputs // shard.num_stacked).start
        stage.shards[f"{name}.lora_B.weight"] = Shard(0, start, second.weight.shape, shard.num_stacked)
        second = columns_of(second, ranks, shard.num_stacked)
    elif shard:
        stage.shards[f"{name}.lora_A.weight"] = Shard(1, ranks.part(num_inputs).start, first.weight.shape)
        first = RowLinear(first, ranks, linear.cuts_tokens)
    linear.lora_A, linear.lora_B = first, second
    linear.register_forward_hook(_adding(lora))


def _without_drawing(num_inputs: int, num_outputs: int, like: torch.Tensor) -> nn.Linear:
    """A linear layer whose weights have no values, of the device and the dtype of `like`."""
    made = nn.Linear(num_inputs, num_outputs, bias=False, device="meta")
    made.weight = nn.Parameter(torch.empty(num_outputs, num_inputs, device=like.device, dtype=like.dtype))
    return made


def _drawn(name: str, rank: int, num_inputs: int, seed: int) -> torch.Tensor:
    """The values at which `lora_A` starts."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ (seed * 0x9E3779B1 & 0xFFFFFFFF))
    return nn.init.kaiming_uniform_(torch.empty(rank, num_inputs), a=math.sqrt(5), generator=generator)


def _adding(lora: Lora) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]:
    """A hook of a linear layer's forward, which adds the adapter's product to the output."""

    def add(linear: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        inner = functional.dropout(args[0], lora.dropout, linear.training) if lora.dropout else args[0]
        return output + lora.scaling * linear.lora_B(linear.lora_A(inner))

    return add
