"""The loss over chunks of targets is that over all of them at once, and no more than a chunk of logits ever stands."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from dflop.costs.live_bytes import LiveBytes
from dflop.models.loss_head import LossHead, targets_at_once
from dflop.models.precision import compute_in, held_in

HIDDEN, VOCABULARY, NUM_TARGETS = 12, 50, 37
# One, a divisor, with a rest, all but one, all, and more than all.
CHUNKS = [1, 9, 10, 36, 37, 128]


def make_head(num_at_once: int, dtype: torch.dtype = torch.float64) -> LossHead:
    torch.manual_seed(0)
    head = LossHead.of(nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=dtype), VOCABULARY)
    head.num_at_once = num_at_once
    return head


def make_targets(dtype: torch.dtype = torch.float64, num_targets: int = NUM_TARGETS) -> tuple[torch.Tensor, ...]:
    drawn = torch.Generator().manual_seed(1)
    hidden = torch.randn(num_targets, HIDDEN, generator=drawn, dtype=torch.float64).to(dtype)
    return hidden.requires_grad_(), torch.randint(VOCABULARY, (num_targets,), generator=drawn)


def plain(head: nn.Linear, hidden: torch.Tensor, target_ids: torch.Tensor) -> list[torch.Tensor]:
    """The loss, and the gradients of the hidden states and of the parameters."""
    logits = nn.functional.linear(hidden, head.weight)
    loss = cross_entropy(logits, target_ids, reduction="sum")
    return [loss, *torch.autograd.grad(loss, [hidden, *head.parameters()])]


@pytest.mark.parametrize("num_at_once", CHUNKS)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_loss_and_gradients_are_those_of_all_logits_at_once(num_at_once, scale):
    head, (hidden, target_ids) = make_head(num_at_once), make_targets()
    loss = scale * head(hidden, target_ids)
    loss.backward()
    found = [loss, hidden.grad, *(own.grad for own in head.parameters())]
    for ours, theirs in zip(found, plain(head, hidden, target_ids), strict=True):
        torch.testing.assert_close(ours, scale * theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_hooks_behind_the_gradient_run_once_also_where_it_is_added_past_autograd(dtype):
    """Sums over replicas begin in such hooks."""
    head, seen = make_head(10), []
    head.weight.grad = torch.zeros_like(head.weight)
    compute_in(head, dtype)
    head.weight.register_post_accumulate_grad_hook(lambda own: seen.append(own.grad.clone()))
    head(*make_targets(dtype)).backward()
    (gradient,) = seen
    assert gradient.any()
    torch.testing.assert_close(gradient, head.weight.grad)


@pytest.mark.parametrize("num_at_once", [10, 128])
def test_a_microbatch_may_have_no_target_and_an_evaluation_has_no_gradient(num_at_once):
    head, (hidden, target_ids) = make_head(num_at_once), make_targets(num_targets=0)
    loss = head(hidden, target_ids)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not head.weight.grad.any()
    hidden, target_ids = make_targets()
    with torch.no_grad():
        evaluated = head(hidden, target_ids)
    torch.testing.assert_close(evaluated, head(hidden, target_ids).detach())


@pytest.mark.parametrize("is_first_frozen", [False, True])
def test_a_frozen_head_gives_the_hidden_states_their_gradient(is_first_frozen):
    head, (hidden, target_ids) = make_head(10), make_targets()
    head.requires_grad_(False)
    hidden.requires_grad_(not is_first_frozen)
    loss = head(hidden, target_ids)
    assert loss.requires_grad == hidden.requires_grad
    if not is_first_frozen:
        loss.backward()
        assert head.weight.grad is None
        torch.testing.assert_close(hidden.grad, plain(make_head(10), hidden, target_ids)[1])


@pytest.mark.parametrize("num_at_once", CHUNKS)
def test_in_half_precision_gradients_of_chunks_are_added_up_in_full(num_at_once):
    """In bf16 a sum of 37 chunks would be off by some of its 2^-9s; each chunk's own product is rounded once."""
    head, (hidden, target_ids) = make_head(num_at_once, torch.float32), make_targets(torch.bfloat16)
    compute_in(head, torch.bfloat16)
    head.weight.grad = torch.ones_like(head.weight, dtype=torch.float32)  # what an earlier microbatch left
    head(hidden, target_ids).backward()
    weight, inputs = head.weight.detach().double().requires_grad_(), hidden.detach().double()
    logits = nn.functional.linear(inputs, weight).bfloat16().double()  # as the product rounds them
    probabilities = logits.softmax(1)
    of_logits = (probabilities - nn.functional.one_hot(target_ids, VOCABULARY)).bfloat16().double()
    expected = 1 + of_logits.T @ inputs
    size = 1 + of_logits.abs().T @ inputs.abs()
    assert ((head.weight.grad - expected).abs() <= 2**-8 * size).all()
    assert ((head.weight.grad - expected).abs() / size).mean() < 2**-11


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_backward_makes_no_second_matrix_as_large_as_the_gradient(dtype):
    hidden_size, num_ids = 512, 1024
    head = LossHead.of(nn.Linear(hidden_size, num_ids, bias=False, dtype=held_in(dtype)), num_ids)
    head.num_at_once = 4
    compute_in(head, dtype)
    head.weight.grad = torch.zeros_like(head.weight, dtype=held_in(dtype))
    hidden = torch.randn(16, hidden_size, dtype=dtype, requires_grad=True)
    with LiveBytes() as live:
        head(hidden, torch.arange(16)).backward()
    assert head.weight.grad.any()
    assert live.peak < head.weight.nbytes / 4


def test_large_logits_lose_no_digits_of_the_loss():
    head, (hidden, target_ids) = make_head(10, torch.float32), make_targets(torch.float32)
    with torch.no_grad():
        hidden[:, 0] = 1.0
        head.weight[:, 0] += 1000.0  # which changes no probability
    loss = head(hidden, target_ids)
    logits = nn.functional.linear(hidden, head.weight).detach()
    expected = cross_entropy(logits.double(), target_ids, reduction="sum")
    assert float(loss.detach()) == pytest.approx(float(expected), rel=5e-6)


def test_in_half_precision_the_loss_is_summed_in_full():
    head, (hidden, target_ids) = make_head(10, torch.float32), make_targets(torch.bfloat16)
    compute_in(head, torch.bfloat16)
    head.weight.grad = torch.zeros_like(head.weight, dtype=torch.float32)
    loss = head(hidden, target_ids)
    loss.backward()
    whole = make_head(128, torch.float32)
    compute_in(whole, torch.bfloat16)
    whole.weight.grad = torch.zeros_like(whole.weight, dtype=torch.float32)
    expected = whole(hidden.detach(), target_ids)
    expected.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(head.weight.grad, whole.weight.grad, rtol=0.02, atol=0.05)


class _LargestLogits(TorchDispatchMode):
    """Rows of the largest tensor that is as wide as the vocabulary and not the matrix or its gradient."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for made in tree_iter(result):
            if isinstance(made, torch.Tensor) and made.ndim == 2 and made.shape[1] == VOCABULARY != made.shape[0]:
                self.rows = max(self.rows, made.shape[0])
        return result


@pytest.mark.parametrize("num_at_once", CHUNKS)
def test_no_more_than_a_chunk_of_logits_stands(num_at_once):
    head, (hidden, target_ids) = make_head(num_at_once), make_targets()
    with _LargestLogits() as seen:
        head(hidden, target_ids).backward()
    # The transposed matrix is as wide, too, and has as many rows as hidden states are wide.
    assert seen.rows == max(HIDDEN, min(num_at_once, NUM_TARGETS))


def test_shared_parameters_are_gathered_and_their_gradients_summed_once_a_pass():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        head, (hidden, target_ids) = make_head(10), make_targets()
        expected = plain(head, hidden, target_ids)
        fully_shard(head, mesh=init_device_mesh("cpu", (1,)))
        calls = []
        head.register_forward_pre_hook(lambda *_: calls.append("gathered"))
        head.register_full_backward_hook(lambda *_: calls.append("summed"))
        head(hidden, target_ids).backward()
        assert calls == ["gathered", "summed"]
        torch.testing.assert_close(hidden.grad, expected[1])
        torch.testing.assert_close(head.weight.grad.to_local(), expected[2])
    finally:
        dist.destroy_process_group()


def test_a_chunk_takes_half_a_gigabyte_at_most_and_of_no_vocabulary_less_than_a_tile():
    for vocabulary in (32_000, 128_256, 152_064, 152_064 / 8):
        num_targets = targets_at_once(vocabulary)
        assert num_targets % 128 == 0
        assert 0.75 * 2**29 < 4 * vocabulary * num_targets <= 2**29
    assert targets_at_once(1e9) == 128
    assert math.isfinite(targets_at_once(100))
