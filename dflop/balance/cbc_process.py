"""The child process that runs CBC: reads one problem a line on stdin, writes one answer a line on stdout, both JSON.

It is run as a file, not imported: nothing but NumPy and python-mip is loaded, so it starts in a fraction of a second.
CBC prints from C code, so the original stdout is redirected to /dev/null. CBC may overrun its time limit; then the
parent kills this process. When stdin closes, because the parent closed it or is gone, the process ends, even during a
solve.

CBC cannot solve a min-max model of hundreds of samples and tens of buckets in a second: warm-started, it returns the
start. So CBC searches one neighbourhood at a time. It redistributes the samples of the largest bucket and a few others
exactly, then those of the largest bucket and the next few. Where this is fast, it takes more buckets at once. A small
problem is a single neighbourhood, and its optimum is proven.
"""

import gc
import json
import math
import os
import queue
import sys
import threading
import time
from collections import Counter

import numpy as np

# Neighbourhoods that CBC usually solves within a few hundredths of a second.
FIRST_VARIABLES = 40
MIN_SOLVE_S = 0.005
# The longest that one neighbourhood may take, as a share of the time limit.
SLICE = 1 / 8
MIN_GAIN = 1e-9
# Where work is limited instead of time: the most branch-and-bound nodes for one neighbourhood.
MOST_NODES = 50


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    requests = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    try:
        import mip

        mip.Model(solver_name=mip.CBC)
    except Exception as error:  # A missing library shows up as ImportError, NameError or OSError.
        _answer(answers, {"error": f"{type(error).__name__}: {error}"})
        return
    _answer(answers, {"ready": True})
    while True:
        request = requests.get()
        try:
            # python-mip's models are cycles that hold C memory, which the collector does not count.
            gc.collect()
            bucket, proven = improve(**request)
            _answer(answers, {"bucket": bucket.tolist(), "proven": proven})
        except Exception as error:  # The parent counts and reports it; the next problem may be fine.
            _answer(answers, {"error": f"{type(error).__name__}: {error}"})


def improve(loads, filled, tokens, kind, bucket, num_buckets, max_bucket_tokens, time_limit_s, num_solves):
    """Lower the largest bucket until it is at most 1, it is proven that no assignment is better, or the limit is met.

    The limit is `time_limit_s`, or, where `num_solves` is not None, this number of neighbourhoods and no time.

    Args:
        loads: `[num_samples][num_modules]` in units of the goal for the largest bucket; equal within a kind.
        filled: `[num_buckets][num_modules]` in the same units, what buckets hold beside their samples.
        tokens: LLM tokens, `[num_samples]`; a bucket holds at most `max_bucket_tokens` (None for no limit).
        kind: equal for interchangeable samples, `[num_samples]`.
        bucket: the start, `[num_samples]`.

    Returns:
        (bucket, whether it is proven that no assignment is better)
    """
    counts_work = num_solves is not None
    deadline = math.inf if counts_work else time.monotonic() + time_limit_s
    loads, filled = np.asarray(loads), np.asarray(filled)
    tokens, kind, bucket = np.asarray(tokens), np.asarray(kind), np.asarray(bucket)
    rng = np.random.default_rng(0)
    num_chosen = min(num_buckets, max(2, round((FIRST_VARIABLES * num_buckets / len(bucket)) ** 0.5)))
    while True:
        peaks = _peaks(loads, filled, bucket)
        largest = int(peaks.argmax())
        if peaks[largest] <= 1:
            return bucket, False
        others = rng.permutation(np.delete(np.arange(num_buckets), largest))
        gained, cut_short = False, False
        for first in range(0, len(others), num_chosen - 1):
            seconds = math.inf if counts_work else min(deadline - time.monotonic(), time_limit_s * SLICE)
            if seconds < MIN_SOLVE_S or num_solves == 0:
                return bucket, False
            if counts_work:
                num_solves -= 1
            chosen = np.append(others[first : first + num_chosen - 1], largest)
            members = np.flatnonzero(np.isin(bucket, chosen))
            regrouped, proven = _redistribute(
                loads[members],
                filled,
                tokens[members],
                kind[members],
                bucket[members],
                max_bucket_tokens,
                {"max_nodes": MOST_NODES} if counts_work else {"max_seconds": seconds},
            )
            cut_short |= not proven
            if _peaks(loads[members], filled, regrouped)[chosen].max() < peaks[largest] * (1 - MIN_GAIN):
                bucket = bucket.copy()
                bucket[members] = regrouped
                gained = True
                break
        if num_chosen == num_buckets and not cut_short:
            return bucket, True
        if not gained:
            num_chosen = max(2, num_chosen - 1) if cut_short else min(num_buckets, num_chosen + 1)


def _redistribute(loads, filled, tokens, kind, bucket, max_bucket_tokens, limit):
    """Solve the buckets of these samples as one integer program, started from `bucket`.

    The variables are integer counts, one row a kind of samples and one column a bucket. Where buckets are
    interchangeable, they are renumbered in the order in which they first appear among the samples, large ones first.
    The first n samples are then in the first n buckets at most, and the variables of later buckets are left out.

    Returns:
        (bucket, whether it is the optimum)
    """
    import mip

    labels = np.unique(bucket)
    bound = ((loads.sum(axis=0) + filled[labels].sum(axis=0)) / len(labels)).max()
    bound = max(bound, (loads.max(axis=0) + filled[labels].min(axis=0)).max())
    start_peak = float(_peaks(loads, filled, bucket)[labels].max())
    if bound >= start_peak * (1 - MIN_GAIN):
        return bucket, True
    kinds = [np.flatnonzero(kind == value) for value in np.unique(kind)]
    kinds.sort(key=lambda samples: -loads[samples].max())
    labels = list(dict.fromkeys(int(label) for samples in kinds for label in bucket[samples]))

    model = mip.Model(solver_name=mip.CBC)
    model.verbose = 0
    model.threads = 1
    model.seed = 1
    model.max_mip_gap = 1e-6
    peak = model.add_var(lb=bound)
    model.objective = peak
    are_alike = np.ptp(filled[labels], axis=0).max() == 0
    start, columns, num_seen = [], [[] for _ in labels], 0
    for samples in kinds:
        num_seen += len(samples)
        row = [
            model.add_var(var_type=mip.INTEGER, ub=len(samples)) for _ in (labels[:num_seen] if are_alike else labels)
        ]
        model += mip.xsum(row) == len(samples)
        for column, label, var in zip(columns, labels, row, strict=False):
            column.append((var, samples))
            start.append((var, float((bucket[samples] == label).sum())))
    for label, column in zip(labels, columns, strict=True):
        for module in range(loads.shape[1]):
            load = mip.xsum(float(loads[samples[0], module]) * var for var, samples in column)
            model += load <= peak - float(filled[label, module])
        model += mip.xsum(var for var, _ in column) >= 1
        if max_bucket_tokens is not None:
            model += mip.xsum(float(tokens[samples[0]] / max_bucket_tokens) * var for var, samples in column) <= 1
    model.start = [*start, (peak, start_peak)]
    status = model.optimize(**limit)
    if model.num_solutions == 0:
        return bucket, False

    return _dealt(columns, labels, bucket), status == mip.OptimizationStatus.OPTIMAL


def _dealt(columns, labels, bucket):
    """The bucket of each sample by the counts that were found: those of a kind are dealt out in order."""
    answer, num_dealt = np.full_like(bucket, -1), Counter()
    for column, label in zip(columns, labels, strict=True):
        for var, samples in column:
            begin = num_dealt[int(samples[0])]
            end = begin + round(var.x)
            answer[samples[begin:end]] = label
            num_dealt[int(samples[0])] = end
    if (answer < 0).any():
        raise ArithmeticError(f"CBC left {(answer < 0).sum()} of {len(answer)} samples out")
    return answer


def _peaks(loads, filled, bucket):
    modules = [np.bincount(bucket, weights=column, minlength=len(filled)) for column in loads.T]
    return np.max(np.transpose(modules) + filled, axis=1)


def _read_requests(requests) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


def _answer(answers, message) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
