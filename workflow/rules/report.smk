"""The run's page, plots and figures. `snakemake --report` puts the page into Snakemake's own report."""


rule report:
    input:
        schedule=f"{RESULTS}/schedule.parquet",
        candidates=f"{RESULTS}/candidates.parquet",
        train=f"{RESULTS}/train/summary.json",
    output:
        page=report(f"{RESULTS}/report/index.html", category="The run", labels={"what": "the whole report"}),
        plots=expand(f"{RESULTS}/report/{{plot}}.svg", plot=["costs", "plans", "timeline", "training", "time_split"]),
        summary=f"{RESULTS}/report/summary.json",
    log:
        f"{RESULTS}/logs/report.log",
    params:
        config=config_for("report"),
        code=code_digest("report"),
    shell:
        "dflop report --config {params.config:q} --run $(dirname {input.schedule}) --out $(dirname {output.summary}) 2>&1 | tee {log}"
