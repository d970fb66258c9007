"""The files of `dflop profile-costs`: what they hold, writing them, and reading those that belong together."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import polars as pl

from dflop.base import UserError
from dflop.models.loads import FEATURES
from dflop.plan.trained import TrainedSet
from dflop.store import read_parquet, write_parquet

__all__ = ["POINT_KEYS", "Measured", "measured_as", "read_measured", "require_parquet", "write_measured"]

POINT_KEYS = ("module", "tp", "piece", "num_layers", "checkpointing", *FEATURES)

_SUFFIXES = (".parquet", ".parameters.parquet", ".device.parquet")
_COLUMNS = (
    (*POINT_KEYS, "pass", "seconds", "attention_s", "peak_bytes", "saved_bytes", "repeat"),
    (
        *("module", "tp", "part", "parameter_bytes", "adapter_bytes", "targets_at_once"),
        *("passing_backward", "passing_kept", "attention_bytes"),
    ),
    (
        *("module", "tp", "model", "device", "device_model", "source", "precision", "torch", "num_ranks", "threads"),
        *("is_frozen", "adapters", "overhead_bytes", "communicator_bytes", "allocator_share", "seconds"),
        *("config_digest", "attention", "sm_mhz_before", "sm_mhz_after", "update_bytes_per_s"),
    ),
)
# Columns that files of earlier versions lack; they are read as null.
_ADDED = {
    "attention": pl.String,
    "sm_mhz_before": pl.Float64,
    "sm_mhz_after": pl.Float64,
    "adapters": pl.String,
    **dict.fromkeys(("adapter_bytes", "passing_backward", "passing_kept", "attention_bytes"), pl.Float64),
    "attention_s": pl.Float64,
    "update_bytes_per_s": pl.Float64,
}


class Measured(NamedTuple):
    """The measured points, the sizes of the parts' parameters, and for each module and tp a row about the device."""

    measurements: pl.DataFrame
    parameters: pl.DataFrame
    device: pl.DataFrame


def write_measured(path: Path, measured: Measured) -> None:
    """Write the measurements to `path` (.parquet) and the rest beside it."""
    for frame, columns, suffix in zip(measured, _COLUMNS, _SUFFIXES, strict=True):
        write_parquet(frame.select(columns), path.with_suffix(suffix))


def read_measured(paths: Sequence[Path]) -> Measured:
    """The contents of files of `dflop profile-costs`, one a module and tp, and of the files beside them.

    Raises:
        UserError: when a file is missing, is not such a file, or holds nothing that can be fitted; when two files have
            the same module and tp; or when they differ in model, device, precision, source, version of torch or kernel
            of attention.
    """
    parts = []
    for path in paths:
        require_parquet(path)
        frames = []
        for suffix, wanted in zip(_SUFFIXES, _COLUMNS, strict=True):
            frames.append(read_parquet(path.with_suffix(suffix), made_by="profile-costs"))
            has = frames[-1].columns
            frames[-1] = frames[-1].with_columns(
                (pl.col(name) if name in has else pl.lit(None)).cast(dtype).alias(name)
                for name, dtype in _ADDED.items()
            )
            if lacking := [name for name in wanted if name not in frames[-1].columns]:
                raise UserError(
                    f"{path.with_suffix(suffix)} has no column {lacking[0]!r}: another version of dflop, or another "
                    "command, wrote it; run `dflop profile-costs` again and give its `--out`, not what lies beside"
                )
        if frames[0]["seconds"].null_count() == len(frames[0]):
            raise UserError(f"{path}: no point was measured without running out of memory; use a larger tp or device")
        parts.append(Measured(*(frame.select(wanted) for frame, wanted in zip(frames, _COLUMNS, strict=True))))
    device = pl.concat([part.device for part in parts], how="vertical_relaxed")
    if twice := device.filter(device.select("module", "tp").is_duplicated()).select("module", "tp").rows():
        raise UserError(f"{twice[0][0]} tp={twice[0][1]} was given twice; give each module and tp once")
    for name in ("source", "model", "device", "device_model", "precision", "torch", "attention"):
        if len(found := device[name].drop_nulls().unique(maintain_order=True)) > 1:
            raise UserError(
                f"these measurements do not belong together: `{name}` is {' in one, '.join(map(repr, found))} in "
                "another; measure all modules with the same config on the same device"
            )
    return Measured(
        *(pl.concat(frames, how="vertical_relaxed") for frames in list(zip(*parts, strict=True))[:2]), device
    )


def measured_as(trained: TrainedSet, module: str) -> dict[str, bool | str | None]:
    """The columns of the row about the device that say in which way the module was measured."""
    own = trained.measured_as(module)
    return {"is_frozen": own == "frozen", "adapters": None if own in ("frozen", "trained") else own}


def require_parquet(path: Path) -> None:
    """Raise `UserError` for a path that does not end in .parquet: names of other files are derived from it."""
    if path.suffix != _SUFFIXES[0]:
        raise UserError(
            f"{path}: the name of measurements must end in {_SUFFIXES[0]} (sizes and device go beside them, as "
            f"{path.with_suffix(_SUFFIXES[1]).name} and {path.with_suffix(_SUFFIXES[2]).name})"
        )
