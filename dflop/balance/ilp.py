"""The integer-programming policy: improves an assignment with CBC, in a process that can be killed.

It takes a `BatchProblem` and a valid assignment. It returns an assignment with a strictly smaller largest bucket, or
the given one with a status that says why. It pays where buckets hold two or three samples; with more, packing meets
the goal.

CBC may overrun its time limit, crash or be missing; none of this raises an error here. The model and the search are in
`cbc_process.py`. A search that the time limit ends may give another answer next time. So solve in one place and send
the result to every rank, or limit the work instead of the time (`counts_work`).
"""

import json
import os
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflop.balance.exchanges import MIN_GAIN
from dflop.balance.packing import descend, filled_s
from dflop.balance.problem import (
    BatchProblem,
    bucket_loads,
    check_assignment,
    goal_s,
)

__all__ = ["MAX_VARIABLES", "CbcProcess", "IlpResult", "without_cbc"]

# The most (kind of sample, bucket) pairs: for larger problems CBC finds nothing within a second.
MAX_VARIABLES = 40_000
# Samples are interchangeable where their loads agree to this share of the mean load. A mean bucket then errs by half of
# that share at most.
KIND_TOLERANCE = 1e-3
START_TIMEOUT_S = 30.0
# Where work is limited instead of time: how many neighbourhoods count as a second of the time limit. CBC's process is
# killed where it takes longer than `WORK_TIMEOUT_S` to start, or to answer.
SOLVES_A_SECOND = 20
WORK_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class IlpResult:
    """An assignment and how it came about.

    Args:
        bucket: int64 `[num_samples]`; `start` itself unless something better was found.
        objective_s: seconds of the largest bucket over all modules, including what counts as filled (`filled_s`).
        status: `good_enough` (the start meets `goal_s`, CBC was not asked), `optimal` (nothing is better, to within
            `KIND_TOLERANCE`), `improved` (better than the start, not proven best), `no_gain` (the limit ended without
            a better one), `too_large` (not tried), `timeout` (CBC overran and was killed), `died` (the process ended
            by itself), `failed` (an error or an invalid answer), `unavailable` (CBC cannot be loaded; it is not tried
            again).
        detail: the error's text where there was one.
    """

    bucket: np.ndarray
    objective_s: float
    status: str
    detail: str = ""


class CbcProcess:
    """A child process with CBC: started by the first solve, killed when it overruns, then started anew.

    Use it as a context manager and from one thread. The child ends with its parent.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen | None = None
        self._unavailable: str | None = None

    def __enter__(self) -> "CbcProcess":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the running child, None where there is none."""
        return None if self._child is None else self._child.pid

    def solve(
        self,
        problem: BatchProblem,
        start: np.ndarray,
        *,
        time_limit_s: float,
        share: np.ndarray | None = None,
        counts_work: bool = False,
    ) -> IlpResult:
        """Search for a smaller largest bucket for `time_limit_s`; return after at most 1.5 times that plus 0.5 s.

        With `counts_work`, do as much work as usually fits into that time, however long it takes. Equal problems then
        have equal answers, unless the child is killed because it has not answered after `WORK_TIMEOUT_S`.

        `share` [num_microbatches, num_modules] gives each microbatch's wanted size as a multiple of the mean size.
        Buckets then count as filled by their difference to the largest share, so that the largest bucket is the one
        furthest above its wanted size. The first solve, and the first after a kill, also wait for the child to start.

        Raises:
            ValueError: `start` is not a valid assignment.
        """
        check_assignment(problem, start)
        filled = filled_s(problem, share)
        goal = goal_s(problem) * (1.0 if share is None else float(share.max()))
        start_s = float((bucket_loads(problem, start) + filled).max())
        if start_s <= goal:
            return IlpResult(bucket=start, objective_s=start_s, status="good_enough")
        kind, loads_s = _kinds(problem)
        if (kind.max() + 1) * problem.num_buckets > MAX_VARIABLES:
            return IlpResult(bucket=start, objective_s=start_s, status="too_large")
        request = {
            "loads": (loads_s / goal).tolist(),
            "filled": (filled / goal).tolist(),
            "tokens": problem.llm_tokens.tolist(),
            "kind": kind.tolist(),
            "bucket": start.tolist(),
            "num_buckets": problem.num_buckets,
            "max_bucket_tokens": problem.max_bucket_tokens,
            "time_limit_s": time_limit_s,
            "num_solves": max(1, round(SOLVES_A_SECOND * time_limit_s)) if counts_work else None,
        }
        timeout_s = WORK_TIMEOUT_S if counts_work else 1.5 * time_limit_s + 0.5
        try:
            self._start(WORK_TIMEOUT_S if counts_work else START_TIMEOUT_S)
            answer = self._exchange(json.dumps(request).encode() + b"\n", timeout_s)
            bucket = np.array(answer["bucket"], dtype=np.int64)
            check_assignment(problem, bucket)
        except _ChildError as error:
            return IlpResult(bucket=start, objective_s=start_s, status=error.status, detail=error.detail)
        except ValueError as error:
            return IlpResult(bucket=start, objective_s=start_s, status="failed", detail=str(error))
        # CBC sees the largest bucket only; the descent keeps that gain, down to the goal, and evens out the modules.
        bucket = descend(problem, bucket, share)
        found_s = float((bucket_loads(problem, bucket) + filled).max())
        if found_s < start_s * (1 - MIN_GAIN):
            status = "optimal" if answer["proven"] else "improved"
            return IlpResult(bucket=bucket, objective_s=found_s, status=status)
        return IlpResult(bucket=start, objective_s=start_s, status="optimal" if answer["proven"] else "no_gain")

    def close(self) -> None:
        """Kill the child. A later solve starts another."""
        if self._child is None:
            return
        self._child.kill()
        self._child.wait()
        self._child.stdin.close()
        self._child.stdout.close()
        self._child = None

    def _start(self, timeout_s: float) -> None:
        if self._unavailable is None and self._child is None:
            # -P keeps this folder's modules from shadowing the standard library's in the child.
            command = [sys.executable, "-P", str(Path(__file__).with_name("cbc_process.py"))]
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            try:
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    bufsize=0,
                    env=environment,
                )
                os.set_blocking(self._child.stdin.fileno(), False)
                self._exchange(b"", timeout_s)
            except OSError as error:
                self._unavailable = str(error)
            except _ChildError as error:
                self.close()  # It may have answered that it has no CBC.
                self._unavailable = error.detail or f"the CBC process {error.status} while it started"
        if self._unavailable is not None:
            raise _ChildError("unavailable", self._unavailable)

    def _exchange(self, request: bytes, timeout_s: float) -> dict:
        """Write the request and read one line, both within the timeout: a stopped child does not read its pipe."""
        try:
            message = json.loads(self._converse(request, time.monotonic() + timeout_s))
        except BaseException:
            # Even after Ctrl-C: a late answer must not be taken for the next problem's.
            self.close()
            raise
        if "error" in message:
            raise _ChildError("failed", message["error"])
        return message

    def _converse(self, request: bytes, deadline: float) -> bytes:
        stdin, stdout = self._child.stdin.fileno(), self._child.stdout.fileno()
        answer = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if request:
                selector.register(stdin, selectors.EVENT_WRITE)
            while not answer.endswith(b"\n"):
                ready = {key.fd for key, _ in selector.select(max(0.0, deadline - time.monotonic()))}
                if not ready:
                    raise _ChildError("timeout")
                if stdout in ready:
                    received = os.read(stdout, 1 << 16)
                    if not received:
                        raise _ChildError("died")
                    answer += received
                if stdin in ready:
                    try:
                        request = request[os.write(stdin, request) :]
                    except BrokenPipeError:
                        raise _ChildError("died") from None
                    if not request:
                        selector.unregister(stdin)
        return bytes(answer)


class _ChildError(Exception):
    """The exchange with the child failed; holds the status to report."""

    def __init__(self, status: str, detail: str = "") -> None:
        super().__init__(status, detail)
        self.status = status
        self.detail = detail


def _kinds(problem: BatchProblem) -> tuple[np.ndarray, np.ndarray]:
    """Each sample's kind `[num_samples]`, counted from 0, and the mean loads of its kind `[num_samples, num_modules]`.

    Samples of a kind are interchangeable. They have equal LLM tokens where buckets have a token limit.
    """
    grain_s = problem.loads_s.mean() * KIND_TOLERANCE
    rounded = np.rint(problem.loads_s / grain_s)
    if problem.max_bucket_tokens is not None:
        rounded = np.column_stack([rounded, problem.llm_tokens])
    _, kind, count = np.unique(rounded, axis=0, return_inverse=True, return_counts=True)
    kind = kind.reshape(-1)
    mean_s = np.stack([np.bincount(kind, weights=column) / count for column in problem.loads_s.T], axis=1)
    return kind, mean_s[kind]


def without_cbc(status: str) -> bool:
    """Whether a schedule's status says that CBC was asked and gave no answer."""
    return any(f"ilp {word}" in status for word in ("timeout", "died", "failed", "unavailable"))
