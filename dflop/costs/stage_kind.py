"""What a pipeline stage is to the cost model: stages of equal kind cost the same.

A stage is made of parts: what every stage has (`stage`: rotary positions, its output), its layers, and, where it
begins or ends the module, `first` (embedding; patches and positions) and `last` (norm, head and loss; projector and
token layout). Whatever is asked of a stage (seconds, bytes, forms of the loads) is the sum of that of its parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import add
from typing import TypeVar

__all__ = ["PARTS", "StageKind", "stage_kinds"]

T = TypeVar("T")

PARTS = ("stage", "layer", "first", "last")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageKind:
    """`num_layers` layers of a module on `tp` ranks, with the module's embedding (`is_first`) and head (`is_last`)."""

    module: str
    tp: int
    num_layers: int
    is_first: bool
    is_last: bool
    checkpointing: bool = False

    @classmethod
    def whole(cls, module: str, tp: int, num_layers: int, *, checkpointing: bool = False) -> "StageKind":
        """A module that is one stage."""
        ends = {"is_first": True, "is_last": True}
        return cls(module=module, tp=tp, num_layers=num_layers, checkpointing=checkpointing, **ends)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Each of `PARTS` that the stage has, and how often."""
        return _parts(self.num_layers, self.is_first, self.is_last)

    def total(self, of_part: Mapping[str, T]) -> T:
        """The sum over the stage's parts of anything that can be added and multiplied by a count: arrays of seconds or
        bytes at some loads, functions of the loads (`Coefficients`), or numbers.

        This is the one place where a stage is put together.
        """
        each = (of_part[part] if count == 1 else count * of_part[part] for part, count in self.parts)
        return reduce(add, each)


@lru_cache(maxsize=1024)
def _parts(num_layers: int, is_first: bool, is_last: bool) -> tuple[tuple[str, int], ...]:
    times = (1, num_layers, int(is_first), int(is_last))
    return tuple((part, count) for part, count in zip(PARTS, times, strict=True) if count)


def stage_kinds(module: str, tp: int, layers: Sequence[int], *, checkpointing: bool = False) -> list[StageKind]:
    """The stages of a module that is split into stages of so many layers each, in order."""
    last = len(layers) - 1
    return [
        StageKind(
            module=module,
            tp=tp,
            num_layers=count,
            is_first=stage == 0,
            is_last=stage == last,
            checkpointing=checkpointing,
        )
        for stage, count in enumerate(layers)
    ]
