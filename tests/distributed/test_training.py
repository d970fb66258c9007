"""Training with process groups: that cutting a batch over ranks, replicas and stages changes nothing.

The oracle is transformers' own model, run on one sample after the other in one process, all in float64. Every
run here has real gloo processes.
"""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import duckdb
import polars as pl
import psutil
import pytest
import torch
from training_runs import end_run, listening, plan_file, process_of_rank, start_run, train, wait_for_steps
from transformers import AutoTokenizer, LlavaOnevisionForConditionalGeneration
from whole_model import build_whole_model, loss_of_batch, optimizer_of

from dflop.config import load_config
from dflop.models import load_model_spec
from dflop.schedule import GlobalBatches
from dflop.shapes import ChatTokenizer, load_samples
from dflop.shapes.records import Turn
from dflop.store import read_table

pytestmark = pytest.mark.serial


@pytest.fixture(scope="module")
def two_ranks(run, tmp_path_factory):
    """What two steps of an encoder rank and an LLM rank wrote, and the lines of their metrics."""
    folder, config = run
    out = tmp_path_factory.mktemp("two-ranks") / "train"
    return out, train(folder, config, plan_file(folder), out)


@pytest.fixture(scope="module")
def reference(run):
    """Losses, gradient norms and final weights of two steps, by transformers' model on one sample at a time."""
    folder, config = run
    loaded = load_config(config)
    model = build_whole_model(loaded)
    optimizer = optimizer_of(model, loaded.train.lr)
    samples, _ = load_samples(folder / "shapes.duckdb", load_model_spec(loaded.model).encoders)
    batches = GlobalBatches(len(samples), 8, 0)
    results = []
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of_batch(model, loaded, samples.take(batches[step]))
        norm = sum(p.grad.pow(2).sum().item() for p in model.parameters() if p.grad is not None) ** 0.5
        optimizer.step()
        results.append((loss, norm))
    return results, {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "layout",
    [
        None,
        pytest.param({"vision_dp": 2, "llm_tp": 2}, marks=pytest.mark.exhaustive),
        {"placement": "colocated", "llm_dp": 2, "llm_tp": 2, "sharding": "parameters", "offloads_optimizer": True},
        {"placement": "colocated", "llm_pp": 2, "sharding": "parameters"},
    ],
    ids=[
        "two ranks",
        "vision dp 2, llm tp 2",
        "sharded parameters, llm tp 2, optimiser offloaded",
        "sharded encoder, llm pp 2",
    ],
)
def test_any_layout_takes_the_same_steps_as_the_unpacked_model_in_one_process(
    run, two_ranks, reference, tmp_path, layout
):
    folder, config = run
    out, steps = two_ranks
    if layout is not None:
        out = tmp_path / "train"
        steps = train(folder, config, plan_file(folder, **layout), out)
    expected, weights = reference
    for step, (loss, norm) in zip(steps, expected, strict=True):
        assert step["loss"] == pytest.approx(loss, rel=1e-12)
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-11)
    trained = LlavaOnevisionForConditionalGeneration.from_pretrained(out / "model", dtype=torch.float64)
    for name, tensor in trained.state_dict().items():
        if tensor.is_floating_point():
            # AdamW moves a weight by up to `lr` = 1e-3 a step, however small its gradient: rounding shows there.
            assert (tensor - weights[name]).abs().max() < 1e-9, name


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_even_on_another_layout(run, two_ranks, tmp_path):
    folder, config = run
    whole = train(folder, config, plan_file(folder), tmp_path / "whole", steps=5)
    shutil.copytree(two_ranks[0], tmp_path / "parts")
    another = plan_file(folder, placement="colocated", llm_pp=2, offloads_optimizer=True)
    train(folder, config, another, tmp_path / "parts", steps=4)
    shutil.copytree(tmp_path / "parts", tmp_path / "shards")
    in_shards = plan_file(folder, placement="colocated", llm_dp=2, llm_tp=2, sharding="parameters")
    resumed = train(folder, config, in_shards, tmp_path / "shards", steps=5)
    assert [step["step"] for step in resumed] == [0, 1, 2, 3, 4]
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
    summary = json.loads((tmp_path / "parts/summary.json").read_text())
    assert (summary["restarts"], summary["num_steps"], summary["attention"]) == (1, 4, "sdpa")
    # What one plan was measured to take is no part of what another takes.
    log = (tmp_path / "parts/log").read_text()
    assert "costs or plan changed at step 2: what was observed before was moved to" in log
    observed = read_table(tmp_path / "parts/observations.duckdb", "observations", made_by="train")
    assert observed["step"].unique().sort().to_list() == [2, 3]


DAMAGES = (
    lambda content: content[: len(content) // 2],
    lambda content: content[:500] + bytes([content[500] ^ 1]) + content[501:],
)


def test_of_checkpoints_with_damaged_shards_each_is_named_in_a_line_and_the_run_begins_anew(run, tmp_path):
    folder, config = run
    out, plan = tmp_path / "train", plan_file(folder)
    whole = train(folder, config, plan, out, checkpoint_every=1)
    for step, damage in enumerate(DAMAGES, 1):
        shard = out / f"checkpoints/step-{step:06}/__0_0.distcp"
        shard.write_bytes(damage(shard.read_bytes()))
    again = train(folder, config, plan, out, steps=3, checkpoint_every=1)
    assert [step["loss"] for step in again[:2]] == [step["loss"] for step in whole]
    log = (out / "log").read_text()
    for step in (1, 2):
        assert re.search(rf"warning: \S+step-{step:06} is damaged: __0_0\.distcp .*; it was moved to ", log), log
    assert "a new run begins: none of its checkpoints is whole; what the earlier one left was moved to" in log
    assert "Traceback" not in log


def test_a_disk_that_takes_no_checkpoints_stops_no_step_but_the_run_at_its_end(run, tmp_path):
    folder, config = run
    out = tmp_path / "train"
    out.mkdir()
    (out / "checkpoints").write_text("a file where the folder ought to be")
    steps = train(folder, config, plan_file(folder), out, steps=4, checkpoint_every=1, fails=True)
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    log = (out / "log").read_text()
    # Each is tried while the next step runs; whoever asks before that has failed hears of the one before.
    assert re.search(r"step 4/4 .* NOT SAVED: rank 0: .* \(checkpoint of step [23] in .*the next", log)
    assert "dflop: the last step could not be saved: rank 0: " in log
    assert "Traceback" not in log


def test_a_run_listens_on_loopback_alone_takes_no_other_into_its_folder_and_ends_when_a_rank_is_stopped(run, tmp_path):
    folder, config = run
    out = tmp_path / "train"
    settings = {"steps": 100_000, "peer_timeout_s": 5, "checkpoint_every": 3, "loader_workers": 1}
    process = start_run(folder, config, plan_file(folder), out, **settings)
    wait_for_steps(process, out, 5)
    places = listening(process.pid)
    assert {address for address, _ in places} == {"127.0.0.1"}
    # A stranger of this machine may connect and say anything: nobody answers, and the run goes on.
    for said in (b"GET / HTTP/1.0\r\n\r\n", bytes(8), b"\xff" * 100_000):
        for place in places:
            with socket.create_connection(place) as stranger, contextlib.suppress(ConnectionError, TimeoutError):
                stranger.settimeout(0.05)
                stranger.sendall(said)
                assert not stranger.recv(1)
    # Nobody else enters the folder where ranks meet, or those of the sockets of their loaders.
    started = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    arguments = [argument.partition("=") for one in started for argument in one.cmdline()]
    meeting = next(Path(value) for name, _, value in arguments if name == "--rdzv-endpoint")
    ends = [Path(end.laddr) for one in started for end in one.net_connections("unix") if end.laddr]
    assert ends
    assert {path.stat().st_mode & 0o777 for path in (meeting, *(end.parent for end in ends))} == {0o700}
    if os.getuid() == 0:
        nobody = {"user": 65534, "group": 65534, "extra_groups": []}
        for file in (meeting / "group", *ends):
            assert subprocess.run(["stat", file], capture_output=True).returncode == 0
            assert subprocess.run(["stat", file], capture_output=True, **nobody).returncode != 0
    wait_for_steps(process, out, 2 + (out / "metrics.jsonl").read_bytes().count(b"\n"))
    train(folder, config, plan_file(folder), out, fails=True, steps=100_000)
    assert f"dflop: {out}: process {process.pid} of " in (out / "log").read_text()
    os.kill(process_of_rank(1, out), signal.SIGSTOP)
    assert end_run(process, out) != 0
    log = (out / "log").read_text()
    assert re.search(r"no sign of life came from: rank 1 \(llm stage 0 replica 0, process ", log), log
    assert re.search(r"the same command goes on from .*step-\d+", log), log


def test_a_finished_run_says_so_and_judges_no_costs_but_those_it_was_trained_with(run, two_ranks, tmp_path):
    folder, config = run
    out, _ = two_ranks
    shutil.copytree(out, tmp_path / "train")
    before = (out / "metrics.jsonl").read_bytes()
    train(folder, config, plan_file(folder), tmp_path / "train")
    log = (tmp_path / "train/log").read_text()
    assert "this run is finished: " in log
    assert "`train.resume: never` trains anew" in log
    assert (tmp_path / "train/metrics.jsonl").read_bytes() == before
    assert (tmp_path / "train/summary.json").read_bytes() == (out / "summary.json").read_bytes()
    # Measured again, the costs are others: what was observed says nothing of them.
    shutil.copytree(folder, tmp_path / "again")
    with duckdb.connect(str(tmp_path / "again/costs.duckdb")) as connection:
        connection.execute("UPDATE time_model SET per_token_s = 3 * per_token_s")
    train(tmp_path / "again", config, plan_file(folder), tmp_path / "train")
    assert "costs.duckdb or plan.yaml have changed since this run was trained" in (tmp_path / "train/log").read_text()
    summary = json.loads((tmp_path / "train/summary.json").read_text())
    assert summary["prices"] == json.loads((out / "summary.json").read_text())["prices"]
    assert summary["correction"]["rerun"] is None


def test_another_rate_begins_a_new_run_which_two_nodes_of_this_machine_can_do(run, two_ranks, tmp_path):
    folder, config = run
    out, steps = two_ranks
    shutil.copytree(out, tmp_path / "train")
    slower = train(folder, config, plan_file(folder), tmp_path / "train", num_nodes=2, lr=1e-4)
    log = (tmp_path / "train/log").read_text()
    assert "a new run begins: `train.lr` was 0.001 and is 0.0001; what the earlier one left was moved to" in log
    assert slower[0]["loss"] == steps[0]["loss"]
    assert slower[1]["loss"] != steps[1]["loss"]
    assert (tmp_path / "train/old-1/metrics.jsonl").read_bytes() == (out / "metrics.jsonl").read_bytes()
    old, new = (
        json.loads((tmp_path / path).read_text()) for path in ("train/old-1/summary.json", "train/summary.json")
    )
    assert (new["restarts"], new["num_steps"]) == (0, 2)
    assert new["first_loss"] == slower[0]["loss"]
    assert new["prices"] == old["prices"]
    assert new["generation"] != old["generation"]


def test_loaders_that_read_ahead_and_a_scheduler_that_does_not_never_wait_for_each_other(run, tmp_path):
    folder, config = run
    plan = plan_file(folder, llm_pp=3, num_microbatches=1)  # the rank in the middle reads nothing
    own = tmp_path / "plan.yaml"
    own.write_text(plan.read_text() + "loading: {processes_of_ranks: 2 1 0 1}\n")
    closely = config | {"schedule": {"policy": "lpt", "lookahead_steps": 1}}
    steps = train(folder, closely, own, tmp_path / "train", steps=4, loader_workers=None, precision="fp32")
    assert [step["step"] for step in steps] == [0, 1, 2, 3]


def test_measured_steps_correct_the_ones_scheduled_after_them_and_a_resumed_run_starts_with_that(run, tmp_path):
    """The table is too low for the encoder by more than any noise: a factor for all modules would change nothing."""
    folder, config = tmp_path / "prepared", run[1]
    shutil.copytree(run[0], folder)
    with duckdb.connect(str(folder / "costs.duckdb")) as connection:
        connection.execute(
            "UPDATE time_model SET const_s = const_s / 10, per_item_s = per_item_s / 10 WHERE module = 'vision'"
        )
    plan = plan_file(folder, vision_dp=1, llm_dp=1, llm_pp=1, num_microbatches=4)
    corrected = config | {"schedule": {"policy": "lpt", "lookahead_steps": 1, "correction": "on"}}
    out = tmp_path / "train"
    first = train(folder, corrected, plan, out, steps=16)
    # Steps 0 and 1 warm up; step 5 is the first that begins, and is scheduled, after step 2 was reported. Five of these
    # make a factor, and the sixth tells whether it predicts better than the table, which is of a made-up device. On a
    # busy machine it may take a few more.
    versions = [step["corrections_version"] for step in first]
    assert versions[:10] == [0] * 10
    assert versions[10] in (0, 6)
    assert versions[-1] >= 7
    learned = read_table(out / "observations.duckdb", "corrections", made_by="train")
    used = learned.filter((pl.col("num_steps") >= 5) & (pl.col("num_observations") >= 6))
    assert len(used)
    assert used["ratio"].min() <= used["factor"].min() <= used["factor"].max() <= used["ratio"].max()
    again = train(folder, corrected, plan, out, steps=18)
    assert again[16]["corrections_version"] >= 7
    # The made-up device is another than this one: the table alone is far off, and what was learned is nearer.
    by_table = abs(math.log(first[4]["pipeline_s"] / first[4]["predicted_step_s"]))
    by_both = abs(math.log(again[17]["pipeline_s"] / again[17]["predicted_step_s"]))
    assert by_both < by_table
    summary = json.loads((out / "summary.json").read_text())
    assert summary["correction"]["stale_share"] > 0.5
    assert (out / "log").read_text().count("the costs look stale") == 1


def test_costs_of_another_device_and_loads_that_nobody_measured_are_said_at_the_start(two_ranks):
    out, steps = two_ranks
    log = (out / "log").read_text()
    assert log.count("warning: the costs were measured on 'a made-up processor' and this is '") == 1
    shares = [step["extrapolated"] for step in steps]
    assert max(shares) > 0  # the made-up measurements end at 8 items
    assert log.count("of the ranks' microbatches are larger (or smaller) than what was measured") == 1
    summary = json.loads((out / "summary.json").read_text())
    assert summary["num_extrapolated_steps"] == sum(share > 0 for share in shares)
    assert summary["extrapolated"] == pytest.approx(sum(shares) / 2)


def test_the_seconds_of_every_step_are_divided_among_what_each_rank_did(two_ranks):
    out, steps = two_ranks
    for step in steps:
        assert sum(step["seconds"]["mean_rank"].values()) == pytest.approx(step["step_s"], abs=1e-4)
        assert step["seconds"]["mean_rank"]["computing_s"] == pytest.approx(
            (1 - step["idle"]) * step["step_s"], abs=1e-4
        )
    seconds = read_table(out / "observations.duckdb", "step_seconds", made_by="train")
    assert seconds.select("step", "rank").rows() == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert seconds["warmup"].all()


def test_a_sample_that_no_device_holds_is_left_out_and_the_run_goes_on(run, tmp_path):
    folder, config = run
    names = ("shapes.duckdb", "costs.duckdb")
    for name in names:
        shutil.copy(folder / name, tmp_path / name)
    with duckdb.connect(str(tmp_path / "shapes.duckdb")) as connection:
        ((freak,),) = connection.execute("SELECT sample_id FROM samples ORDER BY row LIMIT 1").fetchall()
        connection.execute("UPDATE samples SET llm_tokens = 3000000 WHERE sample_id = ?", [freak])
    before = [(tmp_path / name).read_bytes() for name in names]
    steps = train(tmp_path, config, plan_file(tmp_path, llm_pp=1), tmp_path / "train", steps=2)
    assert [step["num_beyond_memory"] for step in steps] == [0, 0]
    rejects = read_table(tmp_path / "train/observations.duckdb", "rejects", made_by="train")
    assert rejects.select("sample_id", "reason", "llm_tokens").rows() == [(freak, "too_large", 3_000_000)]
    assert (rejects["predicted_bytes"] > rejects["limit_bytes"]).all()
    assert json.loads((tmp_path / "train/summary.json").read_text())["num_left_out"] == 1
    assert (tmp_path / "train/log").read_text().count("left out: ") == 1
    assert [(tmp_path / name).read_bytes() for name in names] == before


def test_the_trained_directory_generates_text_from_the_prompts_that_it_was_trained_on(two_ranks):
    folder = two_ranks[0] / "model"
    model, loaded = LlavaOnevisionForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(loaded.values()), loaded  # no weight is missing, left over or of another shape
    tokenizer = AutoTokenizer.from_pretrained(folder)
    question = "What is the opposite of hot?"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
    )
    (trained,) = ChatTokenizer().encode([[Turn("user", question), Turn("assistant", "Cold.")]])
    assert prompt["input_ids"][0].tolist() == trained.token_ids[: trained.is_target.argmax()].tolist()
    produced = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    with torch.no_grad():
        likeliest = model(input_ids=produced).logits[0].argmax(dim=-1)
    num_asked = prompt["input_ids"].shape[1]
    assert produced[0, num_asked:].tolist() == likeliest[num_asked - 1 : -1].tolist()
    assert tokenizer.decode(produced[0]).startswith(tokenizer.decode(prompt["input_ids"][0]))


def test_a_run_with_adapters_goes_on_in_another_layout(run, tmp_path):
    folder, config = run
    lora = {"modules": ["llm", "vision.encoder"], "rank": 4}
    config = config | {"model": config["model"] | {"lora": lora}}
    one, other = plan_file(folder, llm_dp=2), plan_file(folder, llm_tp=2, llm_pp=2)
    whole = train(folder, config, one, tmp_path / "whole", steps=4)
    train(folder, config, one, tmp_path / "resumed", steps=2)
    resumed = train(folder, config, other, tmp_path / "resumed", steps=4)
    assert json.loads((tmp_path / "resumed/summary.json").read_text())["restarts"] == 1
    assert [step["step"] for step in resumed] == [0, 1, 2, 3]
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)
