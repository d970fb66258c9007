"""Model families: what a sample becomes in a model, and the model itself cut into stages.

A family is one folder. Its shape rules, presets and specs are plain Python; the modules that need torch
and transformers (`stages`, `processing`, `attention`) are imported by those who run the model, never here.
"""

from dflop.models.spec import (
    ItemCount,
    ModelSpec,
    ModuleSpec,
    ShapeRules,
    check_runnable,
    check_tp,
    digest_of_spec,
    load_model_spec,
)

__all__ = [
    "ItemCount",
    "ModelSpec",
    "ModuleSpec",
    "ShapeRules",
    "check_runnable",
    "check_tp",
    "digest_of_spec",
    "load_model_spec",
]
