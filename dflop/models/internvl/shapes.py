"""InternVL's shape rules: from the size of a picture or clip to tiles and tokens.

A picture is stretched over the grid of tiles that is closest to its aspect ratio, however few pixels it
has. If the grid has more than one tile, a tile with the whole picture follows. The largest allowed number of
tiles is divided among the pictures of a sample. A frame is one tile, and every tile has the same number of
tokens. The tests compare every number with transformers' own processor and model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dflop.config import AudioConfig
from dflop.models.audio import whisper_audio
from dflop.models.spec import ItemCount, ShapeRules

__all__ = ["InternvlShapes"]


@dataclass(frozen=True, kw_only=True)
class InternvlShapes(ShapeRules):
    """The rules for one encoder resolution.

    A grid has `min_tiles` to `max_tiles` tiles, without the tile of the whole picture. Pixel shuffle reduces the number
    of patches on each side of a tile by `downsample_ratio`.
    """

    image_size: int
    patch_size: int
    downsample_ratio: float
    min_tiles: int
    max_tiles: int

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return ("<img>", "</img>")

    @property
    def tokens_per_tile(self) -> int:
        """Tokens of a tile in the LLM. The encoder computes on `1 / downsample_ratio**2` times as many patches, and on
        a class token."""
        return int(self.image_size // self.patch_size * self.downsample_ratio) ** 2

    def image(self, width: int, height: int, num_images: int) -> ItemCount:
        most = self.most_tiles_of_each(num_images)
        return self._tiles(_num_tiles(width, height, self.image_size, self.min_tiles, most))

    def most_tiles_of_each(self, num_images: int) -> int:
        """The largest number of tiles of each of a sample's pictures. InternVL's training code divides `max_tiles`
        among them; transformers' processor leaves that to its caller."""
        return max(1, self.max_tiles // num_images)

    def video(self, num_frames: int, width: int, height: int) -> ItemCount:
        return self._tiles(num_frames)

    def audio(self, seconds: float, audio: AudioConfig) -> ItemCount:
        return whisper_audio(seconds, audio)

    def placeholder(self, kind: str) -> str:
        return f"<{kind}>" if kind == "audio" else "<IMG_CONTEXT>"

    def in_text(self, kind: str, count: ItemCount, times_s: Sequence[float] = ()) -> str:
        if kind == "audio":
            return self.placeholder(kind)
        tile = f"<img>{self.placeholder(kind)}</img>"
        if kind == "image":
            return tile
        return "\n".join(f"Frame{number}: {tile}" for number in range(1, count.num_items + 1))

    def _tiles(self, num_tiles: int) -> ItemCount:
        return ItemCount(num_tiles, num_tiles * self.tokens_per_tile)


@lru_cache(maxsize=1 << 16)
def _num_tiles(width: int, height: int, image_size: int, min_tiles: int, max_tiles: int) -> int:
    """Tiles of the grid that is closest to the picture's aspect ratio, and one more if it has several.

    Of equally close grids, the largest is taken of those whose area is less than twice the picture's, or else the
    smallest of all.
    """
    grids = _grids(min_tiles, max_tiles)
    if not grids:
        return 1
    distances = [abs(width / height - columns / rows) for columns, rows in grids]
    closest = min(distances)
    tied = [columns * rows for (columns, rows), far in zip(grids, distances, strict=True) if far == closest]
    covered = [num_tiles for num_tiles in tied if 2 * width * height > num_tiles * image_size**2]
    num_tiles = max(covered, default=min(tied))
    return num_tiles + 1 if num_tiles > 1 else 1


@lru_cache(maxsize=256)
def _grids(min_tiles: int, max_tiles: int) -> tuple[tuple[int, int], ...]:
    """All grids (columns, rows) of `min_tiles` to `max_tiles` tiles."""
    return tuple(
        (columns, rows)
        for columns in range(1, max_tiles + 1)
        for rows in range(1, max_tiles // columns + 1)
        if columns * rows >= min_tiles
    )
