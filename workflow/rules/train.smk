"""Train with the plan. Checkpoints are no declared outputs: Snakemake would delete them when a run is interrupted.

A signal that asks all of a job's processes to stop must not end `tee` before training has saved and said so.
"""


rule train:
    input:
        shapes=f"{RESULTS}/shapes.duckdb",
        costs=f"{RESULTS}/costs.duckdb",
        plan=plan_to_train,
    output:
        f"{RESULTS}/train/summary.json",
    log:
        f"{RESULTS}/logs/train.log",
    threads: all_cores()
    resources:
        **all_devices(),
    params:
        config=config_for("train"),
        code=code_digest("train"),
        launcher=launcher(),
    shell:
        "{params.launcher} dflop train --config {params.config:q} --shapes {input.shapes} --costs {input.costs}"
        " --plan {input.plan} --out $(dirname {output}) 2>&1"
        " | (trap '' TERM USR1; exec tee {log})"
