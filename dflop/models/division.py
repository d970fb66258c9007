"""What tensor-parallel ranks share of a stage: names of submodules, for `tensor_parallel` to divide."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dflop.runtime import UserError

__all__ = ["EMBEDDING", "HEAD", "Division", "check_kind", "llm_division"]

# The names that an LLM's two ends have in all models.
EMBEDDING, HEAD = "model.language_model.embed_tokens", "lm_head"

# Language models whose layers have `self_attn` and `mlp` and, beside the matrices below, no parameters but norms: those
# around a block, and Qwen3's of each head.
_LLM_KINDS = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """What ranks share of a stage, by the names that submodules have in the Hugging Face model.

    `blocks` (`*` for a number) widen their input by the linear layers in `columns`, of which each rank computes some
    outputs, and reduce it again by those in `rows`, of which each rank has some inputs. Between the two, `norms` are
    over a width that ranks share, and `head_norms` over one head, with one weight for all. `stacked` are those of the
    `columns` that are so many matrices in one, each of which is divided. `sizes` are attributes of blocks that count
    what ranks share. `embedding` and `head`, which an encoder has not, are divided by ids of the
    vocabulary.
    """

    blocks: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    norms: tuple[str, ...] = ()
    head_norms: tuple[str, ...] = ()
    stacked: Mapping[str, int] = field(default_factory=dict)
    sizes: tuple[str, ...] = ()
    embedding: str | None = None
    head: str | None = None


def llm_division(kind: str) -> Division:
    """The division of an LLM of Llama's layout in `model.language_model`.

    Raises:
        UserError: for layers of another kind (the config's `model_type`).
    """
    check_kind(kind, _LLM_KINDS)
    return Division(
        blocks=("model.language_model.layers.*.self_attn", "model.language_model.layers.*.mlp"),
        columns=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
        rows=("o_proj", "down_proj"),
        head_norms=("q_norm", "k_norm"),
        embedding=EMBEDDING,
        head=HEAD,
    )


def check_kind(kind: str, known: tuple[str, ...]) -> None:
    """Raise `UserError` for a kind of layers (`model_type`) that nobody knows how to divide."""
    if kind not in known:
        raise UserError(f"how to divide the layers of a {kind!r} among ranks is not known; use tp: 1")
