"""Checkpoints: parameters and optimiser state by parameter name, so that any layout can resume them.

`torch.distributed.checkpoint` writes and reads them. A checkpoint is a folder `step-000010`, complete once
it has that name; beside the tensors lies `run.json`, which says what run it belongs to.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

__all__ = ["find_checkpoint", "load_checkpoint", "save_checkpoint", "set_aside"]

_KEPT = 2
_NAME = re.compile(r"step-(\d{6,})")


def save_checkpoint(
    folder: Path, step: int, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, run: dict[str, Any]
) -> None:
    """Write `folder/step-<step>`; every rank must call this. The last two checkpoints are kept."""
    final = folder / f"step-{step:06d}"
    part = folder / f".{final.name}.part"
    is_main = dist.get_rank() == 0
    if is_main:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    dist.barrier()
    dcp.save(_tensors(parameters, optimizer), checkpoint_id=part)
    if is_main:
        (part / "run.json").write_text(json.dumps(run | {"step": step}), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        for old in _checkpoints(folder)[:-_KEPT]:
            shutil.rmtree(old)
    dist.barrier()


def load_checkpoint(folder: Path, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Read a checkpoint into the parameters and the optimiser, in place; every rank must call this."""
    for parameter in parameters.values():
        if parameter.requires_grad and parameter not in optimizer.state:
            optimizer.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    dcp.load(_tensors(parameters, optimizer), checkpoint_id=folder)


def find_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The latest complete checkpoint and its `run.json`."""
    found = _checkpoints(folder)
    return (found[-1], json.loads((found[-1] / "run.json").read_text(encoding="utf-8"))) if found else None


def set_aside(folder: Path) -> Path:
    """Move a folder out of the way without losing it; returns where it went."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside


def _checkpoints(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(
        (path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=lambda path: int(path.name[5:])
    )


def _tensors(parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        tensors[f"model/{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{name}/{key}"] = value
    return tensors
