"""Runs that others published, beside what the analytic cost model and the simulator say of them.

The summary is in docs/explanation/measurements/.

    python tests/benchmarks/published.py --runs FOLDER

FOLDER holds `mpt_fsdp.csv` (MosaicML llm-foundry's table of MPT models under FSDP) and `llm_runs.json` (single runs of
Llamas under Megatron and torchtitan), each with its sources. Every row is priced with the device's entry in
`dflop/base/devices.yaml`, whose constants are the same for all rows, and with the implementation that was used:

- MPT: LayerNorm, a GELU MLP of four times the width, no biases, the head tied to the embedding, eager. Its attention
  has position biases (ALiBi), and its kernels are taken to compute the whole square of a segment, not half of it: the
  rows of 32,768 and 65,536 tokens ask for it on both cards.
- Megatron's layers, which are fused, are `compiled`; a run in fp16 keeps its gradients in 2 bytes, not in 4.
- torchtitan is `eager` or `compiled`. Its selective recomputation keeps every second product and attention's
  result: backward does half of a layer's products again, which is priced between none and all of a layer.

Logits of all targets are taken at once, where dflop takes the loss over chunks of them. The optimiser's step, which is
short, is not priced. Prints each row and the errors, and writes
`results/benchmarks/published.json`.

The stricter test is that of layouts: two runs of one model, with samples of one length on the same cards, differ in
devices, microbatches or implementation; how much longer does one take for a token of a device than the other? What such
a ratio gets wrong, no constant of the card can mend.
"""

import argparse
import csv
import itertools
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import polars as pl
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers.modeling_layers import GradientCheckpointingLayer

from dflop.base.devices import DeviceModel, load_device
from dflop.config.schema import ClusterConfig
from dflop.costs import CostModel
from dflop.costs.analytic import AnalyticPoints, points_of_stage
from dflop.costs.counted import CountedStage, counting
from dflop.costs.fit import fit_model, median_points
from dflop.models import family_of
from dflop.models.attention import packed_attention
from dflop.models.microbatch import SegmentEnds
from dflop.models.spec import ModelSpec
from dflop.models.stages import LlmStage
from dflop.plan import Grid, Plan
from dflop.schedule import Pricer
from dflop.shapes import SampleShapes

REPOSITORY = Path(__file__).parents[2]
# Hidden size, layers and heads of MPT models.
MPT = {"760m": (1536, 24, 12), "1b": (2048, 24, 16), "7b": (4096, 32, 32), "30b": (7168, 48, 56)}
MPT_VOCABULARY = 50_368
DEVICES_A_NODE = 8
LEAST_DIFFERENCE = 0.03
ALIKE = 0.005  # predicted times that differ by less have no order
# How hardware is named in `llm_runs.json`, and the entry that describes it.
HARDWARE = {"A800": "a800-80g", "H100 96GB": "h100-96g"}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One published run. `recompute` is none, all or selective; `sizes` is the LLM's config as JSON, to be hashed."""

    name: str
    device: str
    sizes: str
    tp: int = 1
    pp: int = 1
    dp: int
    sharding: str
    recompute: str
    implementation: str
    seq_len: int
    microbatch_size: int
    num_microbatches: int
    network_gbps: float | None = None
    gradient_bytes: int = 4
    published_s: float
    allocated_gib: float | None = None
    reserved_gib: float | None = None

    @property
    def device_tokens(self) -> float:
        """Tokens of a step for each device."""
        return self.seq_len * self.microbatch_size * self.num_microbatches / (self.tp * self.pp)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="a folder with mpt_fsdp.csv and llm_runs.json")
    arguments = parser.parse_args()
    rows = []
    print(f"{'run':46} {'published':>9} {'predicted':>9}  {'of it':>5}   {'GiB':>5} {'predicted':>9}  of it")
    for run in (*mpt_runs(arguments.runs / "mpt_fsdp.csv"), *single_runs(arguments.runs / "llm_runs.json")):
        step_s, allocated_gib, reserved_gib = predicted(run)
        row = {"run": run.name, "published_s": run.published_s, "predicted_s": step_s}
        row |= {"of": f"{run.device}, {run.sizes}, {run.seq_len}", "device_tokens": run.device_tokens}
        line = f"{run.name:46} {run.published_s:9.3f} {step_s:9.3f}  {step_s / run.published_s:5.2f}"
        published_gib = run.allocated_gib or run.reserved_gib
        if published_gib:
            own_gib = allocated_gib if run.allocated_gib else reserved_gib
            row |= {"published_gib": published_gib, "predicted_gib": own_gib}
            line += f"   {published_gib:5.1f} {own_gib:9.1f}  {own_gib / published_gib:5.2f}"
        rows.append(row)
        print(line, flush=True)
    for what in ("s", "gib"):
        ratios = [row[f"predicted_{what}"] / row[f"published_{what}"] for row in rows if f"published_{what}" in row]
        errors = sorted(abs(ratio - 1) for ratio in ratios)
        named = "step time" if what == "s" else "peak memory"
        print(
            f"{named}: {len(errors)} rows, median error {statistics.median(errors):.1%}, nine in ten within "
            f"{errors[int(0.9 * (len(errors) - 1))]:.1%}, largest {errors[-1]:.1%}; median of predicted over "
            f"published {statistics.median(ratios):.3f}"
        )
    print(layout_ratios(rows))
    out = REPOSITORY / "results/benchmarks/published.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def layout_ratios(rows: list[dict]) -> str:
    """How well the ratios of runs that differ in their layout are predicted, in words."""
    errors, num_apart, num_in_order, num_alike = [], 0, 0, 0
    for one, other in itertools.combinations(rows, 2):
        if one["of"] != other["of"]:
            continue
        published, predicted = (
            (one[name] / one["device_tokens"]) / (other[name] / other["device_tokens"])
            for name in ("published_s", "predicted_s")
        )
        errors.append(abs(predicted / published - 1))
        if abs(published - 1) > LEAST_DIFFERENCE:
            num_apart += 1
            is_alike = abs(predicted - 1) < ALIKE
            num_alike += is_alike
            num_in_order += not is_alike and (predicted > 1) == (published > 1)
    errors.sort()
    most = errors[int(0.9 * (len(errors) - 1))]
    return (
        f"layouts: {len(errors)} pairs of runs, ratio of their times a token off by {statistics.median(errors):.1%} "
        f"in the median, nine in ten within {most:.1%}, largest {errors[-1]:.1%}; of {num_apart} pairs more than "
        f"{LEAST_DIFFERENCE:.0%} apart, {num_in_order} are predicted in their order and {num_alike} alike, within "
        f"{ALIKE:.1%}"
    )


def mpt_runs(path: Path) -> Iterator[Run]:
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            hidden, num_layers, num_heads = MPT[row["model"]]
            seq_len, size, count = (
                int(row[name]) for name in ("seq_len", "microbatch_size", "grad_accumulation")
            )  # fmt: skip
            # The source gives a node's network.
            network_gbps = float(row["inter_node_gbps"]) / DEVICES_A_NODE if row["inter_node_gbps"] else None
            yield Run(
                name=f"{row['hardware']} x {row['num_gpus']}: MPT {row['model']}, {count} x {size} x {seq_len}",
                device=row["hardware"],
                sizes=json.dumps(
                    {
                        "model_type": "mpt",
                        "hidden_size": hidden,
                        "intermediate_size": 4 * hidden,
                        "num_hidden_layers": num_layers,
                        "num_attention_heads": num_heads,
                        "num_key_value_heads": num_heads,
                        "vocab_size": MPT_VOCABULARY,
                    }
                ),
                dp=int(row["num_gpus"]),
                sharding="parameters",
                recompute="all" if row["activation_checkpointing"] == "True" else "none",
                implementation="eager",
                seq_len=seq_len,
                microbatch_size=size,
                num_microbatches=count,
                network_gbps=network_gbps,
                published_s=seq_len * size * count / float(row["tokens_per_s_per_gpu"]),
            )


def single_runs(path: Path) -> Iterator[Run]:
    """Where a row says that something is as above, it is as in the row before."""
    before: dict[str, object] = {}
    for row in json.loads(path.read_text(encoding="utf-8")):
        text = before["text"] if row["text"] == "as above" else row["text"]
        device = next((entry for name, entry in HARDWARE.items() if name in row["hardware"]), before.get("device"))
        uses_titan = "parameters" in str(row.get("sharding"))
        num_devices = row["tp"] * row["pp"] * row["dp"]
        tokens = row["seq_len"] * row["global_batch"] / num_devices
        allocated_mb = row.get("peak_allocated_mb")
        yield Run(
            name=row["name"],
            device=str(device),
            sizes=json.dumps(text),
            **{name: row[name] for name in ("tp", "pp", "dp", "seq_len", "microbatch_size")},
            sharding=row.get("sharding", "optimizer"),
            recompute="selective" if uses_titan else "all" if row["recompute_layers"] else "none",
            implementation="eager" if "eager" in row["name"] else "compiled",
            num_microbatches=row["global_batch"] // row["dp"] // row["microbatch_size"],
            gradient_bytes=2 if "fp16" in row["implementation"] and "bf16" not in row["implementation"] else 4,
            published_s=row.get("step_s") or tokens / row["tokens_per_s_per_gpu"],
            allocated_gib=allocated_mb / 1024 if allocated_mb else None,
            reserved_gib=row.get("peak_reserved_gib"),
        )
        before = {"text": text, "device": device}


def predicted(run: Run) -> tuple[float, float, float]:
    """Seconds of a step, and GiB of the fullest device: what its tensors take, and what its process holds of them."""
    if run.recompute != "selective":
        return priced(run, recomputes=run.recompute == "all")
    of_none, of_all = (np.array(priced(run, recomputes=recomputes)) for recomputes in (False, True))
    text = json.loads(run.sizes)
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    key_value = hidden // text["num_attention_heads"] * text["num_key_value_heads"]
    # Of what a layer keeps in all, beyond its input: half of its products' results, and attention's.
    results = 2 * (hidden + 2 * key_value + hidden + 2 * inner + hidden)
    share = (results / 2 + 2 * hidden) / (run.tp * saved_bytes_of_layer(run))
    weights = np.array([0.5, 1 - share, 1 - share])
    return tuple((of_none + weights * (of_all - of_none)).tolist())


def saved_bytes_of_layer(run: Run) -> float:
    """Bytes that a layer keeps for backward, a token."""
    layers = pl.col("piece") == "layers", ~pl.col("checkpointing"), pl.col("pass") == "forward"
    largest = points_of(run.sizes, run.tp, run.device, run.implementation).measurements.filter(*layers)
    largest = largest.filter(pl.col("num_tokens") == pl.col("num_tokens").max())
    one, two = (largest.filter(num_layers=depth)["saved_bytes"].max() for depth in (1, 2))
    return (two - one) / largest["num_tokens"].max()


def priced(run: Run, *, recomputes: bool) -> tuple[float, float, float]:
    device, spec = load_device(run.device), spec_of(run.sizes)
    num_devices = run.tp * run.pp * run.dp
    cluster = ClusterConfig(
        device="cuda",
        num_nodes=max(1, num_devices // DEVICES_A_NODE),
        devices_per_node=DEVICES_A_NODE,
        memory_gib=device.memory_gib,
        intra_node_gbps=device.link_bytes_per_s * 8 / 1e9,
        inter_node_gbps=run.network_gbps or device.network_bytes_per_s * 8 / 1e9,
        device_model=run.device,
    )
    grid = Grid(module="llm", num_ranks=num_devices, tp=run.tp, pp=run.pp, sharding=run.sharding)
    plan = Plan(placement="monolithic", grids=(grid,), num_microbatches=run.num_microbatches, checkpointing=recomputes)
    costs = costs_of(run.sizes, run.tp, run.device, run.implementation)
    pricer = Pricer(plan, costs, spec, cluster, precision="bf16")
    number = np.arange(run.dp * run.num_microbatches * run.microbatch_size)
    nothing, tokens = np.zeros_like(number), np.full_like(number, run.seq_len)
    shapes = SampleShapes(
        encoders=(),
        sample_id=number,
        source=nothing,
        row=number,
        num_items=np.zeros((len(number), 0), dtype=np.int64),
        kept_tokens=np.zeros((len(number), 0), dtype=np.int64),
        llm_tokens=tokens,
        target_tokens=tokens,
    )
    assignment = pricer.assign(shapes, number % run.dp, number // run.dp % run.num_microbatches)
    step_s = pricer.timeline(pricer.stage_times(shapes, assignment), assignment.slots).step_s
    fewer_bytes = (4 - run.gradient_bytes) / 4 * max(
        pricer.stage_costs.resident_parts(stage).gradients for stage in pricer.stages
    )  # fmt: skip
    held_bytes = pricer.memory_bytes(shapes, assignment)["llm"]
    tensor_bytes = (held_bytes - device.overhead_bytes) / (1 + device.allocator_share) - fewer_bytes
    return step_s, tensor_bytes / 2**30, tensor_bytes * (1 + device.allocator_share) / 2**30


@lru_cache
def costs_of(sizes: str, tp: int, device: str, implementation: str) -> CostModel:
    model, points = load_device(device), points_of(sizes, tp, device, implementation)
    # As if it were not measured: these frameworks repeat a recomputed layer to its end, where torch now stops early.
    fitted = fit_model(median_points(without_recomputing(points.measurements)), points.parameters, "measured")
    return with_device(fitted, model)


def with_device(costs: CostModel, device: DeviceModel) -> CostModel:
    """The costs with what a device's data sheet says beside those of the layers."""
    names = ("overhead_bytes", "allocator_share", "update_bytes_per_s")
    return replace(costs, **{name: getattr(device, name) for name in names})


def without_recomputing(measurements: pl.DataFrame) -> pl.DataFrame:
    """Measurements without the backward of recomputed layers, which then counts as their forward and backward."""
    return measurements.filter(~(pl.col("checkpointing") & (pl.col("pass") == "backward")))


@lru_cache
def points_of(sizes: str, tp: int, device: str, implementation: str) -> AnalyticPoints:
    """Of a Llama, with MPT's own layers where it is one, and with the logits of all targets at once."""
    with counting(tp) as ranks:
        how = {"is_compiled": implementation == "compiled", "recomputes_pointwise": False, "change": changed}
        stage = CountedStage(spec_of(sizes), "llm", 2, ranks, **how)
        return points_of_stage(stage, load_device(device))


def whole_logits(stage: LlmStage) -> None:
    """Have the head take the logits of all targets at once."""
    head = stage.hf.lm_head
    head.num_at_once = 1 << 40
    if head.group is None:
        stage.hf.lm_head = WholeLogits(head.weight)


def changed(stage: LlmStage) -> None:
    whole_logits(stage)
    language_model = stage.hf.model.language_model
    if stage.hf.config.tie_word_embeddings:  # as of all MPT, and no Llama here
        sizes = stage.hf.config.get_text_config()
        for number in stage.layers:
            language_model.layers[number] = MptLayer(sizes.hidden_size, sizes.num_attention_heads)


class WholeLogits(nn.Module):
    """A head with torch's own loss, which is not cut into chunks."""

    num_at_once = math.inf

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
        return cross_entropy((hidden @ self.weight.T).float(), target_ids, reduction="sum")


class MptLayer(GradientCheckpointingLayer):
    """A layer of MPT, whose attention computes whole squares (see above)."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden, bias=False), nn.LayerNorm(hidden, bias=False)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, hidden: torch.Tensor, segment_ends: SegmentEnds, **_: object) -> torch.Tensor:
        qkv = self.qkv(self.norm_1(hidden)).unflatten(-1, (3, self.num_heads, -1))
        heads = [values.transpose(1, 2) for values in qkv.unbind(2)]
        attended, _ = packed_attention(self, *heads, None, segment_ends=segment_ends, is_causal=False)
        hidden = hidden + self.out(attended.flatten(2))
        return hidden + self.down(nn.functional.gelu(self.up(self.norm_2(hidden))))


def spec_of(sizes: str) -> ModelSpec:
    """A model with this LLM."""
    family = family_of("llava_onevision")
    text = json.loads(sizes)
    is_mpt = text["model_type"] == "mpt"
    fields = family.presets["tiny"] | {"text_config": text | {"model_type": "llama"}, "tie_word_embeddings": is_mpt}
    return family.make_spec("mpt" if is_mpt else "published", fields, {})


if __name__ == "__main__":
    main()
