"""The command that makes a folder to work in, for an installed dflop without a checkout."""

from pathlib import Path

import click

from dflop.base import start_folder
from dflop.cli.options import FOLDER

__all__ = ["init_command"]


@click.command("init")
@click.argument("folder", type=FOLDER)
def init_command(folder: Path) -> None:
    """Make a new folder to run the workflow in: a Snakefile, configs, and a profile for Slurm.

    The Snakefile uses the workflow that is installed with dflop. A folder that is not empty is refused.
    """
    written = start_folder(folder)
    click.echo(f"{folder}: wrote {', '.join(written)}")
    click.echo(
        "Next:\n"
        f"  cd {folder}\n"
        "  snakemake --cores 2                      # the demo, about four minutes\n"
        "  snakemake --cores 2 --configfile config/examples/own_data_cpu.yaml           "
        "# your data; put your paths into it first\n"
        "  snakemake --profile slurm --configfile config/examples/slurm_one_node.yaml   "
        "# on a Slurm cluster; needs dflop[slurm]\n"
        "  config/examples/slurm_eight_nodes.yaml is a cluster of 64 GPUs, with what you train with today beside it"
    )
