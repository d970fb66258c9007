"""Weights of a stage: drawn from a seed, or read from a Hugging Face checkpoint.

Every rank makes the weights of its own stage, without communication. Drawn weights depend only on the seed and the
submodule's name, so that every layout starts from the same model.
"""

import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from dflop.base import UserError
from dflop.models.adapter_files import TENSORS, adapter_names, is_adapter
from dflop.models.division import EMBEDDING, HEAD
from dflop.models.tensor_group import Shard, rows_of

__all__ = ["draw_weights", "load_adapter", "load_weights", "norms_in_float64"]

_HEAD, _EMBEDDING = f"{HEAD}.weight", f"{EMBEDDING}.weight"
# Buffers in old checkpoints that follow from the config and are ignored.
_OLD_BUFFERS = re.compile(r"\b(rotary_emb\.inv_freq|position_ids)$")


def draw_weights(
    model: PreTrainedModel,
    seed: int,
    device: torch.device | str,
    then: Callable[[str, nn.Module], None] = lambda name, module: None,
    *,
    is_empty: bool = False,
    are_read: tuple[torch.device | str, torch.dtype] | None = None,
) -> None:
    """Allocate the tensors of a model on the meta device, and initialise each submodule as transformers does, from a
    seed of its own. With `is_empty` the tensors are not initialised, because their values do not matter.

    If parameters will be read from a checkpoint, `are_read` is the device and the dtype to read them into. They are
    allocated there without values, and only buffers are initialised.

    `then` is called with the name and module of each submodule once it is complete, and may replace it in the model.
    """

    @torch.no_grad()
    def draw(module: nn.Module, owner: PreTrainedModel, name: str) -> None:
        """`owner` is the innermost Hugging Face model that contains the submodule: it initialises the submodule."""
        for own_name, own in module._parameters.items():
            if own is not None:  # a new parameter, because `to_empty` cannot replace the data by fake tensors
                on, dtype = are_read or (device, own.dtype)
                made = nn.Parameter(torch.empty_like(own, device=on, dtype=dtype), own.requires_grad)
                made._is_hf_initialized = are_read is not None  # transformers leaves such parameters as they are
                module._parameters[own_name] = made
        for own_name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[own_name] = torch.empty_like(buffer, device=device)
        for child_name, child in list(module.named_children()):
            child_owner = child if isinstance(child, PreTrainedModel) else owner
            draw(child, child_owner, f"{name}.{child_name}" if name else child_name)
        own = list(module._parameters.values())
        if not is_empty and (not own or any(parameter is not None for parameter in own)):  # else another stage has them
            _seed_generator(zlib.crc32(name.encode()) ^ (seed * 0x9E3779B1 & 0xFFFFFFFF), device)
            owner._init_weights(module)
        then(name, module)

    draw(model, model, "")


def _seed_generator(seed: int, device: torch.device | str) -> None:
    """Seed the generators of the CPU and of the device in use. `torch.manual_seed` would also queue a seed, with a
    stack trace, for each kind of device that is not in use, which takes longer than drawing a small module."""
    torch.default_generator.manual_seed(seed)
    if torch.device(device).type == "cuda":
        torch.cuda.manual_seed(seed)


@torch.no_grad()
def load_weights(
    model: PreTrainedModel,
    checkpoint: Path,
    renamings: Sequence[tuple[str, str]],
    shards: Mapping[str, Shard],
    known: Collection[str],
) -> None:
    """Load a stage's tensors from a checkpoint's safetensors files. Of a tensor in `shards` only this rank's part is
    read, and of a tensor that replicas shard (a DTensor) only this replica's rows.

    `renamings` are (pattern, replacement) pairs, applied in order, from names in checkpoints to the model's; a tensor
    whose name becomes empty is skipped. `known` are the names of all tensors of the whole model.

    Raises:
        UserError: when there is no safetensors file, or one is damaged, or naming the first tensor that the checkpoint
            lacks, that has another shape, or that the model does not have; also when a head that should be tied is not
            the embedding.
    """
    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"the checkpoint {checkpoint} holds no *.safetensors file; save the model with `save_pretrained`"
        )
    wanted, head = {name: own for name, own in model.state_dict().items() if not is_adapter(name)}, None
    if model.config.tie_word_embeddings:
        wanted.pop(_HEAD, None)  # the head is the embedding, which checkpoints hold only once
    for file in files:
        with _opened(file) as stored:
            for stored_name in stored.keys():  # noqa: SIM118  (safe_open is no dict)
                name = _renamed(stored_name, renamings)
                if not name:
                    continue
                if name not in known and not _OLD_BUFFERS.search(name):
                    raise UserError(
                        f"the checkpoint {checkpoint} holds {stored_name}, which a model of its config.json does not "
                        "have: training would lose it; correct the config, or take the tensor out"
                    )
                if name == _HEAD and model.config.tie_word_embeddings:
                    head = stored.get_tensor(stored_name)
                if name in wanted:
                    _read_into(wanted.pop(name), stored, stored_name, shards.get(name), f"the checkpoint {checkpoint}")
    if wanted:
        raise UserError(f"the checkpoint {checkpoint} lacks {len(wanted)} tensors of this model, e.g. {min(wanted)}")
    embedding = model.state_dict().get(_EMBEDDING)
    if head is not None and embedding is not None:
        shard = shards.get(_EMBEDDING)
        own = head if shard is None else head.narrow(0, shard.start, len(embedding))
        if own.shape != embedding.shape or not torch.equal(own.to(embedding), embedding):
            raise UserError(
                f"the checkpoint {checkpoint} holds a head that is not its embedding, although its config.json says "
                "`tie_word_embeddings`: true; set that to false"
            )


@torch.no_grad()
def load_adapter(
    model: PreTrainedModel, folder: Path, renamings: Sequence[tuple[str, str]], shards: Mapping[str, Shard]
) -> None:
    """Load what a directory of adapters has of a stage's tensors, as `load_weights` does: the adapters' matrices, and
    what was trained beside them. `adapter_files` checks that nothing is missing.

    Raises:
        UserError: when the file is damaged, or naming the first tensor of another shape.
    """
    wanted = model.state_dict()
    with _opened(folder / TENSORS) as stored:
        for name, stored_name in adapter_names(folder, renamings).items():
            if name in wanted:
                _read_into(wanted[name], stored, stored_name, shards.get(name), f"the adapter {folder}")


def _read_into(own: torch.Tensor, stored: safe_open, name: str, shard: Shard | None, source: str) -> None:
    """Read what this rank has of a tensor, which `source` holds under this name."""
    shape = shard.whole if shard else own.shape
    if (found := torch.Size(stored.get_slice(name).get_shape())) != shape:
        raise UserError(f"{source} holds {name} of shape {list(found)}, its config says {list(shape)}")
    first_row, rows = rows_of(own)
    if rows.numel():
        rows.copy_(_rows(stored, name, own.shape, shard, first_row, rows))


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, framework="pt") as stored:
            yield stored
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read: {error}; copy it again") from None


def _rows(
    stored: safe_open, name: str, shape: torch.Size, shard: Shard | None, first_row: int, rows: torch.Tensor
) -> torch.Tensor:
    """The values of `rows`, which begin at `first_row` of a tensor of this `shape`: the stored tensor, or if `shard` is
    given, a part of it."""
    if shard is None and rows.shape == shape:
        return stored.get_tensor(name)
    values, last_row = stored.get_slice(name), first_row + len(rows)
    if shard is None:
        return values[first_row:last_row]
    if shard.dim == 1:
        return values[first_row:last_row, shard.start : shard.start + shape[1]]
    every, height = shard.whole[0] // shard.num_stacked, shape[0] // shard.num_stacked
    found = []
    for number in range(shard.num_stacked):
        begin, end = max(first_row, number * height), min(last_row, (number + 1) * height)
        onward = shard.start + number * (every - height)  # from a row's index in the part to that in the tensor
        if begin < end:
            found.append(values[begin + onward : end + onward])
    return torch.cat(found)


def _renamed(name: str, renamings: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in renamings:
        name = re.sub(pattern, replacement, name)
    return name


def norms_in_float64(model: nn.Module) -> None:
    """Replace transformers' RMSNorms, which always compute in float32, by torch's own, in place."""
    for owner in list(model.modules()):
        for name, norm in list(owner.named_children()):
            if type(norm).__name__.endswith("RMSNorm") and not isinstance(norm, nn.RMSNorm):
                exact = nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon)
                exact.weight = norm.weight
                setattr(owner, name, exact)
