"""What every rank of a training run does."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.utils import logging

from dflop.base import UserError
from dflop.config import load_config
from dflop.train.generation import Generation
from dflop.train.lost_loaders import allow_open_files, in_one_line, why_loading_ended
from dflop.train.run_folder import MeasuredOn, RunFiles
from dflop.train.stopping import StopRequest, end_loaders
from dflop.train.trainer import Trainer

# What NCCL says where its buffers do not fit into a device's memory.
_NCCL_SAYS = "out of memory", "Failed to CUDA calloc"


def main(request: dict) -> None:
    """Train the rank's part of a run, until its last step or until it is asked to stop.

    Raises:
        UserError: in one line, also where memory, a loader process or open files run out.
    """
    stop = StopRequest()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    logging.set_verbosity_error()
    allow_open_files()
    files = RunFiles(
        **{name: Path(request[name]) for name in ("shapes", "costs", "plan", "out")},
        generation=Generation(**request["generation"]),
        measured_on=MeasuredOn(*request["measured_on"]) if request["measured_on"] else None,
    )
    try:
        config = load_config(request["config"])
        if config.train.loader_workers is None:
            planned = request["loaders_of_ranks"][int(os.environ["RANK"])]
            config = replace(config, train=replace(config.train, loader_workers=planned))
        Trainer(config, files, stop).train()
    except UserError as error:
        raise UserError(in_one_line(error)) from None
    except (RuntimeError, OSError, EOFError) as error:  # torch raises one wherever the rank is when a loader dies
        if why := _why_full(error):
            reason = (
                f"rank {os.environ['RANK']} on {socket.gethostname()}: {why}. The plan was made for "
                f"{config.cluster.memory_gib:g} GiB: with a smaller `cluster.memory_gib` the next plan leaves more "
                "room, and training resumes from its last checkpoint"
            )
        elif not (reason := why_loading_ended(error)):
            raise
        raise UserError(reason) from None
    finally:
        end_loaders()


def _why_full(error: Exception) -> str | None:
    """What was asked for of a device's memory that is full; None for another error."""
    if isinstance(error, torch.OutOfMemoryError):
        return ". ".join(str(error).split(". ")[:2])
    is_full = isinstance(error, dist.DistBackendError) and any(said in str(error) for said in _NCCL_SAYS)
    return "NCCL's buffers do not fit: out of memory" if is_full else None
