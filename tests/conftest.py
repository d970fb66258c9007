"""What all tests share: where the data beside the checkout lies."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real pictures, a clip and tables of real shapes, which the repository does not hold."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the shared data folder beside the checkout")
    return folder
