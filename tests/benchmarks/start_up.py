"""Seconds and host bytes until a rank has its stage of a 7B from a checkpoint.

    python tests/benchmarks/start_up.py [--preset llava_ov_7b] [--layers 28] [--folder FOLDER]

The checkpoint is made up: zeros in bf16 under the model's names, in a file with holes, so that no disk is measured. The
LLM is divided into two stages, which two processes read, one after the other, each into host memory; on a GPU they are
read to the device. *Beside* is the most memory that was the process's own, less that of before and of the stage.
Drawing is what each rank did before it read: as many normal numbers in fp32, on one thread.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from math import prod
from pathlib import Path

import torch

from dflop.base.process_memory import process_bytes
from dflop.models import family_of, load_runtime

FAMILY = "llava_onevision"
TOKENS = {"image": 1001, "video": 1002}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llava_ov_7b")
    parser.add_argument("--layers", type=int, default=28, help="of the LLM, e.g. half of them where memory is short")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is made")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        read(arguments)
        return
    print(f"python {' '.join(sys.argv)}\n", flush=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        write_checkpoint(Path(folder), *config_of(arguments))
        for rank in (0, 1):
            how = ["--preset", arguments.preset, "--layers", str(arguments.layers), "--rank", str(rank)]
            subprocess.run([sys.executable, __file__, *how, "--folder", folder], check=True)


def config_of(arguments: argparse.Namespace):
    runtime, family = load_runtime(FAMILY), family_of(FAMILY)
    spec = family.make_spec(arguments.preset, family.presets[arguments.preset], {})
    spec = runtime.with_depth(spec, "llm", arguments.layers)
    return runtime, runtime.make_config(spec, TOKENS, 0)


def write_checkpoint(folder: Path, runtime, config) -> None:
    with torch.device("meta"):
        tensors = runtime.architecture(config).state_dict()
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + 2 * prod(tensor.shape)
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    print(f"checkpoint of {end / 1e9:.1f} GB", flush=True)


def read(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    runtime, config = config_of(arguments)
    half = arguments.layers // 2
    layers = range(half) if arguments.rank == 0 else range(half, arguments.layers)
    own, before = [process_bytes("RssAnon")], process_bytes("RssAnon")
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            own.append(process_bytes("RssAnon"))

    threading.Thread(target=watch, daemon=True).start()
    started, used = time.monotonic(), time.process_time()
    stage = runtime.build_stage(
        config, "llm", layers=layers, seed=0, checkpoint=arguments.folder, dtype=torch.bfloat16, device="cpu"
    )
    seconds, used = time.monotonic() - started, time.process_time() - used
    done.set()
    num_bytes = sum(own_of.nbytes for own_of in stage.parameters())
    beside = max(own) - before - num_bytes
    values = torch.empty(50_000_000)
    started = time.process_time()
    values.normal_()
    drawing_s = (time.process_time() - started) * sum(own_of.numel() for own_of in stage.parameters()) / len(values)
    print(
        f"rank {arguments.rank}: stage of {num_bytes / 1e9:.2f} GB in {seconds:.1f} s ({used:.1f} s of a core), "
        f"{beside / 1e9:.2f} GB beside it; drawing it in fp32 would take {drawing_s:.1f} s of a core",
        flush=True,
    )


if __name__ == "__main__":
    main()
