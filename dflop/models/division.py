"""Which submodules of a stage tensor-parallel ranks divide among them, by name. `tensor_parallel` divides them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dflop.base import UserError

__all__ = ["EMBEDDING", "HEAD", "Division", "check_kind", "llm_division"]

# The names of an LLM's embedding and head, which are the same in all models.
EMBEDDING, HEAD = "model.language_model.embed_tokens", "lm_head"

# Language models whose layers consist of `self_attn` and `mlp`. Beside the matrices below, these have no parameters but
# norms: those around a block, and Qwen3's over each head.
_LLM_KINDS = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """What ranks divide among them of a stage, by the names that submodules have in the Hugging Face model.

    - `blocks`: the blocks to divide (`*` stands for a number). Their input goes through linear layers of `columns`, and
      then through linear layers of `rows`.
    - `columns`, `rows`: names in a block of the linear layers divided by outputs (columns) and by inputs (rows).
    - `norms`: norms between the two over a width that is divided.
    - `stacked`: of `columns`, those that hold several matrices in one (queries, keys, values), with their number. Each
      of these matrices is divided.
    - `sizes`: attributes of blocks that count what is divided, such as `num_heads`.
    - `embedding`, `head`: divided by ids of the vocabulary; None for encoders.
    - `cuts_tokens`: whether each rank has a part of the tokens between blocks (`token_parts.py`).
    """

    blocks: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    norms: tuple[str, ...] = ()
    stacked: Mapping[str, int] = field(default_factory=dict)
    sizes: tuple[str, ...] = ()
    embedding: str | None = None
    head: str | None = None
    cuts_tokens: bool = False


def llm_division(kind: str) -> Division:
    """The division of an LLM of Llama's layout in `model.language_model`.

    Raises:
        UserError: when `kind` (a `model_type`) is of an LLM whose layers have another layout.
    """
    check_kind(kind, _LLM_KINDS)
    return Division(
        blocks=("model.language_model.layers.*.self_attn", "model.language_model.layers.*.mlp"),
        columns=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
        rows=("o_proj", "down_proj"),
        embedding=EMBEDDING,
        head=HEAD,
        cuts_tokens=True,
    )


def check_kind(kind: str, known: tuple[str, ...]) -> None:
    """Raise `UserError` for layers of a kind (`model_type`) that is not in `known`, as no division of them is known."""
    if kind not in known:
        raise UserError(f"how to divide the layers of a {kind!r} among ranks is not known; use tp: 1")
