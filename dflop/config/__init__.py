"""The experiment config: loaded and checked once, a tree of frozen dataclasses with every default filled in.

A config is a stack of layers (files, texts, single keys), merged left to right over the defaults in `schema`. Unknown
keys, wrong types and impossible values (`kinds`, `together`) are refused with the key's name, its value and what would
be right.
"""

from dflop.config.command_line import with_dotted_keys, with_texts_read
from dflop.config.devices import (
    excess_memory,
    host_bytes_per_s,
    most_memory_gib,
    require_known_memory,
    ring_latency_s,
)
from dflop.config.kinds import SAMPLING, SAMPLING_FORMS
from dflop.config.load import load_config, restrict, select_keys, set_steps, with_value, without_today
from dflop.config.schema import (
    AudioConfig,
    ClusterConfig,
    Config,
    DataConfig,
    FixedGrid,
    FixedPlan,
    LoraConfig,
    ModelConfig,
    PlanConfig,
    ScheduleConfig,
    SlurmConfig,
    SourceConfig,
    TrainConfig,
    VideoConfig,
)

__all__ = [
    "SAMPLING",
    "SAMPLING_FORMS",
    "AudioConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "FixedGrid",
    "FixedPlan",
    "LoraConfig",
    "ModelConfig",
    "PlanConfig",
    "ScheduleConfig",
    "SlurmConfig",
    "SourceConfig",
    "TrainConfig",
    "VideoConfig",
    "excess_memory",
    "host_bytes_per_s",
    "load_config",
    "most_memory_gib",
    "require_known_memory",
    "restrict",
    "ring_latency_s",
    "select_keys",
    "set_steps",
    "with_dotted_keys",
    "with_texts_read",
    "with_value",
    "without_today",
]
