"""The inputs of a model's stages: one microbatch of media, or one microbatch of packed text.

They are made on the host before their turn comes, with all that the stages must know to compute. A stage that asked the
device for a value would wait until the device has done everything before it.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

__all__ = [
    "EncoderBatch",
    "Exchange",
    "MediaProcessor",
    "MediumLayout",
    "Movable",
    "PixelValues",
    "SegmentEnds",
    "SharedFeatures",
    "SharedKeys",
    "TextBatch",
]


class Movable:
    """A dataclass whose tensors go to a device together, also those of tuples and of further `Movable`s in it."""

    __slots__ = ()

    def with_each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same with `change(tensor)` in the place of each tensor."""
        return replace(self, **{own.name: _changed(getattr(self, own.name), change) for own in fields(self)})

    def pin_memory(self) -> Self:
        return self.with_each(torch.Tensor.pin_memory)

    def to(self, device: torch.device) -> Self:
        """On this device. The host does not wait for copies from pinned memory."""
        return self.with_each(lambda tensor: tensor.to(device, non_blocking=True))


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Movable):
        return value.with_each(change)
    return tuple(_changed(own, change) for own in value) if type(value) is tuple else value


class SegmentEnds(Movable):
    """Where the segments of a row end, on the host and on the device.

    `ends` are the positions. `bounds` is int32 [num_segments + 1], as kernels take it: 0, and then the ends. `longest`
    is the length of the longest segment. If segments attend to tokens that other replicas have, `keys` says to which.
    It is no dataclass, since torch.compile would specialise on its values.
    """

    def __init__(self, ends: list[int], bounds: torch.Tensor | None = None, keys: "SharedKeys | None" = None) -> None:
        self.ends, self.keys = ends, keys
        self.bounds = torch.tensor([0, *ends], dtype=torch.int32) if bounds is None else bounds
        self.longest = max((end - start for start, end in itertools.pairwise([0, *ends])), default=0)

    def with_each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        return SegmentEnds(self.ends, change(self.bounds), self.keys and self.keys.with_each(change))


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange(Movable):
    """Rows of a tensor that replicas send to each other. `rows` int64 [num_sent] are those that this one sends, ordered
    by receiver; `num_sent` and `num_received` are how many go to and come from each replica of the `group`."""

    rows: torch.Tensor
    num_sent: tuple[int, ...]
    num_received: tuple[int, ...]
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedKeys(Movable):
    """What the tokens of a microbatch attend to where some of its samples are shared with other replicas.

    Queries come in `queries`: whole samples, and the runs of shares. Each attends to one segment of `keys`, with the
    causal mask at its end. `rows` int64 [num_keys] says where each key is: a token of the microbatch, or behind these a
    row that came with the `exchange`.
    """

    queries: SegmentEnds
    keys: SegmentEnds
    rows: torch.Tensor
    exchange: Exchange


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedFeatures(Movable):
    """Where features go that replicas exchange first. `rows` int64 [num_features] are among those of all encoders'
    replicas, one after the other, and behind them those that came with the `exchange`; `positions` int64 [num_features]
    are their places in the packed text."""

    exchange: Exchange
    rows: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class PixelValues(Movable):
    """What an encoder computes from for each byte of each colour: `table`, float32 [num_colours, 256], made by the
    family's image processor. In an item, `plane` bytes of one colour lie side by side, and then those of the next.

    Pixels travel to the device as bytes, a quarter of their values. Looked up there, they are the processor's own
    values, bit by bit.
    """

    table: torch.Tensor
    plane: int

    def of(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The values of items, uint8 [num_items, *item_shape], in the same shape. The table may be elsewhere."""
        table = self.table.to(pixels.device, non_blocking=True)
        num_colours, num_bytes = table.shape
        first = torch.arange(0, num_colours * num_bytes, num_bytes, dtype=torch.int32, device=pixels.device)
        place = pixels.view(-1, num_colours, self.plane) + first[:, None]
        return table.flatten().to(dtype).index_select(0, place.flatten()).view(pixels.shape)


class MediaProcessor(Protocol):
    """Turns decoded media into the items of one encoder, [num_items, *item_shape]: uint8 if there are `pixel_values`,
    and otherwise float32. Only the methods for the kinds of media that the encoder takes are needed."""

    item_shape: tuple[int, ...]
    pixel_values: PixelValues | None

    def images(self, images: list[Image.Image]) -> list[np.ndarray]:
        """The items of each of a sample's pictures."""

    def frames(self, frames: list[Image.Image], num_frames: int | None = None) -> np.ndarray:
        """The items of frames of a clip, of which `num_frames` are used in all, by default these."""

    def sound(self, samples: np.ndarray) -> np.ndarray:
        """The items of a sound, whose samples are float32 [num_samples] at 16 kHz."""

    def save(self, folder: Path) -> None:
        """Write the files of a Hugging Face processor, or this encoder's part of them, into `folder`. The files of the
        tokenizer and of the encoders before this one are already there."""


@dataclass(frozen=True, slots=True)
class MediumLayout:
    """What an encoder needs to know of one medium to arrange its output: the number of items, the original `height` and
    `width` in pixels, and the `grid` of the items (`models.ItemCount`); for a clip also the seconds between frames."""

    kind: str
    num_items: int
    height: int
    width: int
    grid: tuple[int, int, int] = (0, 0, 0)
    frame_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderBatch(Movable):
    """Media of the samples that one replica of an encoder computes for one microbatch.

    `items` is [num_items, *item_shape], and None on an encoder's later stages. With `pixel_values` they are bytes, of
    which `to` makes values. `media` holds each sample's media in order. `kept_tokens` has one number a sample: how many
    of its media tokens the LLM sees (fewer than all only if the sample is truncated). `layout` is what the family
    computes from the media for its encoder's layers (`FamilyRuntime.layouts`), and None if it computes nothing.
    """

    items: torch.Tensor | None
    media: tuple[tuple[MediumLayout, ...], ...]
    kept_tokens: tuple[int, ...]
    pixel_values: PixelValues | None = None
    layout: Movable | None = None

    def to(self, device: torch.device, dtype: torch.dtype) -> "EncoderBatch":
        """On this device, with the items in this dtype."""
        items, values = self.items, self.pixel_values
        if items is not None and values is not None:
            items, values = values.of(items.to(device, non_blocking=True), dtype), None
        elif items is not None:
            # Both at once, the host would convert into memory that is not pinned, and wait for the copy.
            items = items.to(device, non_blocking=True).to(dtype)
        layout = None if self.layout is None else self.layout.to(device)
        return replace(self, items=items, pixel_values=values, layout=layout)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextBatch(Movable):
    """The packed samples of one microbatch, or the shares of samples that this replica has.

    `token_ids` is [num_tokens]. `position_ids`, which restart at each segment, are [num_tokens], or [num_axes,
    num_tokens] for an LLM with several position axes. `segment_ends` says where each sample ends. `feature_positions`
    says where the encoders' features go: one tensor [num_features] for each replica of the first encoder, then for each
    of the second, and so on. `shared_features` says so instead where samples are shared. `target_positions`
    [num_targets] are the positions whose next token is learned, and `target_ids` [num_targets] are these next tokens.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    segment_ends: SegmentEnds
    feature_positions: tuple[torch.Tensor, ...]
    target_positions: torch.Tensor
    target_ids: torch.Tensor
    shared_features: SharedFeatures | None = None
