"""Measure the costs of microbatches on each module and of transfers on each link, and fit models to both."""


rule cost_settings:
    """Write down everything that costs depend on, apart from the range of loads.

    They are in a file, because Snakemake ignores changed params of a job while jobs upstream of it have to run: changed
    data and changed settings together would leave the old costs in place.
    """
    output:
        f"{RESULTS}/costs/settings.json",
    log:
        f"{RESULTS}/logs/cost_settings.log",
    params:
        config=config_for_costs(),
        model=model_digest(CONFIG.model),
        device=data_sheet(),
        code=code_digest("profile-costs"),
    shell:
        "printf '%s\\n' {params.config:q} > {output} 2> {log}"


rule profile_costs:
    input:
        settings=f"{RESULTS}/costs/settings.json",
        # If it is missing, it is made first. It is ancient, so that new data alone starts no measurement, because a
        # load costs the same whatever data it comes from. The next measurement covers the new range.
        bounds=ancient(load_bounds()),
    output:
        measurements=f"{RESULTS}/costs/{{module}}.tp{{tp}}.parquet",
        parameters=f"{RESULTS}/costs/{{module}}.tp{{tp}}.parameters.parquet",
        device=f"{RESULTS}/costs/{{module}}.tp{{tp}}.device.parquet",
    log:
        f"{RESULTS}/logs/profile_costs/{{module}}.tp{{tp}}.log",
    cache: "omit-software"
    # All cores, so that no other job disturbs the measurement.
    threads: all_cores() if is_measured() else 1
    resources:
        **jobs_of_tp(),
        measuring=int(is_measured()),
    params:
        # The key of the output cache does not contain wildcards, but it contains params.
        module="{module}",
        tp="{tp}",
        bounds="--bounds" if load_bounds() else "",
        # What the settings depend on and do not say. Where a checkpoint such as the demo's data ends behind them, jobs
        # are looked at anew, and of files that were made the content alone counts. The next call then measures.
        model=model_digest(CONFIG.model),
        device=data_sheet(),
        code=code_digest("profile-costs"),
    shell:
        "dflop profile-costs --config {input.settings} --module {wildcards.module} --tp {wildcards.tp}"
        " {params.bounds} {input.bounds} --out {output.measurements} 2>&1 | tee {log}"


rule profile_links:
    output:
        f"{RESULTS}/costs/links.parquet",
    log:
        f"{RESULTS}/logs/profile_links.log",
    cache: "omit-software"
    threads: all_cores()
    resources:
        **on_all_devices("profile_links"),
        measuring=1,
    params:
        config=config_for("profile-links"),
        code=code_digest("profile-links"),
    shell:
        "{resources.launcher} dflop profile-links --config {params.config:q} --out {output} 2>&1 | tee {log}"


rule fit_costs:
    input:
        measurements=all_measurements,
        links=measured_links(),
    output:
        f"{RESULTS}/costs.duckdb",
    log:
        f"{RESULTS}/logs/fit_costs.log",
    params:
        code=code_digest("fit-costs"),
        links="--links" if measured_links() else "",
    shell:
        "dflop fit-costs {input.measurements} {params.links} {input.links} --out {output} 2>&1 | tee {log}"
