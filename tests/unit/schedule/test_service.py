"""Whatever becomes of the process that decides: every rank reads a schedule of every step, and all read the same."""

import dataclasses
import os
import signal
import threading

import psutil
import pytest
import torch.distributed as dist

import dflop.schedule.service as service
from dflop.config import load_config
from dflop.schedule.service import ScheduleService, open_scheduler
from dflop.train.feed import ScheduleFeed, SchedulePublisher

NUM_STEPS = 40
LOOKAHEAD = 4


class Rank(threading.Thread):
    """Reads what a rank reads, ahead of the step it is at, as its loaders do."""

    def __init__(self, store):
        super().__init__(daemon=True)
        self.feed, self.read = ScheduleFeed(store), []

    def run(self):
        for step in range(NUM_STEPS):
            self.read.append(without_times(self.feed.get(step)))


def without_times(schedule) -> bytes:
    return dataclasses.replace(schedule, deciding_s=0.0).to_bytes()


def train(run, harm=lambda step, publisher: None):
    """All steps, with three ranks reading and `harm(step, publisher)` in each. Returns the main rank's schedules."""
    store = dist.HashStore()
    corrections = run.paths["plan"].with_name("corrections.json")
    publisher = SchedulePublisher(store, load_config(run.config), **run.paths, corrections=corrections, first_step=0)
    publisher.start()
    feed, ranks = ScheduleFeed(store), [Rank(store) for _ in range(2)]
    for rank in ranks:
        rank.start()
    schedules = []
    try:
        for step in range(NUM_STEPS):
            publisher.step_started(step, None)
            for rank in ranks:  # as the all-reduce at the end of a step has it
                while len(rank.read) < step and rank.is_alive():
                    rank.join(0.01)
            schedules.append(feed.get(step))
            harm(step, publisher)
        for rank in ranks:
            rank.join(60)
    finally:
        publisher.close()
    assert not publisher.is_alive()
    for rank in ranks:
        assert rank.read == [without_times(schedule) for schedule in schedules]
    return schedules


@pytest.fixture
def run(make_run):
    return make_run(policy="search", lookahead_steps=LOOKAHEAD, search_trials=200, correction="off")


@pytest.fixture
def impatient(monkeypatch):
    """Some seconds of silence are too long; fewer, and a busy machine's would be, too."""
    monkeypatch.setattr(service, "_PATIENCE_S", 8.0)
    monkeypatch.setattr(service, "_LIMITS_OF_PATIENCE", 0)


def policies_of(schedules):
    return [schedule.policy for schedule in schedules]


def expected(run, policy) -> list[bytes]:
    """What a scheduler of its own says of every step, asked by nobody's process."""
    with open_scheduler(load_config(run.config), **run.paths).open() as scheduler:
        return [without_times(scheduler.schedule(step, policy)) for step in range(NUM_STEPS)]


def test_ranks_read_what_the_service_decided_and_how_long_they_waited_is_known(run, capfd):
    schedules = train(run)
    assert [without_times(schedule) for schedule in schedules] == expected(run, "search")
    assert "warning" not in capfd.readouterr().err


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_lpt_stands_in_for_a_service_that_died_or_hangs_until_a_second_one_is_ready(run, capfd, impatient, how):
    pids = []

    def harm(step, publisher):
        if step == 5:
            pids.append(publisher.service.pid)
            os.kill(publisher.service.pid, how)
        if step == NUM_STEPS - 1:
            pids.append(publisher.service.pid)

    schedules = train(run, harm)
    policies = policies_of(schedules)
    first = policies.index("lpt")
    assert policies == ["search"] * first + ["lpt"] * LOOKAHEAD + ["search"] * (NUM_STEPS - first - LOOKAHEAD)
    assert 5 < first <= 5 + 2 * LOOKAHEAD
    searched, packed = expected(run, "search"), expected(run, "lpt")
    for step, schedule in enumerate(schedules):
        assert without_times(schedule) == (packed if policies[step] == "lpt" else searched)[step]
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert f"before step {first + 1}; policy lpt decides up to step {first + 1 + LOOKAHEAD}" in line
    assert ("ended" if how == signal.SIGKILL else "was silent for ") in line
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)  # a stopped process, too, is gone
    assert pids[1] != pids[0]


@pytest.mark.exhaustive
def test_a_service_compiles_all_it_needs_before_patience_counts(make_run, tmp_path, impatient, monkeypatch):
    run = make_run(policy="random", lookahead_steps=LOOKAHEAD, correction="off")  # which has the fewest kernels
    kernels = tmp_path / "kernels"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(kernels))
    corrections = tmp_path / "corrections.json"
    service = ScheduleService(load_config(run.config), **run.paths, corrections=corrections, first_step=0)
    try:
        assert service.next()  # compiling takes longer than a step may
        compiled = set(kernels.rglob("*.nbc"))
        assert compiled
        for _ in range(LOOKAHEAD):
            assert service.next()
        assert set(kernels.rglob("*.nbc")) == compiled
        assert psutil.Process(service.pid).nice() == 19
    finally:
        service.close()


def test_a_service_that_dies_twice_is_not_started_a_third_time(run, capfd, impatient):
    pids = set()

    def harm(step, publisher):
        pids.add(publisher.service.pid)
        if step in (5, 25):
            os.kill(publisher.service.pid, signal.SIGKILL)

    policies = policies_of(train(run, harm))
    assert len(pids) == 2
    assert policies[-8:] == ["lpt"] * 8
    lines = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert [line.rsplit("decides ")[1][:6] for line in lines] == ["up to ", "from h"]


def test_deterministic_runs_are_equal_even_where_the_service_died_in_one(make_run, impatient):
    run = make_run(policy="search", lookahead_steps=LOOKAHEAD, search_trials=200, deterministic=True)

    def harm(step, publisher):
        if step in (3, 20):
            os.kill(publisher.service.pid, signal.SIGKILL)

    assert [without_times(schedule) for schedule in train(run, harm)] == expected(run, "search")


def test_a_wait_for_a_schedule_is_measured(make_run):
    store = dist.HashStore()
    run = make_run()
    with open_scheduler(load_config(run.config), **run.paths).open() as scheduler:
        schedules = [scheduler.schedule(step) for step in range(2)]
    feed = ScheduleFeed(store)
    store.set("schedule/0", schedules[0].to_bytes())
    feed.get(0)
    late = threading.Timer(0.3, lambda: store.set("schedule/1", schedules[1].to_bytes()))
    late.start()
    feed.get(1)
    assert feed.waited_s[0] < 0.2
    assert 0.25 < feed.waited_s[1] < 5
    late.join()
