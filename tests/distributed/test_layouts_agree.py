"""In fp32, twenty steps of loss are the same to 1e-4 whatever the layout."""

import pytest
from training_runs import plan_file, train

pytestmark = pytest.mark.serial

LAYOUTS = {
    "disjoint": {"num_microbatches": 2},
    "colocated, llm pp 2": {"placement": "colocated", "llm_pp": 2, "num_microbatches": 4, "schedule": "zb_h1"},
    "colocated, llm dp 2": {"placement": "colocated", "llm_dp": 2, "num_microbatches": 2},
}


def test_twenty_steps_in_single_precision_agree_between_layouts(run, tmp_path):
    folder, config = run
    losses = {}
    for name, layout in LAYOUTS.items():
        steps = train(
            folder,
            config,
            plan_file(folder, **layout),
            tmp_path / name.replace(" ", "-"),
            steps=20,
            precision="fp32",
            lr=1e-4,
            checkpoint_every=20,
        )
        losses[name] = [step["loss"] for step in steps]
    first, *others = losses.values()
    assert len(first) == 20
    for other in others:
        assert other == pytest.approx(first, rel=1e-4)
