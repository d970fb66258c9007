"""How well costs are predicted, and what measuring and asking take.

    python tests/benchmarks/costs.py [--run results/demo] [--config config/demo.yaml] [--tp 1]

The config's modules are measured and fitted anew, on the CPU or the GPU that it names. `--run` is a finished run of
this config (`make demo` makes one): training's own stage times and memory are compared with what it had predicted;
without one that part is left out. A table with the targets is printed and `results/benchmarks/costs.json` written.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import duckdb
import numpy as np
import yaml

from dflop.config import load_config
from dflop.costs import CostModel, Loads, StageKind
from dflop.plan.layout_key import LayoutKey

REPOSITORY = Path(__file__).parents[2]
NUM_PREDICTIONS = 1_000_000
# By `cluster.device`: error on held-out stages (median, p95), and seconds of profiling (all modules on a CPU, one
# module at one tp on a GPU).
TARGETS = {"cpu": (0.08, 0.20, 60.0), "cuda": (0.03, 0.08, 180.0)}
LOAD_MS, PREDICTIONS_PER_S, STEP_ERROR = 50.0, 1e6, 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=REPOSITORY / "results/demo", help="folder of a finished run")
    parser.add_argument("--config", type=Path, default=REPOSITORY / "config/demo.yaml", help="the run's config")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share a module")
    arguments = parser.parse_args()
    is_finished = (arguments.run / "train/summary.json").is_file()
    with tempfile.TemporaryDirectory() as folder:
        bounds = arguments.run / "load_bounds.json"
        figures = measured_anew(arguments.config, arguments.tp, bounds if is_finished else None, Path(folder))
        figures |= asked(Path(folder) / "costs.duckdb", arguments.tp)
    figures["device"] = load_config(REPOSITORY / "config/config.yaml", arguments.config).cluster.device
    if is_finished:
        figures["held_out_in_the_run"] = held_out(arguments.run / "costs.duckdb")
        figures |= trained(arguments.run)
    else:
        print(f"{arguments.run} is no finished run (`make demo` makes one): nothing is said of training")
    show(figures)
    out = REPOSITORY / "results/benchmarks/costs.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def measured_anew(config: Path, tp: int, bounds: Path | None, folder: Path) -> dict[str, object]:
    """Seconds of `dflop profile-costs` for each module, as a user waits for it, and the error on held-out stages."""
    profiling_s, files = {}, []
    base = REPOSITORY / "config/config.yaml"
    for module in ("vision", "llm"):
        files.append(folder / f"{module}.tp{tp}.parquet")
        started = time.perf_counter()
        dflop("profile-costs", "--config", base, "--config", config, "--module", module, "--tp", tp,
              *(("--bounds", bounds) if bounds else ()), "--out", files[-1])  # fmt: skip
        profiling_s[module] = time.perf_counter() - started
    dflop("fit-costs", *files, "--out", folder / "costs.duckdb")
    return {"profiling_s": profiling_s, "held_out": held_out(folder / "costs.duckdb")}


def held_out(path: Path) -> list[dict[str, object]]:
    """The errors that a `costs.duckdb` says of itself."""
    with duckdb.connect(str(path), read_only=True) as connection:
        rows = connection.execute(
            """SELECT module, tp, coalesce("pass", 'peak memory') AS what, num_held_out, median_error, p95_error, bias
            FROM fit_error ORDER BY quantity DESC, module, what"""
        ).fetchall()
    names = ("module", "tp", "what", "num_held_out", "median_error", "p95_error", "bias")
    return [dict(zip(names, row, strict=True)) for row in rows]


def dflop(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "dflop.cli", *map(str, arguments)], check=True)


def asked(path: Path, tp: int) -> dict[str, float]:
    """Milliseconds of loading the cost model (DuckDB imported), and predictions a second."""
    load_s = min(timed(lambda: CostModel.load(path)) for _ in range(5))
    model = CostModel.load(path)
    tokens = np.random.default_rng(0).integers(32, 4096, NUM_PREDICTIONS).astype(float)
    loads = Loads(np.zeros_like(tokens), tokens, tokens**2 / 4, tokens / 10)
    kind = StageKind.whole("llm", LayoutKey(tp), 28)
    predict_s = min(timed(lambda: model.stage_time(kind, loads)) for _ in range(3))
    return {"load_ms": 1000 * load_s, "predictions_per_s": NUM_PREDICTIONS / predict_s}


def timed(call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def trained(run: Path) -> dict[str, object]:
    """Training's stage times a step and its memory, over what the run had predicted."""
    with duckdb.connect(str(run / "train/observations.duckdb"), read_only=True) as connection:
        ratios = connection.execute(
            "SELECT sum(predicted_s) / sum(seconds) FROM observations "
            """WHERE NOT warmup AND "pass" <> 'sync' GROUP BY step ORDER BY step"""
        ).fetchall()
        passes = connection.execute(
            'SELECT module, "pass", sum(predicted_s) / sum(seconds) FROM observations '
            """WHERE NOT warmup AND "pass" <> 'sync' GROUP BY ALL ORDER BY ALL"""
        ).fetchall()
    plan = yaml.safe_load((run / "plan.yaml").read_text(encoding="utf-8"))
    summary = json.loads((run / "train/summary.json").read_text(encoding="utf-8"))
    by_step = np.array(ratios)[:, 0]
    return {
        "num_steps": len(by_step),
        "step_median_error": float(np.median(np.abs(by_step - 1))),
        "step_predicted_over_measured": float(np.median(by_step)),
        "predicted_over_measured": {f"{module} {direction}": ratio for module, direction, ratio in passes},
        "memory_mib": {
            module: [size / 2**20, summary["peak_memory_bytes"][module] / 2**20]
            for module, size in plan["predicted"]["memory_bytes"].items()
        },
    }


def show(figures: dict) -> None:
    print(f"{platform.machine()}, {os.cpu_count()} cores; python {' '.join(sys.argv)}")
    most_median, most_p95, most_s = TARGETS[figures["device"]]
    rows = [("in the run", row) for row in figures.get("held_out_in_the_run", ())]
    for when, row in [*rows, *(("anew", row) for row in figures["held_out"])]:
        good = row["median_error"] <= most_median and row["p95_error"] <= most_p95
        met = verdict(good, f"{most_median:.0%}, {most_p95:.0%}") if row["what"] != "peak memory" else ""
        print(
            f"held out, {when:<10} {row['module']:>6} tp{row['tp']} {row['what']:<11} median {row['median_error']:6.1%}"
            f"  p95 {row['p95_error']:6.1%}  bias {row['bias']:+6.1%}  of {row['num_held_out']:>2} whole stages{met}"
        )
    seconds = figures["profiling_s"]
    taken_s = sum(seconds.values()) if figures["device"] == "cpu" else max(seconds.values())
    print(
        f"profiling  {' + '.join(f'{module} {taken:.0f} s' for module, taken in seconds.items())}"
        + verdict(taken_s <= most_s, f"{most_s:.0f} s")
    )
    load_ms, predictions_per_s = figures["load_ms"], figures["predictions_per_s"]
    print(f"cost model loaded in {load_ms:.0f} ms{verdict(load_ms <= LOAD_MS, f'{LOAD_MS:.0f} ms')}")
    print(f"{predictions_per_s:,.0f} predictions/s{verdict(predictions_per_s >= PREDICTIONS_PER_S, '1,000,000')}")
    if "step_median_error" not in figures:
        return
    print(
        "stage times of a training step: predicted over measured "
        f"{figures['step_predicted_over_measured']:.2f}, off by {figures['step_median_error']:.1%} "
        f"(medians of {figures['num_steps']} steps){verdict(figures['step_median_error'] <= STEP_ERROR, '15%')}"
    )
    for name, ratio in figures["predicted_over_measured"].items():
        print(f"  {name:<16} {ratio:.2f}")
    for module, (predicted, measured) in figures["memory_mib"].items():
        print(f"peak memory, {module:>6}: predicted {predicted:,.0f} MiB, measured {measured:,.0f} MiB")


def verdict(is_good: bool, target: str) -> str:
    return f"  [{'met' if is_good else 'MISSED'}: {target}]"


if __name__ == "__main__":
    main()
