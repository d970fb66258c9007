"""Plots and figures of the run; `snakemake --report` binds them into one page."""


rule report:
    input:
        schedule=f"{RESULTS}/schedule.parquet",
        candidates=f"{RESULTS}/candidates.parquet",
        train=f"{RESULTS}/train/summary.json",
    output:
        costs=report(f"{RESULTS}/report/costs.svg", category="Costs", caption="../report/costs.rst"),
        plans=report(f"{RESULTS}/report/plans.svg", category="Plan", caption="../report/plans.rst"),
        timeline=report(f"{RESULTS}/report/timeline.svg", category="Plan", caption="../report/timeline.rst"),
        training=report(f"{RESULTS}/report/training.svg", category="Training", caption="../report/training.rst"),
        time_split=report(f"{RESULTS}/report/time_split.svg", category="Training", caption="../report/time_split.rst"),
        summary=report(f"{RESULTS}/report/summary.json", category="Summary", caption="../report/summary.rst"),
    log:
        f"{RESULTS}/logs/report.log",
    params:
        config=config_for("report"),
        code=code_digest("report"),
    shell:
        "dflop report --config {params.config:q} --run $(dirname {input.schedule}) --out $(dirname {output.summary}) 2>&1 | tee {log}"
