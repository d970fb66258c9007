"""What of a model is trained, and what follows from that.

A config names what is frozen (`model.freeze`); everything else is trained. Only this object decides what has a
backward, weight gradients, moments or a sync; all other code asks it.
"""

from dataclasses import dataclass
from typing import Protocol

__all__ = ["EVERYTHING", "PARTS", "StageOfModule", "TrainedSet"]

# The parts that a stage is made of, as cost tables name them (`costs.stage_kind`). An encoder's projector is in `last`.
PARTS = ("stage", "layer", "first", "last")


class StageOfModule(Protocol):
    """A pipeline stage: its module, and whether it is the module's last, which has an encoder's projector."""

    @property
    def module(self) -> str: ...
    @property
    def is_last(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class TrainedSet:
    """The trained part of a model: all of it but what `frozen` names, e.g. ("vision.encoder", "llm").

    A name is a module, or `<module>.encoder`: all of an encoder but its projector.
    """

    frozen: tuple[str, ...] = ()

    def trains(self, module: str) -> bool:
        """Whether any weight of the module has a gradient, and so moments, a master and a gradient sync."""
        return bool(self.parts(module))

    def parts(self, module: str) -> tuple[str, ...]:
        """The parts of the module, out of `PARTS`, whose weights have gradients."""
        if module in self.frozen:
            return ()
        return ("last",) if f"{module}.encoder" in self.frozen else PARTS

    def parts_with_backward(self, module: str) -> tuple[str, ...]:
        """The parts of the module in which gradients are computed. A frozen part of an encoder has no backward, since
        nothing before it is trained; a frozen LLM passes gradients on."""
        return PARTS if module == "llm" else self.parts(module)

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
