"""The figure and the table of `explanation/share-or-split.md`: what each placement takes, by how heavy the encoder is.

    python docs/share_or_split.py

Predicted for 32 H100s from analytic costs and the demo's data, the fastest plan of each placement on the same batches.
Takes about five minutes of one core, writes `docs/figures/share-or-split.svg` and prints the table.
"""

import contextlib
import json
import tempfile
from pathlib import Path

import polars as pl
import yaml
from made_from_code import dflop, shapes_and_costs

from dflop.report.picture import Panel, Picture, as_given, layer, names, number, rows, write_picture
from dflop.report.style import module_colour

PLACEMENTS = ("disjoint", "colocated", "bubble_filled", "monolithic")
# Tensor-parallel sizes that both modules can have.
MODELS = {
    "llava_ov_7b": ("llava_onevision", (1, 2, 4)),
    "internvl_38b": ("internvl", (1,)),
}


def main() -> None:
    figure = Path(__file__).parent / "figures/share-or-split.svg"
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        dflop("demo-data", "--out", "data", "--records", 320)
        found = {preset: steps_of(preset, family, tps) for preset, (family, tps) in MODELS.items()}
    print("| model | " + " | ".join(f"`{name}`" for name in PLACEMENTS) + " |")
    print("|---" * (1 + len(PLACEMENTS)) + "|")
    for preset, steps in found.items():
        cells = [
            f"{steps[name][0]:.2f} s, {steps[name][1]}" if name in steps else "nothing fits" for name in PLACEMENTS
        ]
        print(f"| `{preset}` | " + " | ".join(cells) + " |")
    draw(figure, found)


def steps_of(preset: str, family: str, tps: tuple[int, ...]) -> dict[str, tuple[float, str]]:
    """Step time and plan of the fastest plan of each placement that fits."""
    config = {
        "run": preset,
        "data": {"sources": [{"path": "data/train.json"}]},
        "model": {"family": family, "preset": preset},
        "cluster": {"device": "cuda", "device_model": "h100-80g", "num_nodes": 4, "devices_per_node": 8},
        "costs": {"source": "analytic", "tp_sizes": list(tps)},
        "plan": {"search_batches": 2},
        "train": {"precision": "bf16", "global_batch_size": 128},
    }
    shapes_and_costs(config)
    steps = {}
    for placement in PLACEMENTS:
        text = json.dumps(config | {"plan": config["plan"] | {"placements": [placement]}})
        inputs = ("--config", text, "--shapes", "shapes.duckdb", "--costs", "costs.duckdb")
        try:
            dflop("plan", *inputs, "--out", "plan.yaml", "--candidates", "candidates.parquet")
        except ValueError as error:
            print(preset, placement, error, flush=True)
            continue
        plan = yaml.safe_load(Path("plan.yaml").read_text(encoding="utf-8"))
        grids = ", ".join(
            f"{name} {grid['num_ranks']} ranks tp{grid['tp']} pp{grid['pp']} {grid['sharding']}"
            for name, grid in plan["plan"]["grids"].items()
        )
        print(preset, placement, plan["predicted"]["step_s"], grids, plan["why"], flush=True)
        steps[placement] = (plan["predicted"]["step_s"], grids)
    print(preset, pl.read_parquet("candidates.parquet").head(1)["bottleneck"][0], flush=True)
    return steps


def draw(path: Path, found: dict[str, dict[str, tuple[float, str]]]) -> None:
    """Bars of each placement over the fastest of the model."""
    panels = []
    for preset, steps in found.items():
        least = min(step_s for step_s, _ in steps.values())
        overs = [steps[name][0] / least if name in steps else None for name in PLACEMENTS]
        texts = [f"{over:.2f}" if over else "nothing fits" for over in overs]
        colours = [module_colour("llm" if over and over > 1 else "vision", "forward") for over in overs]
        table = pl.DataFrame(
            {"name": PLACEMENTS, "over": [over or 0.0 for over in overs], "text": texts, "colour": colours}
        )
        scale = {"domain": [0, 1.15 * max(over for over in overs if over)]}
        bars = layer("bar", look={"height": {"band": 0.7}}, color=as_given("colour"))
        words = layer("text", look={"align": "left", "dx": 4}, text="text")
        encoding = {"x": number("over", scale=scale, axis={"grid": False}), "y": names("name")}
        view = {"data": rows(table), "encoding": encoding, "layer": [bars, words]}
        panels.append(Panel(title=f"{preset}: fastest {least:.2f} s", view=view, height=130))
    finding = "Step time of each placement's fastest plan, over the fastest of all"
    note = "Predicted from analytic costs of 32 H100s and the demo's data. Blue: the fastest."
    picture = Picture(section="", finding=finding, note=note, panels=panels, columns=len(panels))
    write_picture(picture, path)


if __name__ == "__main__":
    main()
