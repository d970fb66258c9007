"""Gradients of real stages in every kind of layout, over gloo, against transformers' own model in one process.

Everything is in float64. The oracle runs one sample after the other, unpacked, and steps with `torch.optim.AdamW`.
"""

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from layout_plans import OMNI_PLANS, PLANS
from layouts import NUM_STEPS, run_rank, write_case, write_expected
from processes import spawn
from whole_model import build_whole_model

from dflop.config import load_config
from dflop.costs import CostModel
from dflop.models import load_model_spec
from dflop.schedule import GlobalBatches
from dflop.shapes import SampleShapes, load_samples
from dflop.shapes.text import BUNDLED_TOKENIZER
from dflop.store import read_table

pytestmark = pytest.mark.serial

OMNI_KINDS = {"text", "image", "multi_image", "video", "audio", "mixed"}
# The variant of the model with which CI runs a layout. Each is run with layouts of every kind: pipelines, tensor
# parallelism, shared parameters. Adapters, a projector and parts by pattern are variants as families are.
VARIED = {
    "interleaved": "tied",
    "disjoint 1+4, LLM tp 2 pp 2": "tied",
    "parameters of the LLM": "tied",
    "colocated pp 2 dp 2": "frozen vision",
    "bubble-filled pp 2": "frozen llm",
    # An encoder without its projector is frozen: of its pipeline only the last stage has a backward.
    "encoder pp 2": "projector",
    "bubble-filled pp 2 dp 2": "frozen encoder",
    "parameters of the first stage's encoder": "frozen encoder",
    "monolithic pp 2": "internvl",
    "colocated LLM tp 2": "qwen",
    "encoder pp 2, LLM pp 3": "qwen3",  # features go along between stages of the encoder, and of the LLM
    "disjoint 2+2, both tp 2, checkpointing": "qwen3",
    "disjoint 2+1": "damaged",
    "monolithic tp 2 dp 2": "damaged",
    "colocated interleaved": "last layers",
    "parameters 2": "last layers",
    "parameters 2, tp 2": "qwen last layers",
    "parameters 2+2": "internvl norms",  # of the class token, one row, the second replica has nothing
    "colocated encoder tp 2": "qwen3 parts",
    "disjoint 1+2, LLM pp 2": "lora of the llm",
    "disjoint 1+2, LLM tp 2": "lora of the llm",
    "monolithic 2": "internvl lora",
    "colocated encoder dp 4, LLM tp 2 pp 2": "plain lora",
    "parameters 2x2 of both": "plain lora",
    "disjoint 2+1, encoder tp 2": "qwen lora",
    "colocated pp 2": "qwen3 lora",
}
# Layouts that are a part of a larger one of their kind, or of two, which CI runs.
SMALLER = (
    "disjoint 1+1",
    "disjoint 1+2, LLM dp 2",
    "disjoint 4+1",
    "disjoint 1+4",
    "encoder pp 2 dp 2",
    "colocated 1",
    "colocated 2",
    "bubble-filled encoder dp 4, LLM tp 2 pp 2",
    "monolithic pp 2 dp 2",
    "monolithic tp 2 pp 2",
    "parameters 4, colocated",
    "parameters 2x2",
    "parameters of the encoder",
    "parameters 2 of the LLM, tp 2",
    "three modules 1+1+1",
    "three modules 1+1+2, LLM pp 2",
    "three modules colocated 2",
    "three modules colocated pp 2",
    "three modules monolithic 2",
)
# Samples that several replicas compute together, of each family, with shared, frozen and adapted parameters.
TOGETHER = (
    ("samples over 2", "damaged"),
    ("samples over 4", "qwen"),
    ("samples over 2, LLM pp 2", "tied"),
    ("samples over 2, LLM tp 2", "plain lora"),
    ("samples over 2, colocated pp 2", "qwen3"),
    ("samples over 2, monolithic", "internvl"),
    ("samples over 4, parameters", "plain"),
    ("samples over 2, colocated pp 2", "frozen llm"),
    ("three modules, samples over 2", "omni"),
)
WHOLE = [name for name in PLANS if "samples over" not in name]
ONCE = [(name, VARIED.get(name, "omni" if name in OMNI_PLANS else "plain")) for name in WHOLE if name not in SMALLER]
IN_CI = [case for case in ONCE if "lora" not in case[1]]
LORA = [case for case in ONCE if "lora" in case[1]]
EACH = ("encoder pp 2, LLM pp 3", "colocated pp 2 dp 2", "disjoint 2+2, both tp 2, checkpointing", "parameters 2, tp 2")
OTHERS = [(name, "omni" if name in OMNI_PLANS else "plain") for name in PLANS]
OTHERS += [(name, variant) for variant in NUM_STEPS if variant not in ("plain", "omni") for name in EACH]
OTHERS += [("samples over 4", variant) for variant in ("qwen3", "frozen vision", "frozen llm", "last layers")]
OTHERS += [("samples over 4, parameters", "qwen"), ("samples over 2, LLM pp 2", "internvl")]
OTHERS = [case for case in OTHERS if case not in (*ONCE, *TOGETHER)]
NEEDS_PEFT = pytest.mark.skipif(not find_spec("peft"), reason="no peft")


@pytest.fixture(scope="module")
def prepare(dataset, run, internvl_run, qwen_run, qwen3_run, omni_run, tmp_path_factory) -> Callable[[list], Path]:
    """`prepare(cases)`: a folder with what the ranks read: of each variant its config, and of each case the schedules;
    and with what they must find: the losses and gradients of the whole model."""
    made, config = run
    made_of = {"internvl": internvl_run[0], "qwen": qwen_run[0], "qwen3": qwen3_run[0], "omni": omni_run[0]}
    made_of["qwen3 projector"] = qwen3_run[0]
    made_of |= {f"{family} lora": made_of[family] for family in ("internvl", "qwen", "qwen3")}
    made_of |= {name: made_of[name.partition(" ")[0]] for name in ("qwen last layers", "internvl norms", "qwen3 parts")}
    folder = tmp_path_factory.mktemp("layouts")
    configs = {
        "plain": config,
        "tied": config | {"model": config["model"] | {"path": str(_tied_checkpoint(folder / "tied", config))}},
        **{f"frozen {name}": config | {"model": config["model"] | {"freeze": [name]}} for name in ("vision", "llm")},
        "frozen encoder": config | {"model": config["model"] | {"freeze": ["vision.encoder"]}},
        "projector": config | {"model": config["model"] | {"freeze": ["vision.encoder", "llm"]}},
        "qwen3 projector": qwen3_run[1] | {"model": qwen3_run[1]["model"] | {"freeze": ["vision.encoder", "llm"]}},
        "internvl": internvl_run[1],
        "qwen": qwen_run[1],
        "qwen3": qwen3_run[1],
        "omni": omni_run[1],
        "damaged": config | {"data": config["data"] | {"sources": [{"path": str(folder / "damaged" / "train.json")}]}},
    }
    configs["tied"]["model"].pop("preset")
    of_llm = {"modules": ["llm"], "targets": ["*.q_proj", "*.v_proj", "*.mlp.*"], "rank": 4, "rslora": True}
    configs["lora of the llm"] = config | {"model": config["model"] | {"freeze": ["vision.encoder"], "lora": of_llm}}
    both = {"modules": ["llm", "vision.encoder"], "rank": 4, "alpha": 12}
    for family in ("plain", "internvl", "qwen", "qwen3"):
        own = configs[family]
        configs[f"{family} lora"] = own | {"model": own["model"] | {"lora": both}}
    parts = {
        "last layers": ("plain", ["llm.layers.[2-3]", "llm.norm", "llm.head"]),
        "qwen last layers": ("qwen", ["projector", "llm.layers.3", "llm.head"]),
        "internvl norms": ("internvl", ["*norm*"]),
        "qwen3 parts": ("qwen3", ["vision", "llm.embeddings", "llm.layers.*.self_attn"]),
    }
    for name, (of, train) in parts.items():
        configs[name] = configs[of] | {"model": configs[of]["model"] | {"train": train}}
    configs["qwen3 parts"]["model"]["freeze"] = ["vision.encoder.embeddings", "vision.encoder.layers.0"]
    own = {"llm.head": {"lr": 3e-3, "weight_decay": 0.2}}
    configs["last layers"] |= {"train": configs["last layers"]["train"] | {"modules": own}}
    costs, samples, batches = {}, {}, {}

    def expect(variant: str) -> None:
        values = configs[variant]
        spec, folder_of = load_model_spec(load_config(values).model), made_of.get(variant, made)
        costs[variant] = CostModel.load(folder_of / "costs.duckdb")
        samples[variant], _ = load_samples(folder_of / "shapes.duckdb", spec.encoders)
        batches[variant] = GlobalBatches(len(samples[variant]), 8, 0)
        if variant == "omni":
            batches[variant] = _batches_of_all_kinds(folder_of, samples[variant])
        chosen = [samples[variant].take(batches[variant][step]) for step in range(NUM_STEPS[variant])]
        if variant == "damaged":
            chosen = [_without_one_damaged(chosen[0], dataset.parent, folder / "damaged")]
        write_expected(folder, variant, values, chosen)

    def with_schedules(cases: list[tuple[str, str]]) -> Path:
        for name, variant in cases:
            if variant not in costs:
                expect(variant)
            of_variant = (own[variant] for own in (configs, costs, samples, batches))
            write_case(folder, name, variant, *of_variant)
        return folder

    return with_schedules


def _batches_of_all_kinds(run: Path, samples: SampleShapes) -> GlobalBatches:
    """Batches of which the first has samples of every kind, and the second media for both encoders.

    An encoder for which a batch has no media gets gradients of zero here. In the whole model it gets none, and its
    weights stay as they are.
    """
    table = read_table(run / "shapes.duckdb", "samples", made_by="merge-shapes")
    kind_of = dict(table.select("sample_id", "modality").iter_rows())
    for seed in range(1000):
        batches = GlobalBatches(len(samples), 8, seed)
        first, second = ({kind_of[name] for name in samples.sample_id[batches[step]]} for step in range(2))
        if first == OMNI_KINDS and {"image", "audio"} <= second:
            return batches
    raise AssertionError("no batch has samples of every kind")


def _tied_checkpoint(path: Path, config: dict) -> Path:
    """A checkpoint whose head is its embedding, and its tokenizer."""
    model = build_whole_model(load_config(config)).float()
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = True
    model.lm_head.weight = model.model.language_model.embed_tokens.weight
    model.save_pretrained(path)
    for file in BUNDLED_TOKENIZER.iterdir():
        if file.is_file() and not (path / file.name).exists():
            shutil.copy(file, path / file.name)
    return path


def _without_one_damaged(batch: SampleShapes, dataset: Path, copy: Path) -> SampleShapes:
    """The batch without a sample whose picture is damaged, in this copy of the dataset."""
    shutil.copytree(dataset, copy)
    records = json.loads((copy / "train.json").read_text())
    place = next(place for place, row in enumerate(batch.row) if isinstance(records[row].get("image"), str))
    picture = copy / records[batch.row[place]]["image"]
    picture.write_bytes(picture.read_bytes()[: picture.stat().st_size // 2])
    return batch.take(np.delete(np.arange(len(batch)), place))


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(IN_CI, id="each kind of layout"),
        pytest.param(LORA, id="with adapters", marks=NEEDS_PEFT),
        pytest.param(TOGETHER, id="with samples over several replicas", marks=NEEDS_PEFT),
        pytest.param(OTHERS, id="with other models", marks=[NEEDS_PEFT, pytest.mark.exhaustive]),
    ],
)
def test_every_layout_has_the_gradients_of_the_unpacked_model_in_one_process(prepare, cases):
    spawn(run_rank, (prepare(cases), cases), nprocs=max(plan.world_size for plan in PLANS.values()))
