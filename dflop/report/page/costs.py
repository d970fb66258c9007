"""The page's section on costs: where they come from, and their error on stages that were held out from the fit."""

from typing import Any

import polars as pl

from dflop.report.run import Run

__all__ = ["costs_section"]

# Median errors from which on predictions are called rough, and poor.
_ROUGH, _POOR = 0.1, 0.2


def costs_section(run: Run) -> dict[str, Any]:
    """The section, from the run's measurements and the errors of the fit. `errors` are the rows of `fit_error`;
    `extrapolated` is the share of the plan's microbatches that are beyond the measured loads."""
    seconds = run.fit_error.filter(pl.col("quantity") == "seconds")
    return {
        "finding": _finding(run, seconds),
        "source": run.costs_source,
        "device": run.device_name,
        "precision": ", ".join(run.device.get_column("precision", default=pl.Series(dtype=pl.String)).unique().sort()),
        "errors": run.fit_error.to_dicts(),
        "median_error": seconds["median_error"].median(),
        "extrapolated": float(run.plan_text.get("predicted", {}).get("extrapolated") or 0.0),
    }


def _finding(run: Run, seconds: pl.DataFrame) -> str:
    if run.costs_source != "measured":
        return (
            f"Costs are {run.costs_source}: computed from the model's structure and the data sheet of "
            f"{run.device_name.removesuffix(' (analytic)')}, not measured on it. The documentation says, under What it "
            "brings, how far such costs were off for published runs"
        )
    if seconds.is_empty():
        return f"Costs were measured on {run.device_name}; no whole stage was kept to test the fit on"
    least, most, median = (getattr(seconds["median_error"], how)() for how in ("min", "max", "median"))
    verdict = "good" if median < _ROUGH else "rough" if median < _POOR else "poor"
    finding = (
        f"The costs are {verdict}: on whole stages that no fit saw, predicted seconds are off by {least:.0%} to "
        f"{most:.0%} at the median"
    )
    if median >= _ROUGH:
        finding += "; measure again with nothing else on the device (`snakemake --forcerun profile_costs`)"
    return finding
