"""In fp32, ten steps of loss are the same to 1e-4 whatever the layout; in bf16, sixteen are those of fp32 to 2 %,
with layers compiled as well."""

import pytest
from training_runs import plan_file, train

pytestmark = pytest.mark.serial

LAYOUTS = {
    "disjoint": {"num_microbatches": 2},
    "colocated, llm pp 2": {"placement": "colocated", "llm_pp": 2, "num_microbatches": 4},
    "colocated, llm dp 2": {"placement": "colocated", "llm_dp": 2, "num_microbatches": 2},
}


def test_ten_steps_in_single_precision_agree_between_layouts(run, tmp_path):
    folder, config = run
    losses = {}
    for name, layout in LAYOUTS.items():
        steps = train(
            folder,
            config,
            plan_file(folder, **layout),
            tmp_path / name.replace(" ", "-"),
            steps=10,
            precision="fp32",
            lr=1e-4,
            checkpoint_every=10,
            global_batch_size=4,
        )
        losses[name] = [step["loss"] for step in steps]
    first, *others = losses.values()
    assert len(first) == 10
    for other in others:
        assert other == pytest.approx(first, rel=1e-4)


IN_BF16 = {
    "pipelined, tensor parallelism": {"llm_pp": 2, "llm_tp": 2},
    "shared parameters": {"placement": "colocated", "llm_dp": 2, "sharding": "parameters"},
}

# Small batches: a CPU without instructions for bf16 takes five times as long as in fp32.
HOW = {"steps": 16, "lr": 1e-3, "grad_clip": 1.0, "checkpoint_every": 16, "global_batch_size": 4}


@pytest.fixture(scope="module")
def losses_in_fp32(run, tmp_path_factory):
    folder, config = run
    out = tmp_path_factory.mktemp("fp32")
    steps = train(folder, config, plan_file(folder), out, precision="fp32", **HOW)
    return [step["loss"] for step in steps]


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *((name, "off") for name in IN_BF16),
        pytest.param("shared parameters", "on", marks=pytest.mark.exhaustive),  # it takes as long as all others
    ],
)
def test_sixteen_steps_in_bf16_lose_what_they_lose_in_single_precision(name, compiled, run, losses_in_fp32, tmp_path):
    folder, config = run
    assert losses_in_fp32[-1] < 0.8 * losses_in_fp32[0]
    how = HOW | {"precision": "bf16", "compile": compiled}
    steps = train(folder, config, plan_file(folder, **IN_BF16[name]), tmp_path, **how)
    for step, expected in zip(steps, losses_in_fp32, strict=True):
        assert step["loss"] == pytest.approx(expected, rel=0.02), step["step"]
