"""The commands that check a plan (its predicted memory, the results of its stages), and anybody's packing and logs."""

from pathlib import Path

import click

from dflop.base import UserError
from dflop.cli.options import FILE, FOLDER, config_option, run_argument

__all__ = ["check_model_command", "check_packing_command", "check_plan_command", "verdict_command"]


@click.command("check-plan")
@config_option
@click.option("--costs", type=FILE, required=True)
@click.option("--plan", "plan_path", type=FILE, required=True)
@click.option("--rank", type=int, help="The rank to check; without it, the one that is predicted to hold most.")
@click.option("--pictures", type=click.IntRange(min=1), default=4, show_default=True, help="Pictures a microbatch.")
@click.option("--side", type=click.IntRange(min=28), default=768, show_default=True, help="Pixels of a picture's side.")
@click.option(
    "--text-tokens", type=click.IntRange(min=1), default=2048, show_default=True, help="Text tokens a microbatch."
)
def check_plan_command(
    configs: tuple[str, ...], costs: Path, plan_path: Path, rank: int | None, pictures: int, side: int, text_tokens: int
) -> None:
    """Compare a rank's predicted memory with that of its step, and follow the messages of all ranks. No GPU is needed.

    Memory is tracked on tensors without values. Messages are followed in a model of NCCL.
    """
    from dflop.checks.of_plan import MadeUpLoad, PlanToCheck, check_all
    from dflop.config import load_config
    from dflop.costs import CostModel
    from dflop.models import load_model_spec
    from dflop.plan import load_plan
    from dflop.train import check_plan

    if not configs:
        raise UserError("`dflop check-plan` needs a config: --config config/config.yaml")
    config, plan = load_config(*configs), load_plan(plan_path)
    spec = load_model_spec(config.model)
    check_plan(plan_path, plan, spec)
    cost_model = CostModel.load(costs)
    cost_model.require_made_for(spec, config)
    load = MadeUpLoad(num_pictures=pictures, picture_side=side, text_tokens=text_tokens)
    found = check_all(PlanToCheck(config=config, plan=plan, costs=cost_model, load=load, rank=rank))
    click.echo(f"{plan}\n{found}")


@click.command("check-model")
@config_option
@click.option("--plan", "plan_path", type=FILE)
@click.option("--shapes", type=FILE)
@click.option("--samples", type=click.IntRange(min=1), default=6, show_default=True, help="Samples to run.")
@click.option(
    "--precision", type=click.Choice(["fp64", "fp32"]), default="fp64", show_default=True, help="fp32: half the memory."
)
@run_argument(plan_path="plan.yaml", shapes="shapes.duckdb")
def check_model_command(configs: tuple[str, ...], plan_path: Path, shapes: Path, samples: int, precision: str) -> None:
    """Run a few samples in a plan's stages, packed and one by one, and in plain transformers; print what differs.

    It shows whether packed samples see each other and whether positions are right. It runs in one process on the CPU,
    which must hold the model's weights and three times its gradients. RUN is a run of the workflow, by its name or
    folder; then the files are the run's. If anything is wrong, it is printed, and the exit code is 2.
    """
    from dflop.checks.model_arithmetic import check_model
    from dflop.config import load_config
    from dflop.models import load_model_spec
    from dflop.plan import load_plan
    from dflop.train import check_plan

    config, plan = load_config(*configs), load_plan(plan_path)
    check_plan(plan_path, plan, load_model_spec(config.model))
    checked = check_model(config, plan, shapes, num_samples=samples, precision=precision)
    stages = ", ".join(f"{module} in {count}" for module, count in checked.num_stages.items())
    click.echo(f"{plan}\nstages: {stages}; {precision}; differences from transformers are relative\n")
    click.echo(f"{'sample':32}{'':12}{'tokens':>8}{'loss':>11}{'alone':>10}{'packed':>10}  positions  sees others")
    for sample in checked.samples:
        positions = "right" if sample.has_positions_alone and sample.has_positions_packed else "wrong"
        click.echo(
            f"{sample.sample_id[-31:]:32}{sample.modality:12}{sample.num_tokens:8}{sample.loss:11.4f}{sample.alone:10.1e}"
            f"{sample.packed:10.1e}  {positions:9}  {'yes' if sample.sees else 'no'}"
        )
    click.echo(f"\n{'largest':14}{'one by one':>12}{'packed':>12}")
    for name in ("loss", "logits", "gradients"):
        click.echo(f"{name:14}{getattr(checked.alone, name):12.1e}{getattr(checked.packed, name):12.1e}")
    click.echo(f"(gradients: of {checked.alone.parameter}, and of {checked.packed.parameter})\n")
    if checked.faults:
        raise UserError("; ".join(checked.faults))
    click.echo(
        "Packed samples do not see each other, their positions are transformers', and so are loss, logits and "
        f"gradients to {checked.tolerance:.0e}."
    )


@click.command("check-packing")
@click.argument("model", type=FOLDER)
@click.option("--collator", required=True, metavar="MODULE:NAME", help="Called with a list of samples; packs them.")
@click.option("--dataset", required=True, metavar="MODULE:NAME", help="Samples, or a function that returns them.")
@click.option("--samples", type=click.IntRange(min=2), default=4, show_default=True, help="How many are packed.")
@click.option("--attn", type=click.Choice(["sdpa", "eager"]), default="sdpa", show_default=True, help="Attention.")
def check_packing_command(model: Path, collator: str, dataset: str, samples: int, attn: str) -> None:
    """Compare samples that your collator packs with each of them alone, in any transformers model.

    MODEL is a folder with a config and, if weights are to be read, its weights; without them they are random, which
    shows the same mistakes. MODULE is looked for in the current folder first. It runs on the CPU in fp64. If samples
    see each other, positions are wrong, pictures are lost or targets reach over a boundary, it is printed, and the exit
    code is 2.
    """
    import itertools

    from dflop.checks.packing import check_packing

    if not (model / "config.json").is_file():
        raise UserError(f"{model} has no config.json; give the folder of a transformers model")
    collate, data = _object(collator), _object(dataset)
    if not hasattr(data, "__getitem__") and callable(data):
        data = data()
    chosen = list(itertools.islice(data, samples))
    if len(chosen) < 2:
        raise UserError(f"--dataset {dataset} has {len(chosen)} samples; packing takes two at least")
    checked = check_packing(_transformers_model(model, attn), collate, chosen)
    if checked.samples:
        click.echo(f"{'sample':>6}{'tokens':>9}{'logits':>10}  positions  sees")
    for number, sample in enumerate(checked.samples):
        sees = ", ".join(map(str, sample.sees)) or "none"
        positions = "right" if sample.has_positions else "wrong"
        click.echo(f"{number:6}{sample.num_tokens:9}{sample.logits:10.1e}  {positions:9}  {sees}")
    if checked.samples:
        click.echo(f"loss {checked.loss:.1e}, gradients {checked.gradients:.1e} ({checked.parameter})")
    if checked.faults:
        raise UserError("; ".join(checked.faults))
    click.echo("Packed samples are computed as alone; differences are relative.")


def _object(name: str):
    """What `module:name` names; the module may lie in the current folder."""
    import importlib
    import sys

    module, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{name} cannot be imported as MODULE:NAME: {error}") from None
    finally:
        sys.path.remove("")


def _transformers_model(folder: Path, attn: str):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is no transformers model: {str(error).splitlines()[0]}") from None
    is_vlm = type(config) in AutoModelForImageTextToText._model_mapping
    auto = AutoModelForImageTextToText if is_vlm else AutoModelForCausalLM
    if not any(folder.glob("*.safetensors")):
        click.echo(f"{folder} has no *.safetensors: the weights are random")
        return auto.from_config(config, attn_implementation=attn)
    return auto.from_pretrained(folder, attn_implementation=attn)


@click.command("verdict")
@click.argument("logs", type=FILE, nargs=-1, required=True)
@click.option(
    "--shapes", type=FILE, help="CSV or JSON lines: each step's samples, with `step`, `rank`, `microbatch` and loads."
)
@click.option("--padded", is_flag=True, help="Batches are padded to their longest sample.")
def verdict_command(logs: tuple[Path, ...], shapes: Path | None, padded: bool) -> None:
    """Say of a run of another trainer, by its log, what shapes explain, what balance would save and what bounds it.

    LOGS are traces of torch's profiler or torchtitan's structured logs (a file a rank), NeMo AutoModel's
    training.jsonl, or tables with `step_s` and, where known, `data_s` and loads such as `num_tokens`. Shares have
    intervals of 90 %.
    """
    from dflop.checks.step_logs import read_batches, read_log
    from dflop.checks.verdict import judge

    click.echo(judge(read_log(logs), read_batches(shapes) if shapes else None, padded=padded))
