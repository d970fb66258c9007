"""Asynchronous checkpoints: a step's state is copied at once, and a thread writes the copy to disk.

The threads communicate over a process group of their own, on gloo, so that their messages never mix with those of
training. At most one checkpoint is being written, and the next one waits for it. torch's own `async_save` could write
the tensors, but they are not a whole checkpoint: checksums, `run.json` and the folder's name follow, and only if no
rank has failed.
"""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dflop.models.tensor_group import Shard
from dflop.train.adamw import Piece
from dflop.train.checkpoint import do_together, save_checkpoint
from dflop.train.checkpoint_tensors import Part
from dflop.train.host_buffer import HostBuffer
from dflop.train.observations import Observations

__all__ = ["CheckpointSaver"]

# How long a rank waits for another one to write: a shared file system may be slow. Silent ranks are found much earlier.
_LONGEST_WRITE = timedelta(hours=1)


class CheckpointSaver:
    """One rank's saver. Every rank must construct it, and call `save` and `wait` in the same order.

    Over `group` ranks wait for each other's files. Use it only while no checkpoint is being written.
    """

    def __init__(self, folder: Path, observations: Observations) -> None:
        self._folder, self._observations = folder, observations
        self.group = dist.new_group(backend="gloo", timeout=_LONGEST_WRITE)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._buffer = HostBuffer()
        # The number of steps of the last checkpoint, and why it could not be written; None if it was written.
        self.unsaved: tuple[int, str] | None = None

    def save(self, num_steps: int, parts: Sequence[Part], run: Mapping[str, Any]) -> None:
        """Begin to write the checkpoint after `num_steps` steps, and the observations up to there. Returns when both
        are copied, which is after the checkpoint before has been written.

        Raises:
            Exception: as `wait`.
        """
        self.wait()
        staged = self._staged(parts)
        observed = self._observations.take()

        def write() -> None:
            try:
                trouble = do_together(lambda: self._observations.write(observed, num_steps), self.group)
                trouble = trouble or save_checkpoint(self._folder, num_steps, staged, dict(run), self.group)
                self.unsaved = (num_steps, trouble) if trouble else None
            except BaseException as error:  # for `wait` to raise
                self._error = error

        # A daemon: no process that ends waits for one that another rank has left alone.
        self._thread = threading.Thread(target=write, daemon=True, name="checkpoint-saver")
        self._thread.start()

    def wait(self) -> None:
        """Return when no checkpoint is being written.

        Raises:
            Exception: what ended the writing, unless it was an error of the file system (see `unsaved`).
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self, most_s: float) -> None:
        """After an error in training, wait at most `most_s` seconds for a checkpoint that is being written."""
        if self._thread is not None:
            self._thread.join(most_s)

    def _staged(self, parts: Sequence[Part]) -> list["_StagedPart"]:
        """Copies of the parts, in the same buffer each time: allocating new pages takes longer than copying."""
        pieces = [
            {
                name: part.optimizer.pieces(parameter)
                for name, parameter in part.parameters.items()
                if name not in part.written_elsewhere
            }
            for part in parts
        ]
        of_names = (of_name for of_part in pieces for of_name in of_part.values())
        values = [tensor for own in of_names for piece in own for tensor in (piece.masters, *piece.moments.values())]
        copies = iter(self._buffer.copies_of(values))
        staged = []
        for part, of_part in zip(parts, pieces, strict=True):
            parameters = {name: part.parameters[name].detach() for name in of_part}  # only their shapes are read
            copied = {
                parameters[name]: [
                    Piece(piece.start, next(copies), {kind: next(copies) for kind in piece.moments})
                    for piece in of_name
                ]
                for name, of_name in of_part.items()
            }
            staged.append(_StagedPart(parameters, part.shards, _StagedPieces(copied)))
        return staged


@dataclass(frozen=True, slots=True)
class _StagedPieces:
    """The copied pieces of each parameter that this replica holds."""

    of_parameter: Mapping[torch.Tensor, list[Piece]]

    def pieces(self, parameter: torch.Tensor) -> list[Piece]:
        return self.of_parameter[parameter]


@dataclass(frozen=True, slots=True)
class _StagedPart:
    """A copy of a part."""

    parameters: Mapping[str, torch.Tensor]
    shards: Mapping[str, Shard]
    optimizer: _StagedPieces
    written_elsewhere: Collection[str] = ()
