"""The cost model: seconds and bytes of any stage for any microbatch, from the fitted tables.

Times and activation bytes are linear in the loads of a microbatch (items; tokens, the sum of squared
segment lengths, target tokens), with coefficients that are never negative: more load never costs less.
A stage of L layers costs `rest + L * layer`; `rest` is what a module has once (patch embedding and
projector; embedding, head and loss) and is charged to the stage that ends the module.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dflop.costs.link_model import LinkModel
from dflop.errors import UserError
from dflop.store import read_meta, read_table

__all__ = ["FEATURES", "Coefficients", "CostModel", "Loads", "StageMemory", "column_of"]

# The loads that a module's cost depends on; encoders see items, the LLM sees packed text.
FEATURES = ("num_items", "num_tokens", "sum_sq_tokens", "num_targets")


def column_of(feature: str, unit: str) -> str:
    """The fitted tables' column for a load: `num_items` and `s` -> `per_item_s`."""
    return f"per_{feature.removeprefix('num_').removesuffix('s')}_{unit}"


class Loads(NamedTuple):
    """Loads of microbatches; every array has the same shape, and so has what is computed from them."""

    num_items: np.ndarray
    num_tokens: np.ndarray
    sum_sq_tokens: np.ndarray
    num_targets: np.ndarray


@dataclass(frozen=True, slots=True)
class Coefficients:
    """`const + sum(per_load * load)`; `per_load` follows `FEATURES`."""

    const: float
    per_load: tuple[float, ...]

    def __call__(self, loads: Loads) -> np.ndarray:
        total = np.full(np.shape(loads.num_items), self.const)
        for coefficient, load in zip(self.per_load, loads, strict=True):
            if coefficient:
                total = total + coefficient * load
        return total


class StageMemory(NamedTuple):
    """Bytes of one stage on one rank: what is always there, and each microbatch in flight."""

    resident_bytes: float
    activation_bytes: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """`times[module, tp, part, pass]` in seconds, `activations[module, tp, part]` in bytes; part: layer or rest."""

    times: dict[tuple[str, int, str, str], Coefficients]
    activations: dict[tuple[str, int, str], Coefficients]
    parameter_bytes: dict[tuple[str, int, str], float]
    # A layer's input, which is all that checkpointing keeps of it.
    layer_input: dict[tuple[str, int], Coefficients]
    # Where the costs come from: measured, or analytic, which everything made from them says.
    source: str = "measured"
    links: LinkModel = field(default_factory=LinkModel)

    @classmethod
    def load(cls, path: Path) -> "CostModel":
        """Read `costs.duckdb`.

        Raises:
            UserError: when it is missing, of another schema version, or holds no fit.
        """
        times = {
            (row["module"], row["tp"], row["part"], row["pass"]): _coefficients(row, "s")
            for row in read_table(path, "time_model", made_by="fit-costs").iter_rows(named=True)
        }
        memory = read_table(path, "memory_model", made_by="fit-costs")
        parts = {(row["module"], row["tp"], row["part"]): row for row in memory.iter_rows(named=True)}
        if not times:
            raise UserError(f"{path} holds no time model; make it again with `dflop fit-costs`")
        return cls(
            times=times,
            activations={key: _coefficients(row, "bytes") for key, row in parts.items() if key[2] != "layer_input"},
            parameter_bytes={key: row["parameter_bytes"] for key, row in parts.items()},
            layer_input={key[:2]: _coefficients(row, "bytes") for key, row in parts.items() if key[2] == "layer_input"},
            source=read_meta(path, made_by="fit-costs").get("source", "measured"),
            links=LinkModel.from_table(read_table(path, "link_model", made_by="fit-costs")),
        )

    def stage_time(
        self, module: str, tp: int, num_layers: int, loads: Loads, *, with_rest: bool, checkpointing: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward seconds of each microbatch; a microbatch without any load takes no time.

        Raises:
            UserError: when there are no costs of the module at this tp.
        """
        self.require(module, tp)
        layer_forward = num_layers * self.times[module, tp, "layer", "forward"](loads)
        forward_s, backward_s = layer_forward, num_layers * self.times[module, tp, "layer", "backward"](loads)
        if with_rest:
            forward_s = forward_s + self.times[module, tp, "rest", "forward"](loads)
            backward_s = backward_s + self.times[module, tp, "rest", "backward"](loads)
        if checkpointing:
            backward_s = backward_s + layer_forward
        empty = (np.asarray(loads.num_items) == 0) & (np.asarray(loads.num_tokens) == 0)
        return np.where(empty, 0.0, forward_s), np.where(empty, 0.0, backward_s)

    def stage_memory(
        self, module: str, tp: int, num_layers: int, loads: Loads, *, with_rest: bool, checkpointing: bool = False
    ) -> StageMemory:
        """Parameters, gradients and AdamW's two moments (fp32 each), and activations of each microbatch."""
        self.require(module, tp)
        parameters = num_layers * self.parameter_bytes[module, tp, "layer"]
        per_layer = self.activations[module, tp, "layer"](loads)
        kept = num_layers * per_layer
        if checkpointing:
            # Every layer's input is kept, and one layer at a time is recomputed in full.
            kept = num_layers * self.layer_input[module, tp](loads) + per_layer
        if with_rest:
            parameters += self.parameter_bytes[module, tp, "rest"]
            kept = kept + self.activations[module, tp, "rest"](loads)
        return StageMemory(4.0 * parameters, kept)

    def additive_loads_s(
        self, module: str, tp: int, num_layers: int, loads: Loads, *, with_rest: bool, has_backward: bool = True
    ) -> np.ndarray:
        """Forward plus backward seconds that samples add to a microbatch: `stage_time` without its constants."""
        self.require(module, tp)
        total = np.zeros(np.shape(loads.num_items))
        for part, weight in (("layer", num_layers), ("rest", int(with_rest))):
            for direction in ("forward", "backward") if has_backward else ("forward",):
                fit = self.times[module, tp, part, direction]
                total = total + weight * (fit(loads) - fit.const)
        return total

    def require(self, module: str, tp: int) -> None:
        """Raise `UserError` when there are no costs of the module at this tp."""
        if (module, tp, "layer", "forward") not in self.times:
            known = sorted({f"{name} tp={size}" for name, size, _, _ in self.times})
            raise UserError(
                f"no {self.source} costs for {module} tp={tp} (there are: {', '.join(known)}); "
                f"add {tp} to `costs.tp_sizes` and run `dflop profile-costs` and `dflop fit-costs` again"
            )


def _coefficients(row: dict, unit: str) -> Coefficients:
    return Coefficients(row[f"const_{unit}"], tuple(row[column_of(feature, unit)] for feature in FEATURES))
