"""The demo's dataset with small pictures: an encoder has 4 crops of a sample in the mean, where the demo's have 12."""

from pathlib import Path

from PIL import Image

from dflop.demo import make_demo_data

__all__ = ["make_small_data"]


def make_small_data(folder: Path, num_records: int) -> None:
    """As `make_demo_data`, with no side of a picture over 120 pixels."""
    make_demo_data(folder, num_records=num_records)
    for path in [*folder.rglob("*.png"), *folder.rglob("*.jpg")]:
        with Image.open(path) as picture:
            picture.thumbnail((120, 120))
            picture.save(path)
