"""Snakemake's Slurm executor plugin, with named jobs, a warning if Slurm does not answer, and one line on a failure.

`install` replaces the plugin's executor by this one, which submits jobs as the plugin does. The differences are:

- a job is named by its rule and wildcards;
- whether Slurm keeps accounts is found out by asking it;
- jobs are asked for by their numbers, and an answer is awaited for at most a minute;
- a job that was cancelled on purpose is not submitted again;
- a failure is reported with the job's number, the reason, and the path of the log.
"""

import asyncio
import os
import re
import shlex
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import snakemake_executor_plugin_slurm as plugin
from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.registry import ExecutorPluginRegistry

__all__ = ["Executor", "install", "keeps_accounts", "name_of", "parse_states", "why_ended"]

_ANSWER_S = 60
# Slurm may be silent for this long, as when its controller is restarted.
_SILENCE_S = 900
# A job is taken as ended after this many answers that do not contain it. Its output files then tell whether it failed.
_UNKNOWN_ANSWERS = 5
_FAILED = (
    *("BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
    *("LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED"),
)
# Reasons for which jobs usually wait; any other reason is reported.
_USUAL = ("", "None", "Resources", "Priority", "Dependency", "BeginTime", "Prolog", "Cleaning", "JobArrayTaskLimit")
_TEMPORARY = re.compile(r"time|tempora|contact|connect|try again|socket", re.IGNORECASE)
_WAYS_OUT = {
    "CANCELLED": "it was cancelled on purpose and is not submitted again; the same command goes on from here",
    "TIMEOUT": "it reached its time limit; `slurm.stages.{rule}.time` sets it",
    "OUT_OF_MEMORY": "it needed more memory than it had asked for; `slurm.stages.{rule}.memory_gib` sets that",
    "NODE_FAIL": "its node failed",
    "PREEMPTED": "a job of higher priority took its nodes",
}


def install() -> None:
    """Make `executor: slurm` use this executor in this process."""
    ExecutorPluginRegistry().get_plugin("slurm").executor = Executor


class Executor(plugin.Executor):
    """Snakemake's executor for Slurm."""

    def __init__(self, workflow, logger) -> None:
        # Before the plugin's constructor, which starts the thread that checks jobs.
        self._last_answer = self._last_end = time.monotonic()
        self._is_silent = False
        self._answers_without: dict[str, int] = {}
        self._said_waiting: set[tuple[str, str]] = set()
        self._has_accounts = keeps_accounts()
        os.environ["DFLOP_SLURM_JOB"] = "1"  # for jobs, which inherit the environment
        super().__init__(workflow, logger)

    def __post_init__(self, test_mode: bool = False) -> None:
        super().__post_init__(test_mode)
        # Submit one job at a time, because `run_uuid`, which holds the job's name, is one attribute for all jobs.
        self._job_submission_executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slurm_job_submit")

    def run_job(self, job) -> None:
        self.run_uuid = name_of(job)
        try:
            # The plugin looks at these, too, but fails to report it of a group of jobs, which then never ends.
            plugin.validate_slurm_extra(job)
            plugin.set_gres_string(job)
        except WorkflowError as error:
            job.attempt = max(job.attempt, job.restart_times + 1)
            said = f"The job {self.run_uuid} cannot be submitted (section `slurm` of the config): {error}"
            self._report_job_error_threadsafe(SubmittedJobInfo(job), " ".join(said.split()))
            return
        super().run_job(job)

    def get_account_arg(self, job):
        """The account from the config; without one, Slurm's default is used, and none is guessed."""
        account = job.resources.get("slurm_account")
        yield f" -A {shlex.quote(str(account))}" if account else ""

    def get_partition_arg(self, job) -> str:
        if job.resources.get("slurm_partition") or self._partitions:
            return super().get_partition_arg(job)
        return ""

    async def check_active_jobs(self, active_jobs):
        """Yield the jobs that go on, and report the others."""
        now = time.monotonic()
        # The longer no job has ended, the longer the time between checks: a tenth of it, up to half a minute.
        self.next_seconds_between_status_checks = min(30.0, max(3.0, 0.1 * (now - self._last_end)))
        if not active_jobs:
            self._last_answer = self._last_end = now
            return
        states = await self._ask([job.external_jobid for job in active_jobs])
        if states is None:
            for job in self._after_silence(active_jobs):
                yield job
            return
        for job in active_jobs:
            if self._goes_on(job, *states.get(job.external_jobid, ("UNKNOWN", ""))):
                yield job
            else:
                self._last_end = now
                self.next_seconds_between_status_checks = 3.0

    def _goes_on(self, job, state: str, reason: str) -> bool:
        number = job.external_jobid
        missed = self._answers_without.get(number, 0) + 1 if state == "UNKNOWN" else 0
        self._answers_without[number] = missed
        if state == "COMPLETED" or missed >= _UNKNOWN_ANSWERS:
            if missed:
                self.logger.warning(
                    f"Slurm does not know job {number} ({name_of(job.job)}) any more; its files say how it ended"
                )
            self._forget_log(job)
            self.report_job_success(job)
            return False
        if state in _FAILED:
            if state == "CANCELLED":
                job.job.attempt = max(job.job.attempt, job.job.restart_times + 1)
            self._fail(job, why_ended(job, state, reason))
            return False
        waits = state in ("PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT") and reason not in _USUAL
        if waits and (number, reason) not in self._said_waiting:
            self._said_waiting.add((number, reason))
            self.logger.warning(
                f"Slurm job {number} ({name_of(job.job)}) waits: {reason}; `scancel {number}` cancels it"
            )
        return True

    def _after_silence(self, active_jobs):
        """The jobs to ask for again. If Slurm has been silent for too long, none, and each is reported as failed."""
        silent_s = time.monotonic() - self._last_answer
        numbers = ", ".join(job.external_jobid for job in active_jobs)
        if silent_s > _SILENCE_S:
            for job in active_jobs:
                job.job.attempt = max(job.job.attempt, job.job.restart_times + 1)
                self._fail(
                    job,
                    f"Slurm job {job.external_jobid} ({name_of(job.job)}): Slurm has not answered for "
                    f"{silent_s / 60:.0f} minutes; the job may still run: see `squeue`, and start the same command "
                    "when it has ended",
                )
            return []
        if not self._is_silent:
            self._is_silent = True
            self.logger.warning(
                f"Slurm does not answer; it is asked again for {_SILENCE_S // 60} minutes (jobs {numbers})"
            )
        return active_jobs

    async def _ask(self, numbers: list[str]) -> dict[str, tuple[str, str]] | None:
        """State and reason of jobs by their numbers; None if Slurm does not answer."""
        answer = await _answer_of(_question(numbers, has_accounts=self._has_accounts))
        if answer is None:
            return None
        self._last_answer, self._is_silent = time.monotonic(), False
        return parse_states(answer)

    def _fail(self, job, why: str) -> None:
        # Logged here, because Snakemake prints no message for a group of jobs.
        self.logger.error(why)
        self.report_job_error(job, aux_logs=[str(job.aux["slurm_logfile"])])

    def _forget_log(self, job) -> None:
        if not self.workflow.executor_settings.keep_successful_logs:
            job.aux["slurm_logfile"].unlink(missing_ok=True)

    def _report_job_error_threadsafe(self, job_info, msg: str) -> None:
        """Report a job that could not be submitted. If sbatch refused it, it is not submitted again, unless the error
        was temporary."""
        said = re.search(r"error message was '(.*?)'\.?\n", msg, re.DOTALL)
        if said:
            refusal = " ".join(re.sub(r"^sbatch: (error: )?", "", line) for line in said[1].splitlines())
            if not _TEMPORARY.search(refusal):
                job_info.job.attempt = max(job_info.job.attempt, job_info.job.restart_times + 1)
            msg = (
                f"Slurm refused the job {name_of(job_info.job)}: {refusal}. The section `slurm` of the config says "
                "what jobs ask for; `sinfo` and `sacctmgr show associations user=$USER` say what there is"
            )
        self.logger.error(msg)
        super()._report_job_error_threadsafe(job_info, "")


def name_of(job) -> str:
    """A job's name, such as `profile_costs.module=llm.tp=1`; for a group, its name and its number of jobs."""
    if job.is_group():
        return f"{job.groupid if len(str(job.groupid)) < 30 else 'group'}.{len(job.jobs)}_jobs"
    wildcards = "".join(f".{name}={value}" for name, value in job.wildcards_dict.items())
    return re.sub(r"[^\w.=-]", "_", f"{job.rule.name}{wildcards}")[:120]


def keeps_accounts() -> bool:
    """Whether Slurm has an accounting database that answers."""
    try:
        asked = subprocess.run(
            ["sacct", "-X", "--noheader", "--starttime=now"], capture_output=True, text=True, timeout=_ANSWER_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0 and "disabled" not in asked.stderr


def parse_states(answer: str) -> dict[str, tuple[str, str]]:
    """State and reason by job, from lines `number|STATE|reason`. If a number occurs several times, as after a requeue,
    its last line counts."""
    rows = (line.split("|") for line in answer.splitlines() if line.count("|") >= 2)
    # "CANCELLED by 1000", "OUT_OF_ME+"
    return {
        number: ("OUT_OF_MEMORY" if state.startswith("OUT_OF_ME") else state.split()[0].rstrip("+"), reason.strip())
        for number, state, reason, *_ in rows
        if state
    }


def why_ended(job, state: str, reason: str) -> str:
    """One line on a job that failed."""
    rule = job.job.name if job.job.is_group() else job.job.rule.name
    way_out = _WAYS_OUT.get(state, "" if reason in _USUAL else reason).format(rule=rule)
    log = job.aux["slurm_logfile"] if job.job.is_group() else next(iter(job.job.log), job.aux["slurm_logfile"])
    return f"Slurm job {job.external_jobid} ({name_of(job.job)}) ended as {state}" + (
        f": {way_out}; log: {log}" if way_out else f"; log: {log}"
    )


def _question(numbers: list[str], *, has_accounts: bool) -> list[str]:
    listed = ",".join(numbers)
    if has_accounts:
        return ["sacct", "-X", "--noheader", "--parsable2", "--format=JobIDRaw,State,Reason", f"--jobs={listed}"]
    return ["squeue", "--noheader", "--states=all", "--format=%i|%T|%r", f"--jobs={listed}"]


async def _answer_of(command: list[str]) -> str | None:
    """The output of a command: empty if it does not know the jobs, None if it fails or takes too long."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except OSError:
        return None
    try:
        out, said = await asyncio.wait_for(process.communicate(), _ANSWER_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return None
    if process.returncode and b"Invalid job id" not in said:
        return None
    return out.decode()
