"""Search for the layout to train with, and preview how it regroups the first batches."""


rule search_plan:
    input:
        shapes=shapes_to_plan,
        costs=f"{RESULTS}/costs.duckdb",
        loading=measured_loading(),
    output:
        plan=f"{RESULTS}/plan.yaml",
        candidates=f"{RESULTS}/candidates.parquet",
    log:
        f"{RESULTS}/logs/search_plan.log",
    cache: "omit-software"
    resources:
        **jobs_of_stage("search_plan"),
    params:
        config=config_for("plan"),
        code=code_digest("plan"),
        loading="--loading" if measured_loading() else "",
    shell:
        "dflop plan --config {params.config:q} --shapes {input.shapes} --costs {input.costs}"
        " {params.loading} {input.loading}"
        " --out {output.plan} --candidates {output.candidates} 2>&1 | tee {log}"


rule preview_schedule:
    input:
        shapes=f"{RESULTS}/shapes.duckdb",
        costs=f"{RESULTS}/costs.duckdb",
        plan=f"{RESULTS}/plan.yaml",
    output:
        samples=f"{RESULTS}/schedule.parquet",
        stages=f"{RESULTS}/schedule_stages.parquet",
        steps=f"{RESULTS}/schedule_steps.parquet",
        rejects=f"{RESULTS}/schedule_rejects.parquet",
    log:
        f"{RESULTS}/logs/preview_schedule.log",
    params:
        config=config_for("schedule"),
        code=code_digest("schedule"),
    shell:
        "dflop schedule --config {params.config:q} --shapes {input.shapes} --costs {input.costs}"
        " --plan {input.plan} --out {output.samples} 2>&1 | tee {log}"


rule compare:
    """Compare published systems with ours, by the same costs. It runs only if asked for: `snakemake compare`."""
    input:
        shapes=shapes_to_plan,
        costs=f"{RESULTS}/costs.duckdb",
    output:
        table=f"{RESULTS}/comparison.parquet",
        json=f"{RESULTS}/comparison.json",
        figure=f"{RESULTS}/comparison.svg",
    log:
        f"{RESULTS}/logs/compare.log",
    resources:
        **jobs_of_stage("compare"),
    params:
        config=config_for("compare"),
        code=code_digest("compare"),
    shell:
        "dflop compare --config {params.config:q} --shapes {input.shapes} --costs {input.costs}"
        " --out {output.table} 2>&1 | tee {log}"
