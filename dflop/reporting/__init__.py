"""What a run found, for people: plots, figures and traces."""

from dflop.reporting.report import write_report

__all__ = ["write_report"]
