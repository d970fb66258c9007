"""The stages of the workflow: which config keys each one reads, and which code makes its output.

Both are the stage's rerun triggers: the workflow passes exactly these keys to the command and tracks them
together with a digest of the code, so that an unrelated key or file reruns nothing. A command sees no
other key, whatever it is given: reading one that is not listed here fails at once.
"""

import dataclasses
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dflop.config import Config

__all__ = ["STAGES", "WorkflowStage", "restrict"]

_MODEL = ("model.family", "model.preset", "model.path", "model.tokenizer")
_LIMITS = ("data.max_llm_tokens", "data.max_text_bytes", "data.max_image_pixels", "data.video", "data.audio")
_SHARDS = ("seed", "data.sources", "data.samples_per_shard", "data.watch_media")
_RECORDS = (
    "data/endings.py",
    "data/manifests",
    "data/media.py",
    "data/records.py",
    "data/shapes.py",
    "data/text.py",
    "data/tokenizer",
    "data/webp.py",
)
_BATCH = ("seed", "train.global_batch_size", "train.precision")


@dataclass(frozen=True, slots=True)
class WorkflowStage:
    """`reads` are dotted config keys; `code` are files and folders under `dflop/`."""

    reads: tuple[str, ...]
    code: tuple[str, ...]

    @property
    def code_digest(self) -> str:
        return _digest(("config.py", "store.py", *self.code))


STAGES: dict[str, WorkflowStage] = {
    "demo-data": WorkflowStage((), ("data/demo",)),
    "profile-shapes": WorkflowStage(
        reads=(*_SHARDS, *_LIMITS, *_MODEL),
        code=(
            "models/spec.py",
            "models/audio.py",
            "models/internvl/presets.py",
            "models/internvl/shapes.py",
            "models/llava_onevision/presets.py",
            "models/llava_onevision/shapes.py",
            "data/profile.py",
            *_RECORDS,
        ),
    ),
    "merge-shapes": WorkflowStage(
        (*_SHARDS, "data.duplicate_ids", "model.path", "model.tokenizer"),
        ("data/manifests", "costs/design.py"),
    ),
    "plot-shapes": WorkflowStage((), ("reporting/report.py", "reporting/shapes.py", "reporting/style.py")),
    "profile-costs": WorkflowStage(
        reads=(
            *_MODEL,
            "cluster.device",
            "cluster.device_model",
            "cluster.device_models",
            "cluster.devices_per_node",
            "costs.source",
            "costs.repeats",
            "costs.time_budget_s",
            "costs.target_error",
            "train.precision",
        ),
        code=(
            "models",
            "costs/analytic.py",
            "costs/llm_work.py",
            "costs/vision_work.py",
            "costs/work.py",
            "costs/design.py",
            "costs/measure.py",
            "costs/measured.py",
            "runtime",
            "costs/profile_rank.py",
            "data/text.py",
            "data/tokenizer",
        ),
    ),
    "profile-links": WorkflowStage(
        reads=(
            "cluster.device",
            "cluster.device_model",
            "cluster.num_nodes",
            "cluster.devices_per_node",
            "costs.repeats",
        ),
        code=("costs/links.py", "runtime/torchrun.py"),
    ),
    "fit-costs": WorkflowStage(
        (), ("costs/fit.py", "costs/measured.py", "costs/link_model.py", "costs/model.py", "models/loads.py")
    ),
    "plan": WorkflowStage(
        (*_BATCH, *_MODEL, "model.freeze", "cluster", "plan"),
        (
            "data/samples.py",
            "costs/link_model.py",
            "costs/model.py",
            "models/loads.py",
            "pipeline",
            "balancing",
            "pricing",
            "scheduling",
            "planning",
        ),
    ),
    "schedule": WorkflowStage(
        (*_BATCH, *_MODEL, "model.freeze", "cluster", "schedule"),
        (
            "data/samples.py",
            "costs/link_model.py",
            "costs/model.py",
            "models/loads.py",
            "pipeline",
            "balancing",
            "pricing",
            "scheduling",
        ),
    ),
    "train": WorkflowStage(
        ("seed", "data.sources", *_LIMITS, "model", "cluster", "schedule", "train"),
        (
            "models",
            "data/loading.py",
            "data/samples.py",
            *_RECORDS,
            "pipeline",
            "reporting/trace.py",
            "balancing",
            "pricing",
            "scheduling",
            "training",
        ),
    ),
    "report": WorkflowStage(
        ("run", *_BATCH, *_MODEL, "model.freeze", "cluster", "schedule"),
        ("reporting", "training/observations.py", "pipeline", "balancing", "pricing", "scheduling"),
    ),
}


def restrict(config: Config, keys: Iterable[str]) -> Config:
    """The config without any key but these: reading another raises AttributeError."""
    return _without_others(config, [key.split(".") for key in keys])


def _without_others(section: Any, wanted: list[list[str]]) -> Any:
    restricted = dataclasses.replace(section)
    for item in dataclasses.fields(section):
        below = [path[1:] for path in wanted if path[0] == item.name]
        if not below:
            object.__delattr__(restricted, item.name)
        elif all(below):
            object.__setattr__(restricted, item.name, _without_others(getattr(section, item.name), below))
    return restricted


@cache
def _digest(names: tuple[str, ...]) -> str:
    package = Path(__file__).parent
    running = hashlib.sha256()
    for name in sorted(names):
        path = package / name
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                running.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return running.hexdigest()[:16]
