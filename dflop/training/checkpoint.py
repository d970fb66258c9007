"""Checkpoints: parameters and AdamW's moments by parameter name, so that any layout can resume them.

`torch.distributed.checkpoint` writes and reads them. Moments are written by their owners, in the pieces that these
own: `optimizer/NAME/exp_avg/START` holds a run of the flattened parameter's. A checkpoint is a folder `step-000010`,
complete once it has that name; beside the tensors lies `run.json`, which says what run it belongs to.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from dflop.runtime import UserError
from dflop.training.run_folder import checkpoints_in
from dflop.training.sharded_optimizer import ShardedAdamW

__all__ = ["load_checkpoint", "save_checkpoint"]

_KEPT = 2
_READ_BYTES = 256 * 2**20


class Part(Protocol):
    """Parameters by their names in the whole model, and the optimiser that trains them."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]: ...

    @property
    def optimizer(self) -> ShardedAdamW: ...


def save_checkpoint(folder: Path, step: int, parts: Sequence[Part], run: dict[str, Any]) -> None:
    """Write `folder/step-<step>` from the parts of each rank; every rank must call this.

    The last two checkpoints are kept.
    """
    final = folder / f"step-{step:06d}"
    part = folder / f".{final.name}.part"
    is_main = dist.get_rank() == 0
    if is_main:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    dist.barrier()
    dcp.save(_parameters(parts) | _moments(parts), checkpoint_id=part)
    if is_main:
        (part / "run.json").write_text(json.dumps(run | {"step": step}), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        for old in checkpoints_in(folder)[:-_KEPT]:
            shutil.rmtree(old)
    dist.barrier()


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
