"""What correction brings where the cost table is wrong, and what it costs where it is not.

    python tests/benchmarks/correction.py --shapes FOLDER

FOLDER, mixes, model and costs are those of `scheduler.py`: 512 samples in 64 buckets, an LLM of four stages. A
simulated device takes the table's times, with noise of 5 % a computation, but for one shape bin of the LLM, the one
most met, which takes 30 % longer. Steps are over those of an oracle that knows the device. Without drift, the gate ends
the measuring. With noise of a half, as on cores that others use, there is nothing to learn. At last, the search's time
a trial, with corrections and without. A table is printed and `results/benchmarks/correction.json` written, in some
minutes.
"""

import argparse
import json
import platform
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
from scheduler import MIXES, analytic_costs, draw_mix, make_pricer

from dflop.balance import lpt_buckets
from dflop.config import ModelConfig, ScheduleConfig
from dflop.models import load_model_spec
from dflop.schedule import (
    NO_CORRECTIONS,
    REPORT_LAG_STEPS,
    BatchScheduler,
    CorrectionLoop,
    Corrections,
    GlobalBatches,
    MeasuredStep,
    Pricer,
    StepSchedule,
    StepSearch,
)
from dflop.schedule.correction import bins_of
from dflop.shapes import SampleShapes

NUM_SAMPLES, NUM_BUCKETS, NUM_STAGES = 512, 64, 4
SLOWER, NOISE, MUCH_NOISE = 1.3, 0.05, 0.5
# Steps are compared from this one on.
SETTLED, NUM_COMPARED = 20, 8
NUM_WATCHED = 60
OVERHEAD = 0.001
NUM_TRIALS, NUM_REPEATS = 20_000, 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    arguments = parser.parse_args()
    spec = load_model_spec(ModelConfig(preset="llava_ov_7b"))
    costs = analytic_costs(spec)
    command = " ".join(["python", *sys.argv])
    machine = f"{platform.machine()}, {psutil.cpu_count()} cores"
    print(f"{machine}: {command}\n")
    print(
        f"{'':<14}{'drift: table':>14}{'corrected':>13}{'noise: corrected':>18}{'no drift: off':>15}{'us a trial':>12}"
    )
    print(
        f"{'':<14}{'over oracle':>14}{'over oracle':>13}{'over table':>18}{'at step':>15}{'table':>12}{'corrected':>11}"
    )
    rows = {}
    for mix, shares in MIXES.items():
        samples = draw_mix(arguments.shapes, shares)
        pricer, _ = make_pricer(samples, costs, spec, NUM_SAMPLES, NUM_BUCKETS, NUM_STAGES, 1)
        rows[mix] = row = measure_mix(samples, pricer)
        off = "never" if row["off_at"] is None else row["off_at"]
        print(
            f"{mix:<14}{row['table_over_oracle']:>14.3f}{row['corrected_over_oracle']:>13.3f}"
            f"{row['noisy_over_table']:>18.3f}{off:>15}{row['trial_us']:>12.1f}{row['corrected_trial_us']:>11.1f}",
            flush=True,
        )
    out = Path("results/benchmarks/correction.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    figures = {"command": command, "machine": machine, "rows": rows}
    out.write_text(json.dumps(figures, indent=2) + "\n")


def measure_mix(samples: SampleShapes, table: Pricer) -> dict:
    batches = GlobalBatches(len(samples), NUM_SAMPLES, 0)

    def scheduler(correction: str = "on") -> tuple[BatchScheduler, ScheduleConfig]:
        config = ScheduleConfig(policy="search", correction=correction)
        return BatchScheduler(samples, table, batches, config, 0), config

    by_table, _ = scheduler()
    plain = [by_table.schedule(step) for step in range(SETTLED, SETTLED + NUM_COMPARED)]
    device = table.corrected(slower_in_usual_bin(table, plain))
    oracle_s = true_s(device, [by_table.priced_by(device).schedule(schedule.step) for schedule in plain])
    learned = run(CorrectionLoop(*scheduler()), device, SETTLED + NUM_COMPARED, NOISE)
    noisy = run(CorrectionLoop(*scheduler()), table, SETTLED + NUM_COMPARED, MUCH_NOISE)
    measures = [one.measures for one in run(CorrectionLoop(*scheduler("auto")), table, NUM_WATCHED, NOISE)]
    return {
        "table_over_oracle": true_s(device, plain) / oracle_s,
        "corrected_over_oracle": true_s(device, learned[SETTLED:]) / oracle_s,
        "noisy_over_table": true_s(table, noisy[SETTLED:]) / true_s(table, plain),
        "off_at": None if all(measures) else measures.index(False),
        "trial_us": trial_us(table, samples.take(batches[0])),
        "corrected_trial_us": trial_us(device, samples.take(batches[0])),
    }


def slower_in_usual_bin(table: Pricer, schedules: list[StepSchedule]) -> Corrections:
    met: Counter = Counter()
    for schedule in schedules:
        places = bins_of(table.loads(schedule.shapes, schedule.assignment)["llm"])
        met.update(zip(*(place.ravel().tolist() for place in places), strict=True))
    factors = NO_CORRECTIONS.table("llm")
    factors[:, *met.most_common(1)[0][0]] = SLOWER
    return Corrections(version=1, factors={"llm": factors})


def run(loop: CorrectionLoop, device: Pricer, num_steps: int, noise: float) -> list[StepSchedule]:
    """Steps scheduled ahead as beside training, and measured on the device."""
    rng = np.random.default_rng(0)
    schedules: list[StepSchedule] = []
    for step in range(num_steps):
        ended = step - ScheduleConfig().lookahead_steps - REPORT_LAG_STEPS
        if ended >= 0 and schedules[ended].measures:
            times = device.stage_times(schedules[ended].shapes, schedules[ended].assignment)
            forward_s, backward_s = (
                seconds * np.exp(rng.normal(0, noise, seconds.shape)) for seconds in (times.forward_s, times.backward_s)
            )
            loop.observe(MeasuredStep(step=ended, forward_s=forward_s, backward_s=backward_s, overhead=OVERHEAD))
        schedules.append(loop.schedule(step))
    return schedules


def true_s(device: Pricer, schedules: list[StepSchedule]) -> float:
    return sum(device.step_s(schedule.shapes, schedule.assignment) for schedule in schedules)


def trial_us(pricer: Pricer, shapes: SampleShapes) -> float:
    """The least of several searches from the same start, of one batch."""
    problem = pricer.problem(shapes)
    first = pricer.assign(shapes, *np.divmod(lpt_buckets(problem), problem.num_microbatches))
    search = StepSearch(pricer, shapes)
    search.improve(first, 100, 0)
    seconds = []
    for _ in range(NUM_REPEATS):
        begin = time.process_time()
        search.improve(first, NUM_TRIALS, 0)
        seconds.append(time.process_time() - begin)
    return 1e6 * min(seconds) / NUM_TRIALS


if __name__ == "__main__":
    main()
