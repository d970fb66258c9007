"""What memory is worth: the predicted step over that on devices without a limit, where compiled layers keep what
torch.compile keeps, as they train with layers recomputed as a whole alone, also but for attention, also offloaded, and
with the optimiser offloaded, too; and of FSDP with our sampler.

    python tests/benchmarks/memory_worth.py --shapes FOLDER [--only llava_ov_7b] [--devices 64] [--mixes ordinary]
        [--memory-gib 22 74.5] [--unshared]

H100s with so much memory, nodes with 1,500 GiB for what is offloaded, analytic costs. FOLDER, the mixes and
`--artifacts` are `regret.py`'s. All steps are prices of the fastest plan. FSDP keeps what torch.compile keeps, and
recomputes just enough layers: as a whole, or also but for attention.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import planner
import polars as pl
import regret

from dflop.base import UserError
from dflop.base.devices import load_device
from dflop.comparison.system import fastest_of
from dflop.comparison.systems.fsdp_random import whole_on_every_device
from dflop.config import Config
from dflop.costs import CostModel
from dflop.costs.analytic import points_of_stage
from dflop.costs.counted import CountedStage, counting
from dflop.costs.fit import fit_model, median_points
from dflop.models import ModelSpec
from dflop.search import search_plans
from dflop.shapes import SampleShapes

MODELS = regret.MODELS | {"internvl_38b": "internvl", "internvl_78b": "internvl"}
SMALL, TP_SIZES = (1, 2), (1, 2, 4, 8)
ENDLESS_GIB, HOST_GIB = 1e6, 1500.0
COLUMNS = (
    *(
        "torch's",
        "whole",
        "but for attention",
        "layers offloaded",
        "also the optimiser",
        "FSDP",
        "FSDP, but for attention",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    parser.add_argument("--only", choices=MODELS, nargs="+", default=list(regret.MODELS))
    parser.add_argument("--devices", type=int, nargs="+", choices=regret.BATCH_SIZES, default=[8, 64])
    parser.add_argument("--mixes", choices=regret.MIXES, nargs="+", default=["ordinary", "clips 5 %", "pictures"])
    parser.add_argument("--memory-gib", type=float, nargs="+", default=[load_device(planner.DEVICE).memory_gib])
    parser.add_argument("--artifacts", type=Path, help="a folder to keep costs in")
    parser.add_argument("--unshared", action="store_true", help="plans in which no replicas share samples")
    arguments = parser.parse_args()
    planner.FAMILIES |= MODELS
    print(f"python {' '.join(sys.argv)}\n\n| model, mix | H100s | GiB | without a limit | {' | '.join(COLUMNS)} |")
    print("|---|---|---|---|" + "---|" * len(COLUMNS), flush=True)
    with tempfile.TemporaryDirectory() as name:
        for preset in arguments.only:
            folder = planner.folder_with_costs(preset, arguments.artifacts or Path(name))
            planner.write_mix(arguments.shapes, folder, preset)
            spec = planner.read_inputs(folder, preset, 8, 64)[1]
            tp_sizes = SMALL if preset in regret.MODELS else TP_SIZES
            torchs, ours = (costs_of(spec, tp_sizes, is_torchs=is_torchs) for is_torchs in (True, False))
            for mix, num_devices in itertools.product(arguments.mixes, arguments.devices):
                planner.SHARES = regret.MIXES[mix]
                planner.write_mix(arguments.shapes, folder, preset)
                inputs = planner.read_inputs(folder, preset, num_devices, regret.BATCH_SIZES[num_devices])
                for memory_gib in arguments.memory_gib:
                    steps_s, plan = steps_of(*inputs, memory_gib, torchs, ours, is_shared=not arguments.unshared)
                    cells = [f"{step_s / steps_s[0]:.3f}" if step_s < np.inf else "-" for step_s in steps_s[1:]]
                    about = f"`{preset}`, {mix} | {num_devices} | {memory_gib:.4g} | {steps_s[0]:.3f} s"
                    print(f"| {about} | {' | '.join(cells)} | {plan}", flush=True)


def costs_of(spec: ModelSpec, tp_sizes: Sequence[int], *, is_torchs: bool) -> dict[str, object]:
    """Times and memory of compiled layers, as they train or, with `is_torchs`, as torch.compile has them by default."""
    points = []
    for module, tp in itertools.product(spec.modules, tp_sizes):
        if module.num_heads % tp:
            continue
        with counting(tp) as ranks:
            stage = CountedStage(spec, module.name, 2, ranks, is_compiled=True, recomputes_pointwise=not is_torchs)
            points.append(points_of_stage(stage, load_device(planner.DEVICE)))
    measurements = pl.concat([own.measurements for own in points])
    model = fit_model(median_points(measurements), pl.concat([own.parameters for own in points]), "analytic")
    names = ("times", "activations", "transients", "parameter_bytes", "attention_bytes", "ranges")
    return {name: getattr(model, name) for name in names}


def steps_of(
    config: Config,
    spec: ModelSpec,
    costs: CostModel,
    samples: SampleShapes,
    memory_gib: float,
    torchs: dict[str, object],
    ours: dict[str, object],
    *,
    is_shared: bool,
) -> tuple[list[float], str]:
    """The steps on devices without a limit and of `COLUMNS`, infinite where nothing fits; and the last plan of ours."""
    if not is_shared:
        config = replace(config, plan=replace(config.plan, cp_sizes=[1]))
    endless, limited, hosted = (
        replace(config, cluster=replace(config.cluster, memory_gib=gib, host_memory_gib=host_gib))
        for gib, host_gib in ((ENDLESS_GIB, None), (memory_gib, None), (memory_gib, HOST_GIB))
    )
    whole_alone = {"attention_bytes": {}}
    tried = ((endless, torchs), (limited, torchs | whole_alone), (limited, ours | whole_alone))
    steps_s, plan = [], ""
    for about, of_layers in (*tried, (limited, ours), (hosted, ours)):
        try:
            candidates = search_plans(about, spec, replace(costs, **of_layers), samples).candidates
        except UserError:
            steps_s += [np.inf] * (1 + (about is hosted))
            continue
        plan = str(candidates[0].plan) if about is not endless else plan
        if about is hosted:
            steps_s.append(min((own.step_s for own in candidates if not own.plan.offloads_optimizer), default=np.inf))
        steps_s.append(candidates[0].step_s)
    for keeps_attention in (False, True):
        plans = fastest_of(whole_on_every_device, keeps_attention=keeps_attention)
        found = plans(limited, spec, replace(costs, **torchs), samples, compares=False)
        steps_s.append(found[0].step_s if found else np.inf)
    return steps_s, plan


if __name__ == "__main__":
    main()
