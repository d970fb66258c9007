"""The what-if page: which layout, and what it takes, for a model, a card, a number of devices and a mix of data.

    python docs/what_if.py --search    # half an hour of a core: the rows that the table lacks, into docs/what-if.json
    make what-if                       # the page of that table, docs/_build/what-if.html: one file, no network

Rows are searches with analytic costs of batches of eight samples a device; the page shows these rows and nothing
between them. A layout is told in words beside its sizes.
"""

import argparse
import contextlib
import itertools
import json
import tempfile
from pathlib import Path

import duckdb
import yaml

HERE = Path(__file__).parent
TABLE, PAGE, TEMPLATE = HERE / "what-if.json", HERE / "_build/what-if.html", HERE / "what-if.template.html"
MODELS = {"llava_ov_7b": ("llava_onevision", [1, 2, 4]), "qwen2_5_vl_7b": ("qwen2_5_vl", [1, 2, 4])}
CARDS = ("h100-80g", "h100-96g", "a100-80g", "a800-80g", "h200-141g")
NUM_DEVICES = (8, 64, 256)
# How often a record of each kind is in the manifest, which has more than the largest batch.
MIXES = {
    "pictures, clips and texts": {"image": 8, "video": 8, "text": 8},
    "mostly texts": {"image": 1, "video": 0, "text": 40},
}
# Names of systems in the page, by those of the baselines of `plan.yaml`.
SYSTEMS = {
    "every device the whole model, balanced batches (FSDP-style)": "FSDP, dealt by dflop's sampler",
    "every device the whole model, length-grouped batches (FSDP-style)": "FSDP, batches grouped by length",
    "every device the whole model, random batches (FSDP-style)": "FSDP, random batches",
    "monolithic, random batches (Megatron-style)": "Megatron-style, random batches",
}
WHERE = {
    "monolithic": "the encoder is in the LLM's first stage",
    "colocated": "each device computes for the encoder, then for the LLM",
    "disjoint": "encoder and LLM have devices of their own",
    "bubble_filled": "the encoder computes where the LLM's stages wait",
}
SHARED = {
    "optimizer": "which share the optimiser's state (ZeRO-1)",
    "parameters": "which share the parameters (FSDP)",
    "hybrid": "which share the parameters inside a node (HSDP)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true", help="search the rows that the table lacks")
    if parser.parse_args().search:
        search()
    PAGE.parent.mkdir(exist_ok=True)
    write_page(json.loads(TABLE.read_text(encoding="utf-8")), PAGE)
    print(PAGE)


def write_page(rows: list[dict], path: Path) -> None:
    cards = yaml.safe_load((HERE.parent / "dflop/base/devices.yaml").read_text(encoding="utf-8"))
    sizes = {name: float(card["memory_bytes"]) / 2**30 for name, card in cards.items()}
    told = [row | {"words": in_words(row["plan"]), "card_gib": sizes[row["card"]]} for row in rows]
    # A text in a row may not end the script that holds it.
    text = TEMPLATE.read_text(encoding="utf-8").replace("ROWS", json.dumps(told).replace("</", "<\\/"))
    path.write_text(text, encoding="utf-8")


def in_words(plan: dict) -> str:
    """Where modules are and what replicas share, e.g. `llm: 16 replicas of 4 devices (tensor parallelism 4), …`."""
    told = [WHERE[plan["placement"]], f"{counted(plan['num_microbatches'], 'microbatch', 'es')} a step"]
    for name, grid in plan["grids"].items():
        split = [f"tensor parallelism {grid['tp']}"] * (grid["tp"] > 1) + [f"{grid['pp']} stages"] * (grid["pp"] > 1)
        recomputed = sum(grid["recomputed"]) if grid["recomputed"] else "all" if plan["checkpointing"] else 0
        told.append(
            f"{name}: {counted(grid['dp'], 'replica')} of {counted(grid['tp'] * grid['pp'], 'device')}"
            + (f" ({', '.join(split)})" if split else "")
            + (f", {SHARED[grid['sharding']]}" if grid["dp"] > 1 else "")
            + (f", {recomputed} layers recomputed" if recomputed else "")
        )
    return "; ".join(told)


def counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number > 1 else ''}"


def search() -> None:
    rows = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.is_file() else []
    known = {(row["model"], row["card"], row["devices"], row["mix"]) for row in rows}
    from made_from_code import dflop, shapes_and_costs

    for model, mix, card in itertools.product(MODELS, MIXES, CARDS):
        wanted = [number for number in NUM_DEVICES if (model, card, number, mix) not in known]
        if not wanted:
            continue
        with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
            dflop("demo-data", "--out", "data", "--records", 320)
            write_mix(Path("data/train.json"), MIXES[mix])
            config = config_of(model, card)
            shapes_and_costs(config)
            for number in wanted:
                rows.append({"model": model, "card": card, "devices": number, "mix": mix} | planned(config, number))
                TABLE.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


def write_mix(manifest: Path, times: dict[str, int]) -> None:
    records = json.loads(manifest.read_text(encoding="utf-8"))
    kinds = [next((kind for kind in ("image", "video") if kind in record), "text") for record in records]
    drawn = [
        record | {"id": f"{record['id']} {number}"}
        for record, kind in zip(records, kinds, strict=True)
        for number in range(times[kind])
    ]
    manifest.write_text(json.dumps(drawn), encoding="utf-8")


def config_of(model: str, card: str) -> dict:
    family, tp_sizes = MODELS[model]
    return {
        "run": "what-if",
        "data": {"sources": [{"path": "data/train.json"}]},
        "model": {"family": family, "preset": model},
        "cluster": {"device": "cuda", "device_model": card, "devices_per_node": 8},
        "costs": {"source": "analytic", "tp_sizes": tp_sizes},
        "plan": {"search_batches": 2},
        "train": {"precision": "bf16"},
    }


def planned(config: dict, number: int) -> dict:
    from made_from_code import dflop

    config = config | {
        "cluster": config["cluster"] | {"num_nodes": number // 8},
        "train": config["train"] | {"global_batch_size": 8 * number},
    }
    inputs = ("--config", json.dumps(config), "--shapes", "shapes.duckdb", "--costs", "costs.duckdb")
    dflop("plan", *inputs, "--out", "plan.yaml")
    said = yaml.safe_load(Path("plan.yaml").read_text(encoding="utf-8"))
    step_s = {row["name"]: row.get("step_s") for row in said["baselines"]}
    with duckdb.connect("shapes.duckdb", read_only=True) as shapes:
        query = "SELECT round(avg(llm_tokens)), round(avg(CAST(num_items > 0 AS INT)), 2) FROM samples"
        ((tokens, with_media),) = shapes.execute(query).fetchall()
    return {
        "tokens": tokens,
        "with_media": with_media,
        "plan": said["plan"],
        "step_s": said["predicted"]["step_s"],
        "memory_gib": round(max(said["predicted"]["memory_bytes"].values()) / 2**30, 1),
        "bottleneck": said["predicted"]["bottleneck"],
        "systems": {name: step_s.get(baseline) for baseline, name in SYSTEMS.items()},
    }


if __name__ == "__main__":
    main()
