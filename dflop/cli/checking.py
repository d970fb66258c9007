"""The command that holds a plan's predicted memory against what training would hold."""

from pathlib import Path

import click

from dflop.cli.options import FILE, config_option
from dflop.runtime import UserError

__all__ = ["check_plan_command"]


@click.command("check-plan")
@config_option
@click.option("--costs", type=FILE, required=True)
@click.option("--plan", "plan_path", type=FILE, required=True)
@click.option("--rank", type=int, help="Without it, the one that is predicted to hold most.")
@click.option("--pictures", type=click.IntRange(min=1), default=4, show_default=True, help="Pictures a microbatch.")
@click.option("--side", type=click.IntRange(min=28), default=768, show_default=True, help="Pixels of a picture's side.")
@click.option(
    "--text-tokens", type=click.IntRange(min=1), default=2048, show_default=True, help="Text tokens a microbatch."
)
def check_plan_command(
    configs: tuple[str, ...], costs: Path, plan_path: Path, rank: int | None, pictures: int, side: int, text_tokens: int
) -> None:
    """Hold a rank's predicted memory against what its step takes on tensors without values: no GPU, no memory."""
    from dflop.config import load_config
    from dflop.costs import CostModel
    from dflop.models import digest_of_spec, load_model_spec
    from dflop.parallelism import load_plan
    from dflop.training import check_plan
    from dflop.training.plan_check import MadeUpLoad, check_rank

    if not configs:
        raise UserError("`dflop check-plan` needs a config: --config config/config.yaml")
    config, plan = load_config(*configs), load_plan(plan_path)
    spec = load_model_spec(config.model)
    check_plan(plan_path, plan, spec)
    cost_model = CostModel.load(costs)
    cost_model.require_made_for(
        model=digest_of_spec(spec),
        precision=config.train.precision,
        device_model=config.cluster.device_model,
    )
    checked = check_rank(
        config, plan, cost_model, MadeUpLoad(num_pictures=pictures, picture_side=side, text_tokens=text_tokens), rank
    )
    held = " + ".join(f"{node.module} stage {node.pp_stage} replica {node.dp_rank}" for node in checked.nodes)
    click.echo(f"{plan}\nrank {checked.rank}: {held}\n\n{'GiB':12}{'predicted':>12}{'tracked':>12}{'ratio':>9}")
    rows = [*checked.predicted, "together"]
    predicted, tracked = (own | {"together": sum(own.values())} for own in (checked.predicted, checked.tracked))
    for row in rows:
        ratio = f"{predicted[row] / tracked[row]:9.3f}" if tracked[row] else ""
        click.echo(f"{row:12}{predicted[row] / 2**30:12.4g}{tracked[row] / 2**30:12.4g}{ratio}")
