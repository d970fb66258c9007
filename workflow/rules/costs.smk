"""What a microbatch costs: each module's layers and the links between devices, measured, then fitted."""


rule profile_costs:
    output:
        measurements=f"{RESULTS}/costs/{{module}}.tp{{tp}}.parquet",
        parameters=f"{RESULTS}/costs/{{module}}.tp{{tp}}.parameters.parquet",
        device=f"{RESULTS}/costs/{{module}}.tp{{tp}}.device.parquet",
    log:
        f"{RESULTS}/logs/profile_costs/{{module}}.tp{{tp}}.log",
    cache: "omit-software"
    # All cores, so that nothing else runs beside a measurement.
    threads: all_cores() if is_measured() else 1
    resources:
        **devices_of_tp(),
    params:
        config=config_for("profile-costs"),
        # Wildcards are no part of the between-workflow cache's key, params are.
        module="{module}",
        tp="{tp}",
        model=model_digest(CONFIG.model),
        device=data_sheet(),
        code=code_of("profile-costs"),
    shell:
        "dflop profile-costs --config {params.config:q} --module {wildcards.module} --tp {wildcards.tp}"
        # No input either: other data does not change what a load costs, and as `ancient` it would hide changed params.
        # The data's jobs go first where they can; without the file the range is a usual one.
        " --bounds $(dirname {output.measurements})/../load_bounds.json"
        " --out {output.measurements} 2> {log} | tee -a {log}"


rule profile_links:
    output:
        f"{RESULTS}/costs/links.parquet",
    log:
        f"{RESULTS}/logs/profile_links.log",
    cache: "omit-software"
    threads: all_cores()
    resources:
        **all_devices(),
    params:
        config=config_for("profile-links"),
        code=code_of("profile-links"),
        launcher=launcher(),
    shell:
        "{params.launcher} dflop profile-links --config {params.config:q} --out {output} 2> {log} | tee -a {log}"


rule fit_costs:
    input:
        measurements=all_measurements,
        links=measured_links(),
    output:
        f"{RESULTS}/costs.duckdb",
    log:
        f"{RESULTS}/logs/fit_costs.log",
    params:
        code=code_of("fit-costs"),
        links="--links" if measured_links() else "",
    shell:
        "dflop fit-costs {input.measurements} {params.links} {input.links} --out {output} 2> {log} | tee -a {log}"
