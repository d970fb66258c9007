"""What every rank does to measure costs.

On GPUs there are tp ranks. On CPUs there are as many as training will have on the node, and all run the same point
at the same time: cores share caches and memory, and a rank alone on the machine would be faster than in training.
"""

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
import torch
import torch.distributed as dist
from transformers.utils import logging

from dflop.base import UserError, progress_bar
from dflop.base.devices import COMMUNICATOR_BYTES, find_device
from dflop.base.local_device import device_name, local_device
from dflop.base.rendezvous import join_ranks, leave_ranks
from dflop.config import Config, load_config
from dflop.costs.clocks import sm_mhz
from dflop.costs.design import Design, LoadBounds, Point, fitted_depths, load_bounds
from dflop.costs.measure import Bench
from dflop.costs.measured import POINT_KEYS, Measured, measured_as, write_measured
from dflop.models import digest_of_spec, load_model_spec
from dflop.models.attention import kernel_name
from dflop.models.compilation import compiles_layers
from dflop.models.compile_log import Stopwatch
from dflop.models.precision import COMPUTES_IN
from dflop.models.tensor_group import ALONE, TensorGroup
from dflop.plan.layout_key import LayoutKey
from dflop.shapes import ChatTokenizer

# A point may take minutes on a large model. Other ranks shall not wait much longer than that for one that is gone.
_TIMEOUT = timedelta(minutes=5)


def main(request: dict[str, Any]) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    logging.set_verbosity_error()
    try:
        _measure(load_config(request["config"], has_cluster=False), request)
    finally:
        if dist.is_initialized():
            leave_ranks()


def _measure(config: Config, request: dict[str, Any]) -> None:
    spec, module, tp = load_model_spec(config.model), request["module"], request["tp"]
    is_cuda = config.cluster.device == "cuda"
    device = local_device(config.cluster.device)
    join_ranks("cpu:gloo,cuda:nccl" if is_cuda else "gloo", timeout=_TIMEOUT)
    ranks = _tp_ranks(tp) if tp > 1 else ALONE
    meeting_bytes = bytes_of_meeting(ranks, device)
    bounds = load_bounds(Path(request["bounds"])) if request["bounds"] else LoadBounds()
    tokenizer = ChatTokenizer(Path(request["tokenizer"]), spec.rules)
    bench = Bench(
        spec,
        module,
        fitted_depths(spec.module(module).num_layers)[-1],
        placeholder_ids=tokenizer.placeholder_ids,
        vocab_size=tokenizer.vocab_size(spec.media),
        device=device,
        precision=config.train.precision,
        is_compiled=compiles_layers(config.train.compile, device)[0],
        trained=config.model.trained,
        ranks=ranks,
    )
    design = Design(
        module,
        LayoutKey(tp),
        spec.module(module).num_layers,
        bounds,
        repeats=config.costs.repeats,
        target_error=config.costs.target_error,
        time_budget_s=config.costs.time_budget_s,
        room_bytes=bench.room_bytes(),
    )
    parameters, mhz_before = bench.parameter_sizes(bounds), sm_mhz(device)
    rows: list[dict[str, Any]] = []
    started, spent = time.monotonic(), Stopwatch()  # compiling would leave little of the budget for measuring
    budget_s, failure = config.costs.time_budget_s, None
    with progress_bar(total=round(budget_s), unit="s", disable=dist.get_rank() != 0) as bar:
        while True:
            asked = None
            if dist.get_rank() == 0 and (spent.seconds < budget_s or not design.is_covered):
                try:
                    asked = design.next(rows, parameters)
                except UserError as error:
                    failure = error
            asked = _told(asked)
            if asked is None:
                break
            measured = bench.measure(*asked)
            rows += measured
            seconds = [row["seconds"] for row in measured]
            design.took(asked[0], None if None in seconds else sum(seconds), measured[0]["peak_bytes"])
            bar.update(min(round(budget_s), round(spent.seconds)) - bar.n)
            error = f", held-out error {design.error[0]:.1%} (p95 {design.error[1]:.0%})" if design.error else ""
            bar.set_description_str(f"{module} tp={tp}: {len(rows)} measurements{error}", refresh=False)
    failed = torch.tensor([failure is not None])
    dist.broadcast(failed, src=0)
    if failed.item():
        raise failure or UserError("rank 0 says why")
    device_row = _about(config, request, bench, digest_of_spec(spec), time.monotonic() - started)
    device_row["overhead_bytes"] = max(0, device_row["overhead_bytes"] - meeting_bytes)
    device_row |= {"sm_mhz_before": mhz_before, "sm_mhz_after": sm_mhz(device)}
    if dist.get_rank() == 0:
        points = pl.DataFrame(rows, infer_schema_length=None).sort(*POINT_KEYS, "pass", "repeat")
        write_measured(Path(request["out"]), Measured(points, parameters, pl.DataFrame([device_row])))
    dist.barrier()


def _tp_ranks(tp: int) -> TensorGroup:
    """The tensor-parallel group of this rank, with the same timeout as the other groups."""
    for first in range(0, dist.get_world_size(), tp):
        ranks = tuple(range(first, first + tp))
        group = dist.new_group(list(ranks), timeout=_TIMEOUT)  # all ranks make all groups
        if dist.get_rank() in ranks:
            own = TensorGroup(ranks, ranks.index(dist.get_rank()), group)
    return own


def bytes_of_meeting(ranks: TensorGroup, device: torch.device) -> int:
    """Bytes of a GPU that the communicator of these ranks takes from their first message on. Plans count their
    communicators by themselves."""
    if device.type == "cpu" or ranks.size == 1:
        return 0
    values = torch.zeros(1, device=device)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    dist.all_reduce(values, group=ranks.group)
    torch.cuda.synchronize(device)
    return free_bytes - torch.cuda.mem_get_info(device)[0]


def _about(config: Config, request: dict[str, Any], bench: Bench, model: str, seconds: float) -> dict[str, Any]:
    """The row of the table `device`. Every rank must call this, since it runs a point once more."""
    overhead_bytes, allocator_share = bench.overhead()
    return {
        "module": request["module"],
        "tp": request["tp"],
        "model": model,
        "device": device_name(bench.device),
        "device_model": config.cluster.device_model,
        "source": "measured",
        "precision": config.train.precision,
        "torch": torch.__version__,
        "num_ranks": dist.get_world_size(),
        "threads": torch.get_num_threads(),
        **measured_as(config.model.trained.among(load_model_spec(config.model).modules), request["module"]),
        "overhead_bytes": overhead_bytes,
        "communicator_bytes": _communicator_bytes(config),
        "allocator_share": allocator_share,
        "seconds": seconds,
        "update_bytes_per_s": bench.update_bytes_per_s(),
        "config_digest": request["config_digest"],
        "attention": kernel_name(bench.device, COMPUTES_IN[config.train.precision]),
    }


def _communicator_bytes(config: Config) -> int:
    """What is assumed of a GPU's communicators; `fit-costs` takes what `profile-links` measured, if it did."""
    if config.cluster.device != "cuda":
        return 0
    models_file = config.cluster.device_models
    known = find_device(config.cluster.device_model, Path(models_file) if models_file else None)
    return int(known.communicator_bytes if known else COMMUNICATOR_BYTES)


def _told(asked: tuple[Point, int] | None) -> tuple[Point, int] | None:
    """Rank 0's point and repeat, broadcast to every rank; None ends measuring."""
    text = torch.tensor(list(json.dumps(asked).encode()), dtype=torch.uint8)
    size = torch.tensor([len(text)])
    dist.broadcast(size, src=0)
    if dist.get_rank() != 0:
        text = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(text, src=0)
    told = json.loads(bytes(text.tolist()))
    if told is None:
        return None
    (piece, depth, checkpointing, num_items, segments, num_targets), repeat = told
    return Point(piece, depth, checkpointing, num_items, tuple(segments), num_targets), repeat
