"""What ZeRO-2 would bring at most: gradients divided among replicas, while each holds all parameters.

    python tests/benchmarks/zero2.py --shapes FOLDER [--only llava_ov_7b] [--devices 64] [--mixes ordinary]
        [--memory-gib 74.5] [--nodes fast|slow|single]

The fastest plan if every plan with shared parameters held them whole on each device, over the fastest plan as it is:
without gathers (`free`), or with each layer gathered once, ahead of its forward (`gathered`: right for one microbatch a
step, too much for several). Gradients are summed into their shards behind computing, as they are now. Nodes have 8
H100s with 3,600 Gbps inside and 400 between devices (`slow`: 100), or are of one H100 with 100 Gbps (`single`).
FOLDER, the mixes and `--artifacts` are `regret.py`'s. All steps are prices.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import memory_worth
import numpy as np
import planner
import regret

from dflop.base import UserError
from dflop.costs import Moving, Resident, resident_parts, sharded
from dflop.schedule import stage_costs
from dflop.search import memory_bounds, search_plans

NODES = {"fast": {}, "slow": {"inter_node_gbps": 100.0}, "single": {"devices_per_node": 1, "inter_node_gbps": 100.0}}
WAYS = ("as it is", "free", "gathered")
AS_IT_IS = Moving.over, sharded._units


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    parser.add_argument("--only", choices=memory_worth.MODELS, nargs="+", default=list(regret.MODELS))
    parser.add_argument("--devices", type=int, nargs="+", choices=regret.BATCH_SIZES, default=[8, 64])
    parser.add_argument("--mixes", choices=regret.MIXES, nargs="+", default=["ordinary"])
    parser.add_argument("--memory-gib", type=float, nargs="+", default=[74.5])
    parser.add_argument("--nodes", choices=NODES, default="fast")
    parser.add_argument("--artifacts", type=Path, help="a folder to keep costs in")
    arguments = parser.parse_args()
    planner.FAMILIES |= memory_worth.MODELS
    print(f"python {' '.join(sys.argv)}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        for preset, mix, devices in itertools.product(arguments.only, arguments.mixes, arguments.devices):
            folder = planner.folder_with_costs(preset, arguments.artifacts or Path(name))
            planner.SHARES = regret.MIXES[mix]
            planner.write_mix(arguments.shapes, folder, preset)
            config, *others = planner.read_inputs(folder, preset, devices, regret.BATCH_SIZES[devices])
            cluster = replace(config.cluster, **NODES[arguments.nodes])
            cluster = replace(cluster, num_nodes=devices // cluster.devices_per_node)
            for memory_gib in arguments.memory_gib:
                limited = replace(config, cluster=replace(cluster, memory_gib=memory_gib))
                steps_s = [step_of(way, limited, *others) for way in WAYS]
                ratios = "; ".join(
                    f"{way} {step_s / steps_s[0]:.3f}" for way, step_s in zip(WAYS, steps_s, strict=True)
                )
                print(f"{preset}, {mix}, {devices} H100s, {memory_gib:g} GiB: {steps_s[0]:.3f} s; {ratios}", flush=True)


def step_of(way: str, *about: Any) -> float:
    """The price of the fastest plan in one of `WAYS`; infinite where nothing fits."""
    Moving.over, sharded._units = AS_IT_IS
    for reader in (memory_bounds, stage_costs):
        reader.resident_parts = resident_parts if way == WAYS[0] else whole_parameters
        reader.working_bytes = sharded.working_bytes if way == WAYS[0] else gradients_alone
    if way == "free":
        Moving.over = lambda *sizes, **how: without_gathers(AS_IT_IS[0](*sizes, **how))
    elif way == "gathered":
        sharded._units = gathered_once
    try:
        return search_plans(*about).candidates[0].step_s
    except UserError:
        return np.inf


def whole_parameters(trained: Any, frozen: Any, dp: int, *, value_bytes: int, num_shards: int = 1) -> Resident:
    found = resident_parts(trained, frozen, dp, value_bytes=value_bytes, num_shards=num_shards)
    if num_shards == 1:
        return found
    return found._replace(parameters=found.parameters + (trained + frozen * (1 - 1 / num_shards)) / 4 * value_bytes)


def gradients_alone(
    module: str, parameter_bytes: Mapping[str, float], *, value_bytes: int, trained_bytes: Mapping[str, float]
) -> dict[str, float]:
    """`working_bytes` without gathered parameters: a unit's gradients are summed while the next unit's appear."""
    layer, last = trained_bytes["layer"] / 4, trained_bytes["last"] / 4
    summed = max(4, value_bytes) * max(layer, last)
    return {"stage": summed + value_bytes * layer, "layer": summed, "first": 0.0, "last": 0.0}


def without_gathers(moving: Moving) -> Moving:
    return moving._replace(gather_s={part: 0.0 * seconds for part, seconds in moving.gather_s.items()})


def gathered_once(*about: Any) -> tuple[list, list]:
    forward, backward = AS_IT_IS[1](*about)
    kept = [tuple(move for move in unit.moves if move[0] != "gather_s") for unit in backward]
    return forward, [unit._replace(moves=moves) for unit, moves in zip(backward, kept, strict=True)]


if __name__ == "__main__":
    main()
