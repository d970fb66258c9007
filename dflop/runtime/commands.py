"""The commands of the workflow: which config keys each one reads, and the code that makes its output.

Both decide what runs again: the workflow passes exactly these keys to the command and tracks them together with a
digest of the code, so that an unrelated key or an unrelated change of the program reruns nothing. A command sees no
other key, whatever config it is given: reading one that is not listed here fails at once.
"""

from dataclasses import dataclass
from functools import cache

from dflop.runtime.code_behind import code_digests

__all__ = ["COMMANDS", "IN_PARAMS", "Command", "code_digest"]

_MODEL = ("model.family", "model.preset", "model.path", "model.tokenizer")
_LIMITS = ("data.max_llm_tokens", "data.max_text_bytes", "data.max_image_pixels", "data.video", "data.audio")
_SHARDS = ("seed", "data.sources", "data.samples_per_shard", "data.watch_media")
# Without `cluster.gpu_hour_cost`, which only the report reads: another price reruns nothing else.
_CLUSTER = (
    *("cluster.device", "cluster.num_nodes", "cluster.devices_per_node", "cluster.memory_gib"),
    *("cluster.intra_node_gbps", "cluster.inter_node_gbps", "cluster.device_model", "cluster.device_models"),
)
_BATCH = ("seed", "train.global_batch_size", "train.precision")


@dataclass(frozen=True, slots=True)
class Command:
    """`function` is the command's own, by its dotted name; `reads` are dotted config keys."""

    function: str
    reads: tuple[str, ...]


COMMANDS: dict[str, Command] = {
    "demo-data": Command("dflop.cli.data.demo_data", ()),
    "profile-shapes": Command("dflop.cli.data.profile_shapes", (*_SHARDS, "data.without_encoder", *_LIMITS, *_MODEL)),
    "merge-shapes": Command(
        "dflop.cli.data.merge_shapes",
        (*_SHARDS, "data.duplicate_ids", "data.evaluation_share", "model.path", "model.tokenizer"),
    ),
    "plot-shapes": Command("dflop.cli.data.plot_shapes_command", ()),
    "profile-costs": Command(
        "dflop.cli.costs.profile_costs",
        (
            *_MODEL,
            "model.freeze",
            "cluster.device",
            "cluster.device_model",
            "cluster.device_models",
            "cluster.devices_per_node",
            "costs.source",
            "costs.implementation",
            "costs.repeats",
            "costs.time_budget_s",
            "costs.target_error",
            "train.precision",
            "train.compile",
        ),
    ),
    "profile-links": Command(
        "dflop.cli.costs.profile_links",
        (
            "cluster.device",
            "cluster.device_model",
            "cluster.num_nodes",
            "cluster.devices_per_node",
            "costs.repeats",
        ),
    ),
    "profile-loading": Command(
        "dflop.cli.data.profile_loading", ("seed", "data.sources", "data.watch_media", *_LIMITS, *_MODEL)
    ),
    "fit-costs": Command("dflop.cli.costs.fit_costs_command", ()),
    "plan": Command("dflop.cli.plans.plan_command", (*_BATCH, *_MODEL, "model.freeze", *_CLUSTER, "plan")),
    "schedule": Command("dflop.cli.plans.schedule_command", (*_BATCH, *_MODEL, "model.freeze", *_CLUSTER, "schedule")),
    "compare": Command(
        "dflop.cli.comparison.compare_command",
        (*_BATCH, *_MODEL, "model.freeze", *_CLUSTER, "plan", "schedule"),
    ),
    "train": Command(
        "dflop.cli.training.train_command",
        (
            *("seed", "data.sources", "data.watch_media", "data.evaluation_share", *_LIMITS),
            *("model", *_CLUSTER, "schedule", "train"),
        ),
    ),
    "report": Command(
        "dflop.cli.training.report_command", ("run", *_BATCH, *_MODEL, "model.freeze", "cluster", "schedule")
    ),
}

# Code that does not count as behind a command. The results of the first four are among the command's params.
IN_PARAMS = frozenset(
    {
        "dflop.runtime.commands",
        "dflop.config.load.load_config",
        "dflop.runtime.devices.find_device",
        "dflop.runtime.devices.load_device",
        # Options that the workflow never uses:
        "dflop.cli.elsewhere",  # a manifest in place of a run
        "dflop.cli.emulation",  # emulated training
        "dflop.cli.measuring",  # measured steps in a comparison
    }
)


@cache
def code_digest(command: str) -> str:
    """Digest of the code behind a command, as it was at this process's first call."""
    digests = code_digests((own.function for own in COMMANDS.values()), IN_PARAMS)
    return digests[COMMANDS[command].function]
