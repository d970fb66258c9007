"""Draw a `Picture` or one frame of a `Clip` with Pillow.

Plain pictures are anti-aliased RGB; ruled scans are drawn in palette mode, where a page of 1240 x 3508 pixels takes
a few kilobytes. Noise comes from a generator that the caller seeds.
"""

from math import cos, pi, sin

import numpy as np
from PIL import Image, ImageDraw

from dflop.demo.scenes import BACKGROUNDS, COLOURS, PAPER, Clip, Figure, Picture

__all__ = ["draw_clip_frame", "draw_picture"]

RULE_COLOUR = (176, 186, 206)
_RGB = {**BACKGROUNDS, **COLOURS, "paper": PAPER, "rule": RULE_COLOUR}
_PALETTE_INDEX = {name: index for index, name in enumerate(_RGB)}
# Masks are drawn this many times larger and shrunk, which smooths their edges.
_OVERSAMPLING = 2


def draw_picture(picture: Picture, noise: np.random.Generator) -> Image.Image:
    """The picture, with grain from `noise` if it has any."""
    if picture.ruled:
        return _draw_scan(picture)
    canvas = Image.new("RGB", (picture.width, picture.height), _RGB[picture.background])
    for figure in picture.figures:
        _paste(canvas, figure)
    return _with_grain(canvas, picture.grain, noise) if picture.grain else canvas


def draw_clip_frame(clip: Clip, frame: int) -> Image.Image:
    """Frame number `frame` of a clip, from 0: the figure moves or grows evenly from the first frame to the last."""
    progress = frame / max(1, clip.num_frames - 1)
    side = min(clip.width, clip.height)
    x, y, radius = clip.width // 2, clip.height // 2, round(side * 0.32)
    match clip.motion:
        case "grow":
            radius = round(side * (0.12 + 0.33 * progress))
        case "left" | "right":
            way = 1 - progress if clip.motion == "left" else progress
            x = round(radius + way * (clip.width - 2 * radius))
        case _:
            way = 1 - progress if clip.motion == "up" else progress
            y = round(radius + way * (clip.height - 2 * radius))
    canvas = Image.new("RGB", (clip.width, clip.height), _RGB[clip.background])
    _paste(canvas, Figure(shape=clip.shape, colour=clip.colour, x=x, y=y, radius=radius))
    return canvas


def _draw_scan(picture: Picture) -> Image.Image:
    page = Image.new("P", (picture.width, picture.height), _PALETTE_INDEX["paper"])
    page.putpalette([level for rgb in _RGB.values() for level in rgb])
    pen = ImageDraw.Draw(page)
    pitch = max(24, picture.width // 24)
    for y in range(2 * pitch, picture.height - pitch, pitch):
        pen.line((pitch, y, picture.width - pitch, y), fill=_PALETTE_INDEX["rule"], width=2)
    for figure in picture.figures:
        _draw_shape(
            pen,
            figure.shape,
            (figure.x, figure.y),
            figure.radius,
            fill=_PALETTE_INDEX[figure.colour],
            hole=_PALETTE_INDEX["paper"],
        )
    return page


def _paste(canvas: Image.Image, figure: Figure) -> None:
    side = 2 * figure.radius + 1
    mask = Image.new("L", (side * _OVERSAMPLING, side * _OVERSAMPLING), 0)
    centre = (mask.width // 2, mask.height // 2)
    _draw_shape(ImageDraw.Draw(mask), figure.shape, centre, figure.radius * _OVERSAMPLING, fill=255, hole=0)
    mask = mask.reduce(_OVERSAMPLING)
    canvas.paste(_RGB[figure.colour], (figure.x - figure.radius, figure.y - figure.radius), mask)


def _draw_shape(
    pen: ImageDraw.ImageDraw, shape: str, centre: tuple[int, int], radius: int, *, fill: int, hole: int
) -> None:
    """Draw in the pen's own pixel values; `hole` fills the middle of a ring."""
    x, y = centre
    match shape:
        case "circle":
            pen.circle(centre, radius, fill=fill)
        case "ring":
            pen.circle(centre, radius, fill=fill)
            pen.circle(centre, radius * 0.5, fill=hole)
        case "square":
            half = radius * 0.86
            pen.rectangle((x - half, y - half, x + half, y + half), fill=fill)
        case "cross":
            arm = radius * 0.32
            pen.rectangle((x - radius, y - arm, x + radius, y + arm), fill=fill)
            pen.rectangle((x - arm, y - radius, x + arm, y + radius), fill=fill)
        case "triangle":
            pen.polygon([(x, y - radius), (x + radius, y + 0.8 * radius), (x - radius, y + 0.8 * radius)], fill=fill)
        case "diamond":
            pen.polygon([(x, y - radius), (x + 0.7 * radius, y), (x, y + radius), (x - 0.7 * radius, y)], fill=fill)
        case "star":
            tips = [
                (x + reach * sin(pi * point / 5), y - reach * cos(pi * point / 5))
                for point, reach in zip(range(10), (radius, radius * 0.45) * 5, strict=True)
            ]
            pen.polygon(tips, fill=fill)
        case _:
            raise ValueError(f"no way to draw the shape {shape!r}")


def _with_grain(canvas: Image.Image, amplitude: int, noise: np.random.Generator) -> Image.Image:
    """Add smooth noise of at most `amplitude` grey levels, coarse enough that JPEG keeps it cheaply."""
    cell = max(2, min(canvas.size) // 120)
    coarse = noise.integers(0, 2 * amplitude, (canvas.height // cell, canvas.width // cell), dtype=np.uint8)
    grain = Image.fromarray(coarse).resize(canvas.size, Image.Resampling.BILINEAR)
    levels = np.asarray(canvas).astype(np.int16) + np.asarray(grain, dtype=np.int16)[..., None] - amplitude
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8))
