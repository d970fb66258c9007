"""Scenes: what the demo's pictures, clips and melodies show, before anything is drawn.

Each `imagine_*` function takes a seeded `random.Random` and returns a frozen description that holds every number
needed to draw it. Conversations are written from these descriptions (`conversations.py`) and files are drawn from
them (`media.py`), so an answer and its pixels cannot disagree, and the text can be had without drawing.
"""

import math
from dataclasses import dataclass
from random import Random

__all__ = [
    "BACKGROUNDS",
    "COLOURS",
    "SHAPES",
    "Clip",
    "Figure",
    "Melody",
    "Picture",
    "imagine_clip",
    "imagine_melody",
    "imagine_picture",
    "imagine_small_pictures",
]

Rgb = tuple[int, int, int]

SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross", "ring")
COLOURS: dict[str, Rgb] = {
    "red": (214, 30, 36),
    "orange": (250, 140, 10),
    "yellow": (250, 226, 30),
    "green": (30, 150, 60),
    "cyan": (60, 210, 225),
    "blue": (30, 70, 210),
    "purple": (120, 40, 150),
    "pink": (245, 130, 190),
}
BACKGROUNDS: dict[str, Rgb] = {"white": (255, 255, 255), "grey": (168, 168, 168), "black": (16, 16, 16)}
PAPER: Rgb = (226, 224, 218)

# The formats of single pictures with their shares, as in a LLaVA mix.
FORMATS = (("icon", 0.20), ("web", 0.52), ("banner", 0.09), ("scan", 0.10), ("photo", 0.09))
ICON_SIDES = (32, 40, 48, 64, 64, 72, 96, 128)
WEB_SIZES = (
    (640, 480),
    (640, 480),
    (640, 427),
    (640, 426),
    (500, 375),
    (612, 612),
    (480, 360),
    (800, 600),
    (1024, 768),
)
BANNER_SIZES = ((1200, 180), (970, 250), (728, 90), (900, 200), (468, 60))
SCAN_SIZES = ((800, 2200), (850, 1100), (1240, 1754), (1000, 2600), (1240, 3508))
PHOTO_SIZES = ((1920, 1080), (1600, 1200), (2048, 1365), (1080, 1920))
THUMBNAIL_SIZES = ((320, 240), (240, 320), (200, 200), (256, 192), (336, 336))
CLIP_SIZES = ((96, 64), (128, 96), (160, 120), (192, 108), (240, 180), (320, 240))

# Minor thirds apart, so that neighbours can be told even when a tone lasts a fifth of a second.
LOW_NOTES = range(40, 61, 3)
HIGH_NOTES = range(72, 94, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One coloured figure; `x`, `y` are its centre and `radius` its half width, in pixels."""

    shape: str
    colour: str
    x: int
    y: int
    radius: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """One still picture. `layout` says how the figures stand: `one`, `row` (alike), `pair` (left, right), `column`.

    `grain` is the amplitude of the noise, in grey levels; `ruled` pictures are scans of lined paper.
    """

    width: int
    height: int
    suffix: str
    layout: str
    background: str
    figures: tuple[Figure, ...]
    grain: int = 0
    ruled: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """One figure that moves across the frame, or grows, at a steady pace; `motion` is left, right, up, down or grow."""

    width: int
    height: int
    fps: int
    num_frames: int
    background: str
    shape: str
    colour: str
    motion: str
    suffix: str = ".mp4"

    @property
    def seconds(self) -> float:
        return self.num_frames / self.fps


@dataclass(frozen=True, kw_only=True, slots=True)
class Melody:
    """Tones of equal length, as MIDI note numbers, strictly rising or falling; `register` is low or high for all."""

    notes: tuple[int, ...]
    seconds: float
    register: str
    suffix: str = ".wav"

    @property
    def rises(self) -> bool:
        assert len(self.notes) > 1, "a single tone neither rises nor falls"
        return self.notes[-1] > self.notes[0]


def imagine_picture(rng: Random) -> Picture:
    """A single picture of one of `FORMATS`, from 32-pixel icons to 1240 x 3508 scans."""
    formats, shares = zip(*FORMATS, strict=True)
    match rng.choices(formats, shares)[0]:
        case "icon":
            return _lone_figure(rng, _icon_size(rng), ".png")
        case "web":
            size = _web_size(rng)
            if rng.random() < 0.7:
                return _lone_figure(rng, size, ".jpg", grain=rng.choice((0, 0, 6)))
            return _row_or_pair(rng, size, ".jpg")
        case "banner":
            return _row_or_pair(rng, rng.choice(BANNER_SIZES), ".png")
        case "scan":
            return _scan(rng)
        case _:
            return _lone_figure(rng, rng.choice(PHOTO_SIZES), ".jpg", grain=8)


def imagine_small_pictures(rng: Random, num_pictures: int) -> tuple[Picture, ...]:
    """Pictures of one figure each, for one record: small or medium, because there are several.

    In a third of the cases all figures have one colour, so that both answers to questions of likeness occur.
    """
    shared_colour = rng.choice(list(COLOURS)) if rng.random() < 1 / 3 else None
    pictures = []
    for _ in range(num_pictures):
        draw = rng.random()
        if draw < 0.45:
            size, suffix = _icon_size(rng), ".png"
        elif draw < 0.85:
            size, suffix = rng.choice(THUMBNAIL_SIZES), ".png"
        else:
            size, suffix = _web_size(rng), ".jpg"
        pictures.append(_lone_figure(rng, size, suffix, colour=shared_colour))
    return tuple(pictures)


def imagine_clip(rng: Random) -> Clip:
    """A clip of 1 to 30 s with a heavy tail: half of the clips are shorter than 4 s."""
    width, height = rng.choice(CLIP_SIZES)
    fps = rng.randint(8, 15)
    seconds = min(30.0, max(1.0, rng.lognormvariate(1.3, 0.85)))
    colour = rng.choice(list(COLOURS))
    return Clip(
        width=width,
        height=height,
        fps=fps,
        num_frames=min(30 * fps, max(fps, round(seconds * fps))),
        background=_background_for(rng, colour),
        shape=rng.choice(SHAPES),
        colour=colour,
        motion=rng.choice(("left", "right", "up", "down", "grow")),
    )


def imagine_melody(rng: Random) -> Melody:
    """A melody of one to five tones in 0.5 to 12 s; a tone lasts at least a fifth of a second."""
    num_tones = rng.randint(1, 5)
    register = rng.choice(("low", "high"))
    notes = sorted(rng.sample(LOW_NOTES if register == "low" else HIGH_NOTES, num_tones), reverse=rng.random() < 0.5)
    seconds = min(12.0, max(0.5, 0.2 * num_tones, rng.lognormvariate(0.7, 0.8)))
    return Melody(notes=tuple(notes), seconds=round(seconds, 2), register=register)


def _icon_size(rng: Random) -> tuple[int, int]:
    side = rng.choice(ICON_SIDES)
    return side, side if rng.random() < 0.8 else max(32, side * 3 // 4)


def _web_size(rng: Random) -> tuple[int, int]:
    width, height = rng.choice(WEB_SIZES)
    height += rng.choice((0, 0, 0, -13, -1, 5, 20))
    return (height, width) if rng.random() < 0.4 else (width, height)


def _background_for(rng: Random, *colours: str) -> str:
    """A background that none of the colours melts into: mostly white, sometimes one of the other colours."""
    name = rng.choices(["white", "grey", "black", rng.choice(list(COLOURS))], [0.5, 0.15, 0.15, 0.2])[0]
    rgb = {**BACKGROUNDS, **COLOURS}[name]
    if any(math.dist(rgb, COLOURS[colour]) < 130 for colour in colours):
        return "black" if name == "white" else "white"
    return name


def _lone_figure(
    rng: Random, size: tuple[int, int], suffix: str, *, grain: int = 0, colour: str | None = None
) -> Picture:
    """One figure that fills most of the picture, so that it survives shrinking to a few dozen pixels."""
    width, height = size
    colour = colour or rng.choice(list(COLOURS))
    radius = int(min(size) * rng.uniform(0.30, 0.46))
    figure = Figure(
        shape=rng.choice(SHAPES),
        colour=colour,
        x=rng.randint(radius, width - radius),
        y=rng.randint(radius, height - radius),
        radius=radius,
    )
    background = _background_for(rng, colour)
    return Picture(
        width=width, height=height, suffix=suffix, layout="one", background=background, figures=(figure,), grain=grain
    )


def _row_or_pair(rng: Random, size: tuple[int, int], suffix: str) -> Picture:
    """Figures side by side: two to five alike, or two that differ in colour and shape."""
    width, height = size
    alike = rng.random() < 0.6
    num_figures = rng.randint(2, 5) if alike else 2
    colours = [rng.choice(list(COLOURS))] * num_figures if alike else rng.sample(list(COLOURS), 2)
    shapes = [rng.choice(SHAPES)] * num_figures if alike else rng.sample(SHAPES, 2)
    pitch = width / num_figures
    radius = int(min(height, pitch) * rng.uniform(0.38, 0.44))
    figures = tuple(
        Figure(shape=shape, colour=colour, x=int(pitch * (place + 0.5)), y=height // 2, radius=radius)
        for place, (shape, colour) in enumerate(zip(shapes, colours, strict=True))
    )
    return Picture(
        width=width,
        height=height,
        suffix=suffix,
        layout="row" if alike else "pair",
        background=_background_for(rng, *colours),
        figures=figures,
    )


def _scan(rng: Random) -> Picture:
    """A page of ruled grey paper with one to four different figures, one under another."""
    width, height = rng.choice(SCAN_SIZES)
    num_figures = rng.randint(1, min(4, 2 * height // width))
    colours, shapes = rng.sample(list(COLOURS), num_figures), rng.sample(SHAPES, num_figures)
    pitch = height / num_figures
    radius = int(min(width, pitch) * rng.uniform(0.36, 0.44))
    figures = tuple(
        Figure(
            shape=shape,
            colour=colour,
            x=rng.randint(radius, width - radius),
            y=int(pitch * (place + 0.5)),
            radius=radius,
        )
        for place, (shape, colour) in enumerate(zip(shapes, colours, strict=True))
    )
    layout = "one" if num_figures == 1 else "column"
    return Picture(
        width=width, height=height, suffix=".png", layout=layout, background="paper", figures=figures, ruled=True
    )
