"""What the planner's tests share: drawn samples and a search with the hand-made costs."""

from collections.abc import Callable

import pytest

from dflop.config import Config
from dflop.costs import CostModel
from dflop.search import SearchResult, search_plans
from dflop.shapes import SampleShapes


@pytest.fixture(scope="module")
def samples(draw_samples) -> SampleShapes:
    return draw_samples(60, seed=2)


@pytest.fixture(scope="module")
def search(costs, tiny_spec, samples) -> Callable[..., SearchResult]:
    """`search(config, costs=…, samples=…, **more)`: with the hand-made costs unless told otherwise."""

    def run(
        config: Config, *, costs: CostModel = costs, samples: SampleShapes = samples, **more: object
    ) -> SearchResult:
        return search_plans(config, tiny_spec, costs, samples, **more)

    return run
