"""Two ranks on one card, in layouts of each kind, against the whole model in one process on the CPU.

NCCL refuses two ranks of one card, so they exchange over gloo (`host_group.py`). Streams and slots of memory are those
of GPUs.
"""

import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from layout_plans import PLANS
from layouts import NUM_STEPS, Precision, run_rank, write_case, write_expected
from small_runs import prepare
from torch.multiprocessing import get_context

from dflop.config import load_config
from dflop.costs import CostModel
from dflop.demo import make_demo_data
from dflop.models import load_model_spec
from dflop.schedule import GlobalBatches
from dflop.shapes import load_samples
from dflop.train import wires
from tests.gpu import host_group
from tests.gpu.check import Figures, Setting

__all__ = ["in_layouts"]

_LAYOUTS = (
    "disjoint 1+1",
    "monolithic pp 2",
    "colocated pp 2",
    "colocated LLM tp 2",
    "parameters 2",
    "samples over 2, monolithic",
)
_VARIANT = "plain"
# Weights move by up to the rate of 1e-3 a step where a gradient is little more than rounding.
_SINGLE = {"dtype": torch.float32, "loss": 1e-5, "gradients": 1e-5, "later_gradients": 1e-3, "weights": 3e-3}
_LONGEST_S = 240.0


def in_layouts(setting: Setting) -> Figures:
    """Of each layout 1 if ranks differ from the whole model, else 0. What differs is in the log."""
    folder = setting.folder / "two-ranks"
    (folder / "data").mkdir(parents=True, exist_ok=True)
    make_demo_data(folder / "data", num_records=48)
    made, values = prepare(folder, [folder / "data" / "train.json"], "llava_onevision")
    samples, _ = load_samples(made / "shapes.duckdb", load_model_spec(load_config(values).model).encoders)
    batches = GlobalBatches(len(samples), 8, 0)
    chosen = [samples.take(batches[step]) for step in range(NUM_STEPS[_VARIANT])]
    write_expected(folder, _VARIANT, values, chosen)
    costs, figures = CostModel.load(made / "costs.duckdb"), {}
    for name in _LAYOUTS[2:3] if setting.is_tiny else _LAYOUTS:
        write_case(folder, name, _VARIANT, values, costs, samples, batches)
        figures[f"differs: {name}"] = float(not _agrees(folder, name, setting))
    return figures


def _agrees(folder: Path, name: str, setting: Setting) -> bool:
    """Whether both ranks, each a process, find what is expected."""
    context = get_context("spawn")
    ranks = [
        context.Process(target=_run, args=(rank, folder, name, setting.device))
        for rank in range(PLANS[name].world_size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(_LONGEST_S)
        rank.kill()
        rank.join()
    return all(rank.exitcode == 0 for rank in ranks)


def _run(rank: int, folder: Path, name: str, device: str) -> None:
    host_group.register()
    # In the place of NCCL's ways to make groups.
    wires.message_group = lambda _, timeout: dist.new_group(timeout=timeout)
    dist.split_group = _split
    where = "cuda:0" if device == "cuda" else device
    torch.backends.cudnn.allow_tf32 = False  # in which convolutions would compute otherwise
    try:
        run_rank(rank, folder, [(name, _VARIANT)], Precision(device=where, backend=host_group.BACKEND, **_SINGLE))
    except Exception:
        traceback.print_exc()
        raise


def _split(split_ranks: list[list[int]], timeout) -> dist.ProcessGroup | None:
    made = {tuple(ranks): dist.new_group(ranks, timeout=timeout) for ranks in split_ranks}
    return next((group for ranks, group in made.items() if dist.get_rank() in ranks), None)
