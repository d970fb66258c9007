"""Config keys on Snakemake's command line."""

import pytest

from dflop.config import load_config, with_dotted_keys, with_texts_read
from dflop.runtime import UserError


def _parse(entries: list[str]) -> dict[str, object]:
    """As Snakemake's, in short: no dots, and mappings whose values are texts."""
    values = dict(entry.split("=", 1) for entry in entries)
    assert not any("." in key for key in values)
    return {key: {"steps": "7"} if key == "train" else value for key, value in values.items()}


def test_dotted_keys_go_over_what_the_parser_knows():
    values = with_dotted_keys(_parse)(["seed=3", "train={steps: 7}", "train.lr=1e-3", "costs.tp_sizes=[1, 2]"])
    assert values == {"seed": "3", "train": {"steps": "7", "lr": "1e-3"}, "costs": {"tp_sizes": [1, 2]}}
    config = load_config(values)
    assert (config.train.lr, config.train.steps, config.costs.tp_sizes) == (1e-3, 7, [1, 2])


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
