"""Checkpoints: parameters and AdamW's moments by parameter name, so that any layout can resume them.

`torch.distributed.checkpoint` writes and reads them. Moments are written by their owners, in the pieces that these
own: `optimizer/NAME/exp_avg/START` holds a run of the flattened parameter's. A checkpoint is a folder `step-000010`,
complete once it has that name; beside the tensors lie `run.json`, which says what run it belongs to, and a checksum of
every file (`checkpoint_files`).
"""

import json
import shutil
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dflop.runtime import UserError
from dflop.training.checkpoint_files import checkpoints_in, checksums_of, write_checksums
from dflop.training.sharded_optimizer import Piece

__all__ = ["Part", "do_together", "load_checkpoint", "save_checkpoint"]

_KEPT = 2
_READ_BYTES = 256 * 2**20


class Owned(Protocol):
    """An optimiser, or what is saved of one."""

    def pieces(self, parameter: torch.Tensor) -> list[Piece]: ...


class Part(Protocol):
    """Parameters by their names in the whole model, and the optimiser that trains them."""

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def optimizer(self) -> Owned: ...


def save_checkpoint(
    folder: Path, step: int, parts: Sequence[Part], run: dict[str, Any], group: dist.ProcessGroup | None = None
) -> str | None:
    """Write `folder/step-<step>` from the parts of each rank; every rank must call this. Ranks agree over `group`.

    Returns, on every rank alike, what kept any of them from writing, such as a full disk; None where all is written.
    What was there before is then still there. Otherwise the last two checkpoints are kept.
    """
    final = folder / f"step-{step:06d}"
    part = folder / f".{final.name}.part"
    own: dict[str, tuple[int, str]] = {}

    def write() -> None:
        _save_tensors(part, parts, group)
        own.update(checksums_of(part, _own_files(part)))

    trouble = do_together(lambda: _make_empty(part), group, first_rank_only=True) or do_together(write, group)
    if trouble is None:
        checksums = [own] * dist.get_world_size()
        dist.all_gather_object(checksums, own, group)
        run = run | {"step": step}
        trouble = do_together(lambda: _complete(part, final, run, ChainMap(*checksums)), group, first_rank_only=True)
    if trouble is not None and dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)  # it may be what fills the disk
    return trouble


def do_together(
    action: Callable[[], object], group: dist.ProcessGroup | None = None, *, first_rank_only: bool = False
) -> str | None:
    """Run an action on every rank, or on the first one while the others wait. Ranks agree over `group`.

    Returns, on every rank alike, which rank the file system failed and how; None where it failed none.
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


def load_checkpoint(folder: Path, parts: Sequence[Part]) -> None:
    """Read a checkpoint into the parameters and the optimisers, in place; every rank must call this.

    Moments come piece by piece, so that other pieces than this rank's own take `_READ_BYTES` at once, or one piece.

    Raises:
        UserError: when the checkpoint lacks some of what this rank has.
    """
    parameters = _parameters(parts)
    dcp.load(parameters, checkpoint_id=folder)
    rounds = list(_rounds(_copies(folder, _moments(parts))))
    num_rounds = torch.tensor(len(rounds), device=next(iter(parameters.values())).device)
    dist.all_reduce(num_rounds, dist.ReduceOp.MAX)  # reading is done by all ranks together
    for number in range(int(num_rounds)):
        copies = rounds[number] if number < len(rounds) else []
        read = {copy.source: copy.values.new_empty(copy.source_size) for copy in copies}
        dcp.load(read, checkpoint_id=folder)
        for copy in copies:
            copy.values.copy_(read[copy.source][copy.place])
    num_steps = json.loads((folder / "run.json").read_text(encoding="utf-8"))["step"]
    for own in parts:
        own.optimizer.set_num_steps(num_steps)


def _make_empty(folder: Path) -> None:
    """Make the folder to write to; what saving left that was cut short goes."""
    for left in folder.parent.glob(".step-*.part"):
        shutil.rmtree(left, ignore_errors=True)
    folder.mkdir(parents=True)


def _save_tensors(folder: Path, parts: Sequence[Part], group: dist.ProcessGroup | None) -> None:
    """Each rank's tensors. Where writing failed on any rank, all raise."""
    try:
        dcp.save(_parameters(parts) | _moments(parts), checkpoint_id=folder, process_group=group)
    except dcp.api.CheckpointException as error:
        rank, first = min(((rank, failure[0]) for rank, failure in error.failures.items()), key=lambda pair: pair[0])
        if not all(map(_is_of_disk, (failure[0] for failure in error.failures.values()))):
            raise
        why = first if isinstance(first, OSError) else "torch could not write all bytes; is the disk full?"
        raise OSError(f"{why} (writing the tensors of rank {rank})") from None


def _is_of_disk(error: BaseException) -> bool:
    """torch's own writer meets a file that takes no more bytes with a RuntimeError of the C++ file that it is in."""
    is_of_writer = any(name in str(error) for name in ("inline_container", "PytorchStreamWriter"))
    return isinstance(error, OSError) or (isinstance(error, RuntimeError) and is_of_writer)


def _own_files(folder: Path) -> list[str]:
    """The files that this rank wrote; the first rank wrote their index as well."""
    own = [path.name for path in folder.glob(f"__{dist.get_rank()}_*")]
    return own + ([".metadata"] if dist.get_rank() == 0 else [])


def _complete(part: Path, final: Path, run: dict[str, Any], checksums: Mapping[str, tuple[int, str]]) -> None:
    """Give a checkpoint its last files and its name; older ones are let go."""
    (part / "run.json").write_text(json.dumps(run), encoding="utf-8")
    write_checksums(part, {**checksums, **checksums_of(part, ["run.json"])})
    if final.is_dir():
        shutil.rmtree(final)
    part.rename(final)
    for old in checkpoints_in(final.parent)[:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)


class _Copy(NamedTuple):
    """Values to be filled from a part of a saved piece."""

    values: torch.Tensor
    source: str
    source_size: int
    place: slice


def _copies(folder: Path, moments: dict[str, torch.Tensor]) -> list[_Copy]:
    """What fills these moments from the pieces of a checkpoint, by source."""
    saved: dict[str, list[tuple[int, int]]] = {}  # of each moment where its pieces start and how long they are
    for key, entry in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        if key.startswith("optimizer/"):
            moment, start = key.rsplit("/", 1)
            saved.setdefault(moment, []).append((int(start), entry.size[0]))
    copies = []
    for key, values in moments.items():
        moment, start = key.rsplit("/", 1)
        first, last = int(start), int(start) + len(values)
        num_filled = 0
        for begin, size in saved.get(moment, ()):
            low, high = max(first, begin), min(last, begin + size)
            if low < high:
                num_filled += high - low
                place = slice(low - begin, high - begin)
                copies.append(_Copy(values[low - first : high - first], f"{moment}/{begin}", size, place))
        if num_filled != len(values):
            raise UserError(
                f"{folder} holds {num_filled} of {len(values)} values of {key}; it is not whole, so delete it, and "
                "training goes on from the one before"
            )
    return sorted(copies, key=lambda copy: copy.source)


def _rounds(copies: list[_Copy]) -> Iterator[list[_Copy]]:
    """Copies whose sources together take at most `_READ_BYTES`, or one of them."""
    own: list[_Copy] = []
    for copy in copies:
        sizes = {other.source: other.source_size for other in (*own, copy)}
        if own and sum(sizes.values()) * copy.values.itemsize > _READ_BYTES:
            yield own
            own = []
        own.append(copy)
    if own:
        yield own


def _parameters(parts: Sequence[Part]) -> dict[str, torch.Tensor]:
    return {f"model/{name}": parameter.detach() for own in parts for name, parameter in own.parameters.items()}


def _moments(parts: Sequence[Part]) -> dict[str, torch.Tensor]:
    return {
        f"optimizer/{name}/{moment}/{piece.start}": values
        for own in parts
        for name, parameter in own.parameters.items()
        for piece in own.optimizer.pieces(parameter)
        for moment, values in piece.moments.items()
    }
