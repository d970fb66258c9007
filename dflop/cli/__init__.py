"""The `dflop` command: one subcommand a stage, each reading files and writing files.

A user's mistake is reported in one line on stderr, with exit code 2. Training that was asked to stop, and can be
resumed, ends with exit code 75. Heavy imports stand inside the commands that need them, so that `dflop --help` answers
at once.
"""

import sys

import click

from dflop.base import UserError, printable
from dflop.cli import checking, comparison, costs, data, doctor, evaluation, plans, recipe, start, training

__all__ = ["cli", "main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="dflop")
def cli() -> None:
    """Plan and run multimodal-LLM training around the data.

    The workflow runs these commands in this order: demo-data (for the demo), profile-shapes, merge-shapes, plot-shapes,
    profile-loading, profile-costs, profile-links, fit-costs, plan, schedule, train, report. Each can also be run by
    hand. The workflow does not need the others: compare prices published systems beside a plan of ours, check-plan
    compares a plan's predicted memory with the memory of a rank's step, check-model compares samples in a plan's stages
    with plain transformers, check-packing compares samples that any collator packs with each alone, recipe runs the
    workflow for stages that follow each other, evaluate has lmms-eval evaluate a trained model, init makes a folder to
    run the workflow in, shapes reads a manifest's shapes for other trainers, and doctor looks at a machine.
    """


for module in (checking, comparison, costs, data, doctor, evaluation, plans, recipe, start, training):
    for command in vars(module).values():
        if isinstance(command, click.Command):
            cli.add_command(command)


def main() -> None:
    """Entry point of the `dflop` command."""
    try:
        cli(standalone_mode=False)
    except UserError as error:
        click.echo(f"dflop: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        click.echo(printable(f"dflop: {where}{error.strerror or error}"), err=True)
        sys.exit(2)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("dflop: interrupted", err=True)
        sys.exit(130)
