"""The README's picture: what the ranks of one step compute, as torch deals its samples and as dflop's sampler does.

    python docs/even_ranks.py

The samples are those of the demo's data, which are drawn: pictures, clips and texts. Takes half a minute of one
core, writes `docs/figures/even-ranks.svg` and prints how long ranks wait.
"""

import contextlib
import tempfile
from pathlib import Path

import numpy as np
import polars as pl
from made_from_code import dflop, shapes_and_costs
from torch.utils.data import BatchSampler, DistributedSampler

from dflop import BalancedBatchSampler, sample_costs
from dflop.report.picture import Panel, Picture, as_given, layer, names, number, rows, write_picture
from dflop.report.style import colour, module_colour

NUM_RANKS, BATCH_SIZE = 8, 4
CONFIG = {
    "run": "even-ranks",
    "data": {"sources": [{"path": "data/train.json"}]},
    "model": {"preset": "llava_ov_7b"},
    "cluster": {"device": "cuda", "device_model": "h100-80g"},
    "costs": {"source": "analytic"},
    "train": {"precision": "bf16"},
}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        dflop("demo-data", "--out", "data", "--records", 320)
        shapes_and_costs(CONFIG)
        tokens = sample_costs("shapes.duckdb")[:, -1]
    ranks = range(NUM_RANKS)
    dealt = {
        "as torch deals them": [
            list(BatchSampler(DistributedSampler(tokens, NUM_RANKS, rank, seed=0), BATCH_SIZE, drop_last=True))
            for rank in ranks
        ],
        "dealt by dflop's sampler": [
            list(BalancedBatchSampler(tokens, BATCH_SIZE, NUM_RANKS, rank, padded=False, drop_last=True))
            for rank in ranks
        ],
    }
    draw(Path(__file__).parent / "figures/even-ranks.svg", tokens, dealt)


def draw(path: Path, tokens: np.ndarray, dealt: dict[str, list[list[list[int]]]]) -> None:
    """The first step of an epoch, a bar a rank, a piece a sample; titles say how long ranks wait in a whole epoch."""
    most = max(tokens[batches[0]].sum() for batches in dealt["as torch deals them"])
    panels = []
    for how, ranks in dealt.items():
        loads = np.array([[tokens[batch].sum() for batch in batches] for batches in ranks])
        waiting = 1 - loads.mean(axis=0).sum() / loads.max(axis=0).sum()
        print(f"{how}: ranks wait {waiting:.0%} of an epoch of {loads.shape[1]} steps")
        table = []
        for rank, batches in enumerate(ranks):
            ends = np.cumsum(np.sort(tokens[batches[0]])[::-1])
            for number_of, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
                shade = module_colour("llm", ("forward", "backward")[number_of % 2])
                table.append({"rank": f"rank {rank}", "start": float(start), "end": float(end), "colour": shade})
            if loads[rank, 0] < loads[:, 0].max():
                idle = {"start": float(loads[rank, 0]), "end": float(loads[:, 0].max()), "colour": colour("line")}
                table.append({"rank": f"rank {rank}"} | idle)
        bars = layer("bar", look={"height": {"band": 0.75}}, color=as_given("colour"), x2="end")
        axis = {"scale": {"domain": [0, float(most)]}, "axis": {"grid": False}}
        encoding = {"x": number("start", "tokens of the LLM", **axis), "y": names("rank")}
        title = f"{how}: over an epoch, ranks wait {waiting:.0%} of the time"
        view = {"data": rows(pl.DataFrame(table)), "encoding": encoding, "layer": [bars]}
        panels.append(Panel(title=title, view=view, height=210))
    finding = "One step of eight ranks, the same 32 samples: all wait for the rank that has most"
    note = (
        "Each piece is a sample of the demo's data (pictures, clips, texts), packed, at its number of tokens. "
        "Grey: waiting, if a token takes the same time everywhere."
    )
    write_picture(Picture(section="", finding=finding, note=note, panels=panels, columns=2), path)


if __name__ == "__main__":
    main()
