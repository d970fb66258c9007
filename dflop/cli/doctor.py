"""The command that looks at a machine, before anything else is tried there."""

import click

__all__ = ["doctor_command"]


@click.command("doctor")
def doctor_command() -> None:
    """Print the versions, cards, compilers and limits of this machine, and what it lacks.

    It takes seconds and needs no GPU. The exit code is 1 if something is missing without which nothing can be trained.
    """
    from dflop.checks.machine import findings, look, table

    machine = look()
    click.echo(table(machine))
    if any(finding.is_needed for finding in findings(machine)):
        raise click.exceptions.Exit(1)
