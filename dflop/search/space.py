"""The search space: every layout of a number of devices that the config does not rule out, one row each.

The space is placement x (tp, pp, dp) and sharding of each module x microbatches x pipeline schedule x split of the
layers. How many layers are recomputed follows from the memory of the devices (`recompute`). Rows are kept as numbers in
a table, since a large cluster has millions of them; `plan_of` makes a plan of a row. Every module has the columns
`<module>_tp`, `<module>_pp`, `<module>_dp`, `<module>_sharding` and `<module>_shards`, those of the encoders first.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import polars as pl

from dflop.base import UserError
from dflop.config import Config, FixedPlan, PlanConfig
from dflop.models import ModelSpec, check_modules
from dflop.plan import PLACEMENTS, PLAIN_SCHEDULE, SCHEDULES, SHARDINGS, Grid, Plan, split_layers
from dflop.plan.layout_key import LayoutKey, ModuleLayout
from dflop.search.pins import impossible_pin, without_each

__all__ = [
    "Splits",
    "allowed_cp_sizes",
    "enumerate_space",
    "even_layers",
    "llm_layers",
    "modules_of",
    "plan_of",
    "sharding_columns",
]

# The layers of each stage, by (LLM layout, number of stages), where a split other than the even one is tried, too.
Splits = Mapping[tuple[LayoutKey, int], tuple[int, ...]]

# Numbers of pipeline stages that encoders may have. They are shallow: more stages only add transfers.
_ENCODER_PP = (1, 2, 4)
# In a cluster of more devices than this, modules get multiples of this fraction of them.
_FINEST_SHARE = 64
# On more devices than this, several encoders get fewer choices than a single one: 1, 2, 3, 4, 6, 8, 12, … such
# multiples, one stage, and the same sharding for all. With all choices, two encoders on 64 devices would have nineteen
# million plans. An encoder that `plan.fixed` names keeps all choices.
_FEW_DEVICES = 16


def enumerate_space(
    config: Config,
    spec: ModelSpec,
    layouts: Mapping[str, Sequence[LayoutKey]],
    splits: Splits,
    within: PlanConfig | None = None,
    pins_are: str = "plan.fixed",
    cp: int = 1,
    above: int | None = None,
    offloads_optimizer: bool = False,
) -> pl.DataFrame:
    """The table of all layouts that use every device, within the limits of `config.plan` or those of `within`.

    `layouts` are those of a layer that there are costs for, by module. `pins_are` is the config key that the pins of
    `within` come from. With `cp`, up to so many replicas of the LLM compute a sample, of one node unless it is pinned;
    there may be no such layout. Layouts that were searched with a larger size, `above`, are left out where so many
    replicas share parameters, and so meet in each layer anyway. The plans of all rows offload the optimiser's state, or
    none does.

    Of up to 64 devices, an encoder may get any number; of more, a multiple of a 64th. On more than 16 devices, several
    encoders get 1, 2, 3, 4, 6, 8, 12, … such multiples each, one stage, and the same sharding, except for encoders that
    `plan.fixed` names. Microbatch counts are 1, 2, 3, 4, 6, 8, 12, … as far as every bucket can hold a sample.

    Raises:
        UserError: when the devices, the global batch and the pins leave nothing.
    """
    within = within or config.plan
    check_modules(spec, within.fixed.modules if within.fixed else (), pins_are)
    rows = _rows(config, spec, layouts, splits, within).with_columns(offloads_optimizer=pl.lit(offloads_optimizer))
    if cp > 1:
        before = _may_share(config, above) & (pl.col("llm_shards") >= above) if above else pl.lit(False)
        return rows.filter(_may_share(config, cp), ~before).with_columns(llm_cp=pl.lit(cp, pl.Int32))
    if rows.is_empty():
        raise UserError(_why_nothing(config, within, spec, layouts, pins_are))
    return rows


def _may_share(config: Config, cp: int) -> pl.Expr:
    """Which layouts' LLM replicas may compute samples `cp` at a time."""
    divides = (pl.col("llm_shards") % cp == 0) | (cp % pl.col("llm_shards") == 0)
    in_node = pl.lit(is_cp_pinned(config)) | (config.cluster.devices_per_node % (cp * pl.col("llm_tp")) == 0)
    return (pl.col("llm_dp") % cp == 0) & divides & in_node


def allowed_cp_sizes(config: Config) -> list[int]:
    """Over up to how many replicas samples may be computed: the pinned number, or the config's choices that a node has
    devices for, in order."""
    if is_cp_pinned(config):
        return [config.plan.fixed.modules["llm"].cp]
    sizes = sorted(config.plan.cp_sizes)
    return [size for size in sizes if size <= config.cluster.devices_per_node] or sizes[:1]


def is_cp_pinned(config: Config) -> bool:
    """Whether `plan.fixed` says over up to how many replicas samples are computed."""
    fixed = config.plan.fixed
    return fixed is not None and "llm" in fixed.modules and fixed.modules["llm"].cp is not None


def _rows(
    config: Config, spec: ModelSpec, layouts: Mapping[str, Sequence[LayoutKey]], splits: Splits, within: PlanConfig
) -> pl.DataFrame:
    fixed = within.fixed or FixedPlan()
    gathering = [name for name, sharding in SHARDINGS.items() if sharding.gathers]
    filling = [name for name, placement in PLACEMENTS.items() if placement.fills_bubbles]
    meet = [pl.lit(False), *(pl.col(sharding_columns(encoder.name)[0]).is_in(gathering) for encoder in spec.encoders)]
    grids = _pinned(
        pl.concat([_of_placement(config, spec, layouts, fixed, name) for name in _placements(within, spec)]), fixed
    )
    for module in spec.modules:
        how = _shardings(config, within, fixed, grids, module.name)
        grids = grids.join(how, on=ModuleLayout.columns(module.name), maintain_order="left_right")
    for one, other in itertools.combinations(_with_less_choice(config, spec, fixed), 2):
        can_shard = [pl.col(f"{name}_dp") > 1 for name in (one, other)]
        grids = grids.filter((pl.col(f"{one}_sharding") == pl.col(f"{other}_sharding")) | ~pl.all_horizontal(can_shard))
    return (
        grids.join(_pipelines(within, spec, grids), on="llm_pp")
        .join(_microbatches(config, fixed, grids), on="llm_dp")
        .filter(pl.col("num_microbatches") % pl.col("per_round") == 0)
        .drop("per_round")
        # With one microbatch, all schedules have the same order.
        .filter(
            (pl.col("schedule") == PLAIN_SCHEDULE)
            | (pl.col("num_microbatches") > 1)
            | (pl.lit(fixed.schedule is not None))
        )
        .join(_splits(splits), on=("llm_tp", "llm_pp", "num_chunks"), how="left", coalesce=True)
        .with_columns(pl.col("balanced").fill_null([False]))
        .explode("balanced")
        # Bubbles are filled between microbatches, by encoder replicas that do not wait for each other in each layer.
        .filter(~pl.col("placement").is_in(filling) | ((pl.col("num_microbatches") > 1) & ~pl.any_horizontal(meet)))
    )


def sharding_columns(module: str) -> tuple[str, str]:
    """The columns of a module's sharding, and of the number of replicas among which its parameters are divided."""
    return f"{module}_sharding", f"{module}_shards"


def modules_of(columns: Iterable[str]) -> list[str]:
    """The modules that a row or the table has columns for, in their order."""
    return [name.removesuffix("_pp") for name in columns if name.endswith("_pp")]


def plan_of(row: Mapping[str, object], splits: Splits, *, checkpointing: bool = False) -> Plan:
    """The plan of a row of `enumerate_space`, with all layers recomputed or none."""
    grids, rank_offset = [], 0
    for module in modules_of(row):
        how = ModuleLayout.of_row(row, module)
        layers = splits[how.layout, how.pp] if module == "llm" and row["balanced"] else ()
        sharding, shards = (row[name] for name in sharding_columns(module))
        grids.append(
            Grid(
                module=module,
                num_ranks=how.num_ranks,
                **how.layout._asdict(),
                pp=how.pp,
                rank_offset=rank_offset,
                layers=layers,
                sharding=sharding,
                shards=shards if SHARDINGS[sharding].needs_shards else None,
                cp=row.get(f"{module}_cp", 1),
            )
        )
        if not PLACEMENTS[row["placement"]].shares_ranks:
            rank_offset += how.num_ranks
    return Plan(
        placement=row["placement"],
        grids=tuple(grids),
        num_microbatches=row["num_microbatches"],
        checkpointing=checkpointing,
        schedule=row["schedule"],
        num_chunks=row["num_chunks"],
        offloads_optimizer=row["offloads_optimizer"],
    )


def llm_layers(row: Mapping[str, object], splits: Splits, num_layers: int) -> tuple[int, ...]:
    """The number of layers in each of the LLM's stages (chunks included), for a row of `enumerate_space`."""
    if row["balanced"]:
        return splits[LayoutKey.of_row(row, "llm_"), row["llm_pp"]]
    return even_layers(num_layers, row["llm_pp"] * row["num_chunks"])


@lru_cache(maxsize=4096)
def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The number of layers in each stage of an even split."""
    return tuple(len(part) for part in split_layers(num_layers, num_stages))


def _of_placement(
    config: Config, spec: ModelSpec, layouts: Mapping[str, Sequence[LayoutKey]], fixed: FixedPlan, name: str
) -> pl.DataFrame:
    """The grids of all modules in one placement, one combination a row."""
    num_devices, per_node = config.cluster.num_devices, config.cluster.devices_per_node
    unit = max(1, num_devices // _FINEST_SHARE)
    able = {
        module.name: [layout for layout in layouts[module.name] if per_node % layout.num_ranks == 0]
        for module in spec.modules
    }
    placement = PLACEMENTS[name]
    num_units = -(-num_devices // unit) - 1
    less = _with_less_choice(config, spec, fixed)
    sizes = [
        [unit * size for size in (_doublings(num_units) if encoder.name in less else range(1, num_units + 1))]
        for encoder in spec.encoders
    ]
    pp_sizes = {
        encoder.name: [
            number for number in _ENCODER_PP if number <= (1 if encoder.name in less else encoder.num_layers)
        ]
        for encoder in spec.encoders
    }
    rows, nowhere = [], [(0,) * len(spec.encoders)]
    for shares in nowhere if placement.shares_ranks else _shares(num_devices, sizes):
        starts = [0, *itertools.accumulate(shares)]
        for llm in _llm_layouts(num_devices - starts[-1], able["llm"], spec.module("llm").num_layers):
            if starts[-1] % llm.layout.num_ranks:
                continue  # a tensor-parallel group would lie on two nodes
            of_encoders = []
            for encoder, num_ranks, start in zip(spec.encoders, shares, starts, strict=False):
                found = placement.encoder_layouts(num_ranks, llm, able[encoder.name], pp_sizes[encoder.name])
                of_encoders.append([how.sizes for how in found if start % how.layout.num_ranks == 0])
            rows += [(name, *itertools.chain(*encoders), *llm.sizes) for encoders in itertools.product(*of_encoders)]
    columns = [column for module in spec.modules for column in ModuleLayout.columns(module.name)]
    schema = {"placement": pl.Enum(list(PLACEMENTS)), **dict.fromkeys(columns, pl.Int32)}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _with_less_choice(config: Config, spec: ModelSpec, fixed: FixedPlan) -> list[str]:
    """The encoders that get fewer choices, so that the space does not explode (`_FEW_DEVICES`)."""
    if len(spec.encoders) < 2 or config.cluster.num_devices <= _FEW_DEVICES:
        return []
    return [encoder.name for encoder in spec.encoders if encoder.name not in fixed.modules]


def _shares(num_devices: int, sizes: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Combinations of the encoders' `sizes` (numbers of devices) that leave some devices for the LLM."""
    if not sizes:
        yield ()
        return
    for size in sizes[0]:
        if size < num_devices:
            for others in _shares(num_devices - size, sizes[1:]):
                yield size, *others


def _doublings(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, … up to `most`."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    return sorted(count for count in {*powers, *(3 * power for power in powers)} if count <= most)


def _llm_layouts(num_ranks: int, layouts: Sequence[LayoutKey], num_layers: int) -> Iterator[ModuleLayout]:
    """All layouts of an LLM on `num_ranks` ranks."""
    for layout in layouts:
        for pp in range(1, min(num_layers, num_ranks // layout.num_ranks) + 1):
            if num_ranks % (layout.num_ranks * pp) == 0:
                yield ModuleLayout(layout, pp, num_ranks // (layout.num_ranks * pp))


def _placements(within: PlanConfig, spec: ModelSpec) -> list[str]:
    """The placements of the space. Without encoders all placements are the same, so one is enough."""
    names = [within.fixed.placement] if within.fixed and within.fixed.placement else within.placements
    return names if spec.encoders else names[:1]


def _pinned(grids: pl.DataFrame, fixed: FixedPlan) -> pl.DataFrame:
    """The grids that agree with `plan.fixed`."""
    wanted = {"placement": fixed.placement}
    for module, grid in fixed.modules.items():
        wanted |= {f"{module}_{size}": getattr(grid, size) for size in ("tp", "pp", "dp")}
    for name, value in wanted.items():
        if value is not None:
            grids = grids.filter(pl.col(name) == value)
    return grids


def _shardings(config: Config, within: PlanConfig, fixed: FixedPlan, grids: pl.DataFrame, module: str) -> pl.DataFrame:
    """The shardings of each layout of a module."""
    pinned = fixed.modules[module].sharding if module in fixed.modules else None
    rows = []
    for *sizes, pp, dp in grids.select(ModuleLayout.columns(module)).unique(maintain_order=True).iter_rows():
        for name in [pinned] if pinned else within.shardings:
            sharding = SHARDINGS[name]
            shards = sharding.shards_worth_a_look(dp, LayoutKey(*sizes), config.cluster.devices_per_node)
            if shards is not None and (pp == 1 or not sharding.gathers):
                rows.append((*sizes, pp, dp, name, shards))
    layout, (name, shards) = ModuleLayout.columns(module), sharding_columns(module)
    schema = {**dict.fromkeys(layout, pl.Int32), name: pl.Enum(list(SHARDINGS)), shards: pl.Int32}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _pipelines(within: PlanConfig, spec: ModelSpec, grids: pl.DataFrame) -> pl.DataFrame:
    """The schedules for each number of stages; a single stage has one order only."""
    fixed = within.fixed or FixedPlan()
    schedules = within.schedules if fixed.schedule is None else [fixed.schedule]
    num_layers = spec.module("llm").num_layers
    rows = []
    for pp in grids["llm_pp"].unique().to_list():
        for name in schedules if pp > 1 or fixed.schedule else (PLAIN_SCHEDULE,):
            schedule = SCHEDULES[name]
            rows += [
                (pp, name, num_chunks, schedule.microbatches_per_round(pp))
                for num_chunks in schedule.chunk_counts(pp)
                if num_chunks == 1 or pp * num_chunks <= num_layers
            ]
    sizes = dict.fromkeys(("num_chunks", "per_round"), pl.Int32)
    schema = {"llm_pp": pl.Int32, "schedule": pl.Enum(list(SCHEDULES)), **sizes}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _microbatches(config: Config, fixed: FixedPlan, grids: pl.DataFrame) -> pl.DataFrame:
    rows = []
    for dp in grids["llm_dp"].unique().to_list():
        most = config.train.global_batch_size // dp
        counts = [fixed.num_microbatches] if fixed.num_microbatches else _doublings(most)
        rows += [(dp, count) for count in counts if count <= most]
    return pl.DataFrame(rows, schema={"llm_dp": pl.Int32, "num_microbatches": pl.Int32}, orient="row")


def _splits(splits: Splits) -> pl.DataFrame:
    """The layouts and numbers of stages that have an uneven split, too; chunks are always split evenly."""
    rows = [(*layout, pp, 1, [False, True]) for layout, pp in splits]
    sizes = (*LayoutKey.columns("llm_"), "llm_pp", "num_chunks")
    schema = {**dict.fromkeys(sizes, pl.Int32), "balanced": pl.List(pl.Boolean)}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _why_nothing(
    config: Config, within: PlanConfig, spec: ModelSpec, layouts: Mapping[str, Sequence[LayoutKey]], pins_are: str
) -> str:
    cluster, fixed = config.cluster, within.fixed
    if fixed and (why := impossible_pin(config, spec, layouts, fixed, _placements(within, spec), pins_are)):
        return why
    what = f"no plan uses all {cluster.num_devices} devices of `cluster`"
    if fixed:
        what += f" with `{pins_are}` ({', '.join(without_each(fixed))})"
    known = ", ".join(
        f"{module} {'/'.join(str(layout.tp) for layout in of_module)}" for module, of_module in layouts.items()
    )
    what += (
        f": placements {', '.join(_placements(within, spec))}, tp {known}, {spec.module('llm').num_layers} LLM layers, "
        f"{config.train.global_batch_size} samples a batch"
    )
    if fixed:
        left = {
            pin: _rows(config, spec, layouts, {}, replace(within, fixed=without)).height
            for pin, without in without_each(fixed).items()
        }
        ways = [f"without {pin} there are {number:,} plans" for pin, number in left.items() if number]
        return f"{what}; loosen `{pins_are}`: {', '.join(ways) or 'more than one pin is to blame'}"
    alone = [name for name in within.placements if not PLACEMENTS[name].shares_ranks]
    if cluster.num_devices == 1 and alone == within.placements:
        return f"{what}; {' and '.join(alone)} modules need at least 2 devices"
    return f"{what}; raise `train.global_batch_size` or change the number of devices"
