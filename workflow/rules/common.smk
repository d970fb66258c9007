"""What the rules share: the checked config, the shards of the sources, and the params and inputs of jobs.

Snakemake sees only the shell text of a command, and not its code. So params hold `code_digest(command)` beside the
config keys.
"""

import json
import os
import shlex
import sys
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path

import yaml
from snakemake.exceptions import WorkflowError
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

from dflop.config import load_config, select_keys, with_texts_read
from dflop.shapes.manifests import list_shards, list_sources
from dflop.shapes.profile import useful_workers
from dflop.models import (
    able_tp_sizes,
    check_adapter,
    check_modules,
    check_parts,
    check_runnable,
    load_model_spec,
    model_digest,
    weights_digest,
)
from dflop.base.commands import COMMANDS, code_digest
from dflop.base.devices import load_device
from dflop.base.errors import UserError, way_out_of


def stop_with(error):
    """End with one line and no traceback, for a mistake in the config or the data's manifests."""
    print(f"dflop: {error}", file=sys.stderr, flush=True)
    sys.exit(2)


# Only the main process reads the state of media files again; jobs use what it found.
IS_MAIN = workflow.is_main_process

# If this folder exists, indexes of manifests are cached in it, for this process and for jobs.
Path(".snakemake").mkdir(exist_ok=True)

DEMO_DATA = "results/demo-data"


def is_demo(source):
    return Path(source.path).as_posix().startswith(f"{DEMO_DATA}/")


WORKFLOW = Path(workflow.current_basedir.get_path_or_uri(secret_free=False)).parent
# Python modules that extend Snakemake.
sys.path.insert(0, str(WORKFLOW / "lib"))

try:
    given = with_texts_read(dict(config))
    CONFIG = load_config(given)
    if CONFIG.run == "demo" and all(map(is_demo, CONFIG.data.sources)):
        CONFIG = load_config(WORKFLOW.parent / "config/demo.yaml", given)
    SOURCES = list_sources(CONFIG.data)
    if CONFIG.model.tokenizer and not Path(CONFIG.model.tokenizer, "tokenizer.json").is_file():
        raise UserError(f"`model.tokenizer` is {CONFIG.model.tokenizer}, which holds no tokenizer.json")
    SPEC = load_model_spec(CONFIG.model)
    for pins, key in ((CONFIG.plan.fixed, "plan.fixed"), (CONFIG.plan.today, "plan.today")):
        check_modules(SPEC, pins.modules if pins else (), key)
    check_parts(SPEC, CONFIG.train.part_names)
    if IS_MAIN:
        check_adapter(SPEC, CONFIG.model)
    MODULES = [module.name for module in SPEC.modules]
    # Not every tp size can divide every module of a model.
    TP_SIZES = able_tp_sizes(SPEC, CONFIG.costs.tp_sizes)
    if IS_MAIN and (CONFIG.plan.fixed or CONFIG.plan.today):
        from dflop.comparison import check_pins  # takes a second, of which most configs need none

        if note := check_pins(CONFIG, SPEC):
            print(f"dflop: warning: {note}", file=sys.stderr, flush=True)
except UserError as error:
    stop_with(error)

RESULTS = f"results/{CONFIG.run}"


def write_run_config():
    """Write the whole config into the results folder, for people, and for commands such as `dflop plan RUN`."""
    sections = [section.name for section in fields(CONFIG)]
    path = Path(RESULTS, "config.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(select_keys(CONFIG, sections), sort_keys=False), encoding="utf-8")


# Rules named by `--cache` (or a profile's `cache:`) keep their outputs here for all runs of this checkout.
OUTPUT_CACHE = "SNAKEMAKE_OUTPUT_CACHE"


def output_cache():
    """The folder of the output cache: the latest one, or a new one if rules are forced to run.

    Snakemake would take the forced rules' outputs from the old folder. That one cannot be emptied, because other runs'
    results link into it.
    """
    forcing = {"-f", "--force", "-F", "--forceall", "-R", "--forcerun"}
    forced = IS_MAIN and not workflow.output_settings.dryrun and not forcing.isdisjoint(sys.argv)
    latest = max((int(path.name.rpartition("-")[2]) for path in Path(".snakemake").glob("output-cache-*")), default=0)
    return Path(".snakemake", f"output-cache-{latest + 1 if forced or not latest else latest}").absolute()


Path(os.environ.setdefault(OUTPUT_CACHE, str(output_cache()))).mkdir(parents=True, exist_ok=True)


def config_for(command, **replaced):
    """The config keys that a command reads, as JSON text for `--config`; `replaced` has other values for some keys."""
    return json.dumps(select_keys(CONFIG, COMMANDS[command].reads) | replaced, sort_keys=True)


@cache
def shards_of(source):
    """The shards of a source; the demo's manifests are made first."""
    if is_demo(source) and IS_MAIN:  # jobs start only when they are made
        checkpoints.demo_data.get()
    data = CONFIG.data
    try:
        return list_shards(
            source, data.samples_per_shard, CONFIG.seed, watch_media=data.watch_media, look_again=IS_MAIN
        )
    except UserError as error:
        stop_with(error)


@cache
def shards_by_name():
    """The source and the shard for each shard's name."""
    return {shard.name: (source, shard) for source in SOURCES for shard in shards_of(source)}


def threads_for_shard(wildcards):
    """As many threads as the shard's records can keep busy, so that small shards run side by side. The jobs of a group
    run at the same time, and divide the group's cores."""
    _, shard = shards_by_name()[wildcards.shard]
    in_group = min(workflow.group_settings.group_components.get("shards", 0), len(shards_by_name()))
    return min(max(1, cpus_of("profile_shapes") // in_group) if in_group else 8, useful_workers(shard.num_records))


def config_for_shard(wildcards):
    """The config of a shard's job, with only the shard's source, so that other sources that come or go rerun nothing.

    The source's name is left out, too, because it depends on the names of the others.
    """
    source, _ = shards_by_name()[wildcards.shard]
    part = json.loads(config_for("profile-shapes"))
    part["data"]["sources"] = [
        {
            "path": str(source.path),
            "media_root": str(source.media_root),
            "sampling": source.sampling,
            "trust_sizes": source.trust_sizes,
            "columns": dict(source.columns),
        }
    ]
    part["seed"] = seed_for([source])
    return json.dumps(part, sort_keys=True)


def config_for_costs():
    """The config of the jobs that measure. Where modules are measured as whole ones, it names those that pass gradients
    on and nothing else: parts without a backward are measured like trained ones, so that freezing or unfreezing them
    reruns no measurement."""
    part = json.loads(config_for("profile-costs"))
    measured = CONFIG.model.trained.among(SPEC.modules).measured_modules()
    if measured is not None:
        part["model"] |= {"train": None, "freeze": measured}
    return json.dumps(part, sort_keys=True)


def seed_for(sources):
    """The seed if samples are drawn at random; otherwise 0, so that another seed reruns nothing."""
    return CONFIG.seed if any("random" in source.sampling for source in sources) else 0


def seed_for_merging():
    """The seed if it decides which samples are kept, or held out for evaluation; otherwise 0."""
    return CONFIG.seed if CONFIG.data.evaluation_share else seed_for(SOURCES)


def all_shards(wildcards=None):
    return list(shards_by_name())


def is_measured():
    return CONFIG.costs.source == "measured"


def check_model():
    """Stop before any job if the family can be neither measured nor trained."""
    try:
        check_runnable(CONFIG.model.family)
    except UserError as error:
        stop_with(error)


def shapes_to_plan(wildcards):
    """The shapes as an input of planning. Stops before any job if there are too few records for a global batch; the
    demo's records cannot be counted yet."""
    num_records = sum(shard.num_records for source in SOURCES if not is_demo(source) for shard in shards_of(source))
    wanted = CONFIG.train.global_batch_size
    if wanted > num_records and not any(map(is_demo, SOURCES)):
        stop_with(
            f"`train.global_batch_size` is {wanted}, but `data.sources` have only {num_records} records; lower it to "
            f"{num_records} or less, or add data"
        )
    return f"{RESULTS}/shapes.duckdb"


def weights_to_begin_with(wildcards):
    """A digest of the weights, so that training runs again with others, such as those of an earlier stage."""
    begins_with = CONFIG.model.weights or CONFIG.model.path, CONFIG.model.adapter
    try:
        return " ".join(weights_digest(Path(folder)) for folder in begins_with if folder)
    except UserError as error:
        stop_with(error)


def plan_to_train(wildcards):
    check_model()
    return f"{RESULTS}/plan.yaml"


def all_measurements(wildcards):
    """The measurements to which costs are fitted: a file for each module and tp."""
    if is_measured():
        check_model()
    return [f"{RESULTS}/costs/{module}.tp{tp}.parquet" for module in MODULES for tp in TP_SIZES[module]]


def data_sheet():
    """The device's numbers, if costs are computed from them; they are params, so that a changed number reruns costs."""
    if is_measured():
        return None
    own = CONFIG.cluster.device_models
    return asdict(load_device(CONFIG.cluster.device_model, Path(own) if own else None))


def load_bounds():
    """The file with the range of loads over which to measure; none for analytic costs, which are known at any load."""
    return [f"{RESULTS}/load_bounds.json"] if is_measured() else []


def measured_links():
    """The file of measured links; none if the costs are analytic, or if there is only one device, which offloads
    nothing."""
    has_links = CONFIG.cluster.num_devices > 1 or CONFIG.cluster.host_memory_gib is not None
    return [f"{RESULTS}/costs/links.parquet"] if is_measured() and has_links else []


def measured_loading():
    """The file that says how long loading takes; none if the costs are analytic."""
    return [f"{RESULTS}/loading.parquet"] if is_measured() else []


for source in SOURCES:
    if not is_demo(source):
        shards_of(source)  # a missing manifest stops here, before any job


def all_cores():
    """All cores of this Snakemake run, so that no other job runs at the same time; 1 if their number is not given."""
    try:
        return workflow.cores
    except WorkflowError:
        return 1
