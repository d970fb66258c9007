"""Experiment trackers: TensorBoard, and Weights & Biases if its environment variables ask for it.

A tracker that fails does not stop a run: a warning is printed once, and the tracker is not used any more.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from dflop.base import UserError

__all__ = ["Trackers", "check_trackers"]

# The fields of `metrics.jsonl` that trackers get, and the names under which they get them.
_NAMES = {
    "loss": "loss/train",
    "evaluation_loss": "loss/evaluation",
    "lr": "lr",
    "grad_norm": "grad_norm",
    "step_s": "time/step_s",
    "predicted_step_s": "time/predicted_step_s",
    "idle": "time/idle",
}


def check_trackers(tensorboard: str) -> None:
    """Raise `UserError` if TensorBoard is asked for but not installed."""
    if tensorboard == "on" and not _is_installed("tensorboard"):
        raise UserError(
            "`train.tensorboard` is 'on', and the package tensorboard is not installed; `pip install tensorboard`, or "
            "set it to auto or off"
        )


class Trackers:
    """The first rank's trackers."""

    def __init__(self, out: Path, first_step: int, tensorboard: str) -> None:
        """`tensorboard` is auto, on or off. Events of steps from `first_step` on, as of a resumed run, are replaced."""
        self._trackers: dict[str, _Tracker] = {}
        if tensorboard != "off" and _is_installed("tensorboard"):
            self._start("TensorBoard", lambda: _TensorBoard(out / "tensorboard", first_step))
        if _asks_for_wandb():
            self._start("W&B", lambda: _WeightsAndBiases(out, first_step))

    def add(self, line: Mapping[str, Any]) -> None:
        """Pass a step on; `line` is its line of `metrics.jsonl`."""
        told = {shown: float(line[known]) for known, shown in _NAMES.items() if line.get(known) is not None}
        told["time/tokens_per_s"] = line["num_tokens"] / line["step_s"]
        told |= {f"seconds/{part}": seconds for part, seconds in line["seconds"]["mean_rank"].items()}
        for who, tracker in list(self._trackers.items()):
            try:
                tracker.add(line["step"], told)
            except Exception as error:
                self._give_up(who, error)

    def close(self) -> None:
        """Have everything written."""
        for who, tracker in list(self._trackers.items()):
            try:
                tracker.close()
            except Exception as error:
                self._give_up(who, error)

    def _start(self, who: str, open_it: Callable[[], "_Tracker"]) -> None:
        try:
            self._trackers[who] = open_it()
        except Exception as error:
            self._give_up(who, error)

    def _give_up(self, who: str, error: Exception) -> None:
        self._trackers.pop(who, None)
        print(f"dflop: warning: {who} failed and is not used any more: {error}", file=sys.stderr, flush=True)


class _Tracker(Protocol):
    def add(self, step: int, told: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step or None, flush_secs=10)

    def add(self, step: int, told: dict[str, float]) -> None:
        for name, value in told.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, out: Path, first_step: int) -> None:
        """A resumed run goes on under the id of the first one, unless `WANDB_RUN_ID` says another."""
        import wandb

        kept = out / "wandb" / "run_id"
        known = kept.read_text(encoding="utf-8") if first_step and kept.exists() else None
        run_id = os.environ.get("WANDB_RUN_ID", known)
        self._run = wandb.init(dir=str(out), name=out.absolute().parent.name, id=run_id, resume="allow")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(self._run.id, encoding="utf-8")

    def add(self, step: int, told: dict[str, float]) -> None:
        self._run.log(told, step=step)

    def close(self) -> None:
        self._run.finish()


def _asks_for_wandb() -> bool:
    """Whether W&B's own variables ask for it, and it is installed."""
    asks = os.environ.get("WANDB_PROJECT") or os.environ.get("WANDB_MODE")
    return bool(asks) and os.environ.get("WANDB_MODE") != "disabled" and _is_installed("wandb")


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
