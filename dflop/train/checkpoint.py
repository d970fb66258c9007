"""Checkpoints: parameters and AdamW's moments by parameter name, so that any layout can resume them.

`torch.distributed.checkpoint` writes and reads them (`checkpoint_tensors`). A checkpoint is a folder `step-000010`,
which is complete once it has that name. Beside the tensors it has `run.json`, which says to which run it belongs, and
a checksum of every file (`checkpoint_files`).
"""

import json
import shutil
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dflop.train.checkpoint_files import checkpoints_in, checksums_of, write_checksums
from dflop.train.checkpoint_tensors import Part, load_tensors, save_tensors

__all__ = ["do_together", "load_checkpoint", "save_checkpoint"]

_KEPT = 2


def save_checkpoint(
    folder: Path, step: int, parts: Sequence[Part], run: dict[str, Any], group: dist.ProcessGroup | None = None
) -> str | None:
    """Write `folder/step-<step>` from the parts of each rank; every rank must call this. Ranks communicate over
    `group`.

    Returns, the same on every rank, None if all was written, and otherwise what failed on any rank, such as a full
    disk. After a failure all earlier checkpoints are still there; after success the last two are kept.
    """
    final = folder / f"step-{step:06d}"
    part = folder / f".{final.name}.part"
    of_rank: dict[str, tuple[int, str]] = {}

    def write() -> None:
        _save_tensors(part, parts, group)
        of_rank.update(checksums_of(part, _own_files(part)))

    trouble = do_together(lambda: _make_empty(part), group, first_rank_only=True) or do_together(write, group)
    if trouble is None:
        checksums = [of_rank] * dist.get_world_size()
        dist.all_gather_object(checksums, of_rank, group)
        run = run | {"step": step}
        trouble = do_together(lambda: _complete(part, final, run, ChainMap(*checksums)), group, first_rank_only=True)
    if trouble is not None and dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)  # it may be what filled the disk
    return trouble


def do_together(
    action: Callable[[], object], group: dist.ProcessGroup | None = None, *, first_rank_only: bool = False
) -> str | None:
    """Run an action on every rank, or only on the first one while the others wait. Ranks communicate over `group`.

    Returns, the same on every rank, the first OSError with its rank; None if there was none.
    """
    rank, trouble = dist.get_rank(), None
    if rank == 0 or not first_rank_only:
        try:
            action()
        except OSError as error:
            trouble = f"rank {rank}: {error}"
    troubles: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(troubles, trouble, group)
    return next((trouble for trouble in troubles if trouble), None)


def load_checkpoint(folder: Path, parts: Sequence[Part], group: dist.ProcessGroup | None = None) -> None:
    """Read a checkpoint into the parameters and the optimisers, in place; every rank must call this. Ranks communicate
    over `group`.

    Raises:
        UserError: when the checkpoint lacks values that this rank needs.
    """
    load_tensors(folder, parts, group)
    num_steps = json.loads((folder / "run.json").read_text(encoding="utf-8"))["step"]
    for part in parts:
        part.optimizer.go_on_from(num_steps)


def _make_empty(folder: Path) -> None:
    """Make the folder to write to, and remove what an interrupted save has left."""
    for left in folder.parent.glob(".step-*.part"):
        shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(parents=True)


def _save_tensors(folder: Path, parts: Sequence[Part], group: dist.ProcessGroup | None) -> None:
    """Write each rank's tensors. If writing fails on any rank, all ranks raise OSError."""
    try:
        save_tensors(folder, parts, group)
    except dcp.api.CheckpointException as error:
        rank, first = min(((rank, failure[0]) for rank, failure in error.failures.items()), key=lambda pair: pair[0])
        if not all(map(_is_of_disk, (failure[0] for failure in error.failures.values()))):
            raise
        why = first if isinstance(first, OSError) else "torch could not write all bytes; is the disk full?"
        raise OSError(f"{why} (writing the tensors of rank {rank})") from None


def _is_of_disk(error: BaseException) -> bool:
    """Whether an error is of the disk. torch's own writer raises a RuntimeError that names its C++ file for a full
    disk."""
    is_of_writer = any(name in str(error) for name in ("inline_container", "PytorchStreamWriter"))
    return isinstance(error, OSError) or (isinstance(error, RuntimeError) and is_of_writer)


def _own_files(folder: Path) -> list[str]:
    """The files that this rank wrote; the first rank wrote their index as well."""
    names = [path.name for path in folder.glob(f"__{dist.get_rank()}_*")]
    return names + ([".metadata"] if dist.get_rank() == 0 else [])


def _complete(part: Path, final: Path, run: dict[str, Any], checksums: Mapping[str, tuple[int, str]]) -> None:
    """Write a checkpoint's last files, give it its name, and delete older ones."""
    (part / "run.json").write_text(json.dumps(run), encoding="utf-8")
    write_checksums(part, {**checksums, **checksums_of(part, ["run.json"])})
    if final.is_dir():
        shutil.rmtree(final)
    part.rename(final)
    for old in checkpoints_in(final.parent)[:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
