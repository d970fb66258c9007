"""Costs from the model's structure and a device's data sheet, for hardware that is not at hand.

The model's family counts the work of a layer, and of a module's first and last part, in one forward pass.
`analytic_points` turns the counts into seconds on a device of `devices.yaml`. It returns the same frames as measuring
does, so that `fit_costs` and everything after it treat both alike.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from dflop.base.devices import DeviceModel
from dflop.models import ModelSpec, count_work
from dflop.models.loads import FEATURES, Loads, main_load
from dflop.models.work import ModuleWork, PartWork

__all__ = ["AnalyticPoints", "analytic_points", "points_of_work"]

# The pieces that are priced: piece, number of layers, whether layers are recomputed. `whole` checks the fit of the
# other pieces.
_PIECES = (
    ("layers", 1, False),
    ("layers", 4, False),
    ("layers", 1, True),
    ("layers", 4, True),
    ("first", 0, False),
    ("last", 0, False),
    ("whole", 2, False),
    ("whole", 3, True),
)
_NUM_ITEMS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597, 2000)
# For an encoder whose items attend to each other in runs: numbers of items, and numbers of items in a run.
_NUM_RUN_ITEMS = tuple(16 << doubling for doubling in range(13))
_RUN_LENGTHS = (16, 256, 4_096)
_NUM_TOKENS = tuple(64 << doubling for doubling in range(12))
# The length of a microbatch's segments in tokens, and the share of its tokens that are targets.
_TEXT_FORMS = ((16_384, 0.5), (2_048, 0.05), (2_048, 0.5), (256, 0.1))


@dataclass(frozen=True, slots=True)
class AnalyticPoints:
    """The same frames that measuring gives.

    `measurements` are rows of the table of this name. `parameters` has the parameters' bytes of each part, and
    `targets_at_once`: for how many targets the head holds logits at a time (infinite for other parts).
    """

    measurements: pl.DataFrame
    parameters: pl.DataFrame


def analytic_points(
    spec: ModelSpec,
    module: str,
    tp: int,
    device: DeviceModel,
    implementation: str = "eager",
    *,
    is_frozen: bool = False,
) -> AnalyticPoints:
    """Roofline seconds and saved bytes of `module` at two depths and over the loads that real data has.

    Matrix products take the time of computing or that of moving their operands, whichever is longer. Attention takes
    its computing time, pointwise kernels the time of moving their bytes, all-reduces that of a ring, and every kernel
    its launch. `implementation` is one of `models.work.IMPLEMENTATIONS`. With `is_frozen` the weights are not trained,
    and backward computes gradients of activations only.

    Raises:
        UserError: when tp does not divide the module's heads, the config lacks a size, or the work of a part is not
            known.
    """
    work = count_work(spec, module, tp).by(implementation)
    return points_of_work(work.without_training() if is_frozen else work, module, tp, device)


def points_of_work(work: ModuleWork, module: str, tp: int, device: DeviceModel) -> AnalyticPoints:
    """As `analytic_points`, for a module whose parts do this `work` on each of `tp` ranks."""
    points = _text_points() if main_load(module) == "num_tokens" else _item_points(work)
    loads = Loads(*(np.array([point[feature] for point in points], dtype=float) for feature in FEATURES))
    nothing = np.zeros(len(points))
    kept = {part: getattr(work, part).saved_bytes(loads) for part in ("layer", "first", "last")}
    frames = []
    for direction in ("forward", "backward"):
        seconds = {
            part: _part_s(getattr(work, part), device, loads, direction, tp) for part in ("layer", "first", "last")
        }
        recomputing_s = _part_s(work.layer, device, loads, "forward", tp) if direction == "backward" else nothing
        if direction == "backward" and work.last.again:
            beyond = work.last.loads_again(loads)
            of_beyond_s = _part_s(work.last.again, device, beyond, "forward", tp)
            seconds["last"] = seconds["last"] + np.where(beyond.num_targets > 0, of_beyond_s, 0.0)
        for piece, depth, checkpointing in _PIECES:
            layer_s = depth * (seconds["layer"] + checkpointing * recomputing_s)
            saved = depth * (work.input_bytes(loads) if checkpointing else kept["layer"])
            # One layer at a time is recomputed, and holds all its activations during its backward.
            transient = work.layer.most_passing_bytes(loads) + (kept["layer"] if checkpointing else nothing)
            if piece in ("first", "last"):
                transient = nothing
            if piece == "whole":
                transient = np.maximum(transient - kept["last"], 0.0)  # the last part's activations are free by then
            if piece in ("last", "whole"):
                transient = np.maximum(transient, work.last.most_passing_bytes(loads))
            if piece != "layers":
                ends = ("first", "last") if piece == "whole" else (piece,)
                layer_s = layer_s + sum(seconds[part] for part in ends)
                saved = saved + sum(kept[part] for part in ends)
            if piece in ("layers", "whole"):
                saved = saved + work.stage_bytes(loads)
            frames.append(
                pl.DataFrame(points).with_columns(
                    module=pl.lit(module),
                    tp=pl.lit(tp, pl.Int64),
                    piece=pl.lit(piece),
                    num_layers=pl.lit(depth, pl.Int64),
                    checkpointing=checkpointing,
                    seconds=pl.Series(layer_s),
                    peak_bytes=pl.Series(saved + transient).cast(pl.Int64),
                    saved_bytes=pl.Series(saved).cast(pl.Int64),
                    repeat=pl.lit(0, pl.Int64),
                    **{"pass": pl.lit(direction)},
                )
            )
    sizes = [
        {
            "module": module,
            "tp": tp,
            "part": part,
            "parameter_bytes": 4.0 * getattr(work, part).num_parameters,
            "targets_at_once": getattr(work, part).num_kept,
        }
        for part in ("layer", "first", "last")
    ]
    return AnalyticPoints(pl.concat(frames), pl.DataFrame(sizes))


def _item_points(work: ModuleWork) -> list[dict[str, int]]:
    nothing = dict.fromkeys(FEATURES, 0)
    if not work.layer.square_flops.per_load[FEATURES.index("sum_sq_tokens")]:
        return [nothing | {"num_items": num_items} for num_items in _NUM_ITEMS]
    loads = {(count, count * min(count, length)) for count in _NUM_RUN_ITEMS for length in _RUN_LENGTHS}
    return [nothing | {"num_items": count, "sum_sq_tokens": squares} for count, squares in sorted(loads)]


def _text_points() -> list[dict[str, int]]:
    return [
        {
            "num_items": 0,
            "num_tokens": num_tokens,
            "sum_sq_tokens": num_tokens * min(num_tokens, length),
            "num_targets": max(1, int(num_tokens * target_share)),
        }
        for num_tokens in _NUM_TOKENS
        for length, target_share in _TEXT_FORMS
    ]


def _part_s(part: PartWork, device: DeviceModel, loads: Loads, direction: str, tp: int) -> np.ndarray:
    """Seconds of one part in one direction, an array of the loads' shape.

    Backward adds bf16 gradients to the fp32 gradients of earlier microbatches, which moves 10 bytes a parameter.
    """
    times = 1 if direction == "forward" else 2
    is_trained = direction == "backward" and not part.is_frozen
    products, added_bytes = (2, 10.0) if is_trained else (1, 0.0)
    memory_rate = device.memory_bytes_per_s * device.memory_share
    computing_s = products * part.dense_flops(loads) / device.matmul_flops_per_s(part.size(loads))
    moving_s = products * (part.matmul_bytes(loads) + 2.0 * part.num_matrix_parameters) / memory_rate
    attention_s = times * part.attention_flops(loads) / (device.peak_flops_per_s * device.attention_share)
    pointwise_s = (times * part.pointwise_bytes(loads) + added_bytes * part.num_matrix_parameters) / memory_rate
    on_the_ring = 2 * (tp - 1) / tp * part.reduced_bytes[direction == "backward"](loads)
    reducing_s = on_the_ring / (device.link_bytes_per_s * device.link_share)
    launching_s = times * part.num_kernels * device.launch_s
    return np.maximum(computing_s, moving_s) + attention_s + pointwise_s + reducing_s + launching_s
