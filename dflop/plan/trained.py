"""What of a model is trained, and what follows from that.

A config lists trained parts in `model.train`, frozen parts in `model.freeze` and adapted parts in `model.lora`.
`TrainedSet` decides from these what has a backward, weight gradients, moments or a sync; all other code asks it.

Parameters have plain names, the same for all families: `llm.embeddings…`, `llm.layers.3.self_attn.q_proj.weight`,
`llm.norm…`, `llm.head…`, `vision.encoder.embeddings…`, `vision.encoder.layers.3…`, `vision.projector…`. What is behind
a layer's number is named as in the checkpoint (`models.stages.Stage.plain_name`). A pattern names all that lies under
what it matches: `llm` is the whole LLM, `llm.layers.[20-27]` eight layers, `*norm*` all norms. `encoder` and
`projector` are those of all encoders.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple, Protocol

__all__ = [
    *("EVERYTHING", "FROZEN", "PARTS", "SOME", "WHOLE", "Lora", "StageOfModule", "StageWays", "TrainedSet", "Ways"),
    *("expanded", "matches", "may_match", "names_of"),
]

# The parts that a stage is made of, as cost tables name them (`costs.stage_kind`). An encoder's projector is in `last`.
PARTS = ("stage", "layer", "first", "last")
# How a unit is trained: all its parameters, some or none. The embeddings, each layer, and the head are units.
WHOLE, SOME, FROZEN = "whole", "some", "frozen"
_NUMBERS = re.compile(r"\[(\d+)-(\d+)\]")
# The most layers that a range such as [20-27] may stand for.
_MOST_NUMBERS = 1000


class StageOfModule(Protocol):
    """A pipeline stage: its module, and whether it is the module's last, which has an encoder's projector."""

    @property
    def module(self) -> str: ...
    @property
    def is_last(self) -> bool: ...


class _Module(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def num_layers(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """Low-rank adapters of linear layers (`models.lora`): of the layers of `modules`, e.g. ("llm", "vision.encoder"),
    those whose names match one of the patterns `targets`."""

    modules: tuple[str, ...]
    targets: tuple[str, ...]
    rank: int
    alpha: float
    dropout: float
    rslora: bool

    @property
    def scaling(self) -> float:
        """By what an adapter's product is multiplied. Source of rsLoRA: Kalajdzievski, "A rank stabilization scaling
        factor for fine-tuning with LoRA", 2023."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class StageWays(NamedTuple):
    """How the parts of a stage are trained: `first` and `last`, if it has them, and its layers, of which `num_frozen`
    and `num_in_part` are not whole. The first `num_still` layers and the parts in `still` have no backward. `passing`
    are the places of frozen layers among those behind, in a module whose layers are not all frozen there."""

    first: str = WHOLE
    last: str = WHOLE
    num_frozen: int = 0
    num_in_part: int = 0
    num_still: int = 0
    still: tuple[str, ...] = ()
    passing: tuple[int, ...] = ()


class Ways(NamedTuple):
    """How a module's units are trained, in the order of a forward: `WHOLE`, `SOME` or `FROZEN`.

    Gradients are computed in the units from index `reach` of `[first, *layers, last]` on.
    """

    first: str
    layers: tuple[str, ...]
    last: str
    reach: int

    @property
    def num_still(self) -> int:
        """How many layers, from the first on, have no backward."""
        return min(max(0, self.reach - 1), len(self.layers))

    def within(self, layers: range) -> StageWays:
        """Those of the stage with these layers."""
        own = self.layers[layers.start : layers.stop]
        num_still = min(max(0, self.num_still - layers.start), len(layers))
        still = ["stage"] * (num_still == len(layers)) + ["first"] * (self.reach > 0)
        still += ["last"] * (self.reach > len(self.layers) + 1)
        num_frozen, passing = own.count(FROZEN), ()
        if num_frozen and {*self.layers[self.num_still :]} != {FROZEN}:
            passing = tuple(place for place, way in enumerate(own[num_still:]) if way == FROZEN)
        return StageWays(self.first, self.last, num_frozen, own.count(SOME), num_still, tuple(still), passing)

    @property
    def has_passing(self) -> bool:
        """Whether there are frozen layers among trained ones with a backward."""
        return bool(self.within(range(len(self.layers))).passing)

    @property
    def measured_layer(self) -> int:
        """The layer whose costs stand for all layers, e.g. 20 where layers 20 to 27 are trained: the first one that is
        trained whole, else in part, else the first with a backward, else 0."""
        order = (WHOLE, SOME, FROZEN)
        return min(range(self.num_still, len(self.layers)), key=lambda at: order.index(self.layers[at]), default=0)

    @property
    def partial_layer(self) -> int | None:
        """The first of the layers that are trained in part; it stands for all of them."""
        return next((at for at, way in enumerate(self.layers) if way == SOME), None)


@dataclass(frozen=True, slots=True)
class TrainedSet:
    """The trained parameters of a model: those that `named` matches (all, if it is empty), without those that `frozen`
    matches. With `lora`, adapters are trained in place of the weights of the layers that they adapt.

    `modules` are the model's with their numbers of layers (`among`). Where they are not known, an encoder that is not
    named is taken to be there, and gradients to be passed on to it.
    """

    frozen: tuple[str, ...] = ()
    lora: Lora | None = None
    named: tuple[str, ...] = ()
    modules: tuple[tuple[str, int], ...] = ()

    def among(self, modules: Iterable[_Module]) -> "TrainedSet":
        """The same of a model with these modules."""
        return replace(self, modules=tuple((own.name, own.num_layers) for own in modules))

    def adapts(self, module: str) -> bool:
        """Whether the module's layers have adapters."""
        return self.lora is not None and _root(module) in self.lora.modules

    def includes(self, name: str) -> bool:
        """Whether the parameter with this plain name, which is no adapter's, is trained."""
        return _way_of(*_patterns(self), name) == WHOLE

    def trains(self, module: str) -> bool:
        """Whether any weight of the module has a gradient, and so moments, a master and a gradient sync."""
        ways = self.ways(module)
        return {ways.first, *ways.layers, ways.last} != {FROZEN}

    def trains_weights(self, module: str) -> bool:
        """Whether any of the module's own weights has a gradient, not only its adapters'."""
        return any(_way_of(*_patterns(self), name) != FROZEN for name in _names_of_all(module))

    def ways(self, module: str, num_layers: int | None = None) -> Ways:
        """How the units of a module with so many layers are trained. Without a number, and where `modules` do not give
        it, one layer stands for all."""
        return _ways(self, module, num_layers or dict(self.modules).get(module))

    def has_backward(self, stage: StageOfModule) -> bool:
        """Whether gradients may be computed in the stage. An LLM has a backward in all of its stages: those before the
        first trained layer give nothing back, and take no time for it."""
        return _has_backward(self, stage.module, stage.is_last)

    def gives_gradients_to(self, module: str, layer: int) -> bool:
        """Whether anything before this layer of the module is trained, so that the layer's input has a gradient."""
        return self.ways(module).reach <= layer

    def is_measured_as_trained(self, module: str, name: str) -> bool:
        """Whether a parameter of this plain name has a gradient while the module's costs are measured. The layers that
        are measured stand for `Ways.measured_layer`. Where there is no backward, its times do not count, and all is
        trained."""
        ways = self.ways(module)
        layers = f"{_root(module)}.layers."
        if not name.startswith(layers):
            is_first = name.startswith(f"{_root(module)}.embeddings.")
            return (ways.reach > 0 if is_first else ways.reach > len(ways.layers) + 1) or self.includes(name)
        return ways.num_still == len(ways.layers) or self.includes(_in_layer(layers, name, ways.measured_layer))

    def is_trained_in_part(self, module: str, name: str) -> bool:
        """Whether a parameter of this plain name is trained and belongs to a unit that is trained in part. Its layer
        stands for the first of those trained in part."""
        ways, layers = self.ways(module), f"{_root(module)}.layers."
        if name.startswith(layers):
            partial = ways.partial_layer
            return partial is not None and self.includes(_in_layer(layers, name, partial))
        way = ways.first if name.startswith(f"{_root(module)}.embeddings.") else ways.last
        return way == SOME and self.includes(name)

    def measured_modules(self) -> list[str] | None:
        """The frozen modules that are measured passing gradients on, if all modules are measured as wholes: trained,
        frozen, or with adapters. Else None, and costs depend on what is named."""
        words = {name: self.measured_as(name) for name, _ in self.modules}
        are_whole = all(own in ("trained", "frozen") or own == self._adapted for own in words.values())
        return [name for name, own in words.items() if own == "frozen"] if are_whole else None

    @property
    def _adapted(self) -> str:
        """In words, that a module's layers have adapters."""
        own = self.lora
        if own is None:
            return ""
        dropout = f" with dropout {own.dropout:g}" if own.dropout else ""
        return f"adapted by LoRA of rank {own.rank}{dropout} on {', '.join(own.targets)}"

    def measured_as(self, module: str) -> str:
        """In which way the module's costs are measured, in words: costs of one way are not those of another."""
        ways = self.ways(module)
        layer = WHOLE if ways.num_still == len(ways.layers) else ways.layers[ways.measured_layer]
        ends = [
            WHOLE if ways.reach > 0 else ways.first,
            WHOLE if ways.reach > len(ways.layers) + 1 else ways.last,
        ]
        if self.adapts(module):
            words = self._adapted
        else:
            words = {WHOLE: "trained", SOME: "trained in part", FROZEN: "frozen"}[layer]
        usual = {WHOLE: WHOLE, FROZEN: FROZEN}.get(layer, FROZEN if module == "llm" else WHOLE)
        for where, way in zip(("beginning", "end"), ends, strict=True):
            if way != usual and (where, way) != ("beginning", WHOLE if ways.reach > 0 else ""):
                words += f", its {where} {way}"
        if SOME in (*ends, *(() if self.adapts(module) else ways.layers)):
            words += f" (train {', '.join(self.named) or 'all'}; freeze {', '.join(self.frozen) or 'nothing'})"
        return words


EVERYTHING = TrainedSet()


def expanded(pattern: str) -> Iterator[str]:
    """The pattern with each of its ranges, such as [20-27], replaced by a number: one pattern for each number."""
    if not (found := _NUMBERS.search(pattern)):
        yield pattern
        return
    for number in range(int(found[1]), min(int(found[2]), int(found[1]) + _MOST_NUMBERS) + 1):
        yield from expanded(f"{pattern[: found.start()]}{number}{pattern[found.end() :]}")


def names_of(modules: Iterable[_Module]) -> list[str]:
    """Names of all units of these modules: all parameters lie under one of them."""
    names = []
    for own in modules:
        first, layers, *last = _names_of_all(own.name)
        names += [first, *(f"{layers}.{at}" for at in range(own.num_layers)), *last]
    return names


def may_match(pattern: str, name: str) -> bool:
    """Whether a pattern may name something that lies under this name."""
    return _covered(tuple(expanded(pattern)), name) != FROZEN


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern names the parameter with this plain name, or something that it lies under."""
    return _covered(tuple(expanded(pattern)), name) == WHOLE


@lru_cache(maxsize=1024)
def _patterns(trained: TrainedSet) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is named and what is frozen, without ranges. Adapters take the place of their layers' weights, and those of
    an LLM also of its ends, unless these are named."""
    adapted = trained.lora.modules if trained.lora else ()
    frozen = [*trained.frozen, *(f"{name}.layers" for name in adapted), *(() if trained.named else adapted)]
    named, without = ([own for pattern in some for own in expanded(pattern)] for some in (trained.named, frozen))
    return tuple(named), tuple(without)


@lru_cache(maxsize=1024)
def _ways(trained: TrainedSet, module: str, num_layers: int | None) -> Ways:
    root, patterns = _root(module), _patterns(trained)

    def of(*names: str) -> str:
        found = {_way_of(*patterns, name) for name in names}
        return found.pop() if len(found) == 1 else SOME

    names = [f"{root}.layers"] if num_layers is None else [f"{root}.layers.{at}" for at in range(num_layers)]
    layers = [of(name) for name in names]
    if trained.adapts(module):
        layers = [SOME] * len(layers)
    ends = ("llm.norm", "llm.head") if module == "llm" else (f"{module}.projector",)
    units = [of(f"{root}.embeddings"), *layers, of(*ends)]
    reach = next((at for at, way in enumerate(units) if way != FROZEN), len(units))
    encoders = [name for name, _ in trained.modules if name != "llm"]
    if module == "llm" and (any(map(trained.trains, encoders)) or not trained.modules):
        reach = 0
    return Ways(units[0], tuple(layers), units[-1], reach)


@lru_cache(maxsize=1024)
def _has_backward(trained: TrainedSet, module: str, is_last: bool) -> bool:
    """`TrainedSet.has_backward` of a stage of this module; `is_last` is whether it is the module's last."""
    if module == "llm" or trained.adapts(module) or (is_last and trained.trains_weights(module)):
        return True
    names = (f"{_root(module)}.embeddings", f"{_root(module)}.layers")
    return any(_way_of(*_patterns(trained), name) != FROZEN for name in names)


@lru_cache(maxsize=65536)
def _way_of(named: tuple[str, ...], frozen: tuple[str, ...], name: str) -> str:
    """How what lies under a name is trained."""
    is_named, is_frozen = _covered(named, name) if named else WHOLE, _covered(frozen, name)
    if is_frozen == WHOLE or is_named == FROZEN:
        return FROZEN
    return WHOLE if (is_named, is_frozen) == (WHOLE, FROZEN) else SOME


def _covered(patterns: Iterable[str], name: str) -> str:
    """Whether one of the patterns covers a name, with all that lies under it; may cover some of that; or none.

    What lies under a name is not known here. So a pattern that begins with `*` may cover some of everything.
    """
    names = [name]
    if not name.startswith("llm"):
        names.append(name.partition(".")[2])  # `projector` is that of any encoder
    way = FROZEN
    for pattern in patterns:
        if any(fnmatchcase(own, pattern) or fnmatchcase(own, f"{pattern}.*") for own in names):
            return WHOLE
        starts = [pattern[:end] for end in range(1, len(pattern) + 1)]
        if any(fnmatchcase(f"{own}.", start) for own in names for start in starts):
            way = SOME
    return way


def _names_of_all(module: str) -> tuple[str, ...]:
    """Names that all parameters of a module lie under."""
    root = _root(module)
    ends = ("llm.norm", "llm.head") if module == "llm" else (f"{module}.projector",)
    return f"{root}.embeddings", f"{root}.layers", *ends


def _root(module: str) -> str:
    """What names of a module's layers begin with."""
    return "llm" if module == "llm" else f"{module}.encoder"


def _in_layer(layers: str, name: str, number: int) -> str:
    """The name with another number of its layer; `layers` is what stands before the number."""
    return f"{layers}{number}.{name.removeprefix(layers).partition('.')[2]}"
