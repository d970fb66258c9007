"""Profile the shape of every sample, shard by shard, and merge the shards into one database."""


checkpoint demo_data:
    output:
        train=f"{DEMO_DATA}/train.json",
        audio=f"{DEMO_DATA}/audio.json",
    log:
        "results/logs/demo_data.log",
    priority: 10
    params:
        code=code_digest("demo-data"),
    shell:
        "dflop demo-data --out $(dirname {output.train}) 2>&1 | tee {log}"


rule profile_shapes:
    output:
        f"{RESULTS}/shapes/{{shard}}.parquet",
    log:
        f"{RESULTS}/logs/profile_shapes/{{shard}}.log",
    # Mistakes in the data are found here within seconds, so these jobs run before others.
    priority: 10
    # Under Slurm several shards are one job; the profile says how many.
    group:
        "shards"
    threads: threads_for_shard
    resources:
        **jobs_of_stage("profile_shapes"),
        # So many of a group's jobs run at the same time as the group has cores.
        shard_slots=max(1, -(-SHARD_SLOTS // cpus_of("profile_shapes"))),
    params:
        config=config_for_shard,
        model=model_digest(CONFIG.model),
        code=code_digest("profile-shapes"),
    shell:
        "dflop profile-shapes --config {params.config:q} --shard {wildcards.shard} --out {output} --workers {threads} 2>&1 | tee {log}"


rule merge_shapes:
    input:
        lambda wildcards: [f"{RESULTS}/shapes/{shard}.parquet" for shard in all_shards()],
    output:
        shapes=f"{RESULTS}/shapes.duckdb",
        bounds=f"{RESULTS}/load_bounds.json",
    log:
        f"{RESULTS}/logs/merge_shapes.log",
    priority: 10
    params:
        config=config_for("merge-shapes", seed=seed_for_merging()),
        shards=lambda wildcards: all_shards(),
        code=code_digest("merge-shapes"),
    shell:
        "dflop merge-shapes --config {params.config:q} --shapes $(dirname {output.shapes})/shapes --out {output.shapes}"
        " --bounds {output.bounds} 2>&1 | tee {log}"


rule profile_loading:
    """Measure how long samples take to load, on a machine on which training will run."""
    input:
        f"{RESULTS}/shapes.duckdb",
    output:
        f"{RESULTS}/loading.parquet",
    log:
        f"{RESULTS}/logs/profile_loading.log",
    # All cores, so that no other job disturbs the measurement.
    threads: all_cores()
    resources:
        **jobs_of_stage("profile_loading"),
        measuring=1,
    params:
        config=config_for("profile-loading"),
        code=code_digest("profile-loading"),
    shell:
        "dflop profile-loading --config {params.config:q} --shapes {input} --out {output} 2>&1 | tee {log}"


rule plot_shapes:
    input:
        f"{RESULTS}/shapes.duckdb",
    output:
        f"{RESULTS}/report/shapes.svg",
    log:
        f"{RESULTS}/logs/plot_shapes.log",
    params:
        code=code_digest("plot-shapes"),
    shell:
        "dflop plot-shapes --shapes {input} --out {output} 2>&1 | tee {log}"
