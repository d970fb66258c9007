"""The trained model as a Hugging Face directory: every stage writes its weights, the first rank the rest."""

import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import GenerationConfig

from dflop.parallelism import Plan
from dflop.training.rank_model import RankModel

__all__ = ["export_model"]


def export_model(folder: Path, plan: Plan, model: RankModel) -> None:
    """Write `folder`, whole or not at all, from what each rank holds of the model; every rank must call this.

    Nothing is gathered: the shards are those of an ordinary sharded checkpoint, one a pipeline stage.
    """
    part = folder.with_name(f".{folder.name}.part")
    is_main = dist.get_rank() == 0
    if is_main:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    dist.barrier()
    stages = [(grid.module, number) for grid in plan.grids for number in range(plan.num_stages(grid.module))]
    for own in model.nodes:
        if own.node.dp_rank:
            continue
        index = stages.index((own.node.module, own.node.pp_stage)) + 1
        weights = {name: tensor.contiguous().cpu() for name, tensor in own.stage.hf_state_dict().items()}
        if model.hf_config.tie_word_embeddings:  # checkpoints hold it once, under the embedding's name
            weights.pop("lm_head.weight", None)
        file = part / f"model-{index:05d}-of-{len(stages):05d}.safetensors"
        save_file(weights, file, metadata={"format": "pt"})
        file.chmod(0o644)  # safetensors writes files for their owner alone
    dist.barrier()
    if is_main:
        _write_index(part)
        model.hf_config.save_pretrained(part)
        model.tokenizer.save(part, model.spec.media)
        model.processor.save(part)
        _generation_config(part).save_pretrained(part)
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)
    dist.barrier()


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
    """Generation ends at the tokenizer's end of turn."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    ids = {token["content"]: token["id"] for token in vocabulary}

    def id_of(key: str) -> int | None:
        token = settings.get(key)
        return ids.get(token["content"] if isinstance(token, dict) else token)

    return GenerationConfig(eos_token_id=id_of("eos_token"), pad_token_id=id_of("pad_token"))
