"""Other trainers' parsers take emitted files and read the plan's sizes in them; `make test-trainers` installs these."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import trainers_parsers
from test_emit import CHUNKS, LONG, LONG_IN_A_NODE, ONE_MODULE, PIPELINE, SHARED, SPEC, UNEVEN, WHOLE

from dflop.search.emit import FRAMEWORKS, emit

PACKAGES = Path(__file__).parents[3] / ".trainers"
PLANS = {
    "pipeline": PIPELINE,
    "uneven": UNEVEN,
    "chunks": CHUNKS,
    "whole": WHOLE,
    "shared": SHARED,
    "one module": ONE_MODULE,
    "long": LONG,
    "long, in a node": LONG_IN_A_NODE,
}

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="make test-trainers installs other trainers into .trainers"),
]


@pytest.mark.parametrize("framework", ["torchtitan", "veomni", "automodel", "megatron_bridge", "ms_swift"])
def test_a_trainers_parser_reads_the_plans_sizes(framework, tmp_path):
    about = FRAMEWORKS[framework]
    plans = {name: plan for name, plan in PLANS.items() if not about.refusal(plan)}
    emitted = {name: emit(framework, plan, SPEC, 512) for name, plan in plans.items()}
    files = []
    for name, plan in plans.items():
        folder = tmp_path / str(emitted[name].plan.grid("llm").num_ranks)
        folder.mkdir(exist_ok=True)
        files.append(folder / name)
        files[-1].write_text(emitted[name].to_text(about, plan), encoding="utf-8")
    command = [sys.executable, trainers_parsers.__file__, framework, *map(str, files)]
    environment = os.environ | {"PYTHONPATH": str(PACKAGES)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    for (name, plan), line in zip(plans.items(), lines, strict=True):
        read, llm, made = json.loads(line), plan.grid("llm"), emitted[name].plan.grid("llm")
        assert (read["tp"], read["pp"], read["cp"]) == (llm.tp, llm.pp, llm.cp), name
        assert read["copies"] * read["shards"] * llm.cp == made.dp, name
        if made.gathers:
            # The devices that divide a sample share parameters, too.
            assert read["shards"] * llm.cp == max(llm.cp, made.num_shards), name
        # A step of the trainer has as many samples as the plan's microbatches together.
        assert read["samples"] * plan.num_buckets == read["all_samples"], name
