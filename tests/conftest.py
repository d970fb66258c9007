"""What all tests share: which files come first, how Hypothesis draws, where the data beside the checkout lies, drawn
shapes, costs that nobody measured, and runs made of both."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import made_up_costs
import numpy as np
import pytest
from hypothesis import settings
from run_folders import make_run

from dflop.costs import CostModel
from dflop.shapes import MediaSizes, SampleShapes

__all__ = ["make_run"]

# The files that take longest. They come first, so that none of them is left over for one core at the end. Those that
# start processes, and wait for them, alternate with those that do not.
_LONGEST = tuple(
    f"test_{name}.py"
    for name in (
        *("training", "compilation", "layouts", "plan_memory", "workflow", "counted", "stopping", "analytic"),
        *("fake_cuda", "service", "training_surroundings", "shapes", "links", "side_by_side", "stages", "export"),
        *("constraints", "tensor_parallel", "published_runs", "page", "reruns", "model_arithmetic", "peers"),
        *("slurm_jobs", "tables", "surroundings", "made_up_tables", "against_brute_force", "evaluation", "elsewhere"),
        *("trainer_example", "offloading", "layouts_agree", "deterministic", "packaging", "hostile_media"),
        *("kernels", "two_at_once", "step_bounds"),
    )
)


# No example fails for being slow: machines are shared. CI draws the same examples each time.
settings.register_profile("dflop", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("dflop")


gc.disable()  # until all modules are imported: these are millions of objects, and hardly any garbage


def pytest_collection_finish() -> None:
    """Tests look through nothing of the modules for garbage, and ten times more seldom than Python would."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _LONGEST.index(item.path.name) if item.path.name in _LONGEST else len(_LONGEST))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real pictures, a clip and tables of real shapes, which the repository does not hold."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the shared data folder beside the checkout")
    return folder


@pytest.fixture(scope="session")
def costs() -> CostModel:
    """Round numbers of the tiny model's order: an item weighs as much as 20 tokens, backward twice forward."""
    return made_up_costs.made_up_costs()


@pytest.fixture(scope="session")
def write_made_up_costs() -> Callable[..., None]:
    """`write_made_up_costs(path, noise=0, tp_sizes=(1,), modules=…)`, see `made_up_costs.py`."""
    return made_up_costs.write_made_up_costs


@pytest.fixture(scope="session")
def measure_as() -> Callable[..., made_up_costs.MadeUpFrames]:
    """`measure_as(model, noise=0, repeats=2, seed=0)`, see `made_up_costs.py`."""
    return made_up_costs.measure_as


@pytest.fixture(scope="session")
def draw_samples() -> Callable[..., SampleShapes]:
    """`draw_samples(num_samples, seed)`: skewed sizes, a fifth of the samples without media."""

    def draw(num_samples: int, seed: int = 0) -> SampleShapes:
        rng = np.random.default_rng(seed)
        num_items = np.minimum(1 + rng.geometric(0.12, num_samples), 37)
        num_items[rng.random(num_samples) < 0.2] = 0
        kept_vision_tokens = num_items * rng.integers(20, 40, num_samples)
        text_tokens = rng.integers(20, 300, num_samples)
        counts = np.where(num_items > 0, 1 + np.arange(num_samples) % 2, 0)
        sizes = np.column_stack([np.arange(counts.sum()) + 30, np.arange(counts.sum()) + 20, np.zeros(counts.sum())])
        return SampleShapes(
            encoders=("vision",),
            sample_id=np.array([f"s{index}" for index in range(num_samples)], dtype=object),
            source=np.full(num_samples, "drawn", dtype=object),
            row=np.arange(num_samples),
            num_items=num_items[:, None],
            kept_tokens=kept_vision_tokens[:, None],
            llm_tokens=kept_vision_tokens + text_tokens,
            target_tokens=text_tokens // 3 + 1,
            media=MediaSizes(sizes.astype(np.int32), counts),
        )

    return draw
