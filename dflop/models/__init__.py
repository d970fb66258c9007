"""Model families: what a sample becomes in a model, what the model costs, and the model itself cut into stages.

A family is one folder behind one object (`family`); README.md says how to add one. Beside the folders is what families
share: presets, which are plain Python, and stages, weights, packed attention and tensor parallelism, which need torch
and transformers and are never imported here.
"""

from dflop.models.checkpoint import check_weights, weights_digest
from dflop.models.family import (
    check_adapter,
    check_parts,
    check_runnable,
    family_for,
    family_names,
    family_of,
    load_model_spec,
    load_runtime,
    model_digest,
)
from dflop.models.spec import (
    SOUND_RATE_HZ,
    ItemCount,
    ModelSpec,
    ModuleSpec,
    ShapeRules,
    able_tp_sizes,
    check_modules,
    check_tp,
    digest_of_spec,
)

__all__ = [
    "SOUND_RATE_HZ",
    "ItemCount",
    "ModelSpec",
    "ModuleSpec",
    "ShapeRules",
    "able_tp_sizes",
    "check_adapter",
    "check_modules",
    "check_parts",
    "check_runnable",
    "check_tp",
    "check_weights",
    "digest_of_spec",
    "family_for",
    "family_names",
    "family_of",
    "load_model_spec",
    "load_runtime",
    "model_digest",
    "weights_digest",
]
