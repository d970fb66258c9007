"""What the rules share: the checked config, the shards of the sources, resources of jobs on many devices.

Snakemake sees only the shell text of a command, so params hold `code_digest(command)` beside the config keys.
"""

import json
import os
import sys
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path

import yaml
from snakemake.exceptions import WorkflowError
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

from dflop.config import load_config, select_keys, with_texts_read
from dflop.data.manifests import list_shards, list_sources
from dflop.data.profile import useful_workers
from dflop.models import able_tp_sizes, check_modules, check_runnable, load_model_spec, model_digest
from dflop.runtime.commands import COMMANDS, code_digest
from dflop.runtime.devices import load_device
from dflop.runtime.errors import UserError, way_out_of


def stop_with(error):
    """A mistake in the config or the data's manifests: one line, no traceback."""
    print(f"dflop: {error}", file=sys.stderr, flush=True)
    sys.exit(2)


# Only the main process looks at media files again; the processes of jobs use what it found.
IS_MAIN = workflow.is_main_process

# Where it is, manifests' indexes are kept in it, for this process and for the jobs.
Path(".snakemake").mkdir(exist_ok=True)

DEMO_DATA = "results/demo-data"


def is_demo(source):
    return Path(source.path).as_posix().startswith(f"{DEMO_DATA}/")


WORKFLOW = Path(workflow.current_basedir.get_path_or_uri(secret_free=False)).parent
# What has to do with Snakemake itself.
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
    check_modules(SPEC, CONFIG.plan.fixed.modules if CONFIG.plan.fixed else (), "plan.fixed")
    check_modules(SPEC, CONFIG.train.modules, "train.modules")
    MODULES = [module.name for module in SPEC.modules]
    # Some models have modules that not every size can divide.
    TP_SIZES = able_tp_sizes(SPEC, CONFIG.costs.tp_sizes)
except UserError as error:
    stop_with(error)

RESULTS = f"results/{CONFIG.run}"


def write_run_config():
    """Leave the whole config beside what is made with it: for readers, and for `dflop plan RUN` and its like."""
    sections = [section.name for section in fields(CONFIG)]
    path = Path(RESULTS, "config.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(select_keys(CONFIG, sections), sort_keys=False), encoding="utf-8")


# Rules named by `--cache` (or a profile's `cache:`) keep their outputs here for all runs of this checkout.
OUTPUT_CACHE = "SNAKEMAKE_OUTPUT_CACHE"


def output_cache():
    """The latest folder; a new one where rules are forced to run: Snakemake would take their outputs from the old one,
    which other runs' results are links into."""
    forcing = {"-f", "--force", "-F", "--forceall", "-R", "--forcerun"}
    forced = IS_MAIN and not workflow.output_settings.dryrun and not forcing.isdisjoint(sys.argv)
    folders = sorted(Path(".snakemake").glob("output-cache*"), key=lambda path: path.stat().st_mtime)
    if forced or not folders:
        return Path(".snakemake", f"output-cache-{len(folders) + 1}").absolute()
    return folders[-1].absolute()


Path(os.environ.setdefault(OUTPUT_CACHE, str(output_cache()))).mkdir(parents=True, exist_ok=True)


def config_for(command, **replaced):
    """The config keys that a command reads, as JSON text for `--config`; `replaced` gives keys other values."""
    return json.dumps(select_keys(CONFIG, COMMANDS[command].reads) | replaced, sort_keys=True)


@cache
def shards_of(source):
    """The shards of a source; the demo's manifests are made first."""
    if is_demo(source) and IS_MAIN:  # a job only starts when they are there
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
    """The source and the shard by each shard's name."""
    return {shard.name: (source, shard) for source in SOURCES for shard in shards_of(source)}


def threads_for_shard(wildcards):
    """As many as the shard's records can keep busy, so that small shards run side by side; those of a group of jobs,
    which run at once, share its cores."""
    _, shard = shards_by_name()[wildcards.shard]
    in_group = min(workflow.group_settings.group_components.get("shards", 0), len(shards_by_name()))
    return min(max(1, cpus_of("profile_shapes") // in_group) if in_group else 8, useful_workers(shard.num_records))


def config_for_shard(wildcards):
    """The config of a shard's job: its own source alone, so that other sources that come or go rerun nothing.

    The source's name is left out, too: it depends on what the others are called.
    """
    source, _ = shards_by_name()[wildcards.shard]
    part = json.loads(config_for("profile-shapes"))
    part["data"]["sources"] = [
        {
            "path": str(source.path),
            "media_root": str(source.media_root),
            "sampling": source.sampling,
            "trust_sizes": source.trust_sizes,
        }
    ]
    part["seed"] = seed_for([source])
    return json.dumps(part, sort_keys=True)


def seed_for(sources):
    """The seed where samples are drawn at random, else 0: another seed then reruns nothing."""
    return CONFIG.seed if any("random" in source.sampling for source in sources) else 0


def seed_for_merging():
    """The seed where it decides which samples are kept, or held out for evaluation, else 0."""
    return CONFIG.seed if CONFIG.data.evaluation_share else seed_for(SOURCES)


def all_shards(wildcards=None):
    return list(shards_by_name())


def is_measured():
    return CONFIG.costs.source == "measured"


def check_model():
    """Stop before any job where the family can be neither measured nor trained."""
    try:
        check_runnable(CONFIG.model.family)
    except UserError as error:
        stop_with(error)


def shapes_to_plan(wildcards):
    """A global batch that no data can fill stops here, before any job; the demo's records are not counted yet."""
    num_records = sum(shard.num_records for source in SOURCES if not is_demo(source) for shard in shards_of(source))
    wanted = CONFIG.train.global_batch_size
    if wanted > num_records and not any(map(is_demo, SOURCES)):
        stop_with(
            f"`train.global_batch_size` is {wanted}, but `data.sources` have only {num_records} records; lower it to "
            f"{num_records} or less, or add data"
        )
    return f"{RESULTS}/shapes.duckdb"


def plan_to_train(wildcards):
    check_model()
    return f"{RESULTS}/plan.yaml"


def all_measurements(wildcards):
    """The measurements that costs are fitted to, a file for each module and tp."""
    if is_measured():
        check_model()
    return [f"{RESULTS}/costs/{module}.tp{tp}.parquet" for module in MODULES for tp in TP_SIZES[module]]


def data_sheet():
    """The device's numbers where costs are computed from them, for params, so that another number reruns them."""
    if is_measured():
        return None
    own = CONFIG.cluster.device_models
    return asdict(load_device(CONFIG.cluster.device_model, Path(own) if own else None))


def load_bounds():
    """The file with the range of loads to measure over; none for analytic costs, which are known at any load."""
    return [f"{RESULTS}/load_bounds.json"] if is_measured() else []


def measured_links():
    """The file of measured links; none where the devices are not at hand, or where there is only one."""
    return [f"{RESULTS}/costs/links.parquet"] if is_measured() and CONFIG.cluster.num_devices > 1 else []


def measured_loading():
    """The file that says how long loading takes; none where the machines that train are not at hand."""
    return [f"{RESULTS}/loading.parquet"] if is_measured() else []


for source in SOURCES:
    if not is_demo(source):
        shards_of(source)  # a missing manifest stops here, before any job


def all_cores():
    """All cores of this Snakemake run, so that no other job runs beside; 1 where their number is not given."""
    try:
        return workflow.cores
    except WorkflowError:
        return 1
