"""Text-only conversations: small sums, counting, opposites, spelling, mixed colours, tables and short stories.

Most answers are one sentence; tables and stories run to about a hundred words, so that the lengths of text-only samples
spread as they do in real chat data.
"""

from collections.abc import Callable
from random import Random

from dflop.demo.conversations import Turn
from dflop.demo.scenes import COLOURS, SHAPES

__all__ = ["chat"]

OPPOSITES = (
    ("big", "small"),
    ("hot", "cold"),
    ("day", "night"),
    ("left", "right"),
    ("up", "down"),
    ("old", "young"),
    ("full", "empty"),
    ("fast", "slow"),
    ("light", "dark"),
    ("open", "closed"),
    ("loud", "quiet"),
    ("high", "low"),
)
MIXTURES = (
    ("blue", "yellow", "green"),
    ("red", "yellow", "orange"),
    ("red", "blue", "purple"),
    ("red", "white", "pink"),
    ("black", "white", "grey"),
    ("green", "blue", "cyan"),
)
WORDS = (
    "picture", "circle", "square", "triangle", "star", "window", "garden", "river", "bread", "house", "music", "train",
)  # fmt: skip
PLACES = ("in a quiet garden", "on a long sandy beach", "in an old library", "at the edge of a small town")
WEATHERS = ("The sun was warm.", "A soft rain fell.", "The wind was strong.", "Snow lay on the roofs.")
FRIENDS = ("a dog", "a bird", "a child", "an old painter", "a cat", "a sailor")
EVENTS = (
    "They walked along the river until the light was low.",
    "They counted the boats in the harbour, and there were nine.",
    "They found a box with seven keys, and not one key fitted the door.",
    "They sat under a tree and told each other what they had seen.",
    "They drew a map of the streets and hung it on a wall.",
    "They listened to a train far away, and it came closer and closer.",
    "They baked bread and gave half of it to the people next door.",
    "They looked at a picture for a long time and spoke about its colours.",
)


def chat(rng: Random, num_turns: int) -> tuple[Turn, ...]:
    """`num_turns` turns, each of another kind; at most 7.

    Raises:
        ValueError: for more turns than there are kinds.
    """
    return tuple(make_turn(rng) for make_turn in rng.sample(_KINDS, num_turns))


def _sum(rng: Random) -> Turn:
    a, b = rng.randint(1, 20), rng.randint(1, 20)
    word, result = rng.choice((("plus", a + b), ("times", a * b), ("minus", a - b)))
    if word == "minus" and result < 0:
        a, b, result = b, a, -result
    question = rng.choice(("What is {}?", "How much is {}?", "Work out {}.", "Tell me the result of {}."))
    return Turn(question.format(f"{a} {word} {b}"), f"{a} {word} {b} is {result}.")


def _count(rng: Random) -> Turn:
    start = rng.randint(1, 20)
    stop = start + rng.randint(3, 24)
    numbers = range(start, stop + 1)
    if rng.random() < 0.3:
        start, stop, numbers = stop, start, numbers[::-1]
    question = rng.choice(("Count from {} to {}.", "Please count from {} to {}.", "List the numbers from {} to {}."))
    return Turn(question.format(start, stop), ", ".join(map(str, numbers)) + ".")


def _opposite(rng: Random) -> Turn:
    pair = rng.choice(OPPOSITES)
    word, other = rng.sample(pair, 2)
    question = rng.choice(("What is the opposite of {}?", "Name the opposite of {}.", "Which word means not {}?"))
    return Turn(question.format(word), f"The opposite of {word} is {other}.")


def _spelling(rng: Random) -> Turn:
    word = rng.choice(WORDS)
    question = rng.choice(("How do you spell {}?", "Spell the word {}.", "Which letters make the word {}?"))
    return Turn(question.format(word), f"{word.capitalize()} is spelled {', '.join(word)}.")


def _mixture(rng: Random) -> Turn:
    first, second, result = rng.choice(MIXTURES)
    question = rng.choice(
        ("What do you get when you mix {} and {}?", "Which colour do {} and {} make?", "Mix {} and {}. What is it?")
    )
    return Turn(question.format(first, second), f"{first.capitalize()} and {second} make {result}.")


def _table(rng: Random) -> Turn:
    factor, rows = rng.randint(2, 12), rng.randint(5, 12)
    lines = [f"{row} times {factor} is {row * factor}." for row in range(1, rows + 1)]
    question = rng.choice(("Write the table of {} up to {} rows.", "Multiply {} by the numbers from 1 to {}."))
    return Turn(question.format(factor, rows), "\n".join(lines))


def _story(rng: Random) -> Turn:
    colour, shape, friend = rng.choice(list(COLOURS)), rng.choice(SHAPES), rng.choice(FRIENDS)
    hero = f"{colour} {shape}"
    events = rng.sample(EVENTS, rng.randint(2, 6))
    sentences = [
        f"Once there was a little {hero} that lived {rng.choice(PLACES)}.",
        rng.choice(WEATHERS),
        f"One morning the {hero} met {friend}.",
        *events,
        f"In the evening the {hero} went home and slept well.",
    ]
    question = rng.choice(
        ("Tell me a story about a little {}.", "Write a short story with a little {} in it.", "Invent a tale of a {}.")
    )
    return Turn(question.format(hero), " ".join(sentences))


_KINDS: tuple[Callable[[Random], Turn], ...] = (_sum, _count, _opposite, _spelling, _mixture, _table, _story)
