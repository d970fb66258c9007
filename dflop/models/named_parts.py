"""The check that a config's names of parts (`plan.trained`) are those of parameters that the model has."""

from collections.abc import Mapping

from dflop.base import UserError
from dflop.models.stages import Stage
from dflop.plan.trained import TrainedSet, matches, may_match

__all__ = ["check_names"]


def check_names(given: Mapping[str, str], trained: TrainedSet, stages: Mapping[str, Stage]) -> None:
    """Check the names `given`, by the config key that has them, on all modules of a model, a stage each.

    Raises:
        UserError: for a name that no parameter has, or one that begins with `*` and has none in one of the modules that
            it may have some in; or where nothing is left to train.
    """
    named = {
        module: {stage.plain_name(name) for name in stage.named_hf_parameters() if name not in stage.unread}
        for module, stage in stages.items()
    }
    for key, pattern in given.items():
        has = {module: [name for name in names if matches(pattern, name)] for module, names in named.items()}
        if not any(has.values()):
            like = sorted(name for names in named.values() for name in names if may_match(pattern, _unit_of(name)))
            is_tied = pattern.startswith("llm.head") and "llm.head.weight" not in named["llm"]
            example = (like or sorted(named["llm"]))[0]
            why = "the head is tied to llm.embeddings" if is_tied else f"a parameter is called {example}, for example"
            raise UserError(f"`{key}` is {pattern!r}, which matches nothing; {why}")
        if pattern.startswith("*") and (without := next((module for module, names in has.items() if not names), None)):
            own = next(module for module, names in has.items() if names)
            raise UserError(
                f"`{key}` is {pattern!r}, which matches nothing in {without}; write {own}.{pattern}, so that {without} "
                "needs no backward for it"
            )
    if not trained.lora and not any(map(trained.includes, (name for names in named.values() for name in names))):
        raise UserError("`model.train` and `model.freeze` leave nothing to train; take a name out of `model.freeze`")


def _unit_of(name: str) -> str:
    """The unit that a parameter lies in, e.g. llm.layers.3 or vision.projector."""
    pieces = name.split(".")
    depth = pieces.index("layers") + 2 if "layers" in pieces[:3] else 3 if pieces[1] == "encoder" else 2
    return ".".join(pieces[:depth])
