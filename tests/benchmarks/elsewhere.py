"""What `dflop plan` takes for a million records and 64 devices that are not at hand, and what it says that it saves.

    python tests/benchmarks/elsewhere.py [--records 1000000] [--without-sizes] [--keep FOLDER]

The records are drawn: a quarter are text, the others hold a picture, several, or a clip. Pictures and clips are a few
hundred files of the demo, named over and over. The records hold the sizes of their pictures, as `plan` takes them;
`--without-sizes` has every header read instead. Clips' headers are always read. The command is that of
docs/how-to/plan-elsewhere.md, in an empty folder. Its time by the clock, the seconds of all its processes on a core,
and its largest memory are printed with its last lines, and `results/benchmarks/elsewhere.json` is written.
"""

import argparse
import json
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import psutil
import yaml
from PIL import Image
from shapes import children_of

from dflop.demo import make_demo_data

REPOSITORY = Path(__file__).parents[2]
TARGET_S, TARGET_CORES = 180.0, 2
NUM_DRAWN = 1_200  # of the demo's records, whose media are used
# Shares by number of records, and the most pictures of one that has several.
SHARES = {"text": 0.25, "image": 0.45, "multi_image": 0.15, "video": 0.15}
MOST_PICTURES = 6
# Words of a turn, as a power of e: 20 in the median, 200 in one turn of a hundred.
WORDS_MU, WORDS_SIGMA, MOST_TURNS = 3.0, 1.0, 4
PLAN = (
    'model={family: llava_onevision, preset: llava_ov_7b}',
    "cluster.num_nodes=8",
    "cluster.device_model=h100-80g",
    "cluster.gpu_hour_cost=2.5",
    "train.global_batch_size=512",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--without-sizes", action="store_true", help="read the header of every picture, too")
    parser.add_argument("--keep", type=Path, help="work in this folder and leave it there")
    arguments = parser.parse_args()
    with nullcontext(arguments.keep) if arguments.keep else tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        manifest = work / "million.json"
        if not manifest.is_file():
            write_manifest(manifest, arguments.records, has_sizes=not arguments.without_sizes)
        figures = {
            "command": " ".join(["python", *sys.argv]),
            "machine": f"{platform.machine()}, {psutil.cpu_count()} cores",
            "num_records": arguments.records,
            "manifest_bytes": manifest.stat().st_size,
            **run_plan(manifest),
        }
        figures["saves"] = what_it_saves(work / "results/million/plan.yaml")
    print_figures(figures)
    out = Path("results/benchmarks/elsewhere.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def write_manifest(path: Path, num_records: int, *, has_sizes: bool) -> None:
    drawn = make_demo_data(path.parent, num_records=NUM_DRAWN)
    records = json.loads(drawn.train_manifest.read_text(encoding="utf-8"))
    media = [name for record in records for key in ("image", "video") for name in as_list(record.get(key))]
    pictures = [(name, Image.open(path.parent / name).size) for name in media if not name.endswith(".mp4")]
    clips = [name for name in media if name.endswith(".mp4")]
    words = " ".join(turn["value"] for record in records for turn in record["conversations"]).split()
    words = [word for word in words if not word.startswith("<")]
    chance = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_records):
            (kind,) = chance.choices(list(SHARES), SHARES.values())
            record = {"id": str(number), **with_media(kind, pictures, clips, chance, has_sizes=has_sizes)}
            marks = "<image>\n" * len(as_list(record.get("image"))) + "<video>\n" * ("video" in record)
            record["conversations"] = conversation(marks, words, chance)
            file.write((",\n" if number else "[") + json.dumps(record))
        file.write("]\n")


def as_list(value) -> list:
    return value if isinstance(value, list) else [] if value is None else [value]


def with_media(kind: str, pictures: list, clips: list[str], chance: random.Random, *, has_sizes: bool) -> dict:
    if kind == "text":
        return {}
    if kind == "video":
        return {"video": chance.choice(clips)}
    chosen = chance.choices(pictures, k=1 if kind == "image" else chance.randint(2, MOST_PICTURES))
    names, sizes = zip(*chosen, strict=True)
    record = {"image": list(names)}
    widths, heights = zip(*sizes, strict=True)
    return record | ({"width": list(widths), "height": list(heights)} if has_sizes else {})


def conversation(marks: str, words: list[str], chance: random.Random) -> list[dict[str, str]]:
    turns = []
    for number in range(2 * chance.randint(1, MOST_TURNS)):
        at = chance.randrange(len(words) // 2)
        text = " ".join(words[at : at + 1 + int(chance.lognormvariate(WORDS_MU, WORDS_SIGMA))])
        turns.append({"from": ("human", "gpt")[number % 2], "value": (marks if number == 0 else "") + text})
    return turns


def run_plan(manifest: Path) -> dict[str, object]:
    command = [str(Path(sys.executable).parent / "dflop"), "plan", "million", "--manifest", manifest.name]
    for override in PLAN:
        command += ["--config", override]
    begin, peak_bytes = time.perf_counter(), 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (manifest.parent / "plan.log").open("w") as log:
        process = psutil.Popen(command, cwd=manifest.parent, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak_bytes = max(peak_bytes, sum(map(resident_bytes, [process, *children_of(process)])))
            time.sleep(0.2)
    seconds = time.perf_counter() - begin
    text = (manifest.parent / "plan.log").read_text()
    if process.returncode:
        sys.exit(text)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    core_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "core_s": core_s, "peak_bytes_of_all_processes": peak_bytes, "said": text}


def resident_bytes(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:  # it has just ended
        return 0


def what_it_saves(plan: Path) -> list[dict[str, object]]:
    said = yaml.safe_load(plan.read_text(encoding="utf-8"))
    return [{"name": own["name"], "would_take": own.get("would_take")} for own in said["baselines"]]


def print_figures(figures: dict) -> None:
    print(f"{figures['machine']}; {figures['command']}")
    print(figures["said"][figures["said"].find("\n    step ") :].strip("\n"))
    print(f"\n{figures['num_records']:,} records, {figures['manifest_bytes'] / 1e6:,.0f} MB of JSON")
    met = figures["seconds"] <= TARGET_S
    print(f"{figures['seconds']:.0f} s by the clock{verdict(met, f'{TARGET_S:.0f} s')}")
    most_s = TARGET_S * TARGET_CORES
    print(f"{figures['core_s']:.0f} s of a core{verdict(figures['core_s'] <= most_s, f'{most_s:.0f} s')}")
    print(f"at most {figures['peak_bytes_of_all_processes'] / 2**30:.2f} GiB in all processes together")


def verdict(is_good: bool, target: str) -> str:
    return f"  [{'met' if is_good else 'MISSED'}: {target}]"


if __name__ == "__main__":
    main()
