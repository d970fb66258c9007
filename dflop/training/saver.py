"""Checkpoints written beside training: a step's state is copied at once, and a thread writes the copy to disk.

Ranks agree over a process group of their own, of gloo, so that nothing that a thread says comes between what training
says. One checkpoint at most is being written; the next one waits for it. torch's own `async_save` would write the
tensors as well, but a checkpoint is not whole with them: checksums, the run's own file and the folder's name come
after them, and only where no rank failed.
"""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dflop.models.tensor_group import Shard
from dflop.training.checkpoint import do_together, save_checkpoint
from dflop.training.checkpoint_tensors import Part
from dflop.training.observations import Observations
from dflop.training.sharded_optimizer import Piece

__all__ = ["CheckpointSaver"]


class CheckpointSaver:
    """One rank's; every rank must make it and call its methods in the same order."""

    def __init__(self, folder: Path, observations: Observations) -> None:
        self._folder, self._observations = folder, observations
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._copies: dict[tuple[int, str, str], torch.Tensor] = {}
        # What kept any rank from writing the last checkpoint that was ended, with the steps that it is of.
        self.unsaved: tuple[int, str] | None = None

    def save(self, num_steps: int, parts: Sequence[Part], run: Mapping[str, Any]) -> None:
        """Begin to write the checkpoint behind so many steps, and what was observed up to there. Returns when both are
        copied, and the checkpoint before is written."""
        self.wait()
        staged = [self._staged(number, part) for number, part in enumerate(parts)]
        if any(part.is_cuda for own in parts for part in own.parameters.values()):
            torch.cuda.synchronize()
        observed = self._observations.take()

        def write() -> None:
            try:
                trouble = do_together(lambda: self._observations.write(observed, num_steps), self._group)
                trouble = trouble or save_checkpoint(self._folder, num_steps, staged, dict(run), self._group)
                self.unsaved = (num_steps, trouble) if trouble else None
            except BaseException as error:  # for `wait` to raise
                self._error = error

        # A daemon: no process that ends waits for one that another rank has left alone.
        self._thread = threading.Thread(target=write, daemon=True, name="checkpoint-saver")
        self._thread.start()

    def wait(self) -> None:
        """Return when no checkpoint is being written; raise what ended the writing, other than a file system."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self, most_s: float) -> None:
        """Give a checkpoint that is being written so much time, where training has ended with an error."""
        if self._thread is not None:
            self._thread.join(most_s)

    def _staged(self, number: int, part: Part) -> "_StagedPart":
        parameters: dict[str, torch.Tensor] = {}
        pieces: dict[torch.Tensor, list[Piece]] = {}
        for name, parameter in part.parameters.items():
            if name in part.written_elsewhere:
                continue
            own = parameters[name] = parameter.detach()  # of which the shape is read, and no value
            pieces[own] = [
                self._copied(piece, (number, f"{name}/{piece.start}")) for piece in part.optimizer.pieces(parameter)
            ]
        return _StagedPart(parameters, part.shards, _StagedPieces(pieces))

    def _copied(self, piece: Piece, key: tuple[int, str]) -> Piece:
        moments = {name: self._copy((*key, name), values) for name, values in piece.moments.items()}
        return Piece(piece.start, self._copy((*key, "masters"), piece.masters), moments)

    def _copy(self, key: tuple[int, str, str], values: torch.Tensor) -> torch.Tensor:
        """In the host's memory, at the same place each time: pages that are new cost more than what is copied."""
        if key not in self._copies:
            self._copies[key] = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
        return self._copies[key].copy_(values, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _StagedPieces:
    """What this replica held of each parameter."""

    of_parameter: Mapping[torch.Tensor, list[Piece]]

    def pieces(self, parameter: torch.Tensor) -> list[Piece]:
        return self.of_parameter[parameter]


@dataclass(frozen=True, slots=True)
class _StagedPart:
    """A part as it was when it was copied."""

    parameters: Mapping[str, torch.Tensor]
    shards: Mapping[str, Shard]
    optimizer: _StagedPieces
    written_elsewhere: Collection[str] = ()
