"""Config keys on Snakemake's command line."""

import pytest
import yaml

from dflop.base import UserError
from dflop.config import load_config, with_dotted_keys, with_texts_read


def _parse(entries: list[str]) -> dict[str, object]:
    """As Snakemake's: no dots in keys, mappings and lists of texts, each entry over those before it."""
    values: dict[str, object] = {}
    for key, text in (entry.split("=", 1) for entry in entries):
        assert "." not in key
        value = yaml.load(text, yaml.BaseLoader)
        values[key] = values.get(key, {}) | value if isinstance(value, dict) else value
    return values


def test_dotted_keys_are_written_so_that_the_parser_and_jobs_understand_them():
    entries = ["seed=3", "train={steps: 7}", "train.lr=1e-3", "train.epochs=null", "costs.tp_sizes=[1, 2]"]
    entries += ["schedule.deterministic=true", "data.sources=[{path: a b.json}]"]
    values = with_dotted_keys(_parse)(entries)
    assert values == _parse(entries)  # the list is what jobs are given
    config = load_config(with_texts_read(values))
    assert (config.seed, config.train.lr, config.train.steps, config.train.epochs) == (3, 1e-3, 7, None)
    assert (config.costs.tp_sizes, config.schedule.deterministic) == ([1, 2], True)
    assert config.data.sources[0].path == "a b.json"


def test_a_dotted_key_that_cannot_be_is_refused_as_elsewhere():
    with pytest.raises(UserError, match=r"one entry of the list `data.sources`"):
        with_dotted_keys(_parse)(["data.sources[0].path=x"])


def test_texts_that_jobs_are_given_mean_what_they_were():
    values = {"schedule": {"deterministic": "True"}, "train": {"epochs": "None", "resume": "auto"}, "x": ["false"]}
    assert with_texts_read(values) == {
        "schedule": {"deterministic": True},
        "train": {"epochs": None, "resume": "auto"},
        "x": [False],
    }
