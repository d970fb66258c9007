"""What memory is worth: the predicted step where compiled layers keep what torch.compile keeps, as they train but with
layers recomputed as a whole alone, as they train, and on devices without a limit.

    python tests/benchmarks/memory_worth.py --shapes FOLDER [--only llava_ov_7b] [--devices 64] [--mixes ordinary]
        [--unshared]

H100s, tp 1 and 2, analytic costs. FOLDER, the mixes and `--artifacts` are `regret.py`'s. All steps are prices of the
fastest plan.
"""

import argparse
import itertools
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import planner
import polars as pl
import regret

from dflop.base.devices import load_device
from dflop.costs.analytic import points_of_stage
from dflop.costs.counted import CountedStage, counting
from dflop.costs.fit import fit_model, median_points
from dflop.models import ModelSpec
from dflop.search import search_plans

TP_SIZES = (1, 2)
ENDLESS_GIB = 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    parser.add_argument("--only", choices=regret.MODELS, nargs="+", default=list(regret.MODELS))
    parser.add_argument("--devices", type=int, nargs="+", choices=regret.BATCH_SIZES, default=[8, 64])
    parser.add_argument("--mixes", choices=regret.MIXES, nargs="+", default=["ordinary", "clips 5 %", "pictures"])
    parser.add_argument("--artifacts", type=Path, help="a folder to keep costs in")
    parser.add_argument("--unshared", action="store_true", help="plans in which no replicas share samples")
    arguments = parser.parse_args()
    planner.FAMILIES |= regret.MODELS
    print(f"python {' '.join(sys.argv)}\n\ntorch's  whole   ours endless  of torch's: whole, ours, endless", flush=True)
    with tempfile.TemporaryDirectory() as name:
        for preset in arguments.only:
            folder = planner.folder_with_costs(preset, arguments.artifacts or Path(name))
            planner.write_mix(arguments.shapes, folder, preset)
            spec = planner.read_inputs(folder, preset, 8, 64)[1]
            torchs, ours = (costs_of(spec, is_torchs=is_torchs) for is_torchs in (True, False))
            for mix in arguments.mixes:
                planner.SHARES = regret.MIXES[mix]
                planner.write_mix(arguments.shapes, folder, preset)
                for num_devices in arguments.devices:
                    print_row(folder, preset, mix, num_devices, torchs, ours, is_shared=not arguments.unshared)


def costs_of(spec: ModelSpec, *, is_torchs: bool) -> dict[str, object]:
    """Times and memory of compiled layers, as they train or, with `is_torchs`, as torch.compile has them by default."""
    points = []
    for module, tp in itertools.product(spec.modules, TP_SIZES):
        with counting(tp) as ranks:
            stage = CountedStage(spec, module.name, 2, ranks, is_compiled=True, recomputes_pointwise=not is_torchs)
            points.append(points_of_stage(stage, load_device(planner.DEVICE)))
    measurements = pl.concat([own.measurements for own in points])
    model = fit_model(median_points(measurements), pl.concat([own.parameters for own in points]), "analytic")
    names = ("times", "activations", "transients", "parameter_bytes", "attention_bytes", "ranges")
    return {name: getattr(model, name) for name in names}


def print_row(
    folder: Path, preset: str, mix: str, num_devices: int, torchs: dict, ours: dict, *, is_shared: bool
) -> None:
    config, spec, costs, samples = planner.read_inputs(folder, preset, num_devices, regret.BATCH_SIZES[num_devices])
    if not is_shared:
        config = replace(config, plan=replace(config.plan, cp_sizes=[1]))
    endless = replace(config, cluster=replace(config.cluster, memory_gib=ENDLESS_GIB))
    whole_alone = {"attention_bytes": {}}
    tried = ((config, torchs | whole_alone), (config, ours | whole_alone), (config, ours), (endless, torchs))
    rows = [search_plans(about, spec, replace(costs, **of_layers), samples).candidates[0] for about, of_layers in tried]
    steps_s = [row.step_s for row in rows]
    print(
        " ".join(f"{step_s:6.3f}" for step_s in steps_s),
        "  ",
        " ".join(f"{step_s / steps_s[0]:5.3f}" for step_s in steps_s[1:]),
        f"  {preset}, {mix}, {num_devices}: {rows[2].plan}",
        flush=True,
    )


if __name__ == "__main__":
    main()
