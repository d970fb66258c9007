"""The look that all pictures share: colours by what they stand for, and how numbers are written.

Colours are of Okabe and Ito's palette, which colour-blind readers can tell apart, with a shade for light and one for
dark pages. Every module has a light shade for forward and a strong one for backward, in all pictures the same.
"""

__all__ = ["MODALITY_COLOURS", "PALETTE", "PARTS", "colour", "format_count", "format_seconds", "module_colour"]

# (on light pages and in files, on dark pages)
PALETTE = {
    "page": ("#ffffff", "#15171a"),
    "panel": ("#f6f7f9", "#1f2226"),
    "ink": ("#1c1e21", "#e8eaed"),
    "muted": ("#5d646c", "#a2a9b1"),
    "line": ("#dcdfe4", "#353a40"),
    "bar": ("#9fb3c4", "#5b7288"),
    "strong": ("#b34700", "#ff9d5c"),
    "good": ("#00704f", "#4cc9a0"),
    "wait": ("#eceef1", "#2a2e33"),
    "raw": ("#b5b9be", "#646a71"),
    "measured": ("#1c1e21", "#e8eaed"),
    "predicted": ("#c75300", "#f08a3c"),
    "evaluated": ("#0072b2", "#56b4e9"),
    "vision": ("#0072b2", "#3d9bd6"),
    "vision-light": ("#8ec1e3", "#23536f"),
    "audio": ("#009e73", "#2bb892"),
    "audio-light": ("#8ad1bb", "#1c5c4b"),
    "llm": ("#c75300", "#e07a2c"),
    "llm-light": ("#f5b88a", "#7a4a26"),
    "other": ("#5d646c", "#a2a9b1"),
    "other-light": ("#b5b9be", "#4b5157"),
    "sync": ("#cc79a7", "#cc79a7"),
    "p0": ("#0072b2", "#3d9bd6"),
    "p1": ("#009e73", "#2bb892"),
    "p2": ("#56b4e9", "#7cc4ee"),
    "p3": ("#9aa1a9", "#7d858d"),
    "p4": ("#d55e00", "#e8762c"),
    "p5": ("#cc79a7", "#cc79a7"),
    "p6": ("#e0c93f", "#c9b43a"),
    "p7": ("#d4d8dd", "#3a3f45"),
}
_MODULES = ("vision", "audio", "llm")


def colour(name: str) -> str:
    """A colour of the palette as pictures name it: a variable of the page, which knows whether it is light or dark."""
    return f"var(--{name})"


def module_colour(module: str, direction: str = "backward") -> str:
    return colour((module if module in _MODULES else "other") + "-light" * (direction == "forward"))


# The parts of stacked bars, in their order.
PARTS = tuple(colour(f"p{place}") for place in range(8))

MODALITY_COLOURS = {
    "text": colour("muted"),
    "image": colour("p0"),
    "multi_image": colour("p2"),
    "video": colour("p4"),
    "audio": colour("p1"),
    "mixed": colour("p5"),
}


def format_seconds(seconds: float) -> str:
    """Seconds with three digits and their unit, such as `1.23 s` or `45.6 ms`."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    value, unit = (seconds, "s") if seconds >= 0.1 else (seconds * 1e3, "ms")
    return f"{value:#.3g} {unit}".replace(". ", " ")


def format_count(count: float) -> str:
    """A count with separators for thousands; with three digits if it is a small fraction."""
    return f"{count:,.0f}" if count >= 10 or count == round(count) else f"{count:.3g}"
