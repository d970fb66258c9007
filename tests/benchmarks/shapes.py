"""How fast sample shapes are found: headers against decoding, and a manifest of a million records.

    python tests/benchmarks/shapes.py [--pictures FOLDER] [--captions coco_captions.json] [--records 1000000]

Both sides of a ratio are measured in one run on the same files. Without `--pictures` and `--captions` (COCO's
captions file) the demo data's own are used. A table is printed and `results/benchmarks/shapes.json` written.
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

import psutil
from PIL import Image, ImageOps

from dflop.config import ModelConfig, load_config
from dflop.demo import make_demo_data
from dflop.models import load_model_spec
from dflop.models.llava_onevision.processing import LlavaOnevisionPixels
from dflop.shapes import ShapeReader, load_samples
from dflop.shapes.record_media import Medium
from dflop.shapes.records import Record

REPOSITORY = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, help="a folder of .jpg and .png files")
    parser.add_argument("--captions", type=Path, help="COCO's captions file: sizes and captions of pictures")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--most-pictures", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if arguments.pictures is None or arguments.captions is None:
            make_demo_data(work / "demo")
        figures = {
            "command": " ".join(["python", *sys.argv]),
            "machine": f"{platform.machine()}, {psutil.cpu_count()} cores",
            "headers": time_headers(arguments.pictures or work / "demo", arguments.most_pictures),
            "manifest": time_manifest(work, arguments.captions, arguments.records),
        }
    print_table(figures)
    out = Path("results/benchmarks/shapes.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(figures, indent=2) + "\n")


def time_headers(pictures: Path, most: int) -> dict[str, float]:
    """Seconds a picture: by its header, decoded, and decoded and cut into the encoder's crops as training does it."""
    paths = sorted(path for path in pictures.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    paths = paths[:: max(1, len(paths) // most)][:most]
    spec = load_model_spec(ModelConfig(preset="llava_ov_7b"))
    reader = ShapeReader(spec.rules, load_config().data)
    pixels = LlavaOnevisionPixels(spec)
    records = [Record(None, (Medium("image", str(path.relative_to(pictures))),), ()) for path in paths]

    def decode(path: Path) -> Image.Image:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")

    by_header = [reader.read_media(record, pictures)[0].count.num_items for record in records]
    by_pixels = [len(pixels.images([decode(path)])[0]) for path in paths]
    if by_header != by_pixels:
        sys.exit("the two ways disagree on the number of crops")
    return {
        "num_pictures": len(paths),
        "header_s": best_of(5, lambda: [reader.read_media(record, pictures) for record in records]) / len(paths),
        "decode_s": best_of(2, lambda: [decode(path) for path in paths]) / len(paths),
        "decode_and_process_s": best_of(2, lambda: [pixels.images([decode(path)]) for path in paths]) / len(paths),
    }


def time_manifest(work: Path, captions: Path | None, num_records: int) -> dict[str, float]:
    """The workflow, from a manifest that nobody has seen to its `shapes.duckdb`, and then asked again."""
    manifest = work / "manifest.json"
    write_manifest(manifest, captions, num_records, work / "demo")
    for name in ("workflow", "config"):
        shutil.copytree(REPOSITORY / name, work / name)
    config = {"run": "big", "data": {"sources": [{"path": str(manifest), "trust_sizes": True}]}}
    (work / "big.yaml").write_text(json.dumps(config))
    target = "results/big/shapes.duckdb"
    command = ["snakemake", target, "--cores", "2", "--configfile", "big.yaml"]
    seconds, peak_bytes = run_watched(command, work)
    again_s, _ = run_watched([*command, "--dry-run"], work)
    samples, _ = load_samples(work / target, load_model_spec(ModelConfig(preset="llava_ov_7b")).encoders)
    if len(samples) != num_records:
        sys.exit(f"{len(samples)} samples of {num_records} records")
    return {
        "num_records": num_records,
        "manifest_bytes": manifest.stat().st_size,
        "seconds": seconds,
        "peak_rss_of_any_process_bytes": peak_bytes,
        "dry_run_s": again_s,
    }


def write_manifest(path: Path, captions: Path | None, num_records: int, demo: Path) -> None:
    sources = coco_records(captions) if captions else demo_records(demo)
    with path.open("w") as file:
        for number, record in enumerate(islice(cycle(sources), num_records)):
            file.write((",\n" if number else "[") + json.dumps({**record, "id": str(number)}))
        file.write("]\n")


def coco_records(captions: Path) -> Iterator[dict]:
    content = json.loads(captions.read_text())
    images = {image["id"]: image for image in content["images"]}
    for annotation in content["annotations"]:
        image = images[annotation["image_id"]]
        turns = [
            {"from": "human", "value": "<image>\nDescribe the picture."},
            {"from": "gpt", "value": annotation["caption"]},
        ]
        sizes = {"width": image["width"], "height": image["height"]}
        yield {"image": image["file_name"], **sizes, "conversations": turns}


def demo_records(demo: Path) -> Iterator[dict]:
    for record in json.loads((demo / "train.json").read_text()):
        if isinstance(record.get("image"), str):
            with Image.open(demo / record["image"]) as image:
                width, height = image.size
            yield {**record, "width": width, "height": height}


def run_watched(command: list[str], folder: Path) -> tuple[float, int]:
    """Seconds that a command takes, and the most resident memory that any process of it had."""
    begin, peak = time.perf_counter(), 0
    with (folder / "run.log").open("w") as log:
        process = psutil.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            for member in [process, *children_of(process)]:
                try:
                    peak = max(peak, member.memory_info().rss)
                except psutil.Error:  # it has just ended
                    continue
            try:
                process.wait(timeout=0.1)
            except psutil.TimeoutExpired:
                continue
    seconds = time.perf_counter() - begin
    if process.returncode:
        sys.exit((folder / "run.log").read_text())
    return seconds, peak


def children_of(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def best_of(repeats: int, work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def print_table(figures: dict) -> None:
    headers, manifest = figures["headers"], figures["manifest"]
    print(f"{figures['machine']}; {figures['command']}")
    print(f"{headers['num_pictures']} pictures        µs a picture   times the header's")
    for name in ("header", "decode", "decode_and_process"):
        seconds = headers[f"{name}_s"]
        print(f"{name.replace('_', ' '):20s}{1e6 * seconds:12,.0f}{seconds / headers['header_s']:19,.1f}")
    rate = manifest["num_records"] / manifest["seconds"]
    peak_mib = manifest["peak_rss_of_any_process_bytes"] / 2**20
    print(f"{manifest['num_records']:,} records, {manifest['manifest_bytes'] / 1e6:,.0f} MB of JSON")
    print(f"{manifest['seconds']:.0f} s, {rate:,.0f} records/s; asked again {manifest['dry_run_s']:.1f} s")
    print(f"at most {peak_mib:,.0f} MiB of resident memory in any process")


if __name__ == "__main__":
    main()
