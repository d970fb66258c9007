"""What the Slurm executor makes of Slurm's answers, without a Slurm: programs that stand in for it give the answers."""

import asyncio
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("snakemake_executor_plugin_slurm")
sys.path.insert(0, str(Path(__file__).parents[2] / "workflow" / "lib"))

import slurm_executor
from slurm_executor import Executor, keeps_accounts, name_of, parse_states, why_ended


def _job(rule: str = "train", **wildcards: str) -> SimpleNamespace:
    return SimpleNamespace(
        rule=SimpleNamespace(name=rule),
        wildcards_dict=wildcards,
        is_group=lambda: False,
        log=[f"results/demo/logs/{rule}.log"],
        attempt=1,
        restart_times=2,
    )


def _submitted(job: SimpleNamespace, number: str = "7") -> SimpleNamespace:
    return SimpleNamespace(job=job, external_jobid=number, aux={"slurm_logfile": Path(f"{number}.log")})


class Watched(Executor):
    """The executor with nothing around it: what it reports is kept."""

    def __init__(self) -> None:
        self.said, self.failed, self.succeeded = [], [], []
        self.logger = SimpleNamespace(**dict.fromkeys(("info", "warning", "error"), self.said.append))
        self.workflow = SimpleNamespace(executor_settings=SimpleNamespace(keep_successful_logs=False))
        self._next_seconds_between_status_checks = None
        self._has_accounts = False
        self._last_answer = self._last_end = time.monotonic()
        self._is_silent = False
        self._answers_without, self._said_waiting = {}, set()
        self._main_event_loop = None

    def report_job_error(self, job, **_) -> None:
        self.failed.append(job)

    def report_job_success(self, job) -> None:
        self.succeeded.append(job)

    def look(self, jobs: list) -> list:
        async def still() -> list:
            return [job async for job in self.check_active_jobs(jobs)]

        return asyncio.run(still())


@pytest.fixture
def say(tmp_path, monkeypatch):
    """`say(program, script)`: from now on a program of Slurm does this."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def write(program: str, script: str) -> None:
        path = tmp_path / program
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return write


def test_jobs_are_called_after_their_rule_and_wildcards():
    assert name_of(_job("profile_costs", module="llm", tp="1")) == "profile_costs.module=llm.tp=1"
    group = SimpleNamespace(is_group=lambda: True, groupid="shards", jobs=[1, 2, 3])
    assert name_of(group) == "shards.3_jobs"


@pytest.mark.parametrize(
    ("script", "keeps"),
    [("exit 0", True), ("echo Slurm accounting storage is disabled >&2; exit 1", False), ("exec sleep 60", False)],
)
def test_accounts_are_there_where_sacct_answers(say, monkeypatch, script, keeps):
    monkeypatch.setattr(slurm_executor, "_ANSWER_S", 0.5)
    say("sacct", script)
    assert keeps_accounts() is keeps


def test_the_last_word_on_a_job_counts_and_cut_words_are_understood():
    answer = "7|RUNNING|None\n8|CANCELLED by 1000|None\n9|OUT_OF_ME+|OutOfMemory\n7|PENDING|BeginTime\n"
    assert parse_states(answer) == {
        "7": ("PENDING", "BeginTime"),
        "8": ("CANCELLED", "None"),
        "9": ("OUT_OF_MEMORY", "OutOfMemory"),
    }


@pytest.mark.parametrize(
    ("state", "reason", "said"),
    [
        ("TIMEOUT", "TimeLimit", "reached its time limit; `slurm.stages.train.time` sets it"),
        ("OUT_OF_MEMORY", "None", "`slurm.stages.train.memory_gib`"),
        ("NODE_FAIL", "None", "its node failed"),
        ("FAILED", "NonZeroExitCode", "ended as FAILED: NonZeroExitCode"),
    ],
)
def test_a_failure_is_one_line_with_number_reason_and_log(state, reason, said):
    line = why_ended(_submitted(_job()), state, reason)
    assert line.startswith("Slurm job 7 (train) ended as ")
    assert said in line
    assert line.endswith("; log: results/demo/logs/train.log")
    assert "\n" not in line


def test_jobs_that_go_on_are_asked_for_again_and_others_are_reported(say, tmp_path):
    say("squeue", "printf '1|RUNNING|None\\n2|COMPLETED|None\\n3|TIMEOUT|TimeLimit\\n4|PENDING|PartitionTimeLimit\\n'")
    executor = Watched()
    jobs = [_submitted(_job(), number) for number in "1234"]
    assert executor.look(jobs) == [jobs[0], jobs[3]]
    assert executor.look([jobs[0], jobs[3]]) == [jobs[0], jobs[3]]
    assert (executor.succeeded, executor.failed) == ([jobs[1]], [jobs[2]])
    assert len([line for line in executor.said if "PartitionTimeLimit" in line]) == 1  # said once


def test_only_a_job_that_was_cancelled_on_purpose_is_not_submitted_again(say):
    say("squeue", "printf '1|CANCELLED|None\\n2|FAILED|NonZeroExitCode\\n'")
    cancelled, failed = _job(), _job()
    Watched().look([_submitted(cancelled, "1"), _submitted(failed, "2")])
    # Snakemake submits again while the attempts are not more than the restarts.
    assert cancelled.attempt > cancelled.restart_times
    assert failed.attempt <= failed.restart_times


def test_an_option_that_cannot_be_given_is_said_and_not_waited_for():
    executor, group = Watched(), SimpleNamespace(is_group=lambda: True, groupid="shards", jobs=[1, 2, 3])
    group.attempt, group.restart_times, group.resources = 1, 2, SimpleNamespace(slurm_extra="--comment=mine")
    executor.run_job(group)
    assert [failed.job for failed in executor.failed] == [group]
    assert "The job shards.3_jobs cannot be submitted (section `slurm` of the config)" in executor.said[0]
    assert "\n" not in executor.said[0]
    assert group.attempt > group.restart_times


@pytest.mark.parametrize("script", ["exec sleep 60", "echo Unable to contact slurm controller >&2; exit 1"])
def test_a_silent_slurm_is_waited_for_and_then_given_up(say, monkeypatch, script):
    monkeypatch.setattr(slurm_executor, "_ANSWER_S", 0.3)
    say("squeue", script)
    executor, jobs = Watched(), [_submitted(_job())]
    assert executor.look(jobs) == jobs
    assert executor.look(jobs) == jobs
    assert len(executor.said) == 1
    assert "Slurm does not answer" in executor.said[0]
    monkeypatch.setattr(slurm_executor, "_SILENCE_S", -1)
    assert executor.look(jobs) == []
    assert executor.failed == jobs
    assert "Slurm job 7 (train): Slurm has not answered for" in executor.said[-1]
    assert jobs[0].job.attempt > jobs[0].job.restart_times  # it may still run


def test_a_job_that_slurm_forgot_is_taken_as_ended(say):
    say("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    executor, jobs = Watched(), [_submitted(_job())]
    for _ in range(slurm_executor._UNKNOWN_ANSWERS - 1):
        assert executor.look(jobs) == jobs
    assert executor.look(jobs) == []
    assert executor.succeeded == jobs  # Snakemake looks for its files
