"""The device-hours of an epoch, and its price where the config gives the price of an hour."""

from collections.abc import Sequence
from dataclasses import dataclass

from dflop.config import ClusterConfig
from dflop.schedule import steps_in_epochs
from dflop.search.baseline import TODAY, Baseline

__all__ = ["Epoch", "hour_of", "price_note"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """One epoch of `num_samples` draws (by default of each sample once), in as many whole global batches as training
    takes for it."""

    num_samples: float
    global_batch_size: int
    num_devices: int

    @property
    def num_steps(self) -> int:
        return steps_in_epochs(1, self.num_samples, self.global_batch_size)

    def hours(self, step_s: float) -> float:
        """Device-hours of the epoch, with steps of `step_s` seconds."""
        return self.num_steps * step_s * self.num_devices / 3600

    def __str__(self) -> str:
        return f"an epoch of {self.num_samples:,.0f} samples, {self.num_steps:,} step{'s' * (self.num_steps > 1)}"


def hour_of(cluster: ClusterConfig) -> str:
    """The name of a device-hour of this cluster."""
    return "GPU-hour" if cluster.hides_transfers else "device-hour"


def price_note(epoch: Epoch, cluster: ClusterConfig, step_s: float, baselines: Sequence[Baseline]) -> str:
    """A line on the predicted price of a plan's epoch, and of one with today's layout where that fits.

    Empty where the config has no `cluster.gpu_hour_cost`.
    """
    price = cluster.gpu_hour_cost
    if not price:
        return ""

    def spent(own_step_s: float) -> str:
        hours = epoch.hours(own_step_s)
        written = f"{hours:.3g}" if hours < 1000 else f"{hours:,.0f}"
        return f"{written} {hour_of(cluster)}s, {hours * price:,.2f}"

    note = f"{epoch}: {spent(step_s)} at {price:,.2f} an hour"
    for baseline in baselines:
        if baseline.name == TODAY and baseline.plan:
            note += f"; with today's layout {spent(baseline.step_s)}"
    return f"{note} (predicted)"
