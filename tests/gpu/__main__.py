"""`python -m tests.gpu [--fast] [--only NAME] [--out FILE]`: run the checks on this machine's GPU.

Without a GPU it lists them and ends with exit code 0. `--device cpu --tiny` tries the kit itself, in sizes that say
nothing of speed. The exit code is 1 if a check failed, ended with an error or took too long; not if it was skipped.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.gpu.check import Check, Setting
from tests.gpu.checks import CHECKS
from tests.gpu.runner import REPOSITORY, expected_s, in_child, page, run_checks, said

_PAGES = REPOSITORY / "docs/explanation/measurements"


def main() -> int:
    arguments = _arguments()
    chosen = [check for check in CHECKS if check.name in arguments.only] if arguments.only else list(CHECKS)
    if arguments.fast and not arguments.only:
        chosen = [check for check in chosen if check.fast_s]
    if not arguments.child and arguments.device == "cuda" and not torch.cuda.device_count():
        _list(chosen, is_fast=arguments.fast)
        return 0
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="dflop-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    setting = Setting(device=arguments.device, is_tiny=arguments.tiny, is_fast=arguments.fast, folder=folder)
    if arguments.child:
        in_child(chosen[0], setting)
        return 0
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results = []
    with arguments.out.open("w", encoding="utf-8") as out:
        for result in run_checks(chosen, setting):
            results.append(result)
            print(said(result), flush=True)
            out.write(json.dumps(result) + "\n")
            out.flush()
    print(f"{arguments.out}: {_counted(results)}; logs in {folder}")
    if arguments.device == "cuda" and any("machine" in result for result in results):
        name, text = page(results, f"python -m tests.gpu {' '.join(sys.argv[1:])}".strip())
        (_PAGES / name).write_text(text, encoding="utf-8")
        print(f"{_PAGES / name}: the same as a page; name it in index.md beside it")
    return int(any(result["status"] in ("fail", "error", "timeout") for result in results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Check dflop on one GPU.")
    parser.add_argument("--fast", action="store_true", help="the first checks only, in fewer sizes: about 6 minutes")
    parser.add_argument(
        "--only", action="append", default=[], choices=[check.name for check in CHECKS], help="may be repeated"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that try the kit and measure nothing")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "results/benchmarks/gpu.jsonl", help="a line a check")
    parser.add_argument("--folder", type=Path, help="for logs and what checks share; by default a temporary one")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _list(checks: Sequence[Check], *, is_fast: bool) -> None:
    print(f"torch {torch.__version__} finds no GPU here. On one it would run:")
    for check in checks:
        print(f"  {check.name:14}{check.seconds_of(is_fast=is_fast):5.0f} s  {check.shows}")
        for figure, limit in check.limits.items():
            print(f"{'':24}{figure}: {limit}")
    print(f"{len(checks)} checks, about {expected_s(checks, is_fast=is_fast) / 60:.0f} minutes on an H100 or H200")


def _counted(results: Sequence[dict]) -> str:
    counts = {status: sum(result["status"] == status for result in results) for status in ("pass", "fail", "skipped")}
    counts["error"] = len(results) - sum(counts.values())
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)


if __name__ == "__main__":
    sys.exit(main())
