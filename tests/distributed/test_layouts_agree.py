"""In fp32, ten steps of loss are the same to 1e-4 whatever the layout; in bf16, sixteen are those of fp32 to 2 %,
with layers compiled as well."""

import pytest
from training_runs import plan_file, train

pytestmark = pytest.mark.serial

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
    "layout",
    [
        pytest.param({"llm_pp": 2, "num_microbatches": 4}, id="pp 2", marks=pytest.mark.exhaustive),
        pytest.param({"llm_dp": 2}, id="dp 2", marks=pytest.mark.exhaustive),
    ],
)
def test_ten_steps_in_single_precision_agree_between_layouts(layout, run, losses_in_fp32, tmp_path):
    folder, config = run
    plan = plan_file(folder, placement="colocated", **layout)
    steps = train(folder, config, plan, tmp_path, precision="fp32", **HOW | {"steps": 10})
    assert [step["loss"] for step in steps] == pytest.approx(losses_in_fp32[:10], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        ("pipelined, tensor parallelism", "off"),
        *(pytest.param("shared parameters", compiled, marks=pytest.mark.exhaustive) for compiled in ("off", "on")),
    ],
)
def test_sixteen_steps_in_bf16_lose_what_they_lose_in_single_precision(name, compiled, run, losses_in_fp32, tmp_path):
    folder, config = run
    assert losses_in_fp32[-1] < 0.8 * losses_in_fp32[0]
    how = HOW | {"precision": "bf16", "compile": compiled}
    steps = train(folder, config, plan_file(folder, **IN_BF16[name]), tmp_path, **how)
    for step, expected in zip(steps, losses_in_fp32, strict=True):
        assert step["loss"] == pytest.approx(expected, rel=0.02), step["step"]
