"""The update of weights beside the bandwidth of the card's memory, or of the link to its host, and checkpoints that are
written beside training."""

import shutil
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from dflop.costs import update_bytes
from dflop.train.adamw import AdamW, Rates, squared_norm
from dflop.train.host_buffer import host_zeros
from dflop.train.observations import Observations
from dflop.train.offloaded_adamw import OffloadedAdamW
from dflop.train.saver import CheckpointSaver
from dflop.train.sharded_optimizer import ShardedAdamW
from tests.gpu.check import Figures, Setting
from tests.gpu.clock import copied_bytes_per_s, seconds_of
from tests.gpu.world import alone_in_world

__all__ = ["offloaded", "saved_beside_steps", "updated"]

_VALUES_OF_BUCKET = 2**24
# AdamW reads a value, its gradient and its moments, and writes all but the gradient.
_BYTES_OF_UPDATE = 28


def updated(setting: Setting) -> Figures:
    """Bandwidths of AdamW, the norm, zeroing gradients and all of a step, for 1 B values in buckets of 64 MiB."""
    device = torch.device(setting.device)
    count, size = (2, 2**12) if setting.is_tiny else (60, _VALUES_OF_BUCKET)
    weights = [nn.Parameter(torch.randn(size, device=device)) for _ in range(count)]
    for own in weights:
        own.grad = torch.randn_like(own)
    optimizer, of_weights = AdamW(dict.fromkeys(weights, Rates(1.0, 0.1))), {own: own.grad for own in weights}
    gradients = list(of_weights.values())

    def zero() -> None:
        for own in gradients:
            own.zero_()

    def whole_step() -> None:
        zero()
        squared_norm(gradients)
        for own in gradients:
            own.mul_(1.0)
        optimizer.step(1e-4, of_weights, computed)

    computed = {own: torch.empty_like(own, dtype=torch.bfloat16) for own in weights}
    copied = copied_bytes_per_s(device, 2**20 if setting.is_tiny else 2**30)
    update_s = seconds_of(lambda: optimizer.step(1e-4, of_weights, {}), device)
    norm_s = seconds_of(lambda: squared_norm(gradients), device)
    num_values = count * size
    touched = update_bytes(4.0 * num_values, 1, value_bytes=2)
    return {
        "a copy, bytes a second": copied,
        "update, share of a copy's bandwidth": _BYTES_OF_UPDATE * num_values / update_s / copied,
        "norm, share of a copy's bandwidth": 4 * num_values / norm_s / copied,
        "zeroing, share of a copy's bandwidth": 4 * num_values / seconds_of(zero, device) / copied,
        # Prices of data sheets take 0.84.
        "all of a step, share of a copy's bandwidth": touched / seconds_of(whole_step, device) / copied,
        "seconds of an update of 1 B values": update_s * 1e9 / num_values,
    }


def offloaded(setting: Setting) -> Figures:
    """The update of 0.5 B values whose moments and masters are in the host's memory, beside one on the device."""
    device = torch.device(setting.device)
    count, size = (2, 2**12) if setting.is_tiny else (30, _VALUES_OF_BUCKET)
    num_values = count * size
    started = torch.randn(count, size).pin_memory() if device.type == "cuda" else torch.randn(count, size)
    gradients = [torch.randn(size, device=device) for _ in range(count)]
    plain = [nn.Parameter(own.to(device)) for own in started]
    away = [nn.Parameter(host_zeros(size, gradients[0]).copy_(own)) for own in started]
    computed = {own: torch.zeros(size, dtype=torch.bfloat16, device=device) for own in away}
    staying = AdamW(dict.fromkeys(plain, Rates(1.0, 0.1)))
    moved = OffloadedAdamW(dict.fromkeys(away, Rates(1.0, 0.1)), device, has_masters=True)

    def update() -> None:
        moved.step(1e-4, dict(zip(away, gradients, strict=True)), computed)
        moved.wait()

    for _ in range(3):
        staying.step(1e-4, dict(zip(plain, [own.clone() for own in gradients], strict=True)), {})
        update()
    most = max(float((one.detach().cpu() - other.detach()).abs().max()) for one, other in zip(plain, away, strict=True))
    here = torch.empty_like(started, device=device)
    link = started.nbytes / seconds_of(lambda: here.copy_(started, non_blocking=True), device)
    update_s = seconds_of(update, device)
    return {
        "largest difference from an update on the device": most,
        "a copy to the device, bytes a second": link,
        # Three values of four bytes come and three go.
        "both ways of the state, over one copy's bytes a second": 24 * num_values / update_s / link,
        "seconds of an update of 1 B values": update_s * 1e9 / num_values,
    }


def saved_beside_steps(setting: Setting) -> Figures:
    """Of a state of 8 GB: the rate at which it is copied, the host's memory that is pinned, and steps meanwhile."""
    with alone_in_world(setting) as device:
        count, size = (2, 2**12) if setting.is_tiny else (40, _VALUES_OF_BUCKET)
        weights = {f"weight{number}": nn.Parameter(torch.randn(size, device=device)) for number in range(count)}
        optimizer = ShardedAdamW(
            list(weights.values()),
            dist.group.WORLD,
            rates=dict.fromkeys(weights.values(), Rates(1.0, 0.0)),
            computed_in=torch.bfloat16,
        )
        part = SimpleNamespace(parameters=weights, shards={}, optimizer=optimizer, written_elsewhere=())
        state_bytes = 12 * count * size
        folder = setting.folder / "saver"
        saver = CheckpointSaver(folder / "checkpoints", Observations(folder / "observations", 0, ()))
        alone_s = _seconds_a_step(device, setting)
        saver.save(1, [part], {})  # pins the host's memory
        saver.wait()
        started = time.perf_counter()
        saver.save(2, [part], {})
        copied_s = time.perf_counter() - started
        beside_s = _seconds_a_step(device, setting)
        saver.wait()
        written_s = time.perf_counter() - started
        figures = {
            "bytes written a second": state_bytes / written_s,
            "bytes copied a second": state_bytes / copied_s,
            "pinned bytes over the state's": saver._buffer.num_bytes / state_bytes,
            "a step beside writing, over one alone": beside_s / alone_s,
            "checkpoints that were not written": float(saver.unsaved is not None),
        }
        shutil.rmtree(folder)
        return figures


def _seconds_a_step(device: torch.device, setting: Setting) -> float:
    """The host's seconds of a step of products and small kernels, for each of which it must launch."""
    size = 64 if setting.is_tiny else 4096
    values = torch.randn(size, size, device=device).to(torch.bfloat16)
    for is_warm in (False, True):
        started = time.perf_counter()
        for _ in range(2 if setting.is_tiny else 2000):
            (values @ values).mul_(0.5)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if is_warm:
            return time.perf_counter() - started
    raise AssertionError
