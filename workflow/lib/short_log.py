"""Shorter output of Snakemake, a line or two a job. Its own complete log, in `.snakemake/log`, has everything.

A job's first line has its rule and wildcards, and its second line says that it is done and how long it took. For a
failed job the end of its log is shown. With `--verbose`, Snakemake's own output is printed.
"""

import ast
import json
import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snakemake.logging import ColorizingTextHandler, DefaultFormatter, LogEvent, get_event, logger

__all__ = ["Formatter", "changes_in", "install", "last_lines"]

# Of a failed job's log: how many of its last lines are searched for dflop's own, and how many are shown of dflop's own,
# or else of any.
_NUM_READ, _NUM_OURS, _NUM_LINES = 200, 4, 12
# Messages that are not printed, because they are of no use to a user who waits for a result.
_NOISE = re.compile(
    r"host: |Using shell|Building DAG|Assuming unrestricted|Provided |Rules claiming|Select jobs|Execute \d+|Group jobs"
    r"|Conda env|Storing output|SLURM run ID|Cleaning up SLURM|DAG of jobs will be|Updating |Elapsed"
    r"|Job \S+ has been submitted|Singularity|Touching output|Removing output|Finished jobid|Trying to restart"
    r"|Reasons:|\s+\(check individual|\s*$|Waiting at most|Multiple includes|Output file "
    r"|MinJobAge|Group job |Shutting down|Workflow defines that|Config file \S+ is"
    r"|Some jobs were|If you |Rules with prov"
)
# Messages that repeat a failure, which its job's line already reports.
_SAID = re.compile(r"RuleException:\s+CalledProcessError|Exiting because a job|WorkflowError:\s+At least one job")
_REASON = re.compile(r"dflop: (?!warning)")
_CONFIGS = re.compile(r"'(\{.*?\})'(?=[,;}\]]|$| )")


def install() -> None:
    """Print shorter output from now on, unless Snakemake was asked for more output, or for another form of log."""
    for handler in list(logger.handlers):
        if type(handler) is ColorizingTextHandler and logger.level > logging.DEBUG:
            short = _Handler(nocolor=handler.nocolor, stream=handler.stream)
            for own in handler.filters:
                short.addFilter(own)
            short.setFormatter(Formatter(handler.formatter.quiet, handler.formatter.show_failed_logs))
            logger.removeHandler(handler)
            logger.addHandler(short)


class _Handler(ColorizingTextHandler):
    def emit(self, record: logging.LogRecord) -> None:
        self.last_msg_was_job_info = True  # no empty line before it
        super().emit(record)


class Formatter(DefaultFormatter):
    """Formats each log record as a few lines, or as none."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._started: dict[int, tuple[str, float]] = {}
        self._logs_before: dict[str, tuple[int, int] | None] = {}
        self._done: list[str] = []
        self._said_jobs = ""

    def format(self, record: logging.LogRecord) -> str:
        event = get_event(record)
        if event in (None, LogEvent.JOB_STARTED, LogEvent.ERROR):
            text = str(record.msg or "").lstrip("\n")
            is_noise = _SAID.match(text) or (record.levelno < logging.ERROR and _NOISE.match(text))
            return "" if is_noise else super().format(record)
        own = {
            LogEvent.JOB_INFO: self._job,
            LogEvent.GROUP_INFO: lambda said: "",
            LogEvent.JOB_FINISHED: self._finished,
            LogEvent.PROGRESS: self._progress,
            LogEvent.JOB_ERROR: self._error,
            LogEvent.GROUP_ERROR: lambda said: "",
            LogEvent.RUN_INFO: self._jobs,
            LogEvent.RESOURCES_INFO: lambda said: "",
            LogEvent.WORKFLOW_STARTED: lambda said: "",
        }.get(event)
        return own(record.__dict__) if own else super().format(record)

    def _job(self, said: Mapping[str, Any]) -> str:
        name = _name(said["rule_name"], said["wildcards"])
        self._started[said["jobid"]] = (name, time.monotonic())
        self._logs_before |= {str(log): _state_of(log) for log in said["log"]}
        kind = "checkpoint" if said["is_checkpoint"] else "rule"
        changes = changes_in(str(said["reason"]))
        return f"{_now()} {kind} {name}" + (f"  because {changes}" if changes else "")

    def _finished(self, said: Mapping[str, Any]) -> str:
        name, began = self._started.get(said["job_id"], (f"job {said['job_id']}", time.monotonic()))
        self._done.append(f"{_now()} done {name}  in {time.monotonic() - began:.0f} s")
        return ""

    def _progress(self, said: Mapping[str, Any]) -> str:
        lines, self._done = self._done, []
        return "\n".join(lines) + f"  ({said['done']} of {said['total']})" if lines else ""

    def _jobs(self, said: Mapping[str, Any]) -> str:
        stats = {name: count for name, count in said["stats"].items() if name not in ("total", "all")}
        listed = ", ".join(f"{count} {name}" if count > 1 else name for name, count in stats.items())
        before, self._said_jobs = self._said_jobs, f"{sum(stats.values())} jobs: {listed}" if stats else ""
        return "" if self._said_jobs == before else self._said_jobs  # a dry run reports them twice

    def _error(self, said: Mapping[str, Any]) -> str:
        name = _name(said["rule_name"], said.get("wildcards"))
        own, _, _ = str(said["rule_msg"] or "").partition("For further error details")
        lines = [f"{_now()} FAILED {name}" + (f": {own}" if own else "")]
        # A log that is as it was before is an earlier job's: this one has ended before it wrote anything.
        logs = [Path(log) for log in said["log"] if _state_of(log) != self._logs_before.get(str(log))]
        for log in logs[:1] if self.show_failed_logs else ():
            if ended := last_lines(log):
                lines += [f"  {log} ends with:", *(f"    {line}" for line in ended)]
        return "\n".join(lines)


def changes_in(reason: str) -> str:
    """What has changed for a rule, in short, from Snakemake's `reason`; empty if only files are missing or new."""
    parts = []
    if "arams have changed" in reason:
        found = [_as_mapping(text) for text in _CONFIGS.findall(reason)]
        pairs = [own for own in found if own is not None]
        if len(pairs) >= 2:
            parts += [*_differences(pairs[0], pairs[1])][:6]
        parts = parts or ["its settings changed"]
    if "Code has changed" in reason:
        parts.append("its command changed")
    if "Set of input files has changed" in reason:
        parts.append("its inputs are others")
    if "Forced execution" in reason:
        parts.append("it was asked for")
    return ", ".join(parts)


def last_lines(path: Path) -> list[str]:
    """The end of a log: dflop's own messages, or if there are none, the last lines."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").rstrip().splitlines()
    except OSError:
        return []
    ended = lines[-_NUM_READ:]
    return [line for line in ended if _REASON.match(line)][-_NUM_OURS:] or ended[-_NUM_LINES:]


def _state_of(log: str) -> tuple[int, int] | None:
    """The size and modification time of a log; None if it is not there."""
    try:
        about = Path(log).stat()
    except OSError:
        return None
    return about.st_size, about.st_mtime_ns


def _name(rule: str, wildcards: Mapping[str, str] | None) -> str:
    own = " ".join(f"{name}={value}" for name, value in (wildcards or {}).items())
    return f"{rule}: {own}" if own else rule


def _now() -> str:
    return time.strftime("%H:%M:%S")


def _as_mapping(text: str) -> dict[str, Any] | None:
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
        except (ValueError, SyntaxError):
            continue
        return value if isinstance(value, dict) else None
    return None


def _differences(was: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key in sorted(was.keys() | now.keys()):
        old, new = was.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            short = len(f"{old}{new}") < 60
            found.append(f"{prefix}{key} was {old} and is {new}" if short else f"{prefix}{key} changed")
    return found
