"""Generations: the inputs that a run's results depend on, so that results of different inputs are never mixed.

The weights depend on the data, the model and the config's training settings. A checkpoint is resumed only if none of
these has changed. Measurements are compared with predictions, which also depend on the costs and the plan. If these
change, measurements begin anew, while training goes on.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflop.config import Config, ModelConfig, select_keys
from dflop.models import weights_digest
from dflop.schedule import Pricer, prices_digest
from dflop.shapes.text import TOKENIZER_FILES

__all__ = ["Generation", "generation_of"]

# To be increased when older checkpoints can no longer be read.
_CHECKPOINT_FORMAT = 6
# Digests of files, and the keys that say where these lie. Where two checkpoints have a digest, only it is compared, and
# whether the keys are set; earlier versions wrote fewer.
_BEGINS_WITH = "the weights that training begins with"
_GOES_ON_FROM = "the adapters that training begins with"
_MODELS_FILES = "the model's configs, tokenizer and templates"
_DIGESTS = {
    _BEGINS_WITH: ("model.weights",),
    _GOES_ON_FROM: ("model.adapter",),
    _MODELS_FILES: ("model.path", "model.tokenizer"),
}
# The digest of its samples is compared, but other ones left out are no reason to begin anew: batches keep their order.
_LEFT_OUT = "the samples left out"
_ORDER = "the others in the order of all"  # which earlier versions did not keep
# What the digests of data and weights are of, wherever it lies.
_PLACES = ("path", "media_root")
# Keys that earlier versions do not know, left out where they have these values, which they had.
_NEW_TRAIN_KEYS = {"train.betas": [0.9, 0.999], "train.eps": 1e-8}
# Keys of a source that earlier versions do not know, left out where they say nothing.
_NEW_KEYS = ("columns", "epochs", "weight")
_MODEL_FILES = ("config.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
_KEYS = ("seed", "data.sources", "data.evaluation_share", "data.video", "data.max_llm_tokens", "model", "train")
# Keys that do not affect the weights. The first one, `train.steps`, does so if the learning rate falls until the last
# step.
_FREE = (
    "train.steps",
    "train.epochs",
    "train.checkpoint_every",
    "train.export_precision",
    "train.compile",
    "train.evaluate_every",
    "train.resume",
    "train.loader_workers",
    "train.peer_timeout_s",
    "train.tensorboard",
)


@dataclass(frozen=True, slots=True)
class Generation:
    """What a run's results depend on. `weights` has the inputs of the weights by name, each as JSON; `prices` is a
    digest of the costs and the plan."""

    weights: Mapping[str, str]
    prices: str

    @classmethod
    def of_run(cls, run: Mapping[str, Any]) -> "Generation":
        """The generation in a checkpoint's `run.json`; empty if the file does not have it."""
        return cls(**run.get("generation", {"weights": {}, "prices": ""}))

    def to_dict(self) -> dict[str, Any]:
        return {"weights": dict(self.weights), "prices": self.prices}

    @property
    def digest(self) -> str:
        """A digest of the whole generation."""
        return _digest(self.to_dict())

    def changes_since(self, earlier: "Generation") -> list[str]:
        """The inputs of the weights that differ from those of an earlier generation, in words."""
        if not earlier.weights:
            return ["another version of dflop wrote the checkpoint"]
        names = (self.weights.keys() | earlier.weights.keys()) - {_LEFT_OUT}
        in_both = self.weights.keys() & earlier.weights.keys()
        for digest, places in _DIGESTS.items():
            if digest in in_both:
                names -= {key for key in places if _is_set(key, self.weights) == _is_set(key, earlier.weights)}
            else:
                names -= {digest}
        return [
            _change(name, _value(name, earlier.weights), _value(name, self.weights))
            for name in sorted(names)
            if _compared(name, self.weights) != _compared(name, earlier.weights)
        ]

    def otherwise_left_out(self, earlier: "Generation") -> str | None:
        """What to say where other samples are left out than in an earlier generation; None if they are the same."""
        if self.weights.get(_LEFT_OUT) == earlier.weights.get(_LEFT_OUT):
            return None
        return (
            "other samples are left out than before, as memory, plan, costs or dflop's version are others; the rest "
            "keep their order, unless sources have `epochs` or `weight`, and some may come twice in this epoch, or not "
            "at all"
        )


def generation_of(
    config: Config, data_digests: Iterable[str], left_out: Iterable[tuple[str, int]], pricer: Pricer
) -> Generation:
    """The generation of a run; `left_out` are the (source, row) of samples that the plan's devices cannot hold."""
    weights = {"checkpoint format": _CHECKPOINT_FORMAT} | dict(_flat(select_keys(config, _KEYS)))
    weights["data.sources"] = [
        {key: value for key, value in source.items() if value or key not in _NEW_KEYS}
        for source in weights["data.sources"]
    ]
    weights = {name: value for name, value in weights.items() if _NEW_TRAIN_KEYS.get(name, ...) != value}
    without = sorted(left_out)
    weights |= {"the data": _digest(list(data_digests)), _LEFT_OUT: _digest([*without, _ORDER] if without else [])}
    if begins_with := config.model.weights or config.model.path:
        weights[_BEGINS_WITH] = weights_digest(Path(begins_with))
    if config.model.adapter:
        weights[_GOES_ON_FROM] = weights_digest(Path(config.model.adapter))
    if config.model.path or config.model.tokenizer:
        weights[_MODELS_FILES] = _digest_of_files(config.model)
    free = _FREE if config.train.lr_schedule == "constant" else _FREE[1:]
    written = {name: json.dumps(value, sort_keys=True) for name, value in weights.items() if name not in free}
    return Generation(written, prices_digest(pricer))


def _digest_of_files(model: ModelConfig) -> str:
    """A digest of the files that dflop reads of `model.path` and of the tokenizer, but for weights."""
    folders = {_MODEL_FILES: model.path, TOKENIZER_FILES: model.tokenizer or model.path}
    read = [
        (str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).hexdigest())
        for names, folder in folders.items()
        if folder
        for path in sorted({path for name in names for path in Path(folder).glob(name)})
    ]
    return _digest(read)


def _is_set(name: str, weights: Mapping[str, str]) -> bool:
    return _value(name, weights) != "null"


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _value(name: str, weights: Mapping[str, str]) -> str:
    return weights.get(name, json.dumps(_NEW_TRAIN_KEYS.get(name)))


def _compared(name: str, weights: Mapping[str, str]) -> str:
    """What is compared of an input: of sources not where they lie."""
    value = _value(name, weights)
    if name == "data.sources" and name in weights:
        sources = [{key: own for key, own in source.items() if key not in _PLACES} for source in json.loads(value)]
        return json.dumps(sources, sort_keys=True)
    return value


def _change(name: str, was: str, now: str) -> str:
    if " " in name:
        return f"{name} changed"
    return f"`{name}` changed" if len(f"{was}{now}") > 80 else f"`{name}` was {was} and is {now}"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
