"""What planning takes, and what it brings: searches timed, and plans beside what others would run.

    python tests/benchmarks/planner.py --shapes FOLDER [--only speed|plans]

FOLDER holds tables (CSV) of real shapes: `coco_val2017.csv` and `math_v.csv` (`width`, `height`) and
`nextqa_video.csv` (`seconds`), each with `text_tokens_qwen25`. Drawn from them is the mix of the paper, by number of
samples: 13 % with one picture, 43 % with several, 44 % videos of at most 30 s. No table has samples with several
pictures: 2 to 8 COCO pictures each are assumed. Costs are analytic, of H100s in nodes of 8, 3600 Gbps inside a node and
400 between nodes. A table is printed and `results/benchmarks/planner.json` written.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import polars as pl
import yaml

from dflop.base import UserError
from dflop.base.devices import load_device
from dflop.base.process_memory import process_bytes
from dflop.comparison import price_baselines
from dflop.config import AudioConfig, load_config
from dflop.costs import CostModel
from dflop.models import SOUND_RATE_HZ, ItemCount, check_tp, load_model_spec
from dflop.search import Candidate, search_plans
from dflop.shapes import load_samples
from dflop.shapes.samples import MEDIA_COLUMNS
from dflop.store import SHARD_SCHEMA, ShardFile, write_shapes

REPOSITORY = Path(__file__).parents[2]
# Devices, samples of a global batch and tries (others share the machine); the last is of a model with two encoders.
ONE_ENCODER, TWO_ENCODERS = "llava_ov_7b", "qwen2_5_omni_7b"
SPEED = (
    (ONE_ENCODER, 64, 512, 5),
    (ONE_ENCODER, 1024, 4096, 2),
    (ONE_ENCODER, 8192, 32768, 1),
    (TWO_ENCODERS, 64, 512, 3),
)
# A SigLIP and a 7B LLM, and an InternViT-6B and a 72B LLM.
MODELS = {"llava_ov_7b": "llava_onevision", "internvl_78b": "internvl"}
FAMILIES = MODELS | {TWO_ENCODERS: "qwen2_5_omni_thinker"}
TP_SIZES = (1, 2, 4, 8)
SIZES = ((8, 64), (32, 256), (64, 512), (512, 4096))
DEVICE = "h100-80g"
NUM_SAMPLES = 65_536
SHARES = {"image": 0.13, "multi_image": 0.43, "video": 0.44}
FEWEST_PICTURES, MOST_PICTURES, LONGEST_S = 2, 8, 30.0
# Of samples for a model that hears, this share is a clip's text with a sound of its length in place of its pictures.
SOUND_SHARE = 0.25
# Some mixes have clips of so many tokens, without a spread.
CLIP_TOKENS = 65_000
# A sample of text alone, in mixes that have some, is as long as this many of the tables' texts.
TEXTS = 8
# A prompt's template and a question, where the tables only have an answer; of all text half is learned.
ADDED_TEXT, TARGET_SHARE = 64, 0.5
NAMES = {
    "rule": "published rule at mean shapes, balanced batches",
    "megatron": "monolithic, random batches (Megatron-style)",
    "fsdp": "every device the whole model, random batches (FSDP-style)",
    "by_length": "every device the whole model, length-grouped batches (FSDP-style)",
    "balanced": "every device the whole model, balanced batches (FSDP-style)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    parser.add_argument("--only", choices=("speed", "plans"), help="one half of it")
    arguments = parser.parse_args()
    command = " ".join(["python", *sys.argv])
    figures: dict[str, object] = {"command": command, "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    print(f"{figures['machine']}; {command}")
    print(
        f"{', '.join(f'{share:.0%} {kind}' for kind, share in SHARES.items())}; that samples of several pictures have "
        f"{FEWEST_PICTURES} to {MOST_PICTURES} of COCO's is assumed; analytic costs of H100s of "
        f"{load_device(DEVICE).memory_gib:.1f} GiB, nodes of 8\n",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        for preset in {"speed": [ONE_ENCODER, TWO_ENCODERS], "plans": MODELS}.get(arguments.only, FAMILIES):
            write_artifacts(arguments.shapes, Path(folder), preset)
        if arguments.only != "plans":
            figures["speed"] = measure_speed(Path(folder))
            figures["command_s"] = seconds_of_command(Path(folder))
            print_speed(figures)
        if arguments.only != "speed":
            print_heading()
            figures["plans"] = []
            for preset in MODELS:
                for num_devices, batch_size in SIZES:
                    figures["plans"].append(alone(compare, Path(folder), preset, num_devices, batch_size))
                    print_row(figures["plans"][-1])
    out = REPOSITORY / "results/benchmarks/planner.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def alone(function, *arguments):
    """Called in a process of its own, so that its peak memory is its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def write_artifacts(tables: Path, folder: Path, preset: str) -> None:
    """`<preset>.costs.duckdb` and `<preset>.shapes.duckdb`, as the workflow makes them."""
    write_costs(folder, preset)
    write_mix(tables, folder, preset)


def write_costs(folder: Path, preset: str) -> None:
    config = write_config(folder, preset, 8, 64)
    spec = load_model_spec(load_config(config).model)
    files = []
    for module in (module.name for module in spec.modules):
        for tp in TP_SIZES:
            try:
                check_tp(spec, module, tp)
            except UserError:
                continue  # heads that this many ranks cannot share
            files.append(folder / f"{preset}.{module}.tp{tp}.parquet")
            dflop("profile-costs", "--config", config, "--module", module, "--tp", tp, "--out", files[-1])
    dflop("fit-costs", *files, "--out", folder / f"{preset}.costs.duckdb")


def folder_with_costs(preset: str, folder: Path) -> Path:
    """The preset's folder in this one, with its costs, which are made where they are missing."""
    own = folder / preset
    own.mkdir(parents=True, exist_ok=True)
    if not (own / f"{preset}.costs.duckdb").exists():
        write_costs(own, preset)
    return own


def write_mix(tables: Path, folder: Path, preset: str) -> None:
    spec = load_model_spec(load_config(write_config(folder, preset, 8, 64)).model)
    shard = folder / f"{preset}.mix.parquet"
    draw_mix(tables, spec.rules, hears=len(spec.encoders) > 1).write_parquet(shard)
    source = {"name": ["mix"], "path": [""], "media_root": [""], "sampling": ["all"], "digest": [""]}
    write_shapes(
        folder / f"{preset}.shapes.duckdb",
        [ShardFile(shard, "mix", "mix", 0, 0)],
        pl.DataFrame(source | {"num_records": [NUM_SAMPLES]}),
        {},
        sampled_rows={},
        keep_duplicates=False,
    )


def write_config(folder: Path, preset: str, num_devices: int, batch_size: int) -> Path:
    path = folder / f"{preset}.{num_devices}.yaml"
    cluster = {"num_nodes": num_devices // 8, "devices_per_node": 8, "intra_node_gbps": 3600, "inter_node_gbps": 400}
    values = {
        "model": {"family": FAMILIES[preset], "preset": preset},
        "cluster": cluster | {"device": "cuda", "device_model": DEVICE, "memory_gib": None},
        "costs": {"source": "analytic"},
        "train": {"precision": "bf16", "global_batch_size": batch_size},
    }
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def dflop(*arguments: object) -> str:
    """Run a command; returns what it prints."""
    command = [sys.executable, "-m", "dflop.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def draw_mix(tables: Path, rules, *, hears: bool) -> pl.DataFrame:
    """Samples as a shard of profiling holds them, shaped by the rules of the model's family; some heard, if it can."""
    names = ("coco_val2017", "math_v", "nextqa_video")
    columns = ("width", "height", "seconds", "text_tokens_qwen25")
    coco, math_v, videos = (pl.read_csv(tables / f"{name}.csv", infer_schema_length=None)[columns] for name in names)
    pictures = pl.concat([coco, math_v], how="vertical_relaxed").rows()
    coco, videos = coco.rows(), videos.filter(pl.col("seconds") <= LONGEST_S).rows()
    rng = np.random.default_rng(0)
    shares = {kind: share * (1 - SOUND_SHARE) for kind, share in SHARES.items()} if hears else SHARES
    shares = shares | {"audio": SOUND_SHARE} if hears else shares
    rows = []
    for number, kind in enumerate(rng.choice(list(shares), NUM_SAMPLES, p=list(shares.values()))):
        among, count = (pictures, 1) if kind == "image" else (videos, 1)
        if kind == "multi_image":
            among, count = coco, int(rng.integers(FEWEST_PICTURES, MOST_PICTURES + 1))
        drawn = [among[index] for index in rng.integers(len(among), size=TEXTS if kind == "text" else count)]
        # Width, height, frames and samples of each medium.
        if kind == "text":
            sizes = []
        elif kind == "audio":
            sizes = [(0, 0, 0, round(SOUND_RATE_HZ * seconds)) for _, _, seconds, _ in drawn]
        elif kind == "clip":
            sizes = [(640, 480, frames_within(rules, CLIP_TOKENS), 0)]
        elif kind == "video":
            # One frame a second, the first at 0 s.
            sizes = [(640, 480, math.floor(seconds) + 1, 0) for _, _, seconds, _ in drawn]
        else:
            sizes = [(width, height, 0, 0) for width, height, _, _ in drawn]
        media = [_medium(rules, *size, count) for size in sizes]
        text_tokens = ADDED_TEXT + sum(text for _, _, _, text in drawn)
        num_items, num_tokens = sum(own.num_items for own in media), sum(own.num_tokens for own in media)
        seen, heard = ((num_items, num_tokens), (0, 0)) if kind != "audio" else ((0, 0), (num_items, num_tokens))
        rows.append(
            {
                "row": number,
                "sample_id": str(number),
                "modality": str(kind),
                "num_images": count if kind in ("image", "multi_image") else 0,
                "num_frames": num_items if kind in ("video", "clip") else 0,
                "audio_s": sum(seconds for _, _, seconds, _ in drawn) if kind == "audio" else 0.0,
                "num_items": seen[0],
                "sum_sq_items": 0.0 if kind == "audio" else sum(own.sum_sq_items for own in media),
                "vision_tokens": seen[1],
                "kept_vision_tokens": seen[1],
                "num_audio_windows": heard[0],
                "audio_tokens": heard[1],
                "kept_audio_tokens": heard[1],
                "text_tokens": text_tokens,
                "target_tokens": round(TARGET_SHARE * text_tokens),
                "llm_tokens": num_tokens + text_tokens,
                "truncated": False,
                **dict(zip(MEDIA_COLUMNS, _columns_of(sizes), strict=True)),
            }
        )
    return pl.DataFrame(rows, schema=SHARD_SCHEMA)


def _medium(rules, width: int, height: int, num_frames: int, num_samples: int, num_images: int) -> ItemCount:
    if num_samples:
        return rules.audio(num_samples / SOUND_RATE_HZ, AudioConfig())
    return rules.video(num_frames, width, height) if num_frames else rules.image(width, height, num_images)


def _columns_of(sizes: list[tuple[int, int, int, int]]) -> list[list[int]]:
    """The media's columns: a list of one number a medium for each."""
    rows = []
    for width, height, frames, sound in sizes:
        a_second = 10**6 if frames else 0
        rows.append((width, height, frames, a_second, sound, a_second))
    return [[row[column] for row in rows] for column in range(len(MEDIA_COLUMNS))]


@cache
def frames_within(rules, most_tokens: int) -> int:
    """The most frames of a clip whose tokens are no more than this."""
    return bisect_right(range(most_tokens), most_tokens, lo=1, key=lambda n: rules.video(n, 640, 480).num_tokens) - 1


def measure_speed(folder: Path) -> list[dict[str, object]]:
    """Each search in a process of its own."""
    return [alone(timed_search, folder, *size) for size in SPEED]


def timed_search(folder: Path, preset: str, num_devices: int, batch_size: int, num_tries: int) -> dict[str, object]:
    """The shortest of some tries, after a search for few devices, which loads and compiles all code."""
    search_plans(*read_inputs(folder, preset, 8, 64))
    inputs = read_inputs(folder, preset, num_devices, batch_size)
    tries = []
    for _ in range(num_tries):
        started, computed = time.perf_counter(), time.process_time()
        found = search_plans(*inputs)
        tries.append((time.perf_counter() - started, time.process_time() - computed))
    search_s, cpu_s = min(tries)
    return {
        "model": preset,
        "devices": num_devices,
        "batch_size": batch_size,
        "num_plans": found.num_plans,
        "num_priced": found.num_priced,
        "num_tries": num_tries,
        "search_s": search_s,
        "cpu_s": cpu_s,
        "peak_bytes": process_bytes("VmHWM"),
    }


def read_inputs(folder: Path, preset: str, num_devices: int, batch_size: int):
    config = load_config(write_config(folder, preset, num_devices, batch_size))
    spec = load_model_spec(config.model)
    samples, _ = load_samples(folder / f"{preset}.shapes.duckdb", spec.encoders)
    return config, spec, CostModel.load(folder / f"{preset}.costs.duckdb"), samples


def seconds_of_command(folder: Path) -> float:
    """`dflop plan` as a user waits for it, for the smallest of `SPEED`."""
    preset, num_devices, batch_size, *_ = SPEED[0]
    config = write_config(folder, preset, num_devices, batch_size)
    started = time.perf_counter()
    dflop("plan", "--config", config, "--shapes", folder / f"{preset}.shapes.duckdb",
          "--costs", folder / f"{preset}.costs.duckdb", "--out", folder / "plan.yaml",
          "--candidates", folder / "candidates.parquet")  # fmt: skip
    return time.perf_counter() - started


def compare(folder: Path, preset: str, num_devices: int, batch_size: int) -> dict[str, object]:
    """The fastest plan and the baselines, on the same batches; None: nothing fits.

    `roomy` is the fastest plan if devices had as much memory as any plan needs.
    """
    inputs = read_inputs(folder, preset, num_devices, batch_size)
    config, *others = inputs
    roomy = replace(config, cluster=replace(config.cluster, memory_gib=1e6))
    row: dict[str, object] = {"model": preset, "devices": num_devices, "batch_size": batch_size}
    row["roomy"] = said(search_plans(roomy, *others).candidates[0])
    try:
        row["ours"] = said(search_plans(*inputs).best)
    except UserError as error:
        row |= {"ours": None, "why": str(error)}
    by_name = {baseline.name: baseline for baseline in price_baselines(*inputs)}
    return row | {key: said(by_name[name].priced) if by_name[name].priced else None for key, name in NAMES.items()}


def said(priced: Candidate) -> dict[str, object]:
    most_bytes = max(priced.memory_bytes.values())
    return {"plan": str(priced.plan), "step_s": priced.step_s, "idle": priced.idle, "memory_bytes": most_bytes}


def print_speed(figures: dict) -> None:
    for row in figures["speed"]:
        print(
            f"{row['model']:<15} {row['devices']:>5} devices, batches of {row['batch_size']:>5}: "
            f"{row['num_plans']:>9,} plans in "
            f"{row['search_s']:5.1f} s ({row['cpu_s']:.1f} s of a core), {row['num_priced']:>3} priced to the end, "
            f"peak {row['peak_bytes'] / 2**30:.2f} GiB"
        )
    print(f"`dflop plan` for {SPEED[0][1]}: {figures['command_s']:.1f} s\n", flush=True)


def print_heading() -> None:
    print("step time over that of our fastest plan, and idle\n")
    print(
        f"{'model':<13} {'devices':>7} {'batch':>5} {'ours':>17} {'published rule':>16} "
        f"{'Megatron-style':>16} {'FSDP, random':>13} {'by length':>13} {'balanced':>13} {'endless memory':>20}",
        flush=True,
    )


def print_row(row: dict) -> None:
    cells = [f"{row['model']:<13} {row['devices']:>7} {row['batch_size']:>5}"]
    ours = row["ours"]
    cells.append(f"{ours['step_s']:8.3f} s {ours['idle']:6.1%}" if ours else f"{'nothing fits':>17}")
    for key, width in {
        "rule": 16,
        "megatron": 16,
        "fsdp": 13,
        "by_length": 13,
        "balanced": 13,
        "roomy": 20,
    }.items():
        other = row[key]
        if other is None:
            cells.append(f"{'nothing fits':>{width}}")
        else:
            ratio = f"{other['step_s'] / ours['step_s']:.2f}x" if ours else f"{other['step_s']:.3f} s"
            said_of_it = f"{ratio} {other['idle']:6.1%}"
            cells.append(f"{said_of_it:>{width}}")
    print(" ".join(cells), flush=True)
    if ours:
        print(f"{'':27} {ours['plan']}", flush=True)
    else:
        print(f"{'':27} {row['why']}", flush=True)


if __name__ == "__main__":
    main()
