"""Verdicts on made logs whose truth is known: what shapes explain, what balance would save, who is waited for."""

import gzip
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from dflop.base import UserError
from dflop.checks.step_logs import read_batches, read_log
from dflop.checks.verdict import judge
from dflop.cli import cli


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def made_steps(seed: int, number: int = 200, share: float = 0.7) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and seconds of steps; tokens explain `share` of the seconds' variance."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(20_000, 60_000, number).astype(float)
    seconds = 0.5 + tokens * 1e-5
    noise = rng.standard_normal(number)
    return tokens, seconds + noise * seconds.std() * np.sqrt((1 - share) / share)


def automodel_log(path: Path, tokens: np.ndarray, seconds: np.ndarray) -> Path:
    rows = zip(tokens.tolist(), seconds.tolist(), strict=True)
    return write_lines(
        path,
        [{"step": n, "tps": t / s, "num_tokens_per_step": t, "loss": float("nan")} for n, (t, s) in enumerate(rows)],
    )


def test_the_planted_share_of_shapes_lies_in_the_interval(tmp_path):
    """An interval of 90 % misses the truth in one of ten logs."""
    hits = 0
    for seed in range(20):
        verdict = judge(read_log([automodel_log(tmp_path / "training.jsonl", *made_steps(seed))]))
        assert verdict.slow_steps == []
        hits += verdict.explained.low <= 0.7 <= verdict.explained.high
        assert verdict.explained.high - verdict.explained.low < 0.25
    assert hits >= 15


@pytest.mark.parametrize("seed", range(5))
def test_shapes_that_explain_nothing_are_not_told_apart_from_nothing(tmp_path, seed):
    tokens, seconds = made_steps(seed)
    np.random.default_rng(seed).shuffle(tokens)
    verdict = judge(read_log([automodel_log(tmp_path / "training.jsonl", tokens, seconds)]))
    assert verdict.explained.low < 0.02
    assert "not told apart from nothing" in str(verdict)


def test_planted_stalls_are_set_aside_and_leave_the_shapes_share_as_it_is(tmp_path):
    tokens, seconds = made_steps(3)
    stalled = [0, 31, 32, 150]
    seconds[stalled] += 20.0
    verdict = judge(read_log([automodel_log(tmp_path / "training.jsonl", tokens, seconds)]))
    assert verdict.slow_steps == stalled
    assert verdict.slow == pytest.approx(80 / seconds.sum(), rel=0.05)
    assert verdict.explained.low < 0.7 < verdict.explained.high
    assert "A stalled loader would be among the steps set aside" in str(verdict)
    assert verdict.saved is None
    assert "has no loads of single ranks" in str(verdict)


def table_of(path: Path, **columns: np.ndarray) -> Path:
    pl.DataFrame(columns).write_csv(path)
    return path


@pytest.mark.parametrize(
    ("planted", "said"),
    [(0.2, "bound by: the loader"), (0.01, "not the loader"), (0.043, "cannot be told for certain")],
)
def test_a_planted_wait_for_data_is_found(tmp_path, planted, said):
    tokens, seconds = made_steps(4)
    wait = np.random.default_rng(0).exponential(planted * seconds.mean(), len(seconds))
    verdict = judge(read_log([table_of(tmp_path / "steps.csv", step_s=seconds, data_s=wait, num_tokens=tokens)]))
    assert said in str(verdict)
    assert verdict.waiting.low < wait.sum() / seconds.sum() < verdict.waiting.high
    assert verdict.busy is None


def test_too_few_steps_equal_loads_and_steps_that_are_rarely_ordinary_tell_nothing(tmp_path):
    tokens, seconds = made_steps(5)
    few = judge(read_log([automodel_log(tmp_path / "few.jsonl", tokens[:10], seconds[:10])]))
    assert "cannot be told from 10 ordinary steps" in str(few)
    even = judge(read_log([automodel_log(tmp_path / "even.jsonl", np.full(200, 4096.0), seconds)]))
    assert "cannot be told: tokens vary by 0.00 %" in str(even)
    bursts = seconds + np.where(np.arange(200) % 3 == 0, np.random.default_rng(0).uniform(10, 50, 200), 0)
    verdict = judge(read_log([automodel_log(tmp_path / "bursts.jsonl", tokens, bursts)]))
    assert verdict.explained is None
    assert "34 % of the steps are far beyond" in str(verdict)


def pairs_of(seed: int) -> tuple[list[dict], np.ndarray, np.ndarray]:
    """Samples on two ranks, dealt unevenly, that could be dealt so that both have 1,000 tokens; the slower rank's
    tokens, and the seconds."""
    rng = np.random.default_rng(seed)
    rows, slower = [], []
    for step in range(150):
        first, second = rng.integers(1, 1000, 2).tolist()
        for rank, lengths in ((0, (first, second)), (1, (1000 - first, 1000 - second))):
            rows += [{"step": step, "rank": f"host{rank}", "llm_tokens": length} for length in lengths]
        slower.append(max(first + second, 2000 - first - second))
    slower = np.array(slower)
    return rows, slower, 0.4 + slower * 1e-3 + 0.02 * rng.standard_normal(150)


def test_what_balance_saves_is_that_of_the_planted_ranks(tmp_path):
    rows, slower, seconds = pairs_of(0)
    log = read_log([table_of(tmp_path / "steps.csv", step_s=seconds)])
    assert "cannot be told from this log, which has none" in str(judge(log))
    verdict = judge(log, read_batches(write_lines(tmp_path / "shapes.jsonl", rows)))
    truth = ((slower - 1000) * 1e-3).sum() / seconds.sum()
    assert verdict.saved.low < truth < verdict.saved.high
    assert verdict.saved.high - verdict.saved.low < 0.1
    assert verdict.explained.low > 0.9


def test_padded_batches_cost_their_longest_sample_on_each_rank(tmp_path):
    rows, _, _ = pairs_of(1)
    batches = read_batches(write_lines(tmp_path / "shapes.jsonl", rows))
    by_step = np.array([row["llm_tokens"] for row in rows]).reshape(-1, 2, 2)
    padded_s = 0.4 + 2 * by_step.max(axis=2).max(axis=1) * 1e-3
    log = read_log([table_of(tmp_path / "steps.csv", step_s=padded_s)])
    assert judge(log, batches, padded=True).explained.value > 0.999
    assert judge(log, batches).explained.value < 0.9
    two = read_batches(write_lines(tmp_path / "two.jsonl", [row | {"num_images": 1} for row in rows]))
    with pytest.raises(UserError, match="one column of loads"):
        judge(log, two, padded=True)


def torchtitan_logs(
    folder: Path, tokens: np.ndarray, seconds: np.ndarray, fetching: np.ndarray, first: int = 1
) -> list[Path]:
    """A file a rank; `tokens` are `[num_steps, num_ranks]`, and each step fetches two batches."""
    paths = []
    for rank in range(tokens.shape[1]):
        rows = []
        for step, (all_s, fetch_s) in enumerate(zip(seconds.tolist(), fetching.tolist(), strict=True), first):
            of = {"rank": rank, "step": step}
            rows.append(of | {"log_type_name": "step_start"})
            rows += [of | {"log_type_name": "fetching_batch_end", "value": 500 * fetch_s}] * 2
            value = float(tokens[step - first, rank])
            rows.append(of | {"log_type_name": "metric_value", "event_name": "local_valid_tokens", "value": value})
            rows.append(of | {"log_type_name": "metric_value", "event_name": "loss", "value": 3.0})
            rows.append(of | {"log_type_name": "step_end", "value": 1000 * all_s})
        paths.append(write_lines(folder / f"training.global_rank_{rank}.jsonl", rows))
    return paths


def test_torchtitans_ranks_tell_the_most_that_balance_can_save(tmp_path):
    rng = np.random.default_rng(2)
    tokens = rng.integers(1000, 3000, (120, 4))
    seconds = 0.2 + tokens.max(axis=1) * 1e-3 + 0.01 * rng.standard_normal(120)
    log = read_log(torchtitan_logs(tmp_path, tokens, seconds, np.full(120, 0.3)))
    assert log.seconds == pytest.approx(seconds)
    assert log.data_s == pytest.approx(0.3)
    verdict = judge(log)
    truth = ((tokens.max(axis=1) - tokens.mean(axis=1)) * 1e-3).sum() / seconds.sum()
    assert verdict.saved.low < truth < verdict.saved.high
    assert "would save at most" in str(verdict)
    assert "bound by: the loader" in str(verdict)


def trace_of(path: Path, wait: tuple[int, int], idle: tuple[int, int], rank: int | None = None, first: int = 5) -> Path:
    """Four steps of 1,000 µs: the host waits for data during `wait`; the device has no work during `idle`."""
    events = [{"ph": "M", "name": "process_name"}]
    for step in range(4):

        def add(name: str, category: str, first: int, last: int, at: int = 1000 * step) -> None:
            events.append({"ph": "X", "name": name, "cat": category, "ts": at + first, "dur": last - first})

        add(f"ProfilerStep#{step + first}", "user_annotation", 0, 1000)
        add(f"ProfilerStep#{step + first}", "gpu_user_annotation", 50, 990)
        if wait[1] > wait[0]:
            add("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "user_annotation", *wait)
        add("gemm", "kernel", 0, idle[0])
        add("ncclDevKernel_AllReduce", "kernel", idle[1], 1000)
        add("gemm", "kernel", min(1000, idle[1] + 100), 1000)  # beside the other
    process = {} if rank is None else {"distributedInfo": {"rank": rank}}
    path.write_bytes(gzip.compress(json.dumps(process | {"traceEvents": events}).encode()))
    return path


def test_a_trace_tells_the_loader_from_the_device(tmp_path):
    path = tmp_path / "trace.json.gz"
    verdict = judge(read_log([trace_of(path, (100, 500), (300, 600))]))
    assert (verdict.waiting.value, verdict.busy.value) == pytest.approx((0.2, 0.7))  # 300 to 500 without work
    assert "the loader" in str(verdict)
    assert "cannot be told from this log" in str(verdict)
    hidden = judge(read_log([trace_of(path, (100, 290), (300, 600))]))
    assert hidden.waiting.value == pytest.approx(0)
    assert "bound by: the host: not the loader" in str(hidden)
    assert "collectives run for 40 %" in str(hidden)
    assert "bound by: the device" in str(judge(read_log([trace_of(path, (100, 290), (950, 960))])))


def test_a_trace_without_marks_of_a_loader_still_says_how_busy_the_device_is(tmp_path):
    log = read_log([trace_of(tmp_path / "trace.json.gz", (0, 0), (300, 600))])
    assert "no waits for data; the device has work for 70 %" in str(judge(log))


@pytest.mark.parametrize("known", [True, False])
def test_traces_of_two_ranks_have_a_busy_share_each(tmp_path, known):
    """Each device is busy for half of each step, one in its first half, the other in its second."""
    ranks = (0, 1) if known else (None, None)
    first = trace_of(tmp_path / "0.json.gz", (100, 290), (500, 1000), ranks[0])
    other = trace_of(tmp_path / "1.json.gz", (100, 400), (0, 500), ranks[1])
    log = read_log([first, other])
    verdict = judge(log)
    assert verdict.num_steps == 4
    assert verdict.busy.value == pytest.approx(0.5)
    assert verdict.waiting.value == pytest.approx(0.3)  # of the rank that waits most
    assert "torch's profiler, 2 ranks" in str(verdict)
    assert ("do not say their ranks" in str(verdict)) != known


def test_traces_of_one_rank_are_pieces_of_its_run_or_refused(tmp_path):
    pieces = [trace_of(tmp_path / f"{n}.json.gz", (0, 0), (300, 600), first=n) for n in (5, 15)]
    assert read_log(pieces).step.tolist() == [5, 6, 7, 8, 15, 16, 17, 18]
    same = [trace_of(tmp_path / f"same{n}.json.gz", (0, 0), (300, 600), rank=3) for n in range(2)]
    with pytest.raises(UserError, match="both begin with step 5 of rank 3"):
        read_log(same)


def test_a_resumed_run_of_torchtitan_keeps_its_last_copies(tmp_path):
    """The run goes on from step 61 of 80 in files of its own."""
    rng = np.random.default_rng(4)
    tokens, seconds = rng.integers(1000, 3000, (120, 2)), rng.uniform(1, 2, 120)
    folders = [tmp_path / "b", tmp_path / "a"]
    for folder in folders:
        folder.mkdir()
    first = torchtitan_logs(folders[0], tokens[:80], seconds[:80] + 5.0, np.full(80, 0.3))
    resumed = torchtitan_logs(folders[1], tokens[60:], seconds[60:], np.full(60, 0.1), first=61)
    log = read_log([*resumed, *first])
    assert log.seconds == pytest.approx(np.concatenate([seconds[:60] + 5.0, seconds[60:]]))
    assert log.data_s == pytest.approx(np.repeat([0.3, 0.1], 60))
    assert log.loads["target tokens"].tolist() == tokens.sum(axis=1).tolist()
    assert "40 rows of repeated steps are left out" in str(judge(log))
    # A process that repeats steps in its own file.
    for was, own in zip(first, resumed, strict=True):
        was.write_text(was.read_text() + own.read_text())
    again = read_log(first)
    assert again.seconds == pytest.approx(log.seconds)
    assert again.data_s == pytest.approx(log.data_s)


def test_two_runs_of_torchtitan_are_refused(tmp_path):
    tokens, seconds = np.full((30, 1), 1000), np.full(30, 1.0)
    paths = []
    for name in ("20250101-1200", "20250102-1200"):
        (tmp_path / name).mkdir()
        paths += torchtitan_logs(tmp_path / name, tokens, seconds, seconds / 10)
    with pytest.raises(UserError, match="both begin with step 1 of rank 0") as refused:
        read_log(paths)
    assert all(str(path) in str(refused.value) for path in paths)


def test_the_last_copy_of_a_step_counts_in_tables_and_automodels_logs(tmp_path):
    tokens, seconds = made_steps(6, number=30)
    again = range(20, 30)
    rows = [{"step": n, "tps": tokens[n] / seconds[n], "num_tokens_per_step": tokens[n]} for n in range(30)]
    slower = [rows[n] | {"tps": rows[n]["tps"] / 10} for n in again]
    log = read_log([write_lines(tmp_path / "training.jsonl", rows[:20] + slower + rows[20:])])
    assert log.seconds == pytest.approx(seconds)
    rows = [{"step": n, "rank": r, "step_s": seconds[n], "num_tokens": 5 + r} for n in range(30) for r in range(2)]
    slower = [row | {"step_s": 99.0, "num_tokens": 50} for row in rows[40:]]
    log = read_log([write_lines(tmp_path / "steps.jsonl", rows[:40] + slower + rows[40:])])
    assert log.seconds == pytest.approx(seconds)
    assert log.loads["num_tokens"].tolist() == [11.0] * 30
    assert log.rank_loads["num_tokens"].tolist() == [[5.0, 6.0]] * 30


def test_files_of_two_formats_are_refused_with_their_names(tmp_path):
    tokens, seconds = made_steps(0)
    one, other = automodel_log(tmp_path / "a.jsonl", tokens, seconds), table_of(tmp_path / "b.csv", step_s=seconds)
    with pytest.raises(UserError, match=r"a.jsonl is NeMo AutoModel's log, .*b.csv is a table of steps"):
        read_log([one, other])


def test_steps_with_a_missing_load_or_rank_are_left_out_and_counted(tmp_path):
    tokens, seconds = made_steps(7)
    rows = [{"step": n, "step_s": s, "num_tokens": t} for n, (t, s) in enumerate(zip(tokens, seconds, strict=True))]
    del rows[0]["num_tokens"]
    verdict = judge(read_log([write_lines(tmp_path / "steps.jsonl", rows)]))
    assert verdict.num_steps == 200
    assert verdict.explained.low < 0.7 < verdict.explained.high
    assert "1 step without num_tokens left out of shapes" in str(verdict)
    of_ranks = [row | {"rank": rank} for row in rows for rank in range(2)][:-1]
    verdict = judge(read_log([write_lines(tmp_path / "ranks.jsonl", of_ranks)]))
    assert verdict.num_steps == 199
    assert "1 step without a row of each of 2 ranks left out" in str(verdict)
    assert verdict.explained.low < 0.7 < verdict.explained.high


def test_shapes_of_other_steps_are_told_with_both_ranges(tmp_path):
    rows, _, seconds = pairs_of(0)
    log = read_log([table_of(tmp_path / "steps.csv", step_s=seconds)])
    later = [row | {"step": row["step"] + 1000} for row in rows]
    said = str(judge(log, read_batches(write_lines(tmp_path / "later.jsonl", later))))
    assert "--shapes has steps 1000 to 1149, the log 0 to 149" in said
    del rows[0]["llm_tokens"]
    rows = [row for row in rows if (row["step"], row["rank"]) != (1, "host1")]
    verdict = judge(log, read_batches(write_lines(tmp_path / "shapes.jsonl", rows)))
    assert "2 of 150 steps of the log are not in --shapes" in str(verdict)
    assert verdict.saved is not None


@pytest.mark.parametrize(
    "table",
    [
        "step\tstep_s\tnum_tokens\n0\t0.5\t7\n1\t0.25\t9\n",
        "step;step_s;num_tokens\n0;0,5;7\n1;0,25;9\n",
        "step;step_s;num_tokens\n0;0.5;7\n1;0.25;9\n",
        '{"run": 7}\n{"step": 0, "step_s": 0.5, "num_tokens": 7}\n{"step": 1, "step_s": 0.25, "num_tokens": 9}\n',
        'run 7\n# steps\n{"step": 0, "step_s": 0.5, "num_tokens": 7}\n{"step": 1, "step_s": 0.25, "num_tokens": 9}\n',
    ],
)
def test_tables_with_other_separators_or_a_header_above_json_are_read(tmp_path, table):
    path = tmp_path / "log"
    path.write_text(table)
    log = read_log([path])
    assert (log.seconds.tolist(), log.loads["num_tokens"].tolist()) == ([0.5, 0.25], [7.0, 9.0])


def test_constant_times_and_one_slow_step_are_told_in_plain_words(tmp_path):
    tokens, _ = made_steps(8)
    seconds = np.full(200, 0.5)
    seconds[0] = 9.0
    said = str(judge(read_log([table_of(tmp_path / "steps.csv", step_s=seconds, num_tokens=tokens)])))
    assert "all ordinary steps take the same time" in said
    assert "1 step set aside (0), far beyond" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"a": 1}\n{"b"\n{"c": 1}\n', "line 2 is no JSON"),
        ("step,loss\n1,2.0\n", r"of no known format \(it has step, loss\).*step_s, seconds, step_time_s"),
        ('{"global_step": 2, "log_history": [{"loss": 1.0, "step": 1}]}', "trainer_state.json has no times of steps"),
        ("a\0b", "is no text"),
        ("", "is no table"),
        ("[1, 2]", "holds no records"),
        ("{}", "holds no records"),
        ("step,step_s\n1,2.0\n2,slow\n", "step_s='slow' is no number"),
        ('{"step_s": 0.0}\n{"step_s": 0.0}\n', "no step has a time above 0"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_line(tmp_path, content, said):
    path = tmp_path / "log"
    path.write_text(content)
    with pytest.raises(UserError, match=said) as refused:
        judge(read_log([path]))
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_cell_without_a_value_costs_its_row_only(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text("step,step_s\n1,2.0\n2,n/a\n3,2.5\n")
    assert read_log([path]).seconds.tolist() == [2.0, 2.5]


def test_a_last_line_that_was_cut_off_is_left_out_and_shapes_need_steps_and_loads(tmp_path):
    log = automodel_log(tmp_path / "training.jsonl", *made_steps(1))
    whole = len(read_log([log]).seconds)
    log.write_text(log.read_text()[:-20])
    assert len(read_log([log]).seconds) == whole - 1
    with pytest.raises(UserError, match="must have `step` and one load or more"):
        read_batches(write_lines(tmp_path / "shapes.jsonl", [{"step": 1, "words": 5}]))
    with pytest.raises(UserError, match="does not exist"):
        read_log([tmp_path / "none"])
    with pytest.raises(UserError, match="is no file"):
        read_log([tmp_path])


def test_the_command_prints_the_verdict(tmp_path, capsys):
    rows, _, seconds = pairs_of(0)
    random.Random(0).shuffle(rows)  # the order of the samples is not that of the steps
    shapes = write_lines(tmp_path / "shapes.jsonl", rows)
    steps = table_of(tmp_path / "steps.csv", step=np.arange(150), step_s=seconds)
    cli.main(["verdict", str(steps), "--shapes", str(shapes)], standalone_mode=False)
    said = capsys.readouterr().out
    assert said.startswith("150 steps of a table of steps, ")
    assert "dealt by `dflop.BalancedBatchSampler`, would save" in said


def test_the_callback_on_the_page_writes_a_log_that_is_read(tmp_path, monkeypatch):
    page = Path(__file__).parents[3] / "docs/how-to/ten-minutes.md"
    names: dict = {}
    exec(re.search(r"```python\n(import json.*?)```", page.read_text(), re.DOTALL)[1], names)
    monkeypatch.chdir(tmp_path)
    for rank in range(2):
        callback, args = names["StepSeconds"](), SimpleNamespace(process_index=rank)
        callback.on_train_begin(args, None, None)
        for step in range(1, 4):
            callback.on_step_begin(args, None, None)
            callback.on_step_end(args, SimpleNamespace(global_step=step), None)
    log = read_log([tmp_path / f"steps.{rank}.jsonl" for rank in range(2)])
    assert log.source == "a table of steps, 2 ranks"
    assert log.step.tolist() == [1, 2, 3]
    assert (log.data_s < log.seconds).all()
