"""An LLM's head and the loss over its vocabulary. Only the logits of one chunk of targets are in memory at a time.

The head returns the loss, not logits. So hooks around it, which gather its parameters or sum gradients over ranks, run
once a microbatch, however many chunks there are.
"""

import itertools
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear

__all__ = ["LossHead", "targets_at_once"]

# The logits that are in memory at a time, in fp32. A matrix product of that many rows is as fast as a larger one.
_LOGITS_BYTES = 512 * 2**20
# Matrix products are fast for multiples of this number of rows.
_ROWS = 128
# On CPUs, which have no product that adds to a wider matrix, a gradient is added in so many parts. So it is on tensors
# without values, which have none in torch 2.11.
_NUM_PARTS = 16


def targets_at_once(vocabulary: float) -> int:
    """For how many targets a rank holds logits at a time, if it has `vocabulary` ids of the vocabulary: at most 512 MiB
    of them in fp32."""
    return max(1, int(_LOGITS_BYTES / (4 * vocabulary * _ROWS))) * _ROWS


class LossHead(nn.Linear):
    """The head's matrix. Takes hidden states [num_targets, hidden_size] and target ids [num_targets], and returns their
    summed cross entropy, a scalar.

    If ranks share the vocabulary, this one has the ids from `first_id` on, and the others of `group` have the rest.
    Logits of at most `num_at_once` targets are in memory at a time, in forward and in backward.
    """

    num_at_once: int
    first_id: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(
        cls, head: nn.Linear, vocabulary: float, *, first_id: int = 0, group: dist.ProcessGroup | None = None
    ) -> Self:
        """A head with the matrix of a linear layer. `vocabulary` is the number of ids that each rank holds."""
        assert head.bias is None, "no known LLM has a head with a bias"
        own = cls(head.in_features, head.out_features, bias=False, device="meta")
        own.weight = head.weight
        own.num_at_once, own.first_id, own.group = targets_at_once(vocabulary), first_id, group
        return own

    def forward(self, hidden: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
        return _SummedLoss.apply(hidden, self.weight, target_ids, self)


class _SummedLoss(torch.autograd.Function):
    """Summed cross entropy over chunks of targets. Backward begins with the last chunk.

    Log-probabilities of the last chunk are kept for backward; logits of the other chunks are computed again. Computing
    gradients in forward would save that, but would hold a gradient of the whole matrix for each microbatch in flight.
    The gradient of the logits overwrites them. Torch's checkpointing and cross entropy would need twice the memory, and
    torch's `linear_cross_entropy` does not support a vocabulary that ranks share.

    The matrix's gradients of the chunks are added to the parameter's `grad`, if there is one. Otherwise, as when
    replicas shard parameters, they are summed in the weights' dtype and returned to autograd.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, target_ids: torch.Tensor, head: LossHead
    ) -> torch.Tensor:
        loss, log_sums, kept = _wide(hidden.new_zeros(())), [], None
        for own in _chunks(len(target_ids), head.num_at_once):
            kept = None  # free it before the next chunk's
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
        of_logits = None
        added_to = head.weight.grad if needs_weight else None
        of_weight = torch.zeros_like(weight) if needs_weight and added_to is None else None
        for own in reversed(_chunks(len(target_ids), head.num_at_once)):
            if kept is None:
                of_logits = None  # free it before the next chunk's logits
                kept = _wide(linear(hidden[own], weight)).sub_(log_sums[own].unsqueeze(1))
            of_logits = _gradient(kept, target_ids[own], head, gradient, hidden.dtype)
            kept = None
            if of_hidden is not None:
                torch.mm(of_logits, weight, out=of_hidden[own])
            if needs_weight:
                _add_product(of_weight if added_to is None else added_to, of_logits.T, hidden[own])
        return of_hidden, of_weight, None, None


def _chunks(num_targets: int, num_at_once: int) -> list[slice]:
    """The chunks of targets. If one is smaller it is the first, so that the last, which is kept, is full."""
    ends = [*range(num_targets, 0, -num_at_once), 0]
    return [slice(start, end) for start, end in itertools.pairwise(reversed(ends))] or [slice(0, 0)]


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add `left @ right` to a total that may be wider (fp32 for bf16), without making another matrix as large."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, out=total)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        for rows, own in zip(total.chunk(_NUM_PARTS), left.chunk(_NUM_PARTS), strict=True):
            rows.add_(own @ right)


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _log_probabilities(
    logits: torch.Tensor, target_ids: torch.Tensor, head: LossHead
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each target its logit and the log-sum-exp over the whole vocabulary, both [num_targets], and the
    log-probabilities of this rank's ids, [num_targets, local vocabulary]. Ranks that share the vocabulary need two
    small all-reduces."""
    columns, is_here = _places(target_ids, head)
    at_targets = logits.gather(1, columns).squeeze(1).masked_fill(~is_here, 0.0)
    found = logits.log_softmax(1)
    largest = logits.argmax(1, keepdim=True)  # at the largest logit, the difference below loses no digits
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
    """The gradient of the logits: the probabilities, minus one at targets. Overwrites the log-probabilities."""
    columns, is_here = _places(target_ids, head)
    probabilities = log_probabilities.exp_()
    probabilities.scatter_add_(1, columns, -is_here.to(probabilities.dtype).unsqueeze(1))
    own = probabilities if dtype == probabilities.dtype else torch.empty_like(probabilities, dtype=dtype)
    return torch.mul(probabilities, gradient, out=own)


def _places(target_ids: torch.Tensor, head: LossHead) -> tuple[torch.Tensor, torch.Tensor]:
    """The targets' columns in this rank's logits, [num_targets, 1], and whether this rank has them, [num_targets]."""
    if head.group is None:
        return target_ids.unsqueeze(1), torch.ones_like(target_ids, dtype=torch.bool)
    local_ids = target_ids - head.first_id
    is_here = (local_ids >= 0) & (local_ids < head.out_features)
    return local_ids.clamp(0, head.out_features - 1).unsqueeze(1), is_here
