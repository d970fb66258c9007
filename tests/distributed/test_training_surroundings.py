"""Training in surroundings that nobody would choose: little shared memory, a clock that is set while it runs."""

import json
import shutil
import subprocess

import pytest
from training_runs import end_run, plan_file, start_run, train, wait_for_steps

pytestmark = pytest.mark.exhaustive

CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void) { return access(getenv("SET_BACK"), F_OK) ? 0 : -3600; }

int clock_gettime(clockid_t which, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(which, now);
    if (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE) now->tv_sec += shift();
    return code;
}

int gettimeofday(struct timeval *now, void *zone) {
    int (*real)(struct timeval *, void *) = dlsym(RTLD_NEXT, "gettimeofday");
    int code = real(now, zone);
    now->tv_sec += shift();
    return code;
}

time_t time(time_t *place) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (place) *place = now.tv_sec;
    return now.tv_sec;
}
"""


def numbers_of(value: object, name: str = "") -> list[tuple[str, float]]:
    """All numbers in an object of JSON, with their keys."""
    if isinstance(value, dict):
        return [found for key, inner in value.items() for found in numbers_of(inner, key)]
    if isinstance(value, list):
        return [found for inner in value for found in numbers_of(inner, name)]
    return [(name, value)] if isinstance(value, (int, float)) else []


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs a C compiler")
def test_a_clock_that_is_set_back_an_hour_costs_no_wait_and_no_checkpoint(run, tmp_path, monkeypatch):
    folder, config = run
    (tmp_path / "clock.c").write_text(CLOCK)
    library, set_back, out = tmp_path / "clock.so", tmp_path / "set-back", tmp_path / "train"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("SET_BACK", str(set_back))
    settings = {"steps": 6, "checkpoint_every": 2, "loader_workers": 1}
    process = start_run(folder, config, plan_file(folder), out, **settings)
    wait_for_steps(process, out, 2)
    set_back.touch()
    assert end_run(process, out) == 0, (out / "log").read_text()
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(6))
    assert steps[-1]["time"] < steps[0]["time"]
    seconds = [
        found for found in numbers_of([steps, json.loads((out / "summary.json").read_text())]) if "_s" in found[0]
    ]
    assert len(seconds) > 6
    assert not [found for found in seconds if found[0].endswith("_s") and not 0 <= found[1] < 3000]
    # What was kept before and after is good: the last step is the newest.
    monkeypatch.undo()
    train(folder, config, plan_file(folder), out, **settings)
    assert "this run is finished: " in (out / "log").read_text()


SMALL = 'mount -t tmpfs -o size="$0" tmpfs /dev/shm && exec "$@"'


def test_training_works_with_shared_memory_of_64_mb_as_in_a_container_and_says_where_there_is_too_little(run, tmp_path):
    little, usual = (["unshare", "--mount", "sh", "-c", SMALL, size] for size in ("64k", "64m"))
    if not shutil.which("unshare") or subprocess.run([*little, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a folder")
    folder, config = run
    settings = {"steps": 2, "loader_workers": 1}
    out = tmp_path / "train"
    assert end_run(start_run(folder, config, plan_file(folder), out, within=little, **settings), tmp_path / "little")
    log = (tmp_path / "little/log").read_text()
    assert "/dev/shm (6.1e-05 GiB) has no room for the microbatches that loader processes hand over: make" in log
    assert "]: Traceback" not in log  # of a rank; torch itself prints what it ignores
    assert end_run(start_run(folder, config, plan_file(folder), out, within=usual, **settings), out) == 0
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2
