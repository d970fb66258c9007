"""Checks of a merged config: closed lists of values, ranges, and keys that must agree."""

import math
import re
from typing import Any

from dflop.config.schema import Config, FixedPlan, SourceConfig
from dflop.parallelism import MONOLITHIC, PLACEMENTS, SCHEDULES, SHARDINGS
from dflop.runtime import UserError

__all__ = ["SAMPLING", "SAMPLING_FORMS", "check_values"]

# Keys that hold parts of a plan.
_PINS = ("plan.fixed", "plan.today")
# Keys with a closed list of values.
_CHOICES: dict[str, tuple[str, ...]] = {
    "data.duplicate_ids": ("reject", "keep"),
    "data.without_encoder": ("drop", "reject"),
    "cluster.device": ("cpu", "cuda"),
    "costs.source": ("measured", "analytic"),
    "costs.implementation": ("eager", "compiled", "fused"),
    "plan.placements": tuple(PLACEMENTS),
    "plan.schedules": tuple(SCHEDULES),
    "plan.shardings": tuple(SHARDINGS),
    **{f"{pins}.placement": tuple(PLACEMENTS) for pins in _PINS},
    **{f"{pins}.*.sharding": tuple(SHARDINGS) for pins in _PINS},
    **{f"{pins}.schedule": tuple(SCHEDULES) for pins in _PINS},
    "schedule.policy": ("random", "lpt", "search", "ilp"),
    "schedule.correction": ("off", "on", "auto"),
    "train.precision": ("fp32", "bf16", "fp64"),
    "train.export_precision": ("fp32", "bf16", "fp64"),
    "train.compile": ("auto", "on", "off"),
    "train.resume": ("auto", "never"),
    "train.tensorboard": ("auto", "on", "off"),
    "train.lr_schedule": ("constant", "linear", "cosine"),
    "slurm.gpu_request": ("gres", "gpus"),
}

_AT_LEAST_ONE = (
    "data.samples_per_shard",
    "data.max_llm_tokens",
    "data.max_text_bytes",
    "data.max_image_pixels",
    "data.video.max_frames",
    "data.audio.window_s",
    "data.audio.pooling",
    "cluster.num_nodes",
    "cluster.devices_per_node",
    "costs.tp_sizes",
    "costs.repeats",
    "plan.search_batches",
    *(f"{pins}.*.{size}" for pins in _PINS for size in ("tp", "pp", "dp")),
    *(f"{pins}.num_microbatches" for pins in _PINS),
    "schedule.lookahead_steps",
    "train.global_batch_size",
    "train.steps",
    "train.checkpoint_every",
    "train.evaluate_every",
    *("slurm.cpus_per_node", "slurm.stages.*.cpus"),
)
_ABOVE_ZERO = (
    "costs.time_budget_s",
    "costs.target_error",
    "data.video.fps",
    "cluster.memory_gib",
    "cluster.intra_node_gbps",
    "cluster.inter_node_gbps",
    "cluster.gpu_hour_cost",
    "schedule.time_limit_s",
    "train.lr",
    "train.modules.*.lr",
    "train.grad_clip",
    "train.epochs",
    "train.peer_timeout_s",
    *("slurm.memory_gib", "slurm.stages.*.memory_gib"),
)
_NOT_NEGATIVE = (
    "schedule.search_trials",
    "seed",
    "train.weight_decay",
    "train.modules.*.weight_decay",
    "train.warmup_steps",
    "train.loader_workers",
    "slurm.warn_s",
)
_SHARES = ("train.min_lr_ratio", "data.evaluation_share")
_NOT_EMPTY = ("costs.tp_sizes", "plan.placements", "plan.schedules", "plan.shardings")
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SAMPLING = re.compile(r"all|(first|end|random):(?=[\d.]*[1-9])\d+(%|\.\d+%)?")
_TIME = re.compile(r"\d*[1-9]\d*[mhd]?")
SAMPLING_FORMS = "all, first:30%, first:1000, end:… or random:…, with a whole number above 0 or a percentage"


def check_values(config: Config, *, has_cluster: bool = True) -> None:
    """Refuse a config that no run can be made with. With `has_cluster`, check that there are enough devices, too.

    Raises:
        UserError: naming the key, its value and what would be right.
    """
    _check_each(config)
    _check_together(config)
    _check_sources(config.data.sources)
    if has_cluster:
        _check_devices(config)


def _check_each(config: Config) -> None:
    """Each value by itself."""
    for key, choices in _CHOICES.items():
        for name, value in _values_at(config, key):
            if value not in choices:
                raise UserError(f"`{name}` is {value!r}; it must be one of {', '.join(choices)}")
    for keys, holds, wanted in (
        (_AT_LEAST_ONE, lambda number: number >= 1, "at least 1"),
        (_ABOVE_ZERO, lambda number: number > 0, "above 0 and finite"),
        (_NOT_NEGATIVE, lambda number: number >= 0, "0 or more, and finite"),
        (_SHARES, lambda number: 0 <= number <= 1, "from 0 to 1"),
    ):
        for key in keys:
            for name, value in _values_at(config, key):
                if not (isinstance(value, (int, float)) and value < math.inf and holds(value)):
                    raise UserError(f"`{name}` is {value}; it must be {wanted}")
    for key in _NOT_EMPTY:
        if not _values_at(config, key):
            raise UserError(f"`{key}` is empty; it must hold at least one value")
    if not _RUN_NAME.fullmatch(config.run):
        raise UserError(
            f"`run` is {config.run!r}; it names a folder under results/: use letters, digits, dot, dash and underscore"
        )
    for stage, own in config.slurm.stages.items():
        if own.time is not None and not _TIME.fullmatch(own.time):
            raise UserError(
                f"`slurm.stages.{stage}.time` is {own.time!r}; it must be a whole number of minutes, or "
                "one with its unit: 90m, 24h, 2d"
            )


def _check_together(config: Config) -> None:
    """Values that contradict each other."""
    if config.costs.source == "analytic" and config.train.precision != "bf16":
        raise UserError(
            f"`costs.source` is 'analytic', which knows bf16 alone, and `train.precision` is "
            f"{config.train.precision!r}; set `train.precision: bf16`"
        )
    if config.costs.source == "measured" and config.costs.implementation != "eager":
        raise UserError(
            f"`costs.implementation` is {config.costs.implementation!r}, and measured costs are those of the layers "
            "that train; leave it out, or set `costs.source: analytic`"
        )
    if config.schedule.deterministic and config.schedule.correction == "on":
        raise UserError(
            "`schedule.correction` is 'on' and `schedule.deterministic` true: corrections follow measured times, which "
            "no two runs share; set one of them to off (false)"
        )
    if config.train.steps is not None and config.train.epochs is not None:
        raise UserError(
            f"`train.steps` is {config.train.steps} and `train.epochs` is {config.train.epochs:g}; the one follows "
            "from the other: give one of them, and null for the other"
        )
    if config.train.evaluate_every is not None and not config.data.has_evaluation:
        raise UserError(
            f"`train.evaluate_every` is {config.train.evaluate_every}, but there is nothing to evaluate on; hold a "
            "share of the samples out with `data.evaluation_share`, or give a source `evaluation: true`"
        )


def _values_at(config: Config, key: str) -> list[tuple[str, Any]]:
    """The values at a dotted key: none where an optional section is null, several where it is a list; `*` stands for
    every module that `plan.fixed` or `plan.today` pins, or every name in `train.modules` and `slurm.stages`."""
    if ".*." in key:
        names = key.partition(".*.")
        sections = {"train.modules": config.train.modules, "slurm.stages": config.slurm.stages}
        sections |= {name: pins.modules for name, pins in _pins(config).items()}
        named = sections.get(names[0], {})
        found = [(f"{names[0]}.{name}.{names[2]}", getattr(own, names[2])) for name, own in named.items()]
        return [(name, value) for name, value in found if value is not None]
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
        if value is None:
            return []
    if isinstance(value, (list, tuple)):
        return [(f"{key}[{index}]", entry) for index, entry in enumerate(value)]
    return [(key, value)]


def _check_sources(sources: list[SourceConfig]) -> None:
    for index, source in enumerate(sources):
        if not source.path:
            raise UserError(f"`data.sources[{index}].path` is empty; it must name a manifest")
        if not SAMPLING.fullmatch(source.sampling):
            raise UserError(f"`data.sources[{index}].sampling` is {source.sampling!r}; it must be {SAMPLING_FORMS}")
        if source.name is not None and not _RUN_NAME.fullmatch(source.name):
            raise UserError(
                f"`data.sources[{index}].name` is {source.name!r}; use letters, digits, dot, dash and underscore"
            )


def _check_devices(config: Config) -> None:
    fixed, cluster = config.plan.fixed, config.cluster
    placements = config.plan.placements if fixed is None or fixed.placement is None else [fixed.placement]
    if cluster.num_devices < 2 and not any(PLACEMENTS[name].shares_ranks for name in placements):
        raise UserError(
            f"`cluster` has {cluster.num_devices} device, but in {' and '.join(placements)} plans the encoder and the "
            "LLM have devices of their own; set `cluster.devices_per_node` to at least 2 (on CPUs: processes), "
            "or use `plan.placements: [colocated]`"
        )
    for name, pins in _pins(config).items():
        # A placement that `plan.today` does not give is the one of common frameworks, with modules on shared ranks.
        own = [pins.placement or MONOLITHIC.name] if name == "plan.today" else placements
        _check_pins(config, name, pins, own)


def _pins(config: Config) -> dict[str, FixedPlan]:
    both = dict(zip(_PINS, (config.plan.fixed, config.plan.today), strict=True))
    return {name: pins for name, pins in both.items() if pins is not None}


def _check_pins(config: Config, name: str, pins: FixedPlan, placements: list[str]) -> None:
    cluster = config.cluster
    least_ranks = {"llm": 1} | {module: grid.least_ranks for module, grid in pins.modules.items()}
    is_apart = not any(PLACEMENTS[name].shares_ranks for name in placements)
    # An encoder without a pinned grid needs a device, too.
    needed = max(2, sum(least_ranks.values()), least_ranks["llm"] + 1) if is_apart else least_ranks["llm"]
    if needed > cluster.num_devices:
        own = " (each module its own)" if is_apart else ""
        raise UserError(
            f"`{name}` needs {needed} devices{own}, but `cluster` has {cluster.num_devices} "
            f"({cluster.num_nodes} x {cluster.devices_per_node}); "
            "ask for fewer ranks or raise `cluster.devices_per_node`"
        )
    microbatches = pins.num_microbatches
    if microbatches and microbatches > config.train.global_batch_size:
        raise UserError(
            f"`{name}.num_microbatches` is {microbatches}, more than the {config.train.global_batch_size} samples "
            "of `train.global_batch_size`; every microbatch needs at least one sample"
        )
