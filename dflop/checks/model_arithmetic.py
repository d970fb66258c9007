"""Compare a plan's stages with transformers' own model on real samples, to check packing and cutting.

The model is cut as in the plan. Its stages run the samples one by one, and all of them packed into one microbatch
(`one_process`); transformers' own model runs them one by one. Whether packed samples see each other is also checked
directly: no sample's loss may have a gradient with respect to another sample's tokens or media. Tensor parallelism,
replicas and recomputation are not checked.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import torch

from dflop.base import UserError
from dflop.checks.one_process import (
    Inputs,
    PackedSamples,
    Pass,
    build_plain,
    build_stages,
    each_stage,
    pass_plain,
    pass_stages,
)
from dflop.config import Config
from dflop.models import ModelSpec, load_model_spec
from dflop.models.precision import COMPUTES_IN
from dflop.plan import Plan
from dflop.shapes import SampleShapes, load_samples
from dflop.store import read_table

__all__ = ["TOLERANCES", "CheckedModel", "CheckedSample", "Differences", "check_model"]

# The largest relative differences that rounding can explain, by precision.
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3}


class Differences(NamedTuple):
    """The largest relative differences from transformers' model: of losses, of logits (relative to the sample's largest
    one), and of gradients (relative to the parameter's largest one), with the name of that parameter."""

    loss: float
    logits: float
    gradients: float
    parameter: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedSample:
    """One sample: its `loss` in transformers' model, and the relative difference of the stages' losses, `alone` and
    `packed`. `has_positions_…` says whether position ids are the same. `sees` are the other samples on whose tokens or
    media its loss depends."""

    sample_id: str
    modality: str
    num_tokens: int
    loss: float
    alone: float
    packed: float
    has_positions_alone: bool
    has_positions_packed: bool
    sees: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedModel:
    """The result of the comparison. `faults` has a sentence for each thing that is not as in transformers."""

    samples: tuple[CheckedSample, ...]
    num_stages: Mapping[str, int]
    alone: Differences
    packed: Differences
    tolerance: float

    @property
    def faults(self) -> list[str]:
        found = [
            f"packed samples see each other: the loss of {sample.sample_id} depends on {', '.join(sample.sees)}"
            for sample in self.samples
            if sample.sees
        ]
        for how, right in (("alone", "has_positions_alone"), ("packed", "has_positions_packed")):
            wrong = [sample.sample_id for sample in self.samples if not getattr(sample, right)]
            if wrong:
                found.append(f"positions of {', '.join(wrong)}, {how}, are not those of transformers")
        for how, differences in (("one by one", self.alone), ("packed", self.packed)):
            largest = max(differences[:3])
            if not largest <= self.tolerance:  # as NaN is not
                found.append(f"{how}, the stages' results differ from those of transformers by {largest:.1e}")
        return found


def check_model(config: Config, plan: Plan, shapes: Path, *, num_samples: int, precision: str) -> CheckedModel:
    """Compare a few samples of `shapes`, of each modality in turn, in float64 or float32 (`precision`).

    Raises:
        UserError: when a sample cannot be compared, or a record has changed since it was profiled.
    """
    spec, dtype = load_model_spec(config.model), COMPUTES_IN[precision]
    inputs = Inputs(config, spec, dtype)
    chosen, modalities = _chosen(shapes, spec, num_samples, config.data.max_llm_tokens, config.seed)
    samples = [inputs.sample(chosen.take(np.array([place]))) for place in range(len(chosen))]
    stages = build_stages(config, plan, spec, inputs.hf_config, dtype)
    expected, gradients = pass_plain(build_plain(spec, inputs.hf_config, stages, dtype), spec, samples)
    alone = []
    for sample in samples:
        made = pass_stages(stages, sample)
        made.loss.backward()
        alone.append(made.detached())
    of_alone = _gradients(stages)
    together = inputs.sample(chosen)
    whole = pass_stages(stages, together)
    packed = whole.split(together.text)
    sees = _who_sees_whom(whole, packed, samples)
    whole.loss.backward()
    packed = [part.detached() for part in packed]
    return CheckedModel(
        samples=tuple(
            CheckedSample(
                sample_id=str(sample_id),
                modality=modality,
                num_tokens=theirs.positions.shape[-1],
                loss=float(theirs.loss),
                alone=_apart(single.loss, theirs.loss),
                packed=_apart(part.loss, theirs.loss),
                has_positions_alone=torch.equal(single.positions, theirs.positions),
                has_positions_packed=torch.equal(part.positions, theirs.positions),
                sees=tuple(str(chosen.sample_id[other]) for other in seen),
            )
            for sample_id, modality, single, part, theirs, seen in zip(
                chosen.sample_id, modalities, alone, packed, expected, sees, strict=True
            )
        ),
        num_stages={module: len(built) for module, built in stages.items()},
        alone=_differences(alone, expected, of_alone, gradients),
        packed=_differences(packed, expected, _gradients(stages), gradients),
        tolerance=TOLERANCES[precision],
    )


def _chosen(
    path: Path, spec: ModelSpec, num_samples: int, max_llm_tokens: int, seed: int
) -> tuple[SampleShapes, list[str]]:
    """Samples of each modality in turn, drawn among the shorter half of those that are not truncated, and their
    modalities."""
    samples, _ = load_samples(path, spec.encoders)
    table = read_table(path, "samples", made_by="merge-shapes").select("sample_id", "modality", "truncated")
    rows = pl.DataFrame({"sample_id": samples.sample_id.astype(str)}).join(table, on="sample_id", maintain_order="left")
    whole = np.flatnonzero(~rows["truncated"].to_numpy() & (samples.target_tokens > 0))
    draw, by_modality = np.random.default_rng(seed), []
    for modality in sorted(set(rows["modality"])):
        places = whole[rows["modality"].to_numpy()[whole] == modality]
        shorter = places[np.argsort(samples.llm_tokens[places], kind="stable")][: (len(places) + 1) // 2]
        by_modality.append(draw.permutation(shorter).tolist())
    drawn = [place for row in zip_longest(*by_modality) for place in row if place is not None][:num_samples]
    if not drawn:
        raise UserError(f"{path} has no sample of fewer than {max_llm_tokens} tokens; raise `data.max_llm_tokens`")
    return samples.take(np.array(drawn)), [rows["modality"][place] for place in drawn]


def _who_sees_whom(whole: Pass, parts: Sequence[Pass], samples: Sequence[PackedSamples]) -> list[list[int]]:
    """For each packed sample, the other samples with respect to whose tokens or items its loss has a gradient."""
    inputs = [whole.embedded, *whole.items.values()]
    lengths = [
        [len(sample.text.token_ids) for sample in samples],
        *([len(sample.media[name].items) if name in sample.media else 0 for sample in samples] for name in whole.items),
    ]
    sees = []
    for place, part in enumerate(parts):
        gradients = torch.autograd.grad(part.loss, inputs, retain_graph=True, allow_unused=True)
        seen = set()
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                pieces = (gradient[0] if number == 0 else gradient).split(lengths[number])
                seen |= {other for other, piece in enumerate(pieces) if other != place and bool((piece != 0).any())}
        sees.append(sorted(seen))
    return sees


def _gradients(stages: Mapping[str, list]) -> dict[str, torch.Tensor]:
    """The gradients of the parameters by name, summed over a tied embedding's copies. They are removed from the
    stages."""
    summed: dict[str, torch.Tensor] = {}
    for stage in each_stage(stages):
        for name, parameter in stage.named_hf_parameters().items():
            if parameter.grad is not None:
                summed[name] = summed[name] + parameter.grad if name in summed else parameter.grad
            parameter.grad = None
    return summed


def _differences(
    passes: Sequence[Pass],
    expected: Sequence[Pass],
    gradients: Mapping[str, torch.Tensor],
    expected_gradients: Mapping[str, torch.Tensor],
) -> Differences:
    """The differences of `passes` from `expected`. A gradient may be zero except for rounding, e.g. that of keys'
    biases; it is then compared relative to a thousandth of the largest gradient of all."""
    floor = 1e-3 * max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    apart = {
        name: float((gradients[name] - theirs).abs().max()) / max(floor, float(theirs.abs().max()))
        if name in gradients
        else math.inf
        for name, theirs in expected_gradients.items()
    }
    worst = max(apart, key=lambda name: math.inf if math.isnan(apart[name]) else apart[name])
    pairs = list(zip(passes, expected, strict=True))
    return Differences(
        loss=max(_apart(ours.loss, theirs.loss) for ours, theirs in pairs),
        logits=max(
            float((ours.logits - theirs.logits).abs().max() / theirs.logits.abs().max()) for ours, theirs in pairs
        ),
        gradients=apart[worst],
        parameter=worst,
    )


def _apart(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.detach() - expected).abs() / expected.abs())
