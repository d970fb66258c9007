"""Training with the plan. Checkpoints are not declared, so that an interrupted run finds them again."""


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
        code=code_of("train"),
        launcher=launcher(),
    shell:
        "{params.launcher} dflop train --config {params.config:q} --shapes {input.shapes} --costs {input.costs}"
        " --plan {input.plan} --out $(dirname {output}) 2>&1 | tee {log}"
