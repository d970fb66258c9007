"""The commands that check a plan: its predicted memory, and the results of its stages."""

from pathlib import Path

import click

from dflop.base import UserError
from dflop.cli.options import FILE, config_option, run_argument

__all__ = ["check_model_command", "check_plan_command"]


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
