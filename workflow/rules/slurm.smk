"""What jobs ask Slurm for, from the config's sections `cluster` (devices and nodes) and `slurm` (the site).

Without Slurm the resources here have no effect, except for `measuring`: jobs that measure never run side by side.
"""

# The defaults of a stage: its time limit, GiB of host memory a node, CPU cores a node.
STAGES = {
    "profile_shapes": {"time": "20m", "memory_gib": 2, "cpus": 16},
    "profile_loading": {"time": "60m"},
    "profile_costs": {"time": "60m"},
    "profile_links": {"time": "30m"},
    "search_plan": {"time": "60m", "memory_gib": 16, "cpus": 4},
    "compare": {"time": "60m", "memory_gib": 16, "cpus": 4},
    "train": {"time": "24h"},
}
# The slots that the jobs of a group of shards share; the profile has the same number.
SHARD_SLOTS = 16
MINUTES = {"m": 1, "h": 60, "d": 24 * 60}

for stage in CONFIG.slurm.stages:
    if stage not in STAGES:
        stop_with(f"`slurm.stages.{stage}`: {way_out_of(stage, STAGES, 'slurm.stages.')}")


def of_stage(stage, key):
    """A stage's value from the config, or else its default."""
    own = CONFIG.slurm.stages.get(stage)
    value = getattr(own, key) if own else None
    return STAGES[stage].get(key) if value is None else value


def minutes_of(stage):
    """A stage's time limit in minutes."""
    time = of_stage(stage, "time")
    return int(time.rstrip("mhd")) * MINUTES.get(time[-1], 1)


def cpus_of(stage):
    """CPU cores a node: those of the stage, or else those of a node that trains."""
    devices, cluster = CONFIG.cluster.devices_per_node, CONFIG.cluster
    of_node = CONFIG.slurm.cpus_per_node or devices * (8 if cluster.device == "cuda" else 2)
    return of_stage(stage, "cpus") or of_node


def memory_mb_of(stage):
    """Host memory a node, in MiB. Beside GPUs the host holds a copy of the state that is being saved, and what loaders
    read ahead."""
    devices, cluster = CONFIG.cluster.devices_per_node, CONFIG.cluster
    of_node = CONFIG.slurm.memory_gib or devices * (cluster.memory_gib if cluster.device == "cpu" else 64)
    return round((of_stage(stage, "memory_gib") or of_node) * 1024)


def jobs_of_stage(stage, num_devices=0, num_nodes=1, *, starts_itself=False, takes_signals=False):
    """Resources of a stage's jobs, as the Slurm executor reads them.

    `num_devices` is the number of GPUs a node. If the rule starts its command by `srun` itself (`starts_itself`), the
    key `mpi` keeps the executor from doing so. Jobs with `takes_signals` get a SIGUSR1 ahead of their time limit.
    """
    slurm = CONFIG.slurm
    partition = slurm.partition if stage in DEVICE_STAGES else slurm.cpu_partition or slurm.partition
    gpus = "" if CONFIG.cluster.device == "cpu" else gpu_request(num_devices)
    extra = [*shlex.split(slurm.extra or ""), *shlex.split(of_stage(stage, "extra") or "")]
    if gpus.startswith("--"):
        extra.append(gpus)
    if takes_signals and slurm.warn_s:
        extra.append(f"--signal=USR1@{min(slurm.warn_s, 15 * minutes_of(stage))}")
    resources = {
        "runtime": minutes_of(stage),
        "mem_mb": memory_mb_of(stage),
        "slurm_account": slurm.account,
        "slurm_partition": of_stage(stage, "partition") or partition,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "slurm_extra": shlex.join(extra) or None,  # the executor gives it to a shell as it is
    }
    if stage != "profile_shapes":  # its jobs are grouped, and a group gets the threads of its jobs
        resources["cpus_per_task"] = cpus_of(stage)
    if gpus and not gpus.startswith("--"):
        resources |= {"gres": gpus, "tasks_per_gpu": 0}
    if starts_itself:
        resources |= {"mpi": "srun", "tasks": num_nodes} if num_nodes > 1 else {"mpi": ""}
        resources["nodes"] = num_nodes
    return {name: value for name, value in resources.items() if value is not None}


def gpu_request(num_devices):
    """How a node's GPUs are asked for: a value for `--gres`, or an option of sbatch; empty for none."""
    if not num_devices:
        return ""
    wanted = [*filter(None, [CONFIG.slurm.gpu_type]), str(num_devices)]
    return ":".join(["gpu", *wanted]) if CONFIG.slurm.gpu_request == "gres" else f"--gpus-per-node={':'.join(wanted)}"


# These stages run on the partition on which training will run.
DEVICE_STAGES = ("profile_loading", "profile_costs", "profile_links", "train")


def launcher(stage):
    """Shell text before a stage's command, which starts it on every node of a Slurm job, and is empty outside of one.

    It is a resource, because changed resources do not rerun a job. The srun step asks for cores itself, because it does
    not inherit what the job asked for. When the first task has ended, the others get ten minutes. On a single node it
    is used only in the executor's own jobs, which set `DFLOP_SLURM_JOB`: elsewhere a step may already hold the cores.
    """
    nodes = CONFIG.cluster.num_nodes
    asks = f"--nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpus-per-task={cpus_of(stage)} --wait=600"
    return f"${{{'SLURM_JOB_ID' if nodes > 1 else 'DFLOP_SLURM_JOB'}:+srun {asks}}}"


def jobs_of_tp():
    """Resources of a job that measures at one tp: `tp` GPUs, and their share of the node's cores and memory."""
    if not is_measured():
        return {}
    if CONFIG.cluster.device == "cpu":
        return jobs_of_stage("profile_costs")
    of_tp = {tp: jobs_of_stage("profile_costs", tp) for tp in CONFIG.costs.tp_sizes}
    for tp, asked in of_tp.items():
        for key in ("cpus_per_task", "mem_mb"):
            asked[key] = max(1, asked[key] * tp // CONFIG.cluster.devices_per_node)
    return {key: lambda wildcards, key=key: of_tp[int(wildcards.tp)][key] for key in of_tp[CONFIG.costs.tp_sizes[0]]}


def on_all_devices(stage, **others):
    """Resources of a job on the whole cluster, such as training: all nodes, with all their devices."""
    cluster = CONFIG.cluster
    asked = jobs_of_stage(stage, cluster.devices_per_node, cluster.num_nodes, starts_itself=True, **others)
    return asked | {"launcher": launcher(stage)}


if IS_MAIN:
    import short_log

    short_log.install()
    if "slurm" in ExecutorPluginRegistry().get_registered_plugins():
        import slurm_executor

        slurm_executor.install()
