"""Records: the demo dataset as a list. Each record has its scenes and its conversation; nothing is drawn yet.

`imagine_records` fixes the mix of modalities and gives every record its own random stream; `manifest_entry` is a
record's LLaVA form; `conversation_texts` gives the bare text of a dataset, which is what a tokenizer is trained on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from dflop.demo.chat import chat
from dflop.demo.conversations import Turn, discuss_clip, discuss_melody, discuss_picture, discuss_pictures
from dflop.demo.scenes import (
    Clip,
    Melody,
    Picture,
    imagine_clip,
    imagine_melody,
    imagine_picture,
    imagine_small_pictures,
)

__all__ = ["MIN_RECORDS", "Record", "conversation_texts", "imagine_records", "manifest_entry"]

MIN_RECORDS = 10
# Share of each modality; single images take what is left.
SHARES = {"multi_image": 0.20, "video": 0.12, "text": 0.15, "audio": 0.08}
MEDIA_FOLDER = {"image": "images", "multi_image": "images", "video": "videos", "audio": "audio"}
PLACEHOLDER = {"image": "<image>", "multi_image": "<image>", "video": "<video>", "audio": "<audio>"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One training record; `scenes` and `turns` are in reading order."""

    id: str
    modality: str
    scenes: tuple[Picture | Clip | Melody, ...]
    turns: tuple[Turn, ...]
    opening: str

    @property
    def media_paths(self) -> tuple[str, ...]:
        """One path a scene, relative to the dataset's folder."""
        if len(self.scenes) == 1:
            return (f"{MEDIA_FOLDER[self.modality]}/{self.id}{self.scenes[0].suffix}",)
        return tuple(
            f"{MEDIA_FOLDER[self.modality]}/{self.id}-{place}{scene.suffix}"
            for place, scene in enumerate(self.scenes, start=1)
        )


def imagine_records(num_records: int, seed: int) -> list[Record]:
    """Every record of a dataset, in the order of the manifest.

    Raises:
        ValueError: for fewer than `MIN_RECORDS` records, which could not hold every modality.
    """
    if num_records < MIN_RECORDS:
        raise ValueError(f"num_records={num_records} cannot hold every modality; ask for at least {MIN_RECORDS}")
    modalities = [name for name, share in SHARES.items() for _ in range(max(1, round(share * num_records)))]
    modalities += ["image"] * (num_records - len(modalities))
    Random(f"{seed}/order").shuffle(modalities)
    return [_imagine_record(Random(f"{seed}/{index}"), index, modality) for index, modality in enumerate(modalities)]


def manifest_entry(record: Record) -> dict:
    """The record as LLaVA writes it: `image` is a string, or a list when there are several; absent for text."""
    entry: dict = {"id": record.id}
    match record.modality:
        case "image":
            entry["image"] = record.media_paths[0]
        case "multi_image":
            entry["image"] = list(record.media_paths)
        case "video" | "audio":
            entry[record.modality] = record.media_paths[0]
    entry["conversations"] = []
    for place, turn in enumerate(record.turns):
        question = record.opening.format(question=turn.question) if place == 0 else turn.question
        entry["conversations"].append({"from": "human", "value": question})
        entry["conversations"].append({"from": "gpt", "value": turn.answer})
    return entry


def conversation_texts(num_records: int, seed: int) -> Iterator[str]:
    """The questions and answers of the dataset that these arguments would draw, without media placeholders."""
    for record in imagine_records(num_records, seed):
        for turn in record.turns:
            yield turn.question
            yield turn.answer


def _imagine_record(rng: Random, index: int, modality: str) -> Record:
    num_turns = rng.choices((1, 2, 3, 4), (0.70, 0.15, 0.10, 0.05))[0]
    scenes: tuple[Picture | Clip | Melody, ...] = ()
    match modality:
        case "image":
            picture = imagine_picture(rng)
            scenes, turns = (picture,), discuss_picture(picture, rng, num_turns)
        case "multi_image":
            pictures = imagine_small_pictures(rng, rng.choices(range(2, 7), (0.42, 0.25, 0.16, 0.10, 0.07))[0])
            scenes, turns = pictures, discuss_pictures(pictures, rng, num_turns)
        case "video":
            clip = imagine_clip(rng)
            scenes, turns = (clip,), discuss_clip(clip, rng, num_turns)
        case "audio":
            melody = imagine_melody(rng)
            scenes, turns = (melody,), discuss_melody(melody, rng, num_turns)
        case _:
            turns = chat(rng, num_turns)
    opening = _opening(rng, PLACEHOLDER.get(modality, ""), len(scenes))
    return Record(id=f"{modality}-{index:06d}", modality=modality, scenes=scenes, turns=turns, opening=opening)


def _opening(rng: Random, placeholder: str, num_media: int) -> str:
    """The first turn's text, with its placeholders, as a format string for the question, which mostly comes last."""
    if num_media == 0:
        return "{question}"
    draw = rng.random()
    if draw < 0.1:
        return "{question}\n" + "\n".join([placeholder] * num_media)
    if num_media > 1 and draw < 0.3:
        return "\n".join(f"Picture {place}: {placeholder}" for place in range(1, num_media + 1)) + "\n{question}"
    return "\n".join([placeholder] * num_media) + "\n{question}"
