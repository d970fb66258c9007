"""What `model.train` and `model.freeze` name: in each family the same parts, and nothing that a user did not mean."""

import pytest
import torch

from dflop.base import UserError
from dflop.config import load_config
from dflop.models import load_model_spec, load_runtime
from dflop.plan.trained import FROZEN, SOME, WHOLE, Lora, TrainedSet, names_of

LORA = Lora(modules=("llm",), targets=("*",), rank=8, alpha=16, dropout=0.0, rslora=False)


def stages_of(family: str):
    spec = load_model_spec(load_config({"model": {"family": family}}).model)
    runtime = load_runtime(family)
    config = runtime.make_config(spec, {}, 0)
    for module in spec.modules:
        with torch.device("meta"):
            yield spec, runtime.cut(runtime.architecture(config), module.name, range(module.num_layers))


@pytest.mark.parametrize("family", ["llava_onevision", "internvl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni_thinker"])
def test_every_parameter_lies_under_the_name_of_one_part(family):
    for spec, stage in stages_of(family):
        units = [name for name in names_of(spec.modules) if name.startswith(stage.module)]
        names = [stage.plain_name(name) for name in stage.named_hf_parameters()]
        assert len(set(names)) == len(names)
        assert all(sum(name.startswith(f"{unit}.") for unit in units) == 1 for name in names)
        assert {unit for unit in units for name in names if name.startswith(f"{unit}.")} == set(units)


def trained(*train: str, freeze: tuple[str, ...] = (), lora: Lora | None = None) -> TrainedSet:
    """Of a model with four layers in its encoder and in its LLM."""
    spec = load_model_spec(load_config({}).model)
    return TrainedSet(freeze, lora, train).among(spec.modules)


@pytest.mark.parametrize(
    ("own", "first", "layers", "last", "reach"),
    [
        (trained("llm.layers.[2-3]"), FROZEN, [FROZEN, FROZEN, WHOLE, WHOLE], FROZEN, 3),
        (trained("projector", "llm.layers.3", "llm.head"), FROZEN, [FROZEN, FROZEN, FROZEN, WHOLE], SOME, 0),
        (
            trained("llm", freeze=("llm.layers.[0-1]", "llm.embeddings")),
            FROZEN,
            [FROZEN, FROZEN, WHOLE, WHOLE],
            WHOLE,
            3,
        ),
        (trained("llm.layers.*norm*"), FROZEN, [SOME] * 4, FROZEN, 1),
        (trained("llm.embeddings"), WHOLE, [FROZEN] * 4, FROZEN, 0),
        (trained("projector", lora=LORA), FROZEN, [SOME] * 4, FROZEN, 0),
        (trained(freeze=("vision",), lora=LORA), FROZEN, [SOME] * 4, FROZEN, 1),
        (trained("llm.head", lora=LORA), FROZEN, [SOME] * 4, SOME, 1),
        (trained("vision"), FROZEN, [FROZEN] * 4, FROZEN, 0),
    ],
)
def test_gradients_of_an_llm_end_at_the_first_part_that_is_trained_or_go_on_to_a_trained_encoder(
    own, first, layers, last, reach
):
    assert own.ways("llm") == (first, tuple(layers), last, reach)


def refusal(**model: object) -> str:
    config = load_config({"model": model}).model
    try:
        spec = load_model_spec(config)
        runtime = load_runtime(spec.family)
        runtime.check_trained(spec, runtime.make_config(spec, {}, 0), config.trained)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (
            {"train": ["llm.layers.[4-9]"]},
            "`model.train[0]` is 'llm.layers.[4-9]'; it must be one of vision, llm, vision.e",
        ),
        (
            {"train": ["llm", "llm.layers.1.attention"]},
            "`model.train[1]` is 'llm.layers.1.attention', which matches noth",
        ),
        ({"train": ["*.q_norm"]}, "`model.train[0]` is '*.q_norm', which matches nothing; a parameter is called"),
        (
            {"freeze": ["*.fc1"]},
            "which matches nothing in llm; write vision.*.fc1, so that llm needs no backward for it",
        ),
        ({"train": ["llm.head"], "freeze": ["llm"]}, "names all that would be trained, which leaves nothing to train"),
        ({"train": ["llm.norm"], "freeze": ["*.weight"]}, "leave nothing to train; take a name out of `model.freeze`"),
    ],
)
def test_a_name_that_matches_nothing_and_a_model_without_anything_to_train_are_refused(model, complaint):
    assert complaint in refusal(**model)


def test_a_tied_head_is_named_as_the_embeddings_it_is_tied_to():
    spec = load_model_spec(load_config({}).model)
    runtime = load_runtime(spec.family)
    config = runtime.make_config(spec, {}, 0)
    config.tie_word_embeddings = True
    with pytest.raises(UserError, match=r"which matches nothing; the head is tied to llm\.embeddings"):
        runtime.check_trained(spec, config, TrainedSet(named=("llm.head",)))
