"""The experiment config: its keys, their defaults, and the one place where it is loaded and checked.

A config is a stack of YAML files, JSON texts or dicts, merged left to right over the defaults below.
`load_config` refuses unknown keys, wrong types and impossible values with the key's name, its value and
what would be right. What comes out is a tree of frozen dataclasses. `config/README.md` explains each key.
"""

import dataclasses
import difflib
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError, safe_load

from dflop.runtime import UserError
from dflop.runtime.devices import find_device, load_device

__all__ = [
    "SAMPLING",
    "SAMPLING_FORMS",
    "AudioConfig",
    "ClusterConfig",
    "Config",
    "CostsConfig",
    "DataConfig",
    "FixedGrid",
    "FixedPlan",
    "ModelConfig",
    "PlanConfig",
    "ScheduleConfig",
    "SourceConfig",
    "TrainConfig",
    "VideoConfig",
    "excess_memory",
    "load_config",
    "select_keys",
]

_section = dataclass(frozen=True, kw_only=True, slots=True)


@_section
class SourceConfig:
    """One manifest. `media_root` defaults to the manifest's folder, `name` to its file name."""

    path: str = ""
    media_root: Optional[str] = None
    sampling: str = "all"
    name: Optional[str] = None
    trust_sizes: bool = False


@_section
class VideoConfig:
    fps: float = 1.0
    max_frames: int = 32


@_section
class AudioConfig:
    window_s: float = 30.0
    pooling: int = 2


@_section
class DataConfig:
    sources: list[SourceConfig] = field(default_factory=list)
    samples_per_shard: int = 50_000
    watch_media: bool = False
    duplicate_ids: str = "reject"
    max_llm_tokens: int = 8192
    max_text_bytes: int = 1_000_000
    max_image_pixels: int = 178_956_970
    video: VideoConfig = field(default_factory=VideoConfig)
    audio: AudioConfig = field(default_factory=AudioConfig)


@_section
class ModelConfig:
    family: str = "llava_onevision"
    preset: str = "tiny"
    path: Optional[str] = None
    tokenizer: Optional[str] = None
    freeze: list[str] = field(default_factory=list)


@_section
class ClusterConfig:
    """`load_config` puts a number in place of a `memory_gib` of null."""

    device: str = "cpu"
    num_nodes: int = 1
    devices_per_node: int = 2
    memory_gib: Optional[float] = None
    intra_node_gbps: float = 100.0
    inter_node_gbps: float = 50.0
    device_model: str = "cpu"
    device_models: Optional[str] = None

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node


@_section
class CostsConfig:
    source: str = "measured"
    tp_sizes: list[int] = field(default_factory=lambda: [1])
    repeats: int = 5
    time_budget_s: float = 90.0
    target_error: float = 0.03


@_section
class FixedGrid:
    """A pinned part of a module's grid; null leaves it to the search."""

    tp: Optional[int] = None
    pp: Optional[int] = None
    dp: Optional[int] = None

    @property
    def least_ranks(self) -> int:
        return (self.tp or 1) * (self.pp or 1) * (self.dp or 1)


@_section
class FixedPlan:
    placement: Optional[str] = None
    vision: Optional[FixedGrid] = None
    llm: Optional[FixedGrid] = None
    num_microbatches: Optional[int] = None
    checkpointing: Optional[bool] = None
    schedule: Optional[str] = None


@_section
class PlanConfig:
    placements: list[str] = field(default_factory=lambda: ["disjoint", "colocated"])
    schedules: list[str] = field(default_factory=lambda: ["1f1b", "interleaved_1f1b", "zb_h1"])
    search_batches: Optional[int] = None
    fixed: Optional[FixedPlan] = None


@_section
class ScheduleConfig:
    """`load_config` puts `off` in place of a `correction` of `auto` where schedules shall be deterministic."""

    policy: str = "ilp"
    lookahead_steps: int = 8
    time_limit_s: float = 1.0
    search_trials: int = 5000
    deterministic: bool = False
    correction: str = "auto"


@_section
class TrainConfig:
    global_batch_size: int = 16
    steps: int = 20
    lr: float = 1.0e-4
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    warmup_steps: int = 0
    precision: str = "fp32"
    checkpoint_every: int = 10
    resume: str = "auto"
    loader_workers: int = 1


@_section
class Config:
    run: str = "demo"
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    costs: CostsConfig = field(default_factory=CostsConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


# Keys with a closed list of values.
_CHOICES: dict[str, tuple[str, ...]] = {
    "model.family": ("llava_onevision", "internvl"),
    "data.duplicate_ids": ("reject", "keep"),
    "cluster.device": ("cpu", "cuda"),
    "costs.source": ("measured", "analytic"),
    "plan.placements": ("disjoint", "colocated", "monolithic"),
    "plan.schedules": ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1"),
    "plan.fixed.placement": ("disjoint", "colocated", "monolithic"),
    "plan.fixed.schedule": ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1"),
    "schedule.policy": ("random", "lpt", "search", "ilp"),
    "schedule.correction": ("off", "on", "auto"),
    "train.precision": ("fp32", "bf16", "fp64"),
    "train.resume": ("auto", "never"),
    "model.freeze": ("vision", "llm"),
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
    "plan.fixed.vision.tp",
    "plan.fixed.vision.pp",
    "plan.fixed.vision.dp",
    "plan.fixed.llm.tp",
    "plan.fixed.llm.pp",
    "plan.fixed.llm.dp",
    "plan.fixed.num_microbatches",
    "schedule.lookahead_steps",
    "train.global_batch_size",
    "train.steps",
    "train.checkpoint_every",
)
_ABOVE_ZERO = (
    "costs.time_budget_s",
    "costs.target_error",
    "data.video.fps",
    "cluster.memory_gib",
    "cluster.intra_node_gbps",
    "cluster.inter_node_gbps",
    "schedule.time_limit_s",
    "train.lr",
    "train.grad_clip",
)
_NOT_NEGATIVE = ("schedule.search_trials", "seed", "train.weight_decay", "train.warmup_steps", "train.loader_workers")
_NOT_EMPTY = ("costs.tp_sizes", "plan.placements", "plan.schedules")
# Of a device that no data sheet describes.
_MEMORY_GIB = 4.0
_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SAMPLING = re.compile(r"all|(first|end|random):(?=[\d.]*[1-9])\d+(%|\.\d+%)?")
SAMPLING_FORMS = "all, first:30%, first:1000, end:… or random:…, with a whole number above 0 or a percentage"


def load_config(*layers: Path | str | Mapping[str, Any]) -> Config:
    """Merge the layers over the defaults and check the result.

    A layer is a path to a YAML file, a JSON text (it starts with `{`), or a mapping.

    Raises:
        UserError: naming the key, its value and what would be right.
    """
    node = OmegaConf.structured(Config)
    for layer in layers:
        values, where = _read_layer(layer)
        values = _read_switch(_read_dataset_list(values, where))
        _refuse_misfits(Config, values, where)
        try:
            node = OmegaConf.merge(node, values)
        except OmegaConfBaseException as error:
            raise UserError(_type_message(error, values, where)) from None
    try:
        config: Config = OmegaConf.to_object(node)
    except OmegaConfBaseException as error:  # a `${…}` that leads nowhere
        raise UserError(f"`{error.full_key}`: {str(error).splitlines()[0]}") from None
    _check_values(config)
    schedule = config.schedule
    if schedule.deterministic:
        schedule = dataclasses.replace(schedule, correction="off")
    return dataclasses.replace(config, cluster=_with_memory(config), schedule=schedule)


def select_keys(config: Config, keys: Iterable[str]) -> dict[str, Any]:
    """The part of a config under the given dotted keys, as plain dicts and lists (for JSON and digests)."""
    part: dict[str, Any] = {}
    for key in keys:
        value, target = config, part
        *path, leaf = key.split(".")
        for name in path:
            value = getattr(value, name)
            target = target.setdefault(name, {})
        target[leaf] = _plain(getattr(value, leaf))
    return part


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value


def _read_layer(layer: Path | str | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    if isinstance(layer, Mapping):
        return dict(layer), "config"
    if isinstance(layer, str) and layer.lstrip().startswith("{"):
        try:
            return json.loads(layer), "config text"
        except json.JSONDecodeError as error:
            raise UserError(f"config text is not JSON: {error}") from None
    path = Path(layer)
    try:
        values = safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"config file {path} does not exist; config/config.yaml is the one to start from") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path} cannot be read: {error}") from None
    except YAMLError as error:
        raise UserError(f"config file {path} is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}, str(path)
    if not isinstance(values, dict):
        raise UserError(f"config file {path} holds a {type(values).__name__}; it must hold `key: value` pairs")
    return values, str(path)


_DATASET_KEYS = {"json_path": "path", "sampling_strategy": "sampling"}


def _read_dataset_list(values: dict[str, Any], where: str) -> dict[str, Any]:
    """`data.datasets`, LLaVA-NeXT's name for the sources, and its entries' keys, by our names."""
    data = values.get("data")
    if not isinstance(data, dict):
        return values
    data = dict(data)
    if "datasets" in data:
        if data.get("sources"):
            raise UserError(f"{where}: `data.datasets` and `data.sources` both name the data; keep one of them")
        data["sources"] = data.pop("datasets")
    if isinstance(data.get("sources"), list):
        data["sources"] = [
            {_DATASET_KEYS.get(key, key): value for key, value in entry.items()} if isinstance(entry, dict) else entry
            for entry in data["sources"]
        ]
    return {**values, "data": data}


def _read_switch(values: dict[str, Any]) -> dict[str, Any]:
    """`schedule.correction: on` and `off`, which YAML reads as true and false, by their names."""
    schedule = values.get("schedule")
    if not (isinstance(schedule, dict) and isinstance(schedule.get("correction"), bool)):
        return values
    return {**values, "schedule": {**schedule, "correction": "on" if schedule["correction"] else "off"}}


def _refuse_misfits(section: type, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
    hints = typing.get_type_hints(section)
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1)
            way_out = f"did you mean `{prefix}{near[0]}`?" if near else f"known here: {', '.join(hints)}"
            raise UserError(f"{where}: unknown key `{name}` (value {value!r}); {way_out}")
        nested, is_list = _nested_section(hints[key])
        if value is None:
            if types.NoneType not in typing.get_args(hints[key]):
                raise UserError(f"{where}: `{name}` is null; it must be {_kind_of(hints[key])}")
            continue
        if nested is None:
            is_bool = bool in (hints[key], *typing.get_args(hints[key]))
            wrong_bool = is_bool and not isinstance(value, bool) and "${" not in str(value)
            if isinstance(value, Mapping) or isinstance(value, list) != is_list or wrong_bool:
                raise UserError(f"{where}: `{name}` is {value!r}; it must be {_kind_of(hints[key])}")
            continue
        if is_list:
            if not isinstance(value, list):
                raise UserError(
                    f"{where}: `{name}` is {value!r}; it must be a list, each entry with {_keys_of(nested)}"
                )
            for index, entry in enumerate(value):
                if not isinstance(entry, Mapping):
                    raise UserError(f"{where}: `{name}[{index}]` is {entry!r}; it must hold {_keys_of(nested)}")
                _refuse_misfits(nested, entry, where, f"{name}[{index}].")
        elif isinstance(value, Mapping):
            _refuse_misfits(nested, value, where, f"{name}.")
        else:
            raise UserError(f"{where}: `{name}` is {value!r}; it must hold the keys {_keys_of(nested)}")


def _keys_of(section: type) -> str:
    return ", ".join(item.name for item in dataclasses.fields(section))


def _nested_section(hint: Any) -> tuple[type | None, bool]:
    """The dataclass inside `X`, `Optional[X]` or `list[X]`, and whether it was a list."""
    arguments = [item for item in typing.get_args(hint) if item is not types.NoneType]
    candidate = arguments[0] if arguments else hint
    return (candidate if dataclasses.is_dataclass(candidate) else None), typing.get_origin(hint) is list


def _type_message(error: OmegaConfBaseException, values: Mapping[str, Any], where: str) -> str:
    key = getattr(error, "full_key", None) or "?"
    value: Any = values
    for name in key.replace("[", ".").replace("]", "").split("."):
        try:
            value = value[int(name)] if isinstance(value, list) else value[name]
        except (KeyError, IndexError, ValueError, TypeError):
            return f"{where}: `{key}`: {str(error).splitlines()[0]}"
    if isinstance(value, str) and "${" in value:
        return f"{where}: `{key}` is {value!r}: {str(error).splitlines()[0]}"
    return f"{where}: `{key}` is {value!r}; it must be {_kind_at(key)}"


def _kind_at(key: str) -> str:
    """What the value at a dotted key must be, in words."""
    hint: Any = Config
    for name in re.findall(r"[^.\[\]]+", key):
        section, _ = _nested_section(hint)
        hint = typing.get_args(hint)[0] if name.isdigit() or section is None else typing.get_type_hints(section)[name]
    return _kind_of(hint)


def _kind_of(hint: Any) -> str:
    if typing.get_origin(hint) is list:
        return "a list"
    section, _ = _nested_section(hint)
    if section is not None:
        return f"a section with the keys {_keys_of(section)}"
    arguments = [item for item in typing.get_args(hint) if item is not types.NoneType]
    return _KINDS[arguments[0] if arguments else hint]


def _values_at(config: Config, key: str) -> list[tuple[str, Any]]:
    """The values at a dotted key: none where an optional section is null, several where it is a list."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
        if value is None:
            return []
    if isinstance(value, (list, tuple)):
        return [(f"{key}[{index}]", entry) for index, entry in enumerate(value)]
    return [(key, value)]


def _check_values(config: Config) -> None:
    for key, choices in _CHOICES.items():
        for name, value in _values_at(config, key):
            if value not in choices:
                raise UserError(f"`{name}` is {value!r}; it must be one of {', '.join(choices)}")
    for keys, holds, wanted in (
        (_AT_LEAST_ONE, lambda number: number >= 1, "at least 1"),
        (_ABOVE_ZERO, lambda number: number > 0, "above 0 and finite"),
        (_NOT_NEGATIVE, lambda number: number >= 0, "0 or more, and finite"),
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
    if {"vision", "llm"} <= set(config.model.freeze):
        raise UserError("`model.freeze` names every module, which leaves nothing to train; take one out")
    if config.costs.source == "analytic" and config.train.precision != "bf16":
        raise UserError(
            f"`costs.source` is 'analytic', which knows bf16 alone, and `train.precision` is "
            f"{config.train.precision!r}; set `train.precision: bf16`"
        )
    if config.schedule.deterministic and config.schedule.correction == "on":
        raise UserError(
            "`schedule.correction` is 'on' and `schedule.deterministic` true: corrections follow measured times, which "
            "no two runs share; set one of them to off (false)"
        )
    _check_sources(config.data.sources)
    _check_devices(config)


def _with_memory(config: Config) -> ClusterConfig:
    """The cluster with its devices' memory, which may be left to the device model."""
    cluster, is_analytic = config.cluster, config.costs.source == "analytic"
    own_file = Path(cluster.device_models) if cluster.device_models else None
    device = (load_device if is_analytic else find_device)(cluster.device_model, own_file)
    if cluster.memory_gib is None:
        return dataclasses.replace(cluster, memory_gib=device.memory_gib if device else _MEMORY_GIB)
    if is_analytic and cluster.memory_gib > device.most_memory_gib:
        raise UserError(f"{excess_memory(cluster)}; lower it, leave it out, or choose another `cluster.device_model`")
    return cluster


def excess_memory(cluster: ClusterConfig) -> str | None:
    """What to say of a `memory_gib` that is more than the device model has; None where it is not."""
    most_gib = most_memory_gib(cluster)
    if cluster.memory_gib <= most_gib:
        return None
    return (
        f"`cluster.memory_gib` is {cluster.memory_gib:g}, more than the {most_gib:g} that the data sheet "
        f"of `cluster.device_model` {cluster.device_model!r} says"
    )


def most_memory_gib(cluster: ClusterConfig) -> float:
    """What the data sheet of the device model says, or infinity where there is none."""
    device = find_device(cluster.device_model, Path(cluster.device_models) if cluster.device_models else None)
    return math.inf if device is None else device.most_memory_gib


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
    if cluster.num_devices < 2:
        raise UserError(
            f"`cluster` has {cluster.num_devices} device, but the encoder and the LLM run on devices of their own; set "
            "`cluster.devices_per_node` to at least 2 (on CPUs these are processes)"
        )
    if fixed is None:
        return
    placements = config.plan.placements if fixed.placement is None else [fixed.placement]
    of_modules = [grid.least_ranks if grid else 1 for grid in (fixed.vision, fixed.llm)]
    needed = sum(of_modules) if placements == ["disjoint"] else of_modules[1]
    if needed > cluster.num_devices:
        own = " (each module its own)" if placements == ["disjoint"] else ""
        raise UserError(
            f"`plan.fixed` needs {needed} devices{own}, but `cluster` has {cluster.num_devices} "
            f"({cluster.num_nodes} x {cluster.devices_per_node}); "
            "ask for fewer ranks or raise `cluster.devices_per_node`"
        )
    microbatches = fixed.num_microbatches
    if microbatches and microbatches > config.train.global_batch_size:
        raise UserError(
            f"`plan.fixed.num_microbatches` is {microbatches}, more than the {config.train.global_batch_size} samples "
            "of `train.global_batch_size`; every microbatch needs at least one sample"
        )
