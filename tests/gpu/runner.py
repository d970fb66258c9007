"""Running checks one after the other, each in a process of its own, and saying what they found.

A check that fails, is skipped, ends with an error or takes too long is one line more, and stops no other.
"""

import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.gpu.check import Check, Setting, Skipped

__all__ = ["expected_s", "in_child", "page", "run_check", "run_checks", "said"]

REPOSITORY = Path(__file__).parents[2]
_LAST_LINES = 12
SO_FAR = ".so-far.json"  # how the file with what a check has measured until now ends
_PACKAGES = ("torch", "triton", "transformers", "flash-attn")


def run_checks(checks: Sequence[Check], setting: Setting) -> Iterator[dict[str, Any]]:
    """The results, as they come: first of checks that nothing disturbs, beside each other, then of each timed one."""
    beside = [check for check in checks if not check.is_timed]
    if beside:
        with ThreadPoolExecutor(len(beside)) as threads:
            running = [threads.submit(run_check, check, setting) for check in beside]
            yield from (done.result() for done in as_completed(running))
    yield from (run_check(check, setting) for check in checks if check.is_timed)


def expected_s(checks: Sequence[Check], *, is_fast: bool) -> float:
    """What checks are expected to take together."""
    taken = {check: check.seconds_of(is_fast=is_fast) for check in checks}
    beside = max((seconds for check, seconds in taken.items() if not check.is_timed), default=0.0)
    return beside + sum(seconds for check, seconds in taken.items() if check.is_timed)


def run_check(check: Check, setting: Setting) -> dict[str, Any]:
    """The result of a check in a process of its own. What it prints is in `setting.folder`/NAME.log."""
    log, found = setting.folder / f"{check.name}.log", setting.folder / f"{check.name}.json"
    for old in (found, found.with_suffix(SO_FAR)):
        old.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.gpu", "--child", "--only", check.name, "--device", setting.device]
    command += ["--folder", str(setting.folder)]
    command += [flag for flag, on in (("--tiny", setting.is_tiny), ("--fast", setting.is_fast)) if on]
    started = time.monotonic()
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, cwd=REPOSITORY, env=_environment(setting), stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = child.wait(check.longest_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # what it left behind, too
            child.wait()
    result = json.loads(found.read_text()) if found.exists() else _without_result(check, code, log)
    return {"check": check.name, **result, "seconds": round(time.monotonic() - started, 1)}


def _environment(setting: Setting) -> dict[str, str]:
    """That of a rank of training on this device."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    if setting.device == "cuda":
        with contextlib.suppress(ModuleNotFoundError):  # without it checks are skipped, and say what is missing
            from dflop.base.gpu_environment import gpu_environment

            environment |= gpu_environment(environment)
    return environment


def _without_result(check: Check, code: int | None, log: Path) -> dict[str, Any]:
    last = log.read_text(errors="replace").splitlines()[-_LAST_LINES:] if log.exists() else []
    so_far = log.with_name(f"{check.name}{SO_FAR}")
    found = json.loads(so_far.read_text()) if so_far.exists() else {}
    if code is None:
        return found | {"status": "timeout", "reason": f"no result within {check.longest_s:.0f} s", "last_lines": last}
    return found | {"status": "error", "reason": f"ended with exit code {code}; see {log}", "last_lines": last}


def in_child(check: Check, setting: Setting) -> None:
    """Measure, and leave the result as `setting.folder`/NAME.json. An error is not caught: the log has it."""
    machine, out = {"machine": _machine(setting)}, setting.folder / f"{check.name}.json"
    result: dict[str, Any] = {}
    try:
        for figures in check.measure(setting):
            result = check.judged(figures, setting.device)
            _write(out.with_suffix(SO_FAR), result | machine)
    except Skipped as why:
        result = {"status": "skipped", "reason": str(why)}
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("dflop", "tests"):
            raise
        result = {"status": "skipped", "reason": f"needs {error.name}, which is not installed"}
    _write(out, result | machine)


def _write(path: Path, result: Mapping[str, Any]) -> None:
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(result))
    beside.rename(path)


def _machine(setting: Setting) -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    card = "no GPU"
    if setting.device == "cuda":
        import torch

        card = torch.cuda.get_device_name(0)
    return {"card": card, "cores": str(len(os.sched_getaffinity(0))), "python": platform.python_version(), **versions}


def said(result: Mapping[str, Any]) -> str:
    """A result in lines for people: the verdict, then a line a figure, those that missed their limit marked."""
    head = f"{result['status'].upper():8}{result['check']}  ({result['seconds']:.0f} s)"
    rows = []
    if reason := result.get("reason"):
        head += f": {reason}"
        rows = [f"          | {line}" for line in result.get("last_lines", ())]
    for name, value in result.get("figures", {}).items():
        limit = result["limits"].get(name)
        verdict = "" if limit is None else f"  [{'MISSED' if name in result['missed'] else 'met'}: {limit}]"
        rows.append(f"          {name}: {_number(value)}{verdict}")
    return "\n".join([head, *rows])


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}"


def page(results: Sequence[Mapping[str, Any]], command: str) -> tuple[str, str]:
    """The name and the text of a page of docs/ on these results, by their card."""
    machine = next(result["machine"] for result in results if "machine" in result)
    versions = ", ".join(f"{name} {value}" for name, value in machine.items() if name != "card")
    lines = [
        "---",
        "orphan: true",
        "---",
        f"# Checked on one {machine['card']}",
        "",
        f"`{command}` found this, with {versions}.",
        "",
        "| check | figure | value | limit | verdict |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        if "reason" in result:
            lines.append(f"| {result['check']} | | | | {result['status']}: {result['reason']} |")
        for name, value in result.get("figures", {}).items():
            verdict = "missed" if name in result["missed"] else "met" if name in result["limits"] else ""
            lines.append(
                f"| {result['check']} | {name} | {_number(value)} | {result['limits'].get(name, '')} | {verdict} |"
            )
    slug = re.sub(r"[^a-z0-9]+", "-", machine["card"].lower()).strip("-")
    return f"{slug}.md", "\n".join(lines) + "\n"
