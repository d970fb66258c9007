"""Conversations about scenes: question and answer pairs, in plain regular English.

Each `discuss_*` function takes one scene (or several pictures), a seeded `random.Random` and the number of turns
wanted, and gives at most that many turns, each on another topic. Answers follow one pattern per topic, so that a tiny
model can learn them from the picture; questions vary. An answer never names a colour that the scene does not show.
"""

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from dflop.demo.scenes import Clip, Melody, Picture

__all__ = ["Turn", "discuss_clip", "discuss_melody", "discuss_picture", "discuss_pictures"]

NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six")
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")

ASK_COLOUR = (
    "What colour is the {shape}?",
    "Which colour does the {shape} have?",
    "Name the colour of the {shape}.",
    "The {shape} is of which colour?",
    "Tell me the colour of the {shape}.",
)
ASK_COLOUR_OF_MANY = (
    "What colour are the {shapes}?",
    "Which colour do the {shapes} have?",
    "Name the colour of the {shapes}.",
    "Tell me the colour of the {shapes}.",
)
ASK_SHAPE = (
    "Which figure is this?",
    "What figure do you see?",
    "Name the figure.",
    "What is the shape of the figure?",
    "Which shape is drawn here?",
)
ASK_CAPTION = (
    "Describe the picture.",
    "What does the picture show?",
    "What do you see?",
    "Write a caption for this picture.",
    "Say in one sentence what is drawn here.",
    "Give a short description of the image.",
)
ASK_BACKGROUND = (
    "What colour is the background?",
    "Which colour does the background have?",
    "Name the colour of the background.",
    "What is the colour of the background?",
)
ASK_COUNT = (
    "How many figures are there?",
    "Count the figures.",
    "How many figures do you see?",
    "What is the number of figures in the picture?",
)
ASK_LEFT_RIGHT = (
    "What is on the {side}?",
    "Which figure is on the {side}?",
    "What do you see on the {side} side?",
    "Name the figure on the {side} with its colour.",
)
ASK_COLUMN = (
    "Name the figures from top to bottom.",
    "Which figures are on the page, from top to bottom?",
    "Read the page: which figures does it show?",
    "List all figures on this scan in order.",
)
ASK_WHICH = (
    "Which picture shows the {colour} figure?",
    "In which picture is the figure {colour}?",
    "Where is the {colour} figure?",
    "Find the picture with the {colour} figure.",
)
ASK_SAME = (
    "Do {all} pictures show the same colour?",
    "Are the figures in {all} pictures of one colour?",
    "Is the colour the same in {all} pictures?",
    "Do the figures of {all} pictures agree in colour?",
)
ASK_ORDER = (
    "Name the colours in order.",
    "List the colours from the first picture to the last.",
    "Which colours do the pictures show, in order?",
    "What are the colours of the figures, one after another?",
)
ASK_NTH = (
    "What does the {nth} picture show?",
    "Describe the {nth} picture.",
    "What do you see in the {nth} picture?",
    "Write a caption for the {nth} picture.",
)
ASK_HOW_MANY_PICTURES = (
    "How many pictures show a {shape}?",
    "In how many pictures do you see a {shape}?",
    "Count the pictures with a {shape}.",
    "What is the number of pictures that show a {shape}?",
)
ASK_MOTION = (
    "What does the {shape} do?",
    "How does the {shape} move?",
    "What happens to the {shape} in this video?",
    "Where does the {shape} go?",
    "Describe the motion of the {shape}.",
)
ASK_VIDEO = (
    "Describe the video.",
    "What happens in this clip?",
    "What do you see in the video?",
    "Write a caption for this video.",
)
ASK_RISE = (
    "Does the melody rise or fall?",
    "Do the tones go up or down?",
    "In which direction does the melody go?",
    "Is the melody rising or falling?",
)
ASK_TONES = (
    "How many tones are there?",
    "Count the tones.",
    "How many tones do you hear?",
    "What is the number of tones in the melody?",
)
ASK_REGISTER = (
    "Is the melody low or high?",
    "Are the tones low or high?",
    "Do you hear low tones or high tones?",
    "Which register is the melody in, low or high?",
)


class Turn(NamedTuple):
    """One question and its answer; media placeholders are not part of it."""

    question: str
    answer: str


def discuss_picture(picture: Picture, rng: Random, num_turns: int) -> tuple[Turn, ...]:
    """Turns about one picture; the questions depend on its layout."""
    first = picture.figures[0]
    caption = f"{_a(first.colour)} {first.shape} on {_ground(picture.background)}."
    match picture.layout:
        case "one":
            turns = [
                Turn(_pick(rng, ASK_COLOUR, shape=first.shape), f"The {first.shape} is {first.colour}."),
                Turn(_pick(rng, ASK_SHAPE), f"The figure is a {first.shape}."),
                Turn(_pick(rng, ASK_CAPTION), _sentence(caption)),
            ]
        case "row":
            shapes = first.shape + ("es" if first.shape.endswith("s") else "s")
            alike = f"{NUMBER_WORDS[len(picture.figures)]} {first.colour} {shapes}"
            turns = [
                Turn(_pick(rng, ASK_COUNT), f"There are {alike}."),
                Turn(_pick(rng, ASK_COLOUR_OF_MANY, shapes=shapes), f"The {shapes} are {first.colour}."),
                Turn(_pick(rng, ASK_CAPTION), _sentence(f"{alike} on {_ground(picture.background)}.")),
            ]
        case "pair":
            named = [f"{_a(figure.colour)} {figure.shape}" for figure in picture.figures]
            turns = [
                Turn(_pick(rng, ASK_LEFT_RIGHT, side="left"), _sentence(f"{named[0]} is on the left.")),
                Turn(_pick(rng, ASK_LEFT_RIGHT, side="right"), _sentence(f"{named[1]} is on the right.")),
                Turn(
                    _pick(rng, ASK_CAPTION),
                    _sentence(f"{named[0]} and {named[1]} on {_ground(picture.background)}."),
                ),
            ]
        case _:
            named = [f"{_a(figure.colour)} {figure.shape}" for figure in picture.figures]
            number = NUMBER_WORDS[len(named)]
            turns = [
                Turn(_pick(rng, ASK_COLUMN), f"From top to bottom: {_listed(named)}."),
                Turn(_pick(rng, ASK_COUNT), f"There are {number} figures."),
                Turn(_pick(rng, ASK_COLOUR, shape=first.shape), f"The {first.shape} is {first.colour}."),
            ]
    if not picture.ruled:
        turns.append(Turn(_pick(rng, ASK_BACKGROUND), f"The background is {picture.background}."))
    return _some(turns, rng, num_turns)


def discuss_pictures(pictures: Sequence[Picture], rng: Random, num_turns: int) -> tuple[Turn, ...]:
    """Turns that compare several pictures of one figure each."""
    figures = [picture.figures[0] for picture in pictures]
    colours = [figure.colour for figure in figures]
    count_of = Counter(colours)
    nth = rng.randrange(len(pictures))
    shape = rng.choice(figures).shape
    num_with_shape = sum(figure.shape == shape for figure in figures)
    turns = [
        Turn(_pick(rng, ASK_ORDER), f"The colours are {_listed(colours)}."),
        Turn(_pick(rng, ASK_SAME, all="both" if len(pictures) == 2 else "all"), _compare(colours)),
        Turn(
            _pick(rng, ASK_NTH, nth=ORDINALS[nth]),
            f"The {ORDINALS[nth]} picture shows {_a(colours[nth])} {figures[nth].shape}.",
        ),
        Turn(
            _pick(rng, ASK_HOW_MANY_PICTURES, shape=shape),
            _sentence(f"{NUMBER_WORDS[num_with_shape]} {'picture shows' if num_with_shape == 1 else 'pictures show'} ")
            + f"a {shape}.",
        ),
    ]
    unique = [index for index, colour in enumerate(colours) if count_of[colour] == 1]
    if unique:
        index = rng.choice(unique)
        answer = f"The {ORDINALS[index]} picture shows the {colours[index]} figure."
        turns.append(Turn(_pick(rng, ASK_WHICH, colour=colours[index]), answer))
    return _some(turns, rng, num_turns)


def discuss_clip(clip: Clip, rng: Random, num_turns: int) -> tuple[Turn, ...]:
    """Questions about motion are asked only for clips of at least 3 s: of a shorter one, a trainer that samples one
    frame a second sees too little."""
    motion = "grows" if clip.motion == "grow" else f"moves {clip.motion}"
    turns = [
        Turn(_pick(rng, ASK_COLOUR, shape=clip.shape), f"The {clip.shape} is {clip.colour}."),
        Turn(_pick(rng, ASK_SHAPE), f"The figure is a {clip.shape}."),
    ]
    if clip.seconds >= 3:
        turns.append(Turn(_pick(rng, ASK_MOTION, shape=clip.shape), f"The {clip.shape} {motion}."))
        turns.append(Turn(_pick(rng, ASK_VIDEO), _sentence(f"{_a(clip.colour)} {clip.shape} {motion}.")))
    return _some(turns, rng, num_turns)


def discuss_melody(melody: Melody, rng: Random, num_turns: int) -> tuple[Turn, ...]:
    """Turns about a melody. Its direction is asked about only if it has more than one tone."""
    num_tones = len(melody.notes)
    tones = "There is one tone." if num_tones == 1 else f"There are {NUMBER_WORDS[num_tones]} tones."
    turns = [Turn(_pick(rng, ASK_TONES), tones), Turn(_pick(rng, ASK_REGISTER), f"The melody is {melody.register}.")]
    if num_tones > 1:
        turns.append(Turn(_pick(rng, ASK_RISE), f"The melody {'rises' if melody.rises else 'falls'}."))
    return _some(turns, rng, num_turns)


def _pick(rng: Random, templates: Sequence[str], **words: str) -> str:
    return rng.choice(templates).format(**words)


def _some(turns: list[Turn], rng: Random, num_turns: int) -> tuple[Turn, ...]:
    return tuple(rng.sample(turns, min(num_turns, len(turns))))


def _compare(colours: Sequence[str]) -> str:
    if len(set(colours)) == 1:
        return f"Yes, {'both' if len(colours) == 2 else 'all'} figures are {colours[0]}."
    if len(colours) == 2:
        return f"No, one is {colours[0]} and the other is {colours[1]}."
    return "No, the colours differ."


def _a(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _ground(background: str) -> str:
    return "ruled paper" if background == "paper" else f"{_a(background)} background"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
