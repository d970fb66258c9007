"""The command that looks at a machine, before anything else is tried there."""

import click

__all__ = ["doctor_command"]


@click.command("doctor")
def doctor_command() -> None:
    """Print what of this machine matters to training, and what is missing for which use. It takes seconds, also without
    a GPU. The exit code is 1 if something is missing without which nothing can be trained here.
    """
    from dflop.checks.machine import findings, look, table

    machine = look()
    click.echo(table(machine))
    if any(finding.is_needed for finding in findings(machine)):
        raise click.exceptions.Exit(1)
