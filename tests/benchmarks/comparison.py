"""Published systems beside ours, on the paper's mix and 64 H100s, by the same simulator.

Its table is in docs/explanation/measurements/.

    python tests/benchmarks/comparison.py --shapes FOLDER [--devices 64] [--batch 512] [--only llava_ov_7b] [OPTION ...]

Two models: a SigLIP with a 7B LLM, whose encoder is light, and an InternViT-6B with a 32B LLM, which weigh about as
much. FOLDER, the mix and the costs are `planner.py`'s. `results/benchmarks/comparison-<model>.*` hold what
`dflop compare` writes. Further options are that command's: `--ablate` takes ours apart, and `--scale 8,64,512` does it
at several sizes.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import planner

MODELS = {"llava_ov_7b": "llava_onevision", "internvl_38b": "internvl"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, required=True, help="a folder of tables of real shapes")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--only", choices=MODELS, help="one of the two models")
    arguments, options = parser.parse_known_args()
    planner.FAMILIES |= MODELS
    results = planner.REPOSITORY / "results/benchmarks"
    results.mkdir(parents=True, exist_ok=True)
    print(f"python {' '.join(sys.argv)}: {arguments.devices} H100s, batches of {arguments.batch}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for preset in [arguments.only] if arguments.only else MODELS:
            planner.write_artifacts(arguments.shapes, Path(folder), preset)
            config = planner.write_config(Path(folder), preset, arguments.devices, arguments.batch)
            started = time.perf_counter()
            said = planner.dflop("compare", "--config", config, "--shapes", Path(folder) / f"{preset}.shapes.duckdb",
                                 "--costs", Path(folder) / f"{preset}.costs.duckdb",
                                 *options, "--out", results / f"comparison-{preset}.parquet")  # fmt: skip
            print(f"\n{preset}, {time.perf_counter() - started:.0f} s\n{said}", flush=True)


if __name__ == "__main__":
    main()
