"""The results of a run, for people: a page, plots, figures and traces."""

from dflop.report.report import plot_shapes, write_report

__all__ = ["plot_shapes", "write_report"]
