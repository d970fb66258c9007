"""The trained model as a Hugging Face directory. Every stage writes its weights, and the first rank all other files.

Adapters are merged into the weights beside them. `export_adapter` writes them by themselves.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from dflop.models.adapter_files import is_adapter
from dflop.models.lora import low_rank_product
from dflop.models.runtime import MediaProcessor
from dflop.models.tensor_group import Shard, TensorGroup
from dflop.plan import Plan
from dflop.plan.trained import Lora
from dflop.shapes.text import ChatTokenizer
from dflop.train.parameter_shards import ParameterShards
from dflop.train.rank_model import NodeModel, RankModel

__all__ = ["export_model", "masters_of", "own_weights", "write_processors"]


def export_model(
    folder: Path, plan: Plan, model: RankModel, dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> None:
    """Write `folder`, whole or not at all, from what each rank holds of the model; every rank must call this. Weights
    are written as `dtype`. If that is wider than the dtype of the parameters, they come from the optimiser's masters.
    Ranks wait for each other's files over `group`, whose time limit must fit a slow file system.

    No rank gathers the whole model. The files are those of an ordinary sharded checkpoint, one for each pipeline stage
    and tensor-parallel rank; the tensor-parallel ranks of a stage divide its tensors among them.

    Raises:
        OSError, SafetensorError: when a file cannot be written.
    """
    part = folder.with_name(f".{folder.name}.part")
    is_main = dist.get_rank() == 0
    if is_main:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    dist.barrier(group)
    files = [
        (grid.module, number, place)
        for grid in plan.grids
        for number in range(plan.num_stages(grid.module))
        for place in range(grid.tp)
    ]
    for node_model in model.nodes:
        is_adapted = any(map(is_adapter, node_model.parameters))
        masters = masters_of(node_model) if dtype.itemsize > node_model.dtype.itemsize or is_adapted else {}
        if node_model.node.dp_rank and node_model.shared is None:
            continue
        names = [name for name in node_model.stage.hf_state_dict() if not is_adapter(name)]
        is_tied = model.hf_config.tie_word_embeddings
        weights = own_weights(node_model, names, masters, dtype, is_tied=is_tied, lora=model.trained.lora)
        if node_model.node.dp_rank:
            continue
        index = files.index((node_model.node.module, node_model.node.pp_stage, node_model.ranks.place)) + 1
        file = part / f"model-{index:05d}-of-{len(files):05d}.safetensors"
        save_file(weights, file, metadata={"format": "pt"})
        file.chmod(0o644)  # safetensors writes files for their owner alone
    dist.barrier(group)
    if is_main:
        _write_index(part)
        model.hf_config.dtype = dtype
        model.hf_config.save_pretrained(part)
        write_processors(part, model.tokenizer, model.processors.values(), model.spec.media)
        _generation_config(part).save_pretrained(part)
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)
    dist.barrier(group)


def write_processors(
    folder: Path, tokenizer: ChatTokenizer, processors: Iterable[MediaProcessor], media: Iterable[str]
) -> None:
    """Write the files of the processors, and of the tokenizer for texts with these kinds of media. The chat template is
    the tokenizer's, even if the processors' files come from a checkpoint with another one."""
    tokenizer.save(folder, media)
    for processor in processors:
        processor.save(folder)
    tokenizer.save_template(folder)


def masters_of(node_model: NodeModel) -> dict[str, torch.Tensor]:
    """The masters of the trained parameters, by name and in the host's memory, on the first replica, which writes them;
    every replica must call this."""
    if isinstance(node_model.optimizer, ParameterShards):
        return {}  # the parameters' shards are the masters
    names = {parameter: name for name, parameter in node_model.parameters.items()}
    gathered = node_model.optimizer.whole_masters()
    return {
        names[parameter]: whole.to("cpu", copy=True) for parameter, whole in gathered if not node_model.node.dp_rank
    }


def own_weights(
    node_model: NodeModel,
    names: Iterable[str],
    masters: dict[str, torch.Tensor],
    dtype: torch.dtype,
    *,
    is_tied: bool = False,
    lora: Lora | None = None,
) -> dict[str, torch.Tensor]:
    """Those of a stage's tensors with these names that this rank writes; with `lora`, weights have their adapters
    merged. They are whole, and each tensor-parallel rank writes about the same number of bytes. Parameters that
    replicas shard are gathered, and only the first replica writes them."""
    stage, ranks = node_model.stage, node_model.ranks
    state, weights, held_bytes = stage.hf_state_dict(), {}, [0] * ranks.size

    def whole(name: str, writer: int, dtype: torch.dtype) -> torch.Tensor:
        """The whole tensor, on the first replica and there on the rank that writes it."""
        values, shard = state[name], stage.shards.get(name)
        if isinstance(values, DTensor):
            values = values.full_tensor()  # a collective of all replicas
            if node_model.node.dp_rank:
                return values
        tensor = masters.get(name, values).to(values.device, dtype)
        return _gathered(tensor, shard, ranks, writer) if shard else tensor

    for name in names:
        if is_tied and name == "lm_head.weight":  # checkpoints hold it once, under the embedding's name
            continue
        writer = held_bytes.index(min(held_bytes))
        shape = stage.shards[name].whole if name in stage.shards else state[name].shape
        held_bytes[writer] += shape.numel() * dtype.itemsize
        matrices = [f"{name.removesuffix('weight')}{matrix}.weight" for matrix in ("lora_A", "lora_B")]
        if lora and matrices[0] in state:
            wide = torch.promote_types(dtype, torch.float32)
            values, *both = (whole(own, writer, wide) for own in (name, *matrices))
        else:
            values, both = whole(name, writer, dtype), []
        if writer == ranks.place and not node_model.node.dp_rank:
            merged = values + low_rank_product(lora, *both) if both else values
            weights[name] = merged.to(dtype).contiguous().cpu()
    return weights


def _gathered(tensor: torch.Tensor, shard: Shard, ranks: TensorGroup, writer: int) -> torch.Tensor:
    """On the rank that writes it, the whole tensor, received from the other tensor-parallel ranks."""
    if ranks.place != writer:
        dist.send(tensor.contiguous(), ranks.ranks[writer], group=ranks.group)
        return tensor
    parts, dim = [], shard.dim
    for place, rank in enumerate(ranks.ranks):
        rows = ranks.part(shard.whole[dim] // shard.num_stacked, place)
        width = (rows.stop - rows.start) * shard.num_stacked
        shape = (*shard.whole[:dim], width, *shard.whole[dim + 1 :])
        parts.append(tensor if place == writer else tensor.new_empty(shape))
        if place != writer:
            dist.recv(parts[-1], rank, group=ranks.group)
    return torch.cat([part.unflatten(dim, (shard.num_stacked, -1)) for part in parts], dim + 1).flatten(dim, dim + 1)


def _write_index(folder: Path) -> None:
    weight_map, total_size = {}, 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  (safe_open is no dict)
                weight_map[name] = file.name
                part = weights.get_slice(name)
                total_size += torch.Size(part.get_shape()).numel() * _bytes_of(part.get_dtype())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _bytes_of(dtype: str) -> int:
    return {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8}[dtype]


def _generation_config(folder: Path) -> GenerationConfig:
    """A config with the tokenizer's end-of-turn token as the end of generation."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    ids = {token["content"]: token["id"] for token in vocabulary}

    def id_of(key: str) -> int | None:
        token = settings.get(key)
        return ids.get(token["content"] if isinstance(token, dict) else token)

    return GenerationConfig(eos_token_id=id_of("eos_token"), pad_token_id=id_of("pad_token"))
