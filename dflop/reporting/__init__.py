"""What a run found, for people: plots, figures and traces."""

from dflop.reporting.report import plot_shapes, write_report

__all__ = ["plot_shapes", "write_report"]
