"""A rank's part of a checkpoint's tensors, for `torch.distributed.checkpoint` to write and to read.

A checkpoint has each tensor as a whole, in blocks that ranks wrote. `model/NAME` is a parameter (the optimiser's master
of it, if it is trained), and `optimizer/NAME/exp_avg` is one of AdamW's moments. All are vectors, or matrices [rows,
everything else]. What a rank has of a tensor (the part of its shard that this replica updates) is one block or a few.
So a reader can fill its own blocks from any others, in the precision in which it holds them.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dflop.base import UserError
from dflop.models.tensor_group import Shard
from dflop.train.adamw import Piece
from dflop.train.checkpoint_index import IndexReader

__all__ = ["Part", "load_tensors", "save_tensors"]

# The most bytes of a block. A reader reads whole blocks, although it may need little of them.
_BLOCK_BYTES = 32 * 2**20


class Owned(Protocol):
    """An optimiser, or a copy of its state: it gives the pieces of a parameter that this replica holds."""

    def pieces(self, parameter: torch.Tensor) -> list[Piece]: ...


class Part(Protocol):
    """What is saved of one stage.

    - `parameters`: by their names in the whole model.
    - `shards`: which part of a parameter this rank and its replicas have, if they do not have the whole.
    - `optimizer`: holds this replica's pieces of the parameters.
    - `written_elsewhere`: names of parameters that another part writes.
    """

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def shards(self) -> Mapping[str, Shard]: ...

    @property
    def optimizer(self) -> Owned: ...

    @property
    def written_elsewhere(self) -> Collection[str]: ...


class _Block(NamedTuple):
    """A block `values` of the tensor `name` of shape `whole`, which begins at index `start` in each dimension."""

    name: str
    values: torch.Tensor
    start: torch.Size
    whole: torch.Size

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(self.start, self.values.shape)


def save_tensors(folder: Path, parts: Sequence[Part], group: dist.ProcessGroup | None) -> None:
    """Write what the parts of all ranks hold, each block once; every rank must call this. Ranks communicate over
    `group`. The values must be on the CPU: nothing is asked of a GPU, on which a thread of its own has no device."""
    blocks = (block for part in parts for block in _blocks(part, part.parameters.keys() - set(part.written_elsewhere)))
    # By default, torch's writer copies blocks ahead on the GPU's stream, and waits for all that stands there.
    writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
    dcp.save({}, storage_writer=writer, planner=_SavePlanner(blocks), process_group=group)


def load_tensors(folder: Path, parts: Sequence[Part], group: dist.ProcessGroup | None = None) -> None:
    """Read what the parts hold, in place; every rank must call this. Ranks communicate over `group`.

    Raises:
        UserError: when the checkpoint lacks values that this rank needs, its index is refused (`checkpoint_index`), or
            a tensor is not where the index says.
    """
    blocks = [block for part in parts for block in _blocks(part, part.parameters)]
    reader = IndexReader(folder)
    planner = _LoadPlanner(blocks, _reads(reader, blocks))
    try:
        dcp.load({}, storage_reader=reader, planner=planner, process_group=group)
    except dcp.api.CheckpointException as error:  # raised on all ranks, for what reading has raised on some
        rank, (why, _) = min(error.failures.items())
        raise UserError(
            f"{folder} cannot be read on rank {rank} ({type(why).__name__}: {str(why).partition(chr(10))[0]}); if that "
            "stays so, delete it, and training goes on from the checkpoint before"
        ) from None


class _SavePlanner(dcp.DefaultSavePlanner):
    """Plans the writing of a rank's blocks. If several ranks have the same block, torch's planner keeps one of them."""

    def __init__(self, blocks: Iterator[_Block]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._blocks = {(block.name, block.start): block for block in blocks}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(block.name, block.start),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        block.chunk, TensorProperties.create_from_tensor(block.values), block.whole
                    ),
                )
                for block in self._blocks.values()
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._blocks[index.fqn, index.offset].values


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def __init__(self, blocks: Sequence[_Block], reads: list[ReadItem]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._blocks, self._reads = {(block.name, block.start): block for block in blocks}, reads

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(self._reads)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._blocks[index.fqn, index.offset].values


def _reads(reader: IndexReader, blocks: Sequence[_Block]) -> list[ReadItem]:
    """The reads that fill these blocks from those of a checkpoint.

    Raises:
        UserError: when the checkpoint lacks values of a block.
    """
    saved = reader.read_metadata().state_dict_metadata
    of_name: dict[str, list[_Block]] = {}
    for block in blocks:
        of_name.setdefault(block.name, []).append(block)
    reads: list[ReadItem] = []
    for name, wanted in of_name.items():
        found = []
        if name in saved and saved[name].size == wanted[0].whole:
            found = create_read_items_for_chunk_list(name, saved[name], [block.chunk for block in wanted])
        num_found = sum(math.prod(item.lengths) for item in found)
        num_wanted = sum(block.values.numel() for block in wanted)
        if num_found != num_wanted:
            raise UserError(
                f"{reader.path} holds {num_found} of {num_wanted} values of {name}; it is not whole, so delete it, and "
                "training goes on from the checkpoint before"
            )
        reads += found
    return reads


def _blocks(part: Part, names: Collection[str]) -> Iterator[_Block]:
    """The blocks of a part's parameters with these names, and of their moments."""
    for name, parameter in part.parameters.items():
        if name not in names:
            continue
        shard = part.shards.get(name) or Shard(0, 0, parameter.shape)
        whole = shard.whole if parameter.ndim <= 1 else torch.Size((shard.whole[0], math.prod(shard.whole[1:])))
        width = math.prod(parameter.shape[1:]) if parameter.ndim > 1 else None
        origins = [_start(shard, number, len(whole)) for number in range(shard.num_stacked)]
        num_values = parameter.numel() // shard.num_stacked
        runs = [
            (f"model/{name}" if kind is None else f"optimizer/{name}/{kind}", piece.start, values)
            for piece in part.optimizer.pieces(parameter)
            for kind, values in ((None, piece.masters), *piece.moments.items())
        ]
        for block, start, values in runs:
            for number, first, run in _of_each(values, start, num_values):
                for place, values_there in _as_blocks(run, first, width):
                    at = torch.Size(here + begin for here, begin in zip(place, origins[number], strict=True))
                    yield from _cut(_Block(block, values_there, at, whole))


def _start(shard: Shard, number: int, num_dims: int) -> tuple[int, ...]:
    """Where a shard's part of stacked tensor number `number` begins, as an index in each dimension."""
    assert shard.num_stacked == 1 or shard.dim == 0, "a run of a flattened parameter is cut along its first dimension"
    first = number * (shard.whole[shard.dim] // shard.num_stacked) + shard.start
    return tuple(first if shard.dim == dim else 0 for dim in range(num_dims))


def _of_each(values: torch.Tensor, start: int, num_values: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Cut a range of a flattened parameter, which begins at `start`, at the ends of its stacked tensors of `num_values`
    values each. Gives for each part the number of its tensor, where it begins in that tensor, and its values."""
    end = start + len(values)
    for number in range(start // max(1, num_values), -(-end // max(1, num_values))):
        first, behind = max(start, number * num_values), min(end, (number + 1) * num_values)
        yield number, first - number * num_values, values[first - start : behind - start]


def _as_blocks(values: torch.Tensor, start: int, width: int | None) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Cut a range of a flattened matrix with `width` columns, which begins at `start`, into the rest of a row, whole
    rows, and the beginning of a row. Gives the index of each block's first value, and the block. A vector (`width` is
    None) is not cut."""
    if width is None:
        yield (start,), values
        return
    place, end = start, start + len(values)
    while place < end:
        row, column = divmod(place, width)
        num_rows = max(1, (end - place) // width) if column == 0 else 1
        onward = min(place + num_rows * width - column, end)
        part = values[place - start : onward - start]
        yield (row, column), part.view(num_rows, -1)
        place = onward


def _cut(block: _Block) -> Iterator[_Block]:
    """The block, cut into blocks of at most `_BLOCK_BYTES`, but at least one row."""
    row_bytes = max(1, block.values[0].nbytes) if len(block.values) else 1
    num_rows = max(1, _BLOCK_BYTES // row_bytes)
    for first in range(0, len(block.values), num_rows):
        start = torch.Size((block.start[0] + first, *block.start[1:]))
        yield block._replace(values=block.values[first : first + num_rows], start=start)
