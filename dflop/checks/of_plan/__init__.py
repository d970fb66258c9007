"""The checks of a plan, one in each file: `check` takes a plan with its costs and gives the text to print.

`dflop check-plan` runs them in the order of the files' names. To add a check, add a file.
"""

from dataclasses import dataclass

from dflop.base.tables import found_in_files
from dflop.config import Config
from dflop.costs import CostModel
from dflop.plan import Plan

__all__ = ["MadeUpLoad", "PlanToCheck", "check_all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeUpLoad:
    """A load of one sample for each microbatch and replica of the LLM: `num_pictures` square pictures of `picture_side`
    pixels a side, and `text_tokens` tokens of text, all of which are learned."""

    num_pictures: int
    picture_side: int
    text_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanToCheck:
    """A plan, its costs and a load. `rank` is the rank whose memory is checked, such as 3; None: the rank with the most
    predicted memory."""

    config: Config
    plan: Plan
    costs: CostModel
    load: MadeUpLoad
    rank: int | None


def check_all(asked: PlanToCheck) -> str:
    """What every check found, with an empty line between two.

    Raises:
        UserError: for a plan that cannot be checked.
        ValueError: where a rank would wait for ever.
    """
    return "\n\n".join(check(asked) for check in found_in_files(__name__, "check").values())
