"""The trained adapters as a directory that `peft` loads: `adapter_config.json` and `adapter_model.safetensors`.

What is trained beside the adapters, such as a projector, is in the same file under its own name, as peft writes
embeddings: peft loads it into the base model. So the base model and this directory together are the trained model.
"""

import json
import shutil
from pathlib import Path

import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from dflop.config import ModelConfig
from dflop.models import load_runtime
from dflop.models.adapter_files import INSIDE, SETTINGS, TENSORS, adapter_names, is_adapter
from dflop.models.precision import held_in
from dflop.train.export import masters_of, own_weights
from dflop.train.rank_model import RankModel

__all__ = ["export_adapter", "writes_adapter"]


def writes_adapter(model: RankModel) -> bool:
    """Whether adapters are written: a fully trained LLM beside an adapted encoder would be nearly the whole model."""
    return model.trained.lora is not None and not model.trained.trains_weights("llm")


def export_adapter(folder: Path, model: RankModel, config: ModelConfig, group: dist.ProcessGroup | None = None) -> None:
    """Write `folder`, whole or not at all; every rank must call this. `config` says what training began with: of
    `model.adapter` also what was frozen since is written, because the base model has other values of it.

    Values are the optimiser's, in fp32 at least. Ranks wait for each other's files over `group`.

    Raises:
        OSError, SafetensorError: when a file cannot be written.
    """
    renamings, earlier = load_runtime(model.spec.family).weight_renamings, config.adapter
    also = adapter_names(Path(earlier), renamings) if earlier else ()
    part, is_main = folder.with_name(f".{folder.name}.part"), dist.get_rank() == 0
    if is_main:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    dist.barrier(group)
    for node_model in model.nodes:
        masters = masters_of(node_model)
        if node_model.node.dp_rank and node_model.shared is None:
            continue
        names = [name for name, own in node_model.parameters.items() if own.requires_grad or name in also]
        weights = own_weights(node_model, names, masters, held_in(node_model.dtype))
        if weights and not node_model.node.dp_rank:
            save_file(weights, part / f"{node_model.index}-{node_model.ranks.place}.safetensors")
    dist.barrier(group)
    if is_main:
        _join(part, model, config.weights or config.path)
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)
    dist.barrier(group)


def _join(folder: Path, model: RankModel, base: str | None) -> None:
    """Join the files of all ranks into one, and write the config beside it."""
    values = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            values |= {f"{INSIDE}{name}": stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        file.unlink()
    file = folder / TENSORS
    save_file(values, file, metadata={"format": "pt"})
    file.chmod(0o644)
    lora = model.trained.lora
    adapted = {name.removeprefix(INSIDE).rpartition(".lora_")[0] for name in values if is_adapter(name)}
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "target_modules": sorted(adapted),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "bias": "none",
    }
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2), encoding="utf-8")
