"""Train with the plan. Checkpoints are not declared as outputs: Snakemake would delete them if a run is interrupted.

A signal that asks all processes of a job to stop must not end `tee` before training has saved and reported it. Ahead of
a Slurm job's time limit, training gets a SIGUSR1, saves, and ends with exit code 75. The job is then requeued under its
own number, and training goes on from the checkpoint. A retry would do the same, but the number of retries is limited.
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
        **on_all_devices("train", takes_signals=True),
    params:
        config=config_for("train"),
        weights=weights_to_begin_with,
        code=code_digest("train"),
    shell:
        "{resources.launcher} dflop train --config {params.config:q} --shapes {input.shapes} --costs {input.costs}"
        " --plan {input.plan} --out $(dirname {output}) 2>&1"
        " | (trap '' TERM USR1; exec tee {log})"
        ' || {{ code=$?; if [ $code = 75 ] && [ -n "${{DFLOP_SLURM_JOB:-}}" ];'
        " then scontrol requeue $SLURM_JOB_ID && sleep 60; fi; exit $code; }}"
