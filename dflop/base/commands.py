"""The commands of the workflow: which config keys each one reads, and which rooms of the program make its output.

Both decide what runs again: the workflow passes exactly these keys to the command and tracks them together with a
digest of the rooms' files, so that an unrelated key or a change in a later room reruns nothing. A command sees no other
key, whatever config it is given: reading one that is not listed here fails at once.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["COMMANDS", "GROUND_ROOMS", "LIMITS", "ROOMS", "Command", "code_digest"]

_PACKAGE = Path(__file__).parents[1]

# The rooms, which are folders of dflop/, in the order of the data's way: a room imports only from rooms before it. The
# rooms of the ground also import from each other.
GROUND_ROOMS = ("config", "store", "base", "plan")
ROOMS = (
    *(*GROUND_ROOMS, "models", "demo", "shapes", "loading", "costs", "step", "balance", "schedule", "search"),
    *("comparison", "train", "checks", "report"),
)

_MODEL = ("model.family", "model.preset", "model.path", "model.tokenizer")
_TRAINED = ("model.train", "model.freeze", "model.lora")
# The config's limits on a record and its media, which decide what it becomes.
LIMITS = (
    *("data.max_llm_tokens", "data.max_text_bytes", "data.max_image_pixels", "data.max_clip_pixels"),
    *("data.max_audio_samples", "data.max_decode_s", "data.video", "data.audio"),
)
_SOURCES = ("data.sources", "data.max_samples")
_SHARDS = ("seed", *_SOURCES, "data.samples_per_shard", "data.watch_media")
# Without `cluster.gpu_hour_cost`, which only the report reads: another price reruns nothing else.
_CLUSTER = (
    *("cluster.device", "cluster.num_nodes", "cluster.devices_per_node", "cluster.memory_gib"),
    *("cluster.intra_node_gbps", "cluster.inter_node_gbps", "cluster.device_model", "cluster.device_models"),
)
_BATCH = ("seed", "train.global_batch_size", "train.precision")


@dataclass(frozen=True, slots=True)
class Command:
    """`file` in dflop/cli/ defines the command, `last_room` is the last of `ROOMS` it imports from, and `reads` are
    dotted config keys."""

    file: str
    last_room: str
    reads: tuple[str, ...]


COMMANDS: dict[str, Command] = {
    "demo-data": Command("data.py", "demo", ()),
    "profile-shapes": Command("data.py", "shapes", (*_SHARDS, "data.without_encoder", *LIMITS, *_MODEL)),
    "merge-shapes": Command(
        "data.py",
        "costs",
        (*_SHARDS, "data.duplicate_ids", "data.evaluation_share", "model.path", "model.tokenizer"),
    ),
    "plot-shapes": Command("data.py", "report", ()),
    "profile-costs": Command(
        "costs.py",
        "costs",
        (
            *(*_MODEL, *_TRAINED, "train.precision", "train.compile"),
            *("cluster.device", "cluster.device_model", "cluster.device_models", "cluster.devices_per_node"),
            *("costs.source", "costs.implementation", "costs.repeats", "costs.time_budget_s", "costs.target_error"),
        ),
    ),
    "profile-links": Command(
        "costs.py",
        "costs",
        (
            *("cluster.device", "cluster.device_model", "cluster.num_nodes", "cluster.devices_per_node"),
            "costs.repeats",
        ),
    ),
    "profile-loading": Command("data.py", "loading", ("seed", *_SOURCES, "data.watch_media", *LIMITS, *_MODEL)),
    "fit-costs": Command("costs.py", "costs", ()),
    "plan": Command(
        "plans.py",
        "comparison",
        (*_BATCH, *_MODEL, *_TRAINED, *_CLUSTER, "cluster.host_memory_gib", "data.audio", "plan"),
    ),
    "schedule": Command("plans.py", "train", (*_BATCH, *_MODEL, *_TRAINED, *_CLUSTER, "data.audio", "schedule")),
    "compare": Command(
        "comparison.py",
        "report",
        (*_BATCH, *_MODEL, *_TRAINED, *_CLUSTER, "cluster.host_memory_gib", "data.audio", "plan", "schedule"),
    ),
    "train": Command(
        "training.py",
        "train",
        (
            *("seed", *_SOURCES, "data.watch_media", "data.evaluation_share", *LIMITS),
            *("model", *_CLUSTER, "schedule", "train"),
        ),
    ),
    "report": Command(
        "training.py", "report", ("run", *_BATCH, *_MODEL, *_TRAINED, "cluster", "data.audio", "schedule")
    ),
}


def code_digest(command: str) -> str:
    """Digest of the code that the command may use, as it was at this process's first call: all rooms up to its last,
    its file in cli/, and the file of the options that commands share."""
    used = COMMANDS[command]
    places = *ROOMS[: ROOMS.index(used.last_room) + 1], f"cli/{used.file}", "cli/options.py"
    return hashlib.sha256("".join(map(_digest, places)).encode()).hexdigest()[:16]


@cache
def _digest(place: str) -> str:
    """Digest of a file of the package, or of the files of a folder but for pages (`.md`) and what Python caches."""
    path = _PACKAGE / place
    running = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and file.suffix != ".md" and "__pycache__" not in file.parts:
            running.update(f"{file.relative_to(_PACKAGE).as_posix()}\0".encode() + file.read_bytes())
    return running.hexdigest()
