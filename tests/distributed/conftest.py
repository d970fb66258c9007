"""What several tests of training need: a small dataset with its shapes, made-up costs and a config in float64."""

import json
import os

# Of oracles and of the server that ranks are forked from; ranks have as many as training gives them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from processes import preload
from small_data import make_small_data
from small_runs import prepare

preload()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """The manifest of a small dataset."""
    folder = tmp_path_factory.mktemp("data")
    make_small_data(folder, num_records=48)
    return folder / "train.json"


@pytest.fixture(scope="session")
def run(dataset, tmp_path_factory):
    """A folder with a small dataset's shapes, made-up costs, and a config in float64."""
    return prepare(tmp_path_factory.mktemp("run"), [dataset], "llava_onevision")


@pytest.fixture(scope="session")
def internvl_run(dataset, tmp_path_factory):
    """The same for InternVL."""
    return prepare(tmp_path_factory.mktemp("internvl-run"), [dataset], "internvl")


@pytest.fixture(scope="session")
def qwen_run(dataset, tmp_path_factory):
    """The same for Qwen2.5-VL."""
    return prepare(tmp_path_factory.mktemp("qwen-run"), [dataset], "qwen2_5_vl")


@pytest.fixture(scope="session")
def qwen3_run(dataset, tmp_path_factory):
    """The same for Qwen3-VL."""
    return prepare(tmp_path_factory.mktemp("qwen3-run"), [dataset], "qwen3_vl")


@pytest.fixture(scope="session")
def omni_run(dataset, tmp_path_factory):
    """The same for Qwen2.5-Omni's thinker: sounds, too, and records of several kinds of media."""
    entries = {name: json.loads((dataset.parent / name).read_text()) for name in ("train.json", "audio.json")}
    sounds = [entry["audio"] for entry in entries["audio.json"]]
    pictures = [entry["image"] for entry in entries["train.json"] if isinstance(entry.get("image"), str)]
    clips = [entry["video"] for entry in entries["train.json"] if "video" in entry]
    answer = {"from": "gpt", "value": "Several things at once."}
    mixed = [
        {"image": pictures[0], "audio": sounds[0], "said": "<image>\nWhat does one hear here?\n<audio>"},
        {"audio": sounds[:2], "video": clips[0], "said": "First <audio>, then <audio>, and now <video>?"},
        {"video": clips[1], "image": pictures[1], "said": "Is <video> more than <image>?"},
    ]
    records = [
        {"id": f"mixed-{number}", "conversations": [{"from": "human", "value": entry.pop("said")}, answer], **entry}
        for number, entry in enumerate(mixed)
    ]
    path = dataset.parent / "mixed.json"
    path.write_text(json.dumps(records))
    manifests = (dataset, dataset.with_name("audio.json"), path)
    folder = tmp_path_factory.mktemp("omni-run")
    return prepare(folder, manifests, "qwen2_5_omni_thinker")
