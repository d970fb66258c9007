"""An LLM's head and the loss over its vocabulary, of which no more than a chunk of logits stands at a time.

What the head is asked for is the loss, not logits: hooks around it, which gather its parameters or sum gradients over
ranks, run once a microbatch, however many chunks there are.
"""

import itertools
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear

from dflop.models.llm_work import targets_at_once

__all__ = ["LossHead"]

PutOff = Callable[[nn.Parameter, nn.Parameter | None, torch.Tensor, torch.Tensor], bool]


class LossHead(nn.Linear):
    """A matrix from hidden states [num_targets, hidden_size] and target ids [num_targets] to their summed loss.

    Where ranks share the vocabulary, this one has the ids from `first_id` on, and the others of `group` the rest.
    Logits of at most `num_at_once` targets stand at a time, in forward and in backward. `put_off` may take on the
    gradient of the matrix (`Deferral.put_off`), for one of the chunks.
    """

    num_at_once: int
    first_id: int
    group: dist.ProcessGroup | None
    put_off: PutOff | None = None

    @classmethod
    def of(
        cls, head: nn.Linear, vocabulary: float, *, first_id: int = 0, group: dist.ProcessGroup | None = None
    ) -> Self:
        """A head with the matrix of a linear layer, on ranks that hold so much of the vocabulary each."""
        assert head.bias is None, "no known LLM has a head with a bias"
        own = cls(head.in_features, head.out_features, bias=False, device="meta")
        own.weight = head.weight
        own.num_at_once, own.first_id, own.group = targets_at_once(vocabulary), first_id, group
        return own

    def forward(self, hidden: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
        return _SummedLoss.apply(hidden, self.weight, target_ids, self)


class _SummedLoss(torch.autograd.Function):
    """Summed cross entropy over chunks of targets, whose backward begins with the last one.

    Log-probabilities of the last chunk are kept for it. Logits of the others are computed again: gradients made in
    forward would save that, and hold one more of the whole matrix for each microbatch in flight. The gradient of logits
    takes their place: torch's checkpointing and cross entropy need twice the memory, and torch's
    `linear_cross_entropy` knows no vocabulary that ranks share.

    Gradients of the matrix, of one chunk each, are added up in the parameter's `grad` where that is wider than the
    weights (fp32 beside bf16). Where there is none, as where replicas share parameters, they are added up in the
    weights' dtype and given to autograd.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, target_ids: torch.Tensor, head: LossHead
    ) -> torch.Tensor:
        loss, log_sums, kept = _wide(hidden.new_zeros(())), [], None
        for own in _chunks(len(target_ids), head.num_at_once):
            kept = None  # one at a time
            of_targets, log_sum, kept = _log_probabilities(_wide(linear(hidden[own], weight)), target_ids[own], head)
            loss += (log_sum - of_targets).sum()
            log_sums.append(log_sum)
        ctx.save_for_backward(hidden, weight, target_ids, torch.cat(log_sums))
        ctx.kept, ctx.head = kept, head
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, target_ids, log_sums = ctx.saved_tensors
        head, kept, ctx.kept = ctx.head, ctx.kept, None
        assert kept is not None, "the loss of a microbatch has one backward"
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_weight = of_logits = None
        wide = head.weight.grad if needs_weight and _is_wider(head.weight.grad, weight) else None
        *others, last = _chunks(len(target_ids), head.num_at_once)
        for own in (last, *reversed(others)):
            if kept is None:
                of_logits = None  # one at a time
                kept = _wide(linear(hidden[own], weight)).sub_(log_sums[own].unsqueeze(1))
            of_logits = _gradient(kept, target_ids[own], head, gradient, hidden.dtype)
            kept = None
            if of_hidden is not None:
                torch.mm(of_logits, weight, out=of_hidden[own])
            if not needs_weight:
                continue
            # One chunk's alone: what is put off holds the gradient of its logits until then.
            if own == last and head.put_off and head.put_off(head.weight, None, hidden[own], of_logits):
                continue
            if wide is not None:
                wide.add_(of_logits.T @ hidden[own])
            elif of_weight is None:
                of_weight = of_logits.T @ hidden[own]
            else:
                torch.addmm(of_weight, of_logits.T, hidden[own], out=of_weight)
        return of_hidden, of_weight, None, None


def _chunks(num_targets: int, num_at_once: int) -> list[slice]:
    """What is left over comes first, so that the last one, which is kept, is whole."""
    ends = [*range(num_targets, 0, -num_at_once), 0]
    return [slice(start, end) for start, end in itertools.pairwise(reversed(ends))] or [slice(0, 0)]


def _is_wider(gradient: torch.Tensor | None, weight: torch.Tensor) -> bool:
    return gradient is not None and gradient.dtype != weight.dtype


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _log_probabilities(
    logits: torch.Tensor, target_ids: torch.Tensor, head: LossHead
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each target its logit and the logarithm of the sum over the vocabulary, [num_targets]; and this rank's
    log-probabilities [num_targets, local vocabulary]. Ranks that share the vocabulary need two small all-reduces."""
    columns, is_here = _places(target_ids, head)
    at_targets = logits.gather(1, columns).squeeze(1).masked_fill(~is_here, 0.0)
    found = logits.log_softmax(1)
    largest = logits.argmax(1, keepdim=True)  # where the difference loses no digits
    local = (logits.gather(1, largest) - found.gather(1, largest)).squeeze(1)
    if head.group is None:
        return at_targets, local, found
    highest = local.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, head.group)
    sums = torch.stack([(local - highest).exp(), at_targets])
    dist.all_reduce(sums, dist.ReduceOp.SUM, head.group)
    log_sums = highest + sums[0].log()
    return sums[1], log_sums, found.add_((local - log_sums).unsqueeze(1))


def _gradient(
    log_probabilities: torch.Tensor,
    target_ids: torch.Tensor,
    head: LossHead,
    gradient: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Of the logits: probabilities, less one at targets. The log-probabilities are given up."""
    columns, is_here = _places(target_ids, head)
    probabilities = log_probabilities.exp_()
    probabilities.scatter_add_(1, columns, -is_here.to(probabilities.dtype).unsqueeze(1))
    own = probabilities if dtype == probabilities.dtype else torch.empty_like(probabilities, dtype=dtype)
    return torch.mul(probabilities, gradient, out=own)


def _places(target_ids: torch.Tensor, head: LossHead) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of the targets among the rank's logits, [num_targets, 1], and whether they are there, [num_targets]."""
    if head.group is None:
        return target_ids.unsqueeze(1), torch.ones_like(target_ids, dtype=torch.bool)
    local_ids = target_ids - head.first_id
    is_here = (local_ids >= 0) & (local_ids < head.out_features)
    return local_ids.clamp(0, head.out_features - 1).unsqueeze(1), is_here
