"""A trained model's folder has files of the tokenizer's folder and of the checkpoint, and the tokenizer's template."""

import json

import pytest
from transformers import AutoTokenizer, LlavaOnevisionProcessor

from dflop.models import ModelSpec, load_runtime
from dflop.shapes import BUNDLED_TOKENIZER, ChatTokenizer
from dflop.shapes.template_files import read_template
from dflop.train.export import write_processors

MINE, THEIRS = "mine {{ messages[0].content }}", "theirs {{ messages[0].content }}"
LISTED_THEIRS = [{"name": "default", "template": THEIRS}]
# What the tokenizer's folder has, with the template `MINE`, and a checkpoint that the model's other files are from.
TWO_FOLDERS = {
    "settings of old": ({"chat_template.jinja": MINE}, {"processor_config.json": {"chat_template": THEIRS, "size": 4}}),
    "settings with names": (
        {"tokenizer_config.json": {"chat_template": MINE}},
        {"processor_config.json": {"chat_template": LISTED_THEIRS}},
    ),
    "settings without the default": (
        {"additional_chat_templates/default.jinja": MINE, "additional_chat_templates/rag.jinja": "rag"},
        {"processor_config.json": {"chat_template": [{"name": "tool_use", "template": THEIRS}]}},
    ),
    "of a processor": (
        {"processor_config.json": {"chat_template": MINE}, "chat_template.jinja": THEIRS},
        {"processor_config.json": {"size": 4}},
    ),
    "of a processor with one of old beside": (
        {"processor_config.json": {"chat_template": MINE}, "chat_template.json": {"chat_template": THEIRS}},
        {},
    ),
}


@pytest.mark.parametrize("case", TWO_FOLDERS)
def test_the_template_is_the_one_that_the_model_was_trained_with(tmp_path, tiny_spec: ModelSpec, case):
    own, checkpoint, made = (tmp_path / name for name in ("own", "checkpoint", "made"))
    for folder, files in zip((own, checkpoint, made), (*TWO_FOLDERS[case], {}), strict=True):
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        folder.mkdir(exist_ok=True)
    (own / "tokenizer.json").write_bytes((BUNDLED_TOKENIZER / "tokenizer.json").read_bytes())
    processor = load_runtime(tiny_spec.family).processors["vision"](tiny_spec, checkpoint)
    write_processors(made, ChatTokenizer(own), [processor], tiny_spec.media)
    assert read_template(made).source == read_template(own).source == MINE
    read_by_transformers = (
        LlavaOnevisionProcessor.get_processor_dict(made)[0]["chat_template"],
        AutoTokenizer.from_pretrained(made).chat_template,
    )
    for found in read_by_transformers:
        assert (found["default"] if isinstance(found, dict) else found) == MINE
    if "processor_config.json" in TWO_FOLDERS[case][1]:
        theirs = TWO_FOLDERS[case][1]["processor_config.json"]
        kept = {key: value for key, value in theirs.items() if key != "chat_template"}
        assert json.loads((made / "processor_config.json").read_text()) == kept
