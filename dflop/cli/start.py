"""The command that makes a folder to work in, for an installed dflop without a checkout."""

from pathlib import Path

import click

from dflop.base import start_folder
from dflop.cli.options import FOLDER

__all__ = ["init_command"]


@click.command("init")
@click.argument("folder", type=FOLDER)
@click.option("--recipe", help="The name of a file in config/recipes, which is copied to recipe.yaml.")
def init_command(folder: Path, recipe: str | None) -> None:
    """Make a new folder to run the workflow in: a Snakefile, configs, and a profile for Slurm.

    The Snakefile uses the workflow that is installed with dflop. A folder that is not empty is refused.
    """
    written = start_folder(folder, recipe)
    click.echo(f"{folder}: wrote {', '.join(written)}")
    if recipe:
        click.echo(
            "Next:\n"
            f"  cd {folder}\n"
            "  $EDITOR recipe.yaml                      # put your paths and your cluster into it\n"
            "  dflop recipe recipe.yaml -n              # shows what would run, or names what is missing\n"
            "  dflop recipe recipe.yaml --profile slurm"
        )
        return
    click.echo(
        "Next:\n"
        f"  cd {folder}\n"
        "  snakemake --cores 2                      # the demo, about eight minutes\n"
        "  snakemake --cores 2 --configfile config/examples/own_data_cpu.yaml           "
        "# your data; put your paths into it first\n"
        "  snakemake --profile slurm --configfile config/examples/slurm_one_node.yaml   "
        "# on a Slurm cluster; needs dflop[slurm]\n"
        "  config/examples/slurm_eight_nodes.yaml is a cluster of 64 GPUs, with what you train with today beside it"
    )
