"""The search space: every plan for a number of devices that the config does not rule out."""

from collections.abc import Iterator

from dflop.config import Config, FixedGrid, FixedPlan
from dflop.errors import UserError
from dflop.models import ModelSpec
from dflop.pipeline import Grid, Plan

__all__ = ["enumerate_plans"]


def enumerate_plans(config: Config, spec: ModelSpec) -> Iterator[Plan]:
    """Disjoint plans over all devices at tp=1, first without and then with activation checkpointing.

    Microbatch counts are 1, 2, 3, 4, 6, 8, 12, … as far as every bucket can hold a sample.

    Raises:
        UserError: when `plan.fixed` and the devices leave nothing.
    """
    fixed = config.plan.fixed or FixedPlan()
    vision, llm = fixed.vision or FixedGrid(), fixed.llm or FixedGrid()
    for grid, name in ((vision, "vision"), (llm, "llm")):
        if (grid.tp or 1) > 1:
            raise UserError(f"`plan.fixed.{name}.tp` is {grid.tp}: tensor parallelism cannot be run yet; use tp: 1")
    if (vision.pp or 1) > 1:
        raise UserError(f"`plan.fixed.vision.pp` is {vision.pp}: encoders run in one stage; use pp: 1")
    num_layers = spec.module("llm").num_layers
    num_devices = config.cluster.num_devices
    found = False
    for checkpointing in (False, True) if fixed.checkpointing is None else (fixed.checkpointing,):
        for vision_dp in range(1, num_devices):
            for pp in range(1, min(num_layers, num_devices - vision_dp) + 1):
                dp, rest = divmod(num_devices - vision_dp, pp)
                pinned = ((vision.dp, vision_dp), (llm.pp, pp), (llm.dp, dp))
                if rest or any(want not in (None, have) for want, have in pinned):
                    continue
                for num_microbatches in _microbatch_counts(config.train.global_batch_size // dp, fixed):
                    found = True
                    yield Plan(
                        placement="disjoint",
                        grids=(
                            Grid(module="vision", num_ranks=vision_dp),
                            Grid(module="llm", num_ranks=pp * dp, pp=pp, rank_offset=vision_dp),
                        ),
                        num_microbatches=num_microbatches,
                        checkpointing=checkpointing,
                    )
    if not found:
        raise UserError(
            f"no plan uses all {num_devices} devices of `cluster` with the encoder and the LLM on ranks of their own"
            + (f" and `plan.fixed` {_pins(fixed)}" if config.plan.fixed else "")
            + f", {num_layers} LLM layers and {config.train.global_batch_size} samples a batch; "
            "use at least 2 devices, loosen `plan.fixed` or raise `train.global_batch_size`"
        )


def _pins(fixed: FixedPlan) -> str:
    parts = [
        f"{name} {key}={getattr(grid, key)}"
        for name, grid in (("vision", fixed.vision), ("llm", fixed.llm))
        if grid
        for key in ("tp", "pp", "dp")
        if getattr(grid, key)
    ]
    if fixed.num_microbatches:
        parts.append(f"num_microbatches={fixed.num_microbatches}")
    return f"({', '.join(parts)})"


def _microbatch_counts(most: int, fixed: FixedPlan) -> list[int]:
    if fixed.num_microbatches:
        return [fixed.num_microbatches] if fixed.num_microbatches <= most else []
    powers = [1 << exponent for exponent in range(most.bit_length())]
    return sorted({count for power in powers for count in (power, 3 * power) if count <= most})
