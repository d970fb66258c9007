"""Whether a transformers model computes packed samples as it computes them alone, and which known mistake it is if not.

Nothing of dflop's models is used: the model is anybody's, and so is the collator that packs. A few samples go through
the collator one by one and together. Compared are tokens, media, the positions that rotary embeddings are asked for,
logits, loss and gradients; and no logit of a sample may have a gradient at another sample's tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dflop.base import UserError

__all__ = ["PackedSample", "PackingCheck", "check_packing"]

# Relative differences above this are mistakes: fp64 leaves some 1e-13.
TOLERANCE = 1e-8


@dataclass(frozen=True, kw_only=True)
class PackedSample:
    """What was found of one sample: the largest difference of its logits, relative to its largest logit; numbers of the
    samples that it sees; and whether its positions are those that it has alone."""

    num_tokens: int
    logits: float
    sees: list[int]
    has_positions: bool


@dataclass(frozen=True, kw_only=True)
class PackingCheck:
    """`faults` are sentences, empty where packing is right. `loss` and `gradients` are relative differences."""

    samples: list[PackedSample]
    loss: float
    gradients: float
    parameter: str
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Run:
    logits: torch.Tensor  # [tokens, vocabulary]
    loss_sum: torch.Tensor
    num_targets: int
    positions: torch.Tensor | None  # [axes, tokens]
    embedded: torch.Tensor  # [tokens, hidden]


def check_packing(
    model: nn.Module, collate: Callable[[list[Any]], Mapping[str, Any]], samples: Sequence[Any]
) -> PackingCheck:
    """Compare the samples packed by `collate` with each of them alone. The model is left in fp64.

    Raises:
        UserError: the collator does not pack, or what it makes cannot be run alone.
    """
    model.double().eval()
    alone = [_as_inputs(collate([sample])) for sample in samples]
    packed = _as_inputs(collate(list(samples)))
    lengths = [_num_tokens(batch) for batch in alone]
    if packed["input_ids"].shape[0] > 1:
        raise UserError(
            f"the collator makes a batch of {list(packed['input_ids'].shape)} of {len(samples)} samples: it pads them "
            "in rows of their own and packs nothing"
        )
    faults = _wrong_inputs(alone, packed, lengths)
    if faults:
        return PackingCheck(samples=[], loss=math.nan, gradients=math.nan, parameter="", faults=faults)
    single = [_run(model, batch) for batch in alone]
    together = _run(model, packed)
    ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
    places = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    sees = _seen(together, places)
    found = [
        PackedSample(
            num_tokens=length,
            logits=_difference(together.logits[place], run.logits),
            sees=sees[number],
            has_positions=_same_positions(together.positions, place, run.positions),
        )
        for number, (length, place, run) in enumerate(zip(lengths, places, single, strict=True))
    ]
    num_targets = sum(run.num_targets for run in single)
    loss_alone = sum(run.loss_sum for run in single) / num_targets
    loss_packed = together.loss_sum / max(1, together.num_targets)
    gradients, parameter = _gradients(model, loss_packed, loss_alone)
    faults = _mistakes(model, packed, found, places, together, single)
    if together.num_targets != num_targets:
        faults.append(
            f"packed, {together.num_targets} tokens are learned from, alone {num_targets}: the labels of a sample's "
            "first token must be -100, or the last token of the sample before learns to predict it"
        )
    loss = _difference(loss_packed, loss_alone)
    worst = max(loss, gradients, *(sample.logits for sample in found))
    if not faults and worst > TOLERANCE:
        faults.append(f"loss, logits or gradients differ by {worst:.1e}, and none of the known mistakes is the reason")
    return PackingCheck(samples=found, loss=loss, gradients=gradients, parameter=parameter, faults=faults)


def _as_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(batch, Mapping) or getattr(batch.get("input_ids"), "ndim", 0) != 2:
        raise UserError("the collator must make a mapping with `input_ids` of shape [1, tokens]")
    if "labels" not in batch:
        raise UserError("the collator must make `labels`, from which the loss is computed")
    return {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def _num_tokens(batch: Mapping[str, Any]) -> int:
    """Tokens without padding at the end."""
    mask = batch.get("attention_mask")
    return int(mask.sum()) if torch.is_tensor(mask) and mask.ndim == 2 else batch["input_ids"].shape[1]


def _wrong_inputs(alone: list[dict], packed: dict, lengths: list[int]) -> list[str]:
    """What is wrong before anything is computed: other tokens, or media that are gone."""
    faults = []
    ids = torch.cat([batch["input_ids"][0, :length] for batch, length in zip(alone, lengths, strict=True)])
    if not torch.equal(ids, packed["input_ids"][0, : len(ids)]):
        faults.append("the packed tokens are not the samples' tokens one after the other, in the order that was given")
    for name in sorted({name for batch in alone for name, value in batch.items() if _is_media(name, value)}):
        rows = sum(len(batch[name]) for batch in alone if torch.is_tensor(batch.get(name)))
        kept = len(packed[name]) if torch.is_tensor(packed.get(name)) else 0
        if kept != rows:
            faults.append(f"pictures are lost: packed, `{name}` has {kept} rows, the samples alone have {rows}")
    return faults


def _is_media(name: str, value: Any) -> bool:
    return torch.is_tensor(value) and name.startswith(("pixel_values", "image_", "video_", "input_features"))


def _run(model: nn.Module, batch: dict[str, Any]) -> _Run:
    seen: list[torch.Tensor] = []
    embedded: list[torch.Tensor] = []
    num_tokens = batch["input_ids"].shape[1]

    def note_positions(module, args, kwargs):
        given = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        if torch.is_tensor(given) and given.shape[-1] == num_tokens:
            seen.append(given.reshape(-1, num_tokens))

    def note_embedded(module, args, output):
        if output.shape[-2] == num_tokens and not embedded:
            output.retain_grad()
            embedded.append(output)

    hooks = [model.get_input_embeddings().register_forward_hook(note_embedded)]
    hooks += [
        module.register_forward_pre_hook(note_positions, with_kwargs=True)
        for module in model.modules()
        if type(module).__name__.endswith("RotaryEmbedding")
    ]
    try:
        output = model(**{name: value for name, value in batch.items() if name != "labels"}, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    targets = batch["labels"][0, 1:]
    loss_sum = nn.functional.cross_entropy(output.logits[0, :-1], targets, ignore_index=-100, reduction="sum")
    return _Run(
        logits=output.logits[0],
        loss_sum=loss_sum,
        num_targets=int((targets != -100).sum()),
        positions=seen[0] if seen else None,
        embedded=embedded[0],
    )


def _seen(together: _Run, places: list[slice]) -> list[list[int]]:
    """Of each sample the numbers of the samples at whose tokens its logits have a gradient."""
    weights = torch.randn(together.logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = []
    for place in places:
        (grad,) = torch.autograd.grad(
            (together.logits[place] * weights[place]).sum(), together.embedded, retain_graph=True
        )
        found.append([n for n, other in enumerate(places) if other != place and grad[..., other, :].abs().max() > 0])
    return found


def _difference(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).detach().abs().max() / right.detach().abs().max().clamp_min(1e-30))


def _same_positions(packed: torch.Tensor | None, place: slice, alone: torch.Tensor | None) -> bool:
    if packed is None or alone is None:
        return packed is alone
    packed, alone = torch.broadcast_tensors(packed[:, place], alone[:, : place.stop - place.start])
    return torch.equal(packed, alone)


def _gradients(model: nn.Module, packed: torch.Tensor, alone: torch.Tensor) -> tuple[float, str]:
    """The largest difference of a parameter's gradient, relative to the largest of all gradients; and its parameter."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    packed_grads, alone_grads = (
        torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
        for loss in (packed, alone)
    )
    largest = max((float(grad.abs().max()) for grad in alone_grads if grad is not None), default=1.0)
    worst, where = 0.0, next(iter(named), "")
    for name, found, right in zip(named, packed_grads, alone_grads, strict=True):
        if found is None and right is None:
            continue
        zero = torch.zeros(())
        apart = float(((zero if found is None else found) - (zero if right is None else right)).abs().max()) / largest
        if apart > worst:
            worst, where = apart, name
    return worst, where


def _mistakes(
    model: nn.Module,
    packed: dict[str, Any],
    found: list[PackedSample],
    places: list[slice],
    together: _Run,
    single: list[_Run],
) -> list[str]:
    faults = []
    wrong = [number for number, sample in enumerate(found) if not sample.has_positions]
    if wrong:
        faults.append(_wrong_positions(wrong[-1], places, together, single))
    blind = [number for number, sample in enumerate(found) if sample.sees]
    if blind:
        who = f"sample {blind[0]} sees sample {', '.join(map(str, found[blind[0]].sees))}"
        if "attention_mask" in packed and not _sees_without_mask(model, packed, places):
            faults.append(
                f"samples see each other ({who}) because of the attention_mask: transformers tells packed samples "
                "apart by position_ids only where there is no mask; leave it out"
            )
        else:
            faults.append(
                f"samples see each other ({who}): nothing tells the attention where samples end; give position_ids "
                "that begin at 0 with each sample (with mRoPE four rows, the first of which is the text's)"
            )
    return faults


def _wrong_positions(number: int, places: list[slice], together: _Run, single: list[_Run]) -> str:
    packed, alone = together.positions, single[number].positions
    if packed is None or alone is None:
        return "packed and alone, positions reach the rotary embeddings in different ways"
    packed, alone = torch.broadcast_tensors(packed[:, places[number]], alone)
    if len(alone) > 1 and bool((packed == packed[:1]).all()) and not bool((alone == alone[:1]).all()):
        return (
            f"positions have one dimension where the model's have {len(alone)} (mRoPE): pictures of sample {number} "
            "lose their rows and columns; make the positions of each sample with the model's get_rope_index"
        )
    shift = packed - alone
    if bool((shift == shift[0, 0]).all()):
        return f"positions run on: those of sample {number} begin at {int(packed[0, 0])}, not at {int(alone[0, 0])}"
    return f"positions of sample {number} are not those that it has alone"


def _sees_without_mask(model: nn.Module, packed: dict[str, Any], places: list[slice]) -> bool:
    without = {name: value for name, value in packed.items() if name != "attention_mask"}
    return any(_seen(_run(model, without), places))
