"""The `dflop` command: one subcommand a stage, each reading files and writing files.

A user's mistake is reported in one line on stderr, with exit code 2. Training that was asked to stop, and can be
resumed, ends with exit code 75. Heavy imports stand inside the commands that need them, so that `dflop --help` answers
at once.
"""

import gc
import os
import resource
import sys

import click

from dflop.base import UserError, printable
from dflop.cli import checking, comparison, costs, data, doctor, evaluation, plans, recipe, start, training

__all__ = ["cli", "main"]

# Libraries map so much when they are loaded; some of them end the process where they cannot.
_LEAST_ADDRESSES = 2 << 30
# What the system's loader says where it finds no room for a library.
_NO_ADDRESSES = ("map segment", "allocate memory")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="dflop")
def cli() -> None:
    """Plan and run multimodal-LLM training around the data.

    The workflow runs these commands in this order: demo-data (for the demo), profile-shapes, merge-shapes, plot-shapes,
    profile-loading, profile-costs, profile-links, fit-costs, plan, schedule, train, report. Each can also be run by
    hand. The workflow does not need the others: compare prices published systems beside a plan of ours, check-plan
    compares a plan's predicted memory with the memory of a rank's step, check-model compares samples in a plan's stages
    with plain transformers, check-packing compares samples that any collator packs with each alone, verdict reads logs
    of other trainers, recipe runs the workflow for stages that follow each other, evaluate has lmms-eval evaluate a
    trained model, init makes a folder to run the workflow in, shapes reads a manifest's shapes for other trainers, and
    doctor looks at a machine.
    """
    limit = _address_limit()
    if limit is not None and limit < _LEAST_ADDRESSES and not {"-h", "--help"} & {*sys.argv}:
        raise UserError(_too_little(limit))


for module in (checking, comparison, costs, data, doctor, evaluation, plans, recipe, start, training):
    for command in vars(module).values():
        if isinstance(command, click.Command):
            cli.add_command(command)


def main() -> None:
    """Entry point of the `dflop` command."""
    gc.set_threshold(10_000, 10, 10)  # imports leave hardly any garbage: to look for it takes a quarter of their time
    _open_standard_files()
    try:
        cli(standalone_mode=False)
    except (MemoryError, ImportError) as error:
        limit = _address_limit()
        is_memory = isinstance(error, MemoryError) or any(said in str(error) for said in _NO_ADDRESSES)
        if limit is None or not is_memory:
            raise
        click.echo(f"dflop: {_too_little(limit)}", err=True)
        sys.exit(2)
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


def _open_standard_files() -> None:
    """Open those that the caller has closed (`2>&-`). A table would otherwise get their number, and what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which has the lowest number that is free
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _address_limit() -> int | None:
    """The most bytes of addresses that this process may have; None if it may have any."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def _too_little(limit: int) -> str:
    return f"`ulimit -v` leaves {limit / 1e9:.1f} GB, too little to load libraries; run `ulimit -v unlimited` first"
