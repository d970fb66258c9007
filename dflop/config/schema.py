"""The config's sections, their keys, defaults and kinds of values (`kinds`), as frozen dataclasses, by which pydantic
checks a merged config. `config/README.md` explains each key."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, dataclass_transform

from pydantic import ConfigDict, StrictBool, field_validator, model_validator

from dflop.config import kinds
from dflop.plan.trained import Lora, TrainedSet, matches

__all__ = [
    "AudioConfig",
    "ClusterConfig",
    "Config",
    "CostsConfig",
    "DataConfig",
    "FixedGrid",
    "FixedPlan",
    "LoraConfig",
    "ModelConfig",
    "ModuleTraining",
    "PlanConfig",
    "ScheduleConfig",
    "SlurmConfig",
    "SlurmStage",
    "SourceConfig",
    "TrainConfig",
    "VideoConfig",
]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _section(section: type) -> type:
    section.__pydantic_config__ = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
    return dataclass(frozen=True, kw_only=True, slots=True)(section)


@_section
class SourceConfig:
    """One manifest. `media_root` defaults to the manifest's folder, `name` to its file name.

    `columns` maps keys of a record to the manifest's own names for them. `epochs` is how often an epoch draws each
    sample, `weight` the source's part of all samples that are drawn; no source has one where another has the other.
    """

    path: kinds.Manifest = ""
    media_root: str | None = None
    sampling: kinds.Sampling = "all"
    name: kinds.SourceName | None = None
    trust_sizes: StrictBool = False
    evaluation: StrictBool = False
    columns: dict[kinds.RecordKey, str] = field(default_factory=dict)
    epochs: kinds.Repeats | None = None
    weight: kinds.AboveZero | None = None


@_section
class VideoConfig:
    fps: kinds.AboveZero = 1.0
    max_frames: kinds.Count = 32


@_section
class AudioConfig:
    window_s: kinds.AtLeastOne = 30.0
    pooling: kinds.Count = 2


@_section
class DataConfig:
    sources: list[SourceConfig] = field(default_factory=list)
    max_samples: kinds.Count | None = None
    samples_per_shard: kinds.Count = 50_000
    watch_media: StrictBool = False
    duplicate_ids: Literal["reject", "keep"] = "reject"
    without_encoder: Literal["drop", "reject"] = "drop"
    evaluation_share: kinds.Share = 0.0
    max_llm_tokens: kinds.Count = 8192
    max_text_bytes: kinds.Count = 1_000_000
    max_image_pixels: kinds.Count = 178_956_970
    max_clip_pixels: kinds.Count = 1 << 28
    max_audio_samples: kinds.Count = 172_800_000
    max_decode_s: kinds.AboveZero = 30.0
    video: VideoConfig = field(default_factory=VideoConfig)
    audio: AudioConfig = field(default_factory=AudioConfig)

    @property
    def has_evaluation(self) -> bool:
        return self.evaluation_share > 0 or any(source.evaluation for source in self.sources)


@_section
class LoraConfig:
    """Low-rank adapters, which are trained in place of the weights of `modules`."""

    modules: Annotated[list[str], kinds.SOME] = field(default_factory=lambda: ["llm"])
    targets: Annotated[list[str], kinds.SOME] = field(default_factory=lambda: ["*"])
    rank: kinds.Count = 8
    alpha: kinds.AboveZero = 16.0
    dropout: kinds.BelowOne = 0.0
    rslora: StrictBool = False


@_section
class ModelConfig:
    family: str = "llava_onevision"
    preset: str = "tiny"
    path: str | None = None
    tokenizer: str | None = None
    weights: str | None = None
    adapter: str | None = None
    train: list[str] | None = None
    freeze: list[str] = field(default_factory=list)
    lora: LoraConfig | None = None

    @property
    def trained(self) -> TrainedSet:
        """What of the model is trained."""
        parts = {"frozen": tuple(self.freeze), "named": tuple(self.train or ())}
        if self.lora is None:
            return TrainedSet(**parts)
        own = {item.name: getattr(self.lora, item.name) for item in fields(self.lora)}
        own |= {"modules": tuple(self.lora.modules), "targets": tuple(self.lora.targets)}
        return TrainedSet(**parts, lora=Lora(**own))


@_section
class ClusterConfig:
    """`load_config` replaces null memory (GiB) and link speeds (Gbit/s) by numbers."""

    device: Literal["cpu", "cuda"] = "cpu"
    num_nodes: kinds.Count = 1
    devices_per_node: kinds.Count = 2
    memory_gib: kinds.AboveZero | None = None
    host_memory_gib: kinds.AboveZero | None = None
    intra_node_gbps: kinds.AboveZero | None = None
    inter_node_gbps: kinds.AboveZero | None = None
    device_model: str = "cpu"
    device_models: str | None = None
    gpu_hour_cost: kinds.AboveZero | None = None

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def hides_transfers(self) -> bool:
        """Whether devices compute while they communicate.

        Ranks that are processes on CPUs do both on the same cores. A `device_model` other than cpu stands for GPUs,
        also with `device: cpu`: a machine without a GPU may plan for GPUs.
        """
        return not (self.device == "cpu" and self.device_model == "cpu")


@_section
class CostsConfig:
    source: Literal["measured", "analytic"] = "measured"
    implementation: Literal["auto", "eager", "compiled"] = "auto"
    tp_sizes: Annotated[list[kinds.Count], kinds.SOME] = field(default_factory=lambda: [1])
    repeats: kinds.Count = 5
    time_budget_s: kinds.AboveZero = 90.0
    target_error: kinds.AboveZero = 0.03


@_section
class FixedGrid:
    """A pinned part of a module's grid; null leaves it to the search."""

    tp: kinds.Count | None = None
    pp: kinds.Count | None = None
    dp: kinds.Count | None = None
    sharding: kinds.ShardingName | None = None
    cp: kinds.PowerOfTwo | None = None

    @property
    def least_ranks(self) -> int:
        return (self.tp or 1) * (self.pp or 1) * (self.dp or 1)


@_section
class FixedPlan:
    """Pinned parts of a plan; null leaves a part to the search.

    In a file each module's grid stands beside the other keys, under the module's name: `{placement: disjoint, vision:
    {tp: 1}}`. `models.check_modules` checks that the model has a module of this name.
    """

    placement: kinds.Placement | None = None
    modules: dict[str, FixedGrid] = field(default_factory=dict)
    num_microbatches: kinds.Count | None = None
    checkpointing: StrictBool | None = None
    schedule: kinds.ScheduleName | None = None

    @model_validator(mode="before")
    @classmethod
    def _move_modules(cls, pins: Any) -> Any:
        """Move the grids under `modules`. A null grid pins nothing, and took away what an earlier layer pinned."""
        if not isinstance(pins, Mapping):
            return pins
        keys = {item.name for item in fields(cls)} - {"modules"}
        modules = {name: grid for name, grid in pins.items() if name not in keys and grid is not None}
        return {name: value for name, value in pins.items() if name in keys} | {"modules": modules}

    @field_validator("modules")
    @classmethod
    def _leave_out_open(cls, modules: dict[str, FixedGrid]) -> dict[str, FixedGrid]:
        return {name: grid for name, grid in modules.items() if grid != FixedGrid()}


@_section
class PlanConfig:
    placements: Annotated[list[kinds.Placement], kinds.SOME] = field(
        default_factory=lambda: ["disjoint", "colocated", "bubble_filled", "monolithic"]
    )
    schedules: Annotated[list[kinds.ScheduleName], kinds.SOME] = field(
        default_factory=lambda: ["1f1b", "interleaved_1f1b", "gpipe"]
    )
    shardings: Annotated[list[kinds.ShardingName], kinds.SOME] = field(
        default_factory=lambda: ["optimizer", "parameters", "hybrid"]
    )
    cp_sizes: Annotated[list[kinds.PowerOfTwo], kinds.SOME] = field(default_factory=lambda: [1, 2, 4, 8])
    search_batches: kinds.Count | None = None
    fixed: FixedPlan | None = None
    today: FixedPlan | None = None


@_section
class ScheduleConfig:
    """Where `deterministic` is true, `load_config` replaces a `correction` of `auto` by `off`."""

    policy: kinds.PolicyName = "ilp"
    lookahead_steps: kinds.Count = 8
    time_limit_s: kinds.AboveZero = 1.0
    search_trials: kinds.CountOrZero = 8000
    deterministic: StrictBool = False
    correction: kinds.Switch = "auto"


@_section
class ModuleTraining:
    """Settings for training one module or part; null takes the value that `train` has for all modules."""

    lr: kinds.AboveZero | None = None
    weight_decay: kinds.NotNegative | None = None


@_section
class TrainConfig:
    """Without `steps` and `epochs`, `load_config` sets `steps` to 20. With `epochs`, `dflop train` computes `steps`
    from the size of the data. `load_config` sets a `checkpoint_every` of null by the kind of device."""

    global_batch_size: kinds.Count = 16
    steps: kinds.Count | None = None
    epochs: kinds.AboveZero | None = None
    lr: kinds.AboveZero = 1.0e-4
    weight_decay: kinds.NotNegative = 0.01
    betas: kinds.Betas = field(default_factory=lambda: [0.9, 0.999])
    eps: kinds.AboveZero = 1.0e-8
    grad_clip: kinds.AboveZero = 1.0
    warmup_steps: kinds.CountOrZero = 0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: kinds.Share = 0.0
    modules: dict[str, ModuleTraining] = field(default_factory=dict)
    precision: kinds.Precision = "fp32"
    compile: kinds.Switch = "auto"
    export_precision: kinds.Precision | None = None
    checkpoint_every: kinds.Count | None = None
    resume: Literal["auto", "require", "never"] = "auto"
    evaluate_every: kinds.Count | None = None
    loader_workers: kinds.CountOrZero | None = None
    peer_timeout_s: kinds.AboveZero = 60.0
    tensorboard: kinds.Switch = "auto"

    @property
    def part_names(self) -> dict[str, str]:
        """The names of parts in `modules`, by their keys."""
        return {f"train.modules.{name}": name for name in self.modules}

    def of_part(self, name: str) -> tuple[float, float]:
        """Learning rate and weight decay of a parameter with this plain name (`plan.trained`): of the patterns in
        `modules` that name it, the last one counts."""
        given = [own for pattern, own in self.modules.items() if matches(pattern, name)]
        lr = next((own.lr for own in reversed(given) if own.lr is not None), self.lr)
        decays = (own.weight_decay for own in reversed(given) if own.weight_decay is not None)
        return lr, next(decays, self.weight_decay)


@_section
class SlurmStage:
    """What the jobs of one stage ask Slurm for; null leaves it to `SlurmConfig` and the stage's own default."""

    partition: str | None = None
    time: kinds.TimeLimit | None = None
    memory_gib: kinds.AboveZero | None = None
    cpus: kinds.Count | None = None
    extra: kinds.Options | None = None


@_section
class SlurmConfig:
    """How jobs are submitted. No command reads it, so that another partition or time limit reruns nothing."""

    account: str | None = None
    partition: str | None = None
    cpu_partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpu_request: Literal["gres", "gpus"] = "gres"
    gpu_type: str | None = None
    cpus_per_node: kinds.Count | None = None
    memory_gib: kinds.AboveZero | None = None
    extra: kinds.Options | None = None
    warn_s: kinds.CountOrZero = 300
    stages: dict[str, SlurmStage] = field(default_factory=dict)


@_section
class Config:
    run: kinds.RunName = "demo"
    seed: kinds.CountOrZero = 0
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    costs: CostsConfig = field(default_factory=CostsConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)

    @property
    def layers_of_costs(self) -> str:
        """The layers that the costs are of, `eager` or `compiled`.

        They are those of training; only for analytic costs may `costs.implementation` say otherwise. Data sheets are of
        GPUs, whatever `cluster.device` is.
        """
        is_analytic = self.costs.source == "analytic"
        if is_analytic and self.costs.implementation != "auto":
            return self.costs.implementation
        on_gpus = is_analytic or self.cluster.device == "cuda"
        return "compiled" if self.train.compile == "on" or (self.train.compile == "auto" and on_gpus) else "eager"
