"""The config's sections, their keys and defaults, as frozen dataclasses. `config/README.md` explains each key."""

from dataclasses import dataclass, field
from typing import Optional

__all__ = [
    "AudioConfig",
    "ClusterConfig",
    "Config",
    "CostsConfig",
    "DataConfig",
    "FixedGrid",
    "FixedPlan",
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

_section = dataclass(frozen=True, kw_only=True, slots=True)


@_section
class SourceConfig:
    """One manifest. `media_root` defaults to the manifest's folder, `name` to its file name."""

    path: str = ""
    media_root: Optional[str] = None
    sampling: str = "all"
    name: Optional[str] = None
    trust_sizes: bool = False
    evaluation: bool = False


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
    without_encoder: str = "drop"
    evaluation_share: float = 0.0
    max_llm_tokens: int = 8192
    max_text_bytes: int = 1_000_000
    max_image_pixels: int = 178_956_970
    video: VideoConfig = field(default_factory=VideoConfig)
    audio: AudioConfig = field(default_factory=AudioConfig)

    @property
    def has_evaluation(self) -> bool:
        return self.evaluation_share > 0 or any(source.evaluation for source in self.sources)


@_section
class ModelConfig:
    family: str = "llava_onevision"
    preset: str = "tiny"
    path: Optional[str] = None
    tokenizer: Optional[str] = None
    freeze: list[str] = field(default_factory=list)


@_section
class ClusterConfig:
    """`load_config` replaces null memory (GiB) and link speeds (Gbit/s) by numbers."""

    device: str = "cpu"
    num_nodes: int = 1
    devices_per_node: int = 2
    memory_gib: Optional[float] = None
    intra_node_gbps: Optional[float] = None
    inter_node_gbps: Optional[float] = None
    device_model: str = "cpu"
    device_models: Optional[str] = None
    gpu_hour_cost: Optional[float] = None

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
    source: str = "measured"
    implementation: str = "eager"
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
    sharding: Optional[str] = None

    @property
    def least_ranks(self) -> int:
        return (self.tp or 1) * (self.pp or 1) * (self.dp or 1)


@_section
class FixedPlan:
    """Pinned parts of a plan; null leaves a part to the search.

    In a file each module's grid stands beside the other keys, under the module's name: `{placement: disjoint, vision:
    {tp: 1}}`. `models.check_modules` checks that the model has a module of this name.
    """

    placement: Optional[str] = None
    modules: dict[str, FixedGrid] = field(default_factory=dict)
    num_microbatches: Optional[int] = None
    checkpointing: Optional[bool] = None
    schedule: Optional[str] = None


@_section
class PlanConfig:
    placements: list[str] = field(default_factory=lambda: ["disjoint", "colocated", "monolithic"])
    schedules: list[str] = field(default_factory=lambda: ["1f1b", "interleaved_1f1b", "zb_h1"])
    shardings: list[str] = field(default_factory=lambda: ["optimizer", "parameters", "hybrid"])
    search_batches: Optional[int] = None
    fixed: Optional[FixedPlan] = None
    today: Optional[FixedPlan] = None


@_section
class ScheduleConfig:
    """Where `deterministic` is true, `load_config` replaces a `correction` of `auto` by `off`."""

    policy: str = "ilp"
    lookahead_steps: int = 8
    time_limit_s: float = 1.0
    search_trials: int = 8000
    deterministic: bool = False
    correction: str = "auto"


@_section
class ModuleTraining:
    """Settings for training one module; null takes the value that `train` has for all modules."""

    lr: Optional[float] = None
    weight_decay: Optional[float] = None


@_section
class TrainConfig:
    """Without `steps` and `epochs`, `load_config` sets `steps` to 20. With `epochs`, `dflop train` computes `steps`
    from the size of the data."""

    global_batch_size: int = 16
    steps: Optional[int] = None
    epochs: Optional[float] = None
    lr: float = 1.0e-4
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    warmup_steps: int = 0
    lr_schedule: str = "constant"
    min_lr_ratio: float = 0.0
    modules: dict[str, ModuleTraining] = field(default_factory=dict)
    precision: str = "fp32"
    compile: str = "auto"
    export_precision: Optional[str] = None
    checkpoint_every: int = 10
    resume: str = "auto"
    evaluate_every: Optional[int] = None
    loader_workers: Optional[int] = None
    peer_timeout_s: float = 60.0
    tensorboard: str = "auto"

    def of_module(self, name: str) -> tuple[float, float]:
        """A module's learning rate and weight decay."""
        own = self.modules.get(name, ModuleTraining())
        return (
            self.lr if own.lr is None else own.lr,
            self.weight_decay if own.weight_decay is None else own.weight_decay,
        )


@_section
class SlurmStage:
    """What the jobs of one stage ask Slurm for; null leaves it to `SlurmConfig` and the stage's own default."""

    partition: Optional[str] = None
    time: Optional[str] = None
    memory_gib: Optional[float] = None
    cpus: Optional[int] = None
    extra: Optional[str] = None


@_section
class SlurmConfig:
    """How jobs are submitted. No command reads it, so that another partition or time limit reruns nothing."""

    account: Optional[str] = None
    partition: Optional[str] = None
    cpu_partition: Optional[str] = None
    qos: Optional[str] = None
    constraint: Optional[str] = None
    gpu_request: str = "gres"
    gpu_type: Optional[str] = None
    cpus_per_node: Optional[int] = None
    memory_gib: Optional[float] = None
    extra: Optional[str] = None
    warn_s: int = 300
    stages: dict[str, SlurmStage] = field(default_factory=dict)


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
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
