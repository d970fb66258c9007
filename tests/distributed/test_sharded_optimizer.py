"""AdamW shared out over replicas, against torch's own on the summed gradients."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from processes import spawn
from torch import nn

from dflop.base import UserError
from dflop.train import checkpoint_tensors
from dflop.train.adamw import Rates, rates_of
from dflop.train.checkpoint import load_checkpoint, save_checkpoint
from dflop.train.sharded_optimizer import ShardedAdamW

pytestmark = pytest.mark.serial

_SHAPES = [(7, 9), (5,), (130, 3), (64,), (1,), (40, 40)]
_LR, _DECAY, _SCALE = 1e-2, 0.1, 0.3
_OWN = Rates(3.0, 0.4, (0.8, 0.95), 1e-3)


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    made = [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in _SHAPES]
    made[3].requires_grad_(False)
    return made


def _rates(parameters: list[nn.Parameter], weight_decay: float = _DECAY) -> dict[nn.Parameter, Rates]:
    """Those of the factor `_LR`; the last but one has its own."""
    rates = {own: rates_of(own, Rates(1.0, weight_decay)) for own in parameters}
    return rates | ({parameters[-2]: _OWN} if len(parameters) == len(_SHAPES) else {})


def _gradients(step: int, replica: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in _SHAPES]


def _expected(num_steps: int, num_replicas: int) -> tuple[list[nn.Parameter], torch.optim.AdamW]:
    """What torch's own AdamW makes of the sums."""
    parameters = _parameters()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [own for own in trained if own.ndim > 1], "weight_decay": _DECAY},
        {"params": [own for own in trained if own.ndim <= 1 and own is not parameters[-2]], "weight_decay": 0.0},
        {"params": [parameters[-2]], **_OWN._asdict(), "lr": _OWN.lr * _LR},
    ]
    optimizer = torch.optim.AdamW(groups, lr=_LR)
    for step in range(num_steps):
        of_replicas = (_gradients(step, replica) for replica in range(num_replicas))
        for parameter, gradients in zip(parameters, zip(*of_replicas, strict=True), strict=True):
            parameter.grad = sum(gradients) * _SCALE if parameter.requires_grad else None
        optimizer.step()
    return parameters, optimizer


def _join(replica: int, num_replicas: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=replica, world_size=num_replicas)


def _sharded(
    parameters: list[nn.Parameter], bucket_bytes: int = 1024, *, narrow: bool = False, offloads: bool = False
) -> ShardedAdamW:
    """`narrow` parameters are computed in bf16; their masters and gradients are in fp64."""
    return ShardedAdamW(
        parameters,
        dist.group.WORLD,
        rates=_rates(parameters),
        bucket_bytes=bucket_bytes,
        computed_in=torch.bfloat16 if narrow else None,
        offloads=offloads,
    )


def _add_gradients(parameters: list[nn.Parameter], step: int, replica: int) -> None:
    for parameter, gradient in zip(parameters, _gradients(step, replica), strict=True):
        if parameter.requires_grad and parameter.dtype == gradient.dtype:
            (parameter * gradient).sum().backward()
        elif parameter.requires_grad:  # what autograd gives would be rounded
            parameter.grad.add_(gradient)


def _check_moments(sharded: ShardedAdamW, own: list[nn.Parameter], plain: list, expected: torch.optim.AdamW) -> None:
    """Every value has one owner, whose moments are those of the whole."""
    for parameter, reference in zip(own, plain, strict=True):
        owners = torch.zeros(parameter.numel())
        for piece in sharded.pieces(parameter):
            size = len(piece.masters)
            owners[piece.start : piece.start + size] += bool(piece.moments)
            for name, values in piece.moments.items():
                whole = expected.state[reference][name].flatten()
                torch.testing.assert_close(values, whole[piece.start : piece.start + size])
            masters = reference.detach().flatten()[piece.start : piece.start + size]
            torch.testing.assert_close(piece.masters, masters, rtol=1e-12, atol=1e-14)
        dist.all_reduce(owners)
        assert (owners == float(parameter.requires_grad)).all()


def _check_replica(
    replica: int, num_replicas: int, store: str, bucket_bytes: int, narrow: bool, offloads: bool, early: bool
) -> None:
    _join(replica, num_replicas, store)
    own = _parameters()
    sharded = _sharded(own, bucket_bytes, narrow=narrow, offloads=offloads)
    for step in range(3):
        sharded.zero_grad()
        with sharded.summing() if early else nullcontext():
            _add_gradients(own, step, replica)
        sharded.sum_gradients()
        norm_squared = torch.tensor(sharded.norm_squared(), dtype=torch.float64)
        dist.all_reduce(norm_squared)
        sharded.step(_LR, _SCALE)
        sharded.wait_for_parameters()
        plain, expected = _expected(step + 1, num_replicas)
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain if p.requires_grad]) / _SCALE
        torch.testing.assert_close(norm_squared, norm**2)
        for parameter, reference in zip(own, plain, strict=True):
            tolerance = 1e-12 if parameter.dtype == torch.float64 else 2**-8  # to nearest
            ours = parameter.detach().double()
            torch.testing.assert_close(ours, reference.detach(), rtol=tolerance, atol=1e-14)
    assert all((mine.dtype == torch.bfloat16) == (narrow and mine.requires_grad) for mine in own)
    for parameter, whole in sharded.whole_masters():
        reference = plain[next(place for place, mine in enumerate(own) if mine is parameter)]
        torch.testing.assert_close(whole, reference.detach(), rtol=1e-12, atol=1e-14)
    _check_moments(sharded, own, plain, expected)
    dist.destroy_process_group()


def _part(own: list[nn.Parameter], optimizer: ShardedAdamW) -> SimpleNamespace:
    parameters = {str(name): parameter for name, parameter in enumerate(own)}
    return SimpleNamespace(parameters=parameters, shards={}, optimizer=optimizer, written_elsewhere=())


def _save(replica: int, num_replicas: int, store: str, folder: Path, block_bytes: int, offloads: bool) -> None:
    _join(replica, num_replicas, store)
    checkpoint_tensors._BLOCK_BYTES = block_bytes
    own = _parameters()
    sharded = _sharded(own, offloads=offloads)
    for step in range(2):
        sharded.zero_grad()
        _add_gradients(own, step, replica)
        sharded.sum_gradients()
        sharded.step(_LR, _SCALE)
        sharded.wait_for_parameters()
    save_checkpoint(folder, 2, [_part(own, sharded)], {})
    dist.destroy_process_group()


def _check_loaded(replica: int, num_replicas: int, store: str, folder: Path, offloads: bool) -> None:
    """Read into other replicas, and into such as compute in another precision."""
    _join(replica, num_replicas, store)
    narrow = _parameters()
    of_narrow = _sharded(narrow, bucket_bytes=100, narrow=True, offloads=offloads)
    load_checkpoint(folder / "step-000002", [_part(narrow, of_narrow)])
    _check_moments(of_narrow, narrow, *_expected(2, 3))
    for parameter, reference in zip(narrow, _expected(2, 3)[0], strict=True):
        torch.testing.assert_close(parameter.detach().double(), reference.detach(), rtol=2**-8, atol=1e-14)
    own = _parameters()
    sharded = _sharded(own, bucket_bytes=2**20, offloads=offloads)
    load_checkpoint(folder / "step-000002", [_part(own, sharded)])
    _check_moments(sharded, own, *_expected(2, 3))
    # The next step is the third, of which each replica has the sum of what three had, by their number.
    summed = [sum(each) for each in zip(*(_gradients(2, other) for other in range(3)), strict=True)]
    for parameter, gradient in zip(own, summed, strict=True):
        if parameter.requires_grad:
            parameter.grad.copy_(gradient / num_replicas)
    sharded.sum_gradients()
    sharded.step(_LR, _SCALE)
    sharded.wait_for_parameters()
    for parameter, reference in zip(own, _expected(3, 3)[0], strict=True):
        torch.testing.assert_close(parameter.detach(), reference.detach(), rtol=1e-12, atol=1e-14)
    dist.destroy_process_group()


_REPLICAS = [
    (1, 2**20, False, True),
    (2, 1, False, False),
    (3, 1024, False, False),
    (3, 1024, True, False),
    (2, 1024, True, True),
]


# In CI each of them sums in one of the two ways.
@pytest.mark.parametrize(
    ("num_replicas", "bucket_bytes", "narrow", "offloads", "early"),
    [
        pytest.param(*case, early, marks=() if early == number % 2 else pytest.mark.exhaustive)
        for number, case in enumerate(_REPLICAS)
        for early in (False, True)
    ],
)
def test_replicas_update_what_they_own_as_one_adamw_updates_all(
    num_replicas, bucket_bytes, narrow, offloads, early, tmp_path
):
    how = str(tmp_path / "store"), bucket_bytes, narrow, offloads, early
    spawn(_check_replica, (num_replicas, *how), nprocs=num_replicas)


def _check_early_sums(replica: int, num_replicas: int, store: str) -> None:
    _join(replica, num_replicas, store)
    first, last, tied = parameters = [nn.Parameter(torch.ones(128, 1)) for _ in range(3)]  # in the order of forward
    how = {"rates": _rates(parameters), "complete_later": [tied], "bucket_bytes": 1}
    sharded = ShardedAdamW(parameters, dist.group.WORLD, **how)

    def now() -> list[float]:
        """The gradients in the part that this replica owns, behind all sums that have begun."""
        for own in sharded._sums:
            own.wait()
        return [own.grad.view(num_replicas, -1)[replica].unique().item() for own in parameters]

    with sharded.summing():
        (last * (replica + 1)).sum().backward()
        assert now() == [0.0, 3.0, 0.0]
        (tied * (replica + 1)).sum().backward()
        (first * (replica + 1)).sum().backward()
        assert now() == [3.0, 3.0, replica + 1.0]
    tied.grad.add_(1.0)  # a part of its gradient that another rank sends
    sharded.sum_gradients()
    assert now() == [3.0, 3.0, 5.0]

    sharded.zero_grad()
    with sharded.summing():
        if replica == 0:  # the other replica has nothing to compute in its last microbatch
            (last + first).sum().backward()
    assert now()[:2] == [1.0, 1.0]
    sharded.sum_gradients()
    dist.destroy_process_group()


def _check_late_values(replica: int, num_replicas: int, store: str) -> None:
    _join(replica, num_replicas, store)
    first, last, apart = parameters = [nn.Parameter(torch.ones(128, 1)) for _ in range(3)]
    how = {"rates": _rates(parameters, 0.0), "needed_first": [last], "bucket_bytes": 1}
    sharded = ShardedAdamW(parameters, dist.group.WORLD, **how)
    for number in range(2):  # the second time, nobody has waited for the third parameter
        sharded.zero_grad()
        for own in parameters:
            own.grad.fill_(1.0)
        sharded.sum_gradients()
        sharded.step(_LR, 1.0)
        expected = torch.full((128, 1), 1 - (number + 1) * _LR)  # what AdamW's steps are under equal gradients
        for own in (last, first):
            sharded.wait_for_parameters([own, nn.Parameter(torch.ones(1))])
            torch.testing.assert_close(own.detach(), expected)
    sharded.wait_for_parameters()
    torch.testing.assert_close(apart.detach(), expected)
    dist.destroy_process_group()


def test_updated_values_are_there_for_who_waits_for_them(tmp_path):
    spawn(_check_late_values, (2, str(tmp_path / "store")), nprocs=2)


def test_sums_begin_as_the_last_backward_completes_gradients(tmp_path):
    spawn(_check_early_sums, (2, str(tmp_path / "store")), nprocs=2)


@pytest.mark.parametrize(("num_replicas", "block_bytes", "offloads"), [(2, 512, True), (4, 2**20, False)])
def test_another_number_of_replicas_reads_what_others_owned(num_replicas, block_bytes, offloads, tmp_path):
    """Those that have their state in host memory read it from those that do not, and the other way round."""
    spawn(_save, (3, str(tmp_path / "saving"), tmp_path, block_bytes, not offloads), nprocs=3)
    spawn(_check_loaded, (num_replicas, str(tmp_path / "loading"), tmp_path, offloads), nprocs=num_replicas)


def test_a_checkpoint_that_lacks_moments_is_refused(tmp_path):
    _join(0, 1, str(tmp_path / "store"))
    try:
        own = _parameters()
        frozen = ShardedAdamW([], dist.group.WORLD, rates={})
        save_checkpoint(tmp_path, 2, [_part(own, frozen)], {})
        with pytest.raises(UserError, match=r"step-000002 holds 0 of 63 values of optimizer/0/exp_avg; .* delete it"):
            load_checkpoint(tmp_path / "step-000002", [_part(own, _sharded(own))])
    finally:
        dist.destroy_process_group()


def test_a_frozen_stage_has_nothing_to_update(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        optimizer = ShardedAdamW([frozen], dist.group.WORLD, rates={})
        optimizer.zero_grad()
        optimizer.sum_gradients()
        optimizer.step(_LR, 1.0)
        assert optimizer.norm_squared() == 0
        (piece,) = optimizer.pieces(frozen)
        assert not piece.moments
        assert (piece.masters == 1).all()
        assert (frozen == 1).all()
    finally:
        dist.destroy_process_group()
