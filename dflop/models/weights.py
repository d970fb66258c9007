"""Weights of a stage: drawn from a seed, or read from a Hugging Face checkpoint.

Every rank makes the weights of its own stage, without asking another. Drawn ones depend on the seed and on the
submodule's name alone, so that every layout starts from the same model.
"""

import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import load_state_dict

from dflop.runtime import UserError

__all__ = ["draw_weights", "load_weights", "norms_in_float64"]


def draw_weights(model: PreTrainedModel, seed: int) -> None:
    """Initialise all submodules as transformers does, each from a seed of its own."""
    _draw(model, model, "", seed)


@torch.no_grad()
def _draw(module: nn.Module, owner: PreTrainedModel, name: str, seed: int) -> None:
    """`owner` is the innermost Hugging Face model around the submodule: it knows how to initialise it."""
    for child_name, child in module.named_children():
        child_owner = child if isinstance(child, PreTrainedModel) else owner
        _draw(child, child_owner, f"{name}.{child_name}" if name else child_name, seed)
    torch.manual_seed(zlib.crc32(name.encode()) ^ (seed * 0x9E3779B1 & 0xFFFFFFFF))
    own = list(module._parameters.values())
    if own and all(parameter is None for parameter in own):
        return  # its parameters are another stage's
    owner._init_weights(module)


def load_weights(model: PreTrainedModel, checkpoint: Path, renamings: Sequence[tuple[str, str]]) -> None:
    """Load a stage's tensors from a checkpoint's safetensors files.

    `renamings` are pairs of a pattern and a replacement, applied in order: from names in checkpoints to the model's.

    Raises:
        UserError: naming the first tensor that the checkpoint lacks.
    """
    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        raise UserError(f"`model.path` {checkpoint} holds no *.safetensors file; save the model with `save_pretrained`")
    wanted = set(model.state_dict())
    if model.config.tie_word_embeddings:
        wanted.discard("lm_head.weight")  # it is the embedding, which checkpoints hold once
    found: set[str] = set()
    for file in files:
        named = {_renamed(name, renamings): tensor for name, tensor in load_state_dict(str(file)).items()}
        weights = {name: tensor for name, tensor in named.items() if name in wanted}
        model.load_state_dict(weights, strict=False)
        found |= set(weights)
    if missing := sorted(wanted - found):
        raise UserError(f"`model.path` {checkpoint} lacks {len(missing)} tensors of this model, e.g. {missing[0]}")


def _renamed(name: str, renamings: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in renamings:
        name = re.sub(pattern, replacement, name)
    return name


def norms_in_float64(model: nn.Module) -> None:
    """Exchange transformers' RMSNorms, which compute in float32 whatever they get, for torch's own, in place."""
    for owner in list(model.modules()):
        for name, norm in list(owner.named_children()):
            if type(norm).__name__.endswith("RMSNorm") and not isinstance(norm, nn.RMSNorm):
                exact = nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon)
                exact.weight = norm.weight
                setattr(owner, name, exact)
