"""What of a model is trained, and what follows from that.

A config names what is frozen (`model.freeze`); everything else is trained. Only this object decides whether a module
has a backward, weight gradients, moments or a sync; all other code asks it.
"""

from dataclasses import dataclass

__all__ = ["EVERYTHING", "TrainedSet"]


@dataclass(frozen=True, slots=True)
class TrainedSet:
    """The trained part of a model: all of it but the modules in `frozen`, e.g. ("vision",)."""

    frozen: tuple[str, ...] = ()

    def trains(self, module: str) -> bool:
        """Whether the module's weights have gradients, and so moments, masters and a gradient sync."""
        return module not in self.frozen

    def has_backward(self, module: str) -> bool:
        """Whether gradients are computed in the module. A frozen encoder has none; a frozen LLM passes them on."""
        return module == "llm" or self.trains(module)

    def passes_gradients_on(self, module: str) -> bool:
        """Whether the module is frozen but has a backward: a frozen LLM behind a trained encoder."""
        return self.has_backward(module) and not self.trains(module)


EVERYTHING = TrainedSet()
