"""What of a model is trained, and what follows from that.

A config names what is frozen (`model.freeze`) and what is adapted (`model.lora`); everything else is trained. Only
this object decides what has a backward, weight gradients, moments or a sync; all other code asks it.
"""

import math
from dataclasses import dataclass
from typing import Protocol

__all__ = ["EVERYTHING", "PARTS", "Lora", "StageOfModule", "TrainedSet"]

# The parts that a stage is made of, as cost tables name them (`costs.stage_kind`). An encoder's projector is in `last`.
PARTS = ("stage", "layer", "first", "last")


class StageOfModule(Protocol):
    """A pipeline stage: its module, and whether it is the module's last, which has an encoder's projector."""

    @property
    def module(self) -> str: ...
    @property
    def is_last(self) -> bool: ...


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


@dataclass(frozen=True, slots=True)
class TrainedSet:
    """The trained part of a model. What `frozen` names, e.g. ("vision.encoder", "llm"), is not trained, and of what
    `lora` adapts its adapters alone.

    A name is a module, or `<module>.encoder`: all of an encoder but its projector.
    """

    frozen: tuple[str, ...] = ()
    lora: Lora | None = None

    def adapts(self, module: str) -> bool:
        """Whether the module's layers have adapters."""
        return self.lora is not None and ("llm" if module == "llm" else f"{module}.encoder") in self.lora.modules

    def trains(self, module: str) -> bool:
        """Whether any weight of the module has a gradient, and so moments, a master and a gradient sync."""
        return bool(self.parts(module)) or self.adapts(module)

    def parts(self, module: str) -> tuple[str, ...]:
        """The parts of the module, out of `PARTS`, whose own weights have gradients, not only their adapters'."""
        if module in self.frozen or (module == "llm" and self.adapts(module)):
            return ()
        return ("last",) if f"{module}.encoder" in self.frozen or self.adapts(module) else PARTS

    def parts_with_backward(self, module: str) -> tuple[str, ...]:
        """The parts of the module in which gradients are computed. A frozen part of an encoder has no backward, since
        nothing before it is trained; what lies behind an adapter passes gradients on, and so does a frozen LLM."""
        if module == "llm":
            return PARTS
        return ("stage", "layer", "last") if self.adapts(module) else self.parts(module)

    def parts_measured_as_trained(self, module: str) -> tuple[str, ...]:
        """The parts whose own weights have gradients while costs are measured: also those without a backward, whose
        times of backward do not count."""
        trained, with_backward = self.parts(module), self.parts_with_backward(module)
        return tuple(part for part in PARTS if part in trained or part not in with_backward)

    def measured_as(self, module: str) -> str:
        """In which way the module's costs are measured, in words: costs of one way are not those of another."""
        if self.adapts(module):
            own = self.lora
            dropout = f" with dropout {own.dropout:g}" if own.dropout else ""
            return f"adapted by LoRA of rank {own.rank}{dropout} on {', '.join(own.targets)}"
        return "frozen" if self.passes_gradients_on(module) else "trained"

    def has_backward(self, stage: StageOfModule) -> bool:
        """Whether gradients are computed in the stage."""
        parts = self.parts_with_backward(stage.module)
        return "layer" in parts or (stage.is_last and "last" in parts)

    def layers_have_backward(self, module: str) -> bool:
        """Whether gradients are computed in the module's layers."""
        return "layer" in self.parts_with_backward(module)

    def passes_gradients_on(self, module: str) -> bool:
        """Whether the module is frozen but has a backward: a frozen LLM behind a trained encoder."""
        return self.layers_have_backward(module) and not self.trains(module)


EVERYTHING = TrainedSet()
