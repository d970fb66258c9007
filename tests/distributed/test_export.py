"""The directory that training leaves is a Hugging Face checkpoint of its family, processor and tokenizer included."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from PIL import Image
from safetensors.torch import load_file
from training_runs import plan_file, train
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoTokenizer,
    PreTrainedModel,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
)

from dflop.config import Config, load_config
from dflop.models import ItemCount, family_names, load_model_spec, load_runtime
from dflop.models.precision import COMPUTES_IN
from dflop.plan import Grid, Plan
from dflop.shapes import ChatTokenizer
from dflop.shapes.reader import expand_text
from dflop.shapes.records import Turn
from dflop.step import make_program
from dflop.train.export import export_model
from dflop.train.rank_model import build_rank_model
from dflop.train.topology import place_in_world

pytestmark = pytest.mark.serial

EXAMPLES = Path(__file__).parents[2] / "config" / "examples"


@pytest.fixture
def alone(tmp_path):
    """A world of one process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def save_checkpoint(folder: Path, config: Config, *, tied: bool) -> None:
    """A checkpoint in several files, as transformers writes one."""
    spec, runtime = load_model_spec(config.model), load_runtime(config.model.family)
    tokenizer = ChatTokenizer(None, spec.rules)
    token_ids = tokenizer.placeholder_ids | tokenizer.special_ids
    hf_config = runtime.make_config(spec, token_ids, tokenizer.vocab_size(spec.media))
    hf_config.tie_word_embeddings = tied
    torch.manual_seed(5)
    runtime.architecture(hf_config).save_pretrained(folder, max_shard_size="800KB")
    tokenizer.save(folder, spec.media)
    for make_processor in runtime.processors.values():
        make_processor(spec, None).save(folder)


def export_untrained(config: Config, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the configured model as one process has it before the first step, computed in `dtype`."""
    grids = tuple(Grid(module=module.name, num_ranks=1) for module in load_model_spec(config.model).modules)
    plan = Plan(placement="colocated", grids=grids, num_microbatches=1)
    topology = place_in_world(make_program(plan), torch.device("cpu"), torch.float32, dist.HashStore())
    export_model(folder, plan, build_rank_model(config, plan, topology, dtype), torch.float32)


# Families, tied heads and dtypes (computed in; masters are written): every pair of them in half of the combinations.
COMBINATIONS = [
    pytest.param(family, tied, dtype, marks=() if (number + tied + half) % 2 else pytest.mark.exhaustive)
    for number, family in enumerate(family_names())
    for tied in (False, True)
    for half, dtype in enumerate((torch.float32, torch.bfloat16))
]


@pytest.mark.parametrize(("family", "tied", "dtype"), COMBINATIONS)
def test_a_model_that_was_not_trained_is_written_as_it_was_loaded(alone, family, tied, dtype, tmp_path):
    loaded, written = tmp_path / "loaded", tmp_path / "written"
    save_checkpoint(loaded, load_config({"model": {"family": family}}), tied=tied)
    assert len(list(loaded.glob("*.safetensors"))) > 1
    export_untrained(load_config({"model": {"family": family, "path": str(loaded)}}), written, dtype)

    architecture = load_runtime(family).architecture
    (before, found_before), (after, found_after) = (
        architecture.from_pretrained(folder, output_loading_info=True) for folder in (loaded, written)
    )
    assert not any(found_before.values())
    assert not any(found_after.values()), found_after
    assert after.config.tie_word_embeddings == tied
    theirs = after.state_dict()
    assert before.state_dict().keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in before.state_dict().items())
    ids = torch.arange(100, 130)[None]
    assert torch.equal(before(input_ids=ids).logits, after(input_ids=ids).logits)
    images = [AutoImageProcessor.from_pretrained(folder).to_dict() for folder in (loaded, written)]
    assert images[0] == images[1]
    assert AutoTokenizer.from_pretrained(written).get_vocab() == AutoTokenizer.from_pretrained(loaded).get_vocab()


def test_of_a_whole_qwen2_5_omni_the_thinker_is_loaded_and_written(alone, tmp_path):
    loaded, written, family = tmp_path / "loaded", tmp_path / "written", "qwen2_5_omni_thinker"
    save_checkpoint(loaded, load_config({"model": {"family": family}}), tied=False)
    thinker = load_runtime(family).architecture.from_pretrained(loaded)
    for file in loaded.glob("model*"):
        file.unlink()
    # The parts that speak, with sizes as small as they may be.
    llm = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 9000, "head_dim": 32}
    llm |= {"num_attention_heads": 2, "num_key_value_heads": 1, "embedding_size": 128, "thinker_hidden_size": 128}
    llm |= {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6}}
    dit = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 32, "emb_dim": 32}
    dit |= {"enc_emb_dim": 8, "enc_dim": 8, "enc_channels": [8, 8, 8, 8, 24], "enc_attention_channels": 8, "mel_dim": 8}
    wave = {"dit_config": dit, "bigvgan_config": {"mel_dim": 8, "upsample_initial_channel": 64}}
    whole_config = Qwen2_5OmniConfig(thinker_config=thinker.config.to_dict(), talker_config=llm, token2wav_config=wave)
    whole = Qwen2_5OmniForConditionalGeneration(whole_config)
    whole.thinker.load_state_dict(thinker.state_dict())
    whole.save_pretrained(loaded, max_shard_size="800KB")

    export_untrained(load_config({"model": {"family": family, "path": str(loaded)}}), written)
    after, found = load_runtime(family).architecture.from_pretrained(written, output_loading_info=True)
    assert not any(found.values()), found
    assert all(torch.equal(tensor, after.state_dict()[name]) for name, tensor in thinker.state_dict().items())


def inputs_of(
    model: PreTrainedModel, items: np.ndarray, count: ItemCount, ids: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What the family's model takes of one picture."""
    pixels = torch.from_numpy(items)
    if model.config.model_type == "internvl":
        return {"pixel_values": pixels}
    of_picture = (ids == model.config.image_token_id).long()
    grid = torch.tensor([count.grid])
    return {"pixel_values": pixels.flatten(0, 1), "image_grid_thw": grid, "mm_token_type_ids": of_picture}


@pytest.mark.parametrize(
    ("family", "of"),
    [
        ("internvl", "internvl_run"),
        pytest.param("qwen2_5_vl", "qwen_run", marks=pytest.mark.exhaustive),  # whose model takes what Qwen3-VL's does
        ("qwen3_vl", "qwen3_run"),
    ],
)
def test_a_familys_example_trains_and_what_it_leaves_generates_text_of_a_picture(family, of, request, tmp_path):
    folder, config = request.getfixturevalue(of)
    example = yaml.safe_load((EXAMPLES / f"{family}_cpu.yaml").read_text(encoding="utf-8"))
    assert load_config(example).model.family == family
    chosen = {"steps": 2, "precision": "fp32", "lr": example["train"]["lr"]}
    steps = train(folder, config | {"model": example["model"]}, plan_file(folder), tmp_path / "train", **chosen)
    assert [step["step"] for step in steps] == [0, 1]

    spec, runtime = load_model_spec(load_config(example).model), load_runtime(family)
    written = tmp_path / "train/model"
    model, found = runtime.architecture.from_pretrained(written, output_loading_info=True)
    assert not any(found.values()), found
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 200, 3), dtype=np.uint8))
    processor = runtime.processors["vision"](spec, written)
    (items,) = processor.images([picture])
    items = processor.pixel_values.of(torch.from_numpy(items), torch.float32).numpy()
    count = spec.rules.image(200, 60, 1)
    assert len(items) == count.num_items > 1
    tokenizer = ChatTokenizer(written)  # which has all that the family's texts need by now
    (text,) = tokenizer.encode([[Turn("user", f"{spec.rules.in_text('image', count)}\nWhat?"), Turn("assistant", "A")]])
    context = text.token_ids == model.config.image_token_id
    assert context.sum() == 1
    text = type(text)(text.token_ids, text.is_target, np.flatnonzero(context))
    ids, is_target = expand_text(text, [count.num_tokens], 10_000)
    prompt = torch.from_numpy(ids[: is_target.argmax()])[None]
    made = model.generate(input_ids=prompt, **inputs_of(model, items, count, prompt), max_new_tokens=3, do_sample=False)
    with torch.no_grad():
        likeliest = model(input_ids=made, **inputs_of(model, items, count, made)).logits[0].argmax(dim=-1)
    num_asked = prompt.shape[1]
    assert made[0, num_asked:].tolist() == likeliest[num_asked - 1 : -1].tolist()


@pytest.mark.parametrize(
    ("precision", "sharding"),
    [
        pytest.param("fp32", "parameters", marks=pytest.mark.exhaustive),
        pytest.param("bf16", "optimizer", marks=pytest.mark.exhaustive),
        ("bf16", "parameters"),
    ],
)
def test_adapters_are_written_merged_and_as_peft_loads_them(run, precision, sharding, tmp_path):
    peft = pytest.importorskip("peft")
    folder, config = run
    loaded, out = tmp_path / "loaded", tmp_path / "train"
    save_checkpoint(loaded, load_config(config), tied=False)
    lora = {"modules": ["llm", "vision.encoder"], "targets": ["*_proj", "*.fc1"], "rank": 4, "alpha": 6, "rslora": True}
    model = {"path": str(loaded), "lora": lora}
    plan = plan_file(folder, llm_tp=2, llm_dp=2, vision_dp=2, sharding=sharding)
    train(folder, config | {"model": model}, plan, out, steps=3, precision=precision, export_precision="fp32")

    held = load_file(out / "adapter/adapter_model.safetensors")
    assert not any(torch.equal(values, values.bfloat16()) for name, values in held.items() if "lora_" in name)
    architecture = load_runtime("llava_onevision").architecture
    base, merged = (architecture.from_pretrained(path).eval() for path in (loaded, out / "model"))
    for parameter in base.parameters():  # frozen weights are held as they compute
        parameter.data = parameter.data.to(COMPUTES_IN[precision]).float()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    with_adapters = peft.PeftModel.from_pretrained(base, out / "adapter").eval()
    ids = torch.arange(100, 130)[None]
    with torch.no_grad():
        theirs, ours = (own(input_ids=ids).logits for own in (with_adapters, merged))
    assert (theirs - ours).abs().max() < 1e-6 * theirs.abs().max()
    of_peft, trained = with_adapters.merge_and_unload().state_dict(), merged.state_dict()
    adapted = re.compile(r".*layers\.\d+\..*(_proj|fc1)\.weight")
    for name, tensor in trained.items():
        assert (tensor - of_peft[name]).abs().max() < 1e-6, name
        is_trained = bool(adapted.fullmatch(name)) or "projector" in name or name == "model.image_newline"
        assert torch.equal(tensor, before[name]) != is_trained, name


@pytest.mark.parametrize("sharding", [pytest.param("parameters", marks=pytest.mark.exhaustive), "optimizer"])
def test_training_goes_on_from_pefts_adapters_and_what_lies_beside_them(run, sharding, tmp_path):
    peft = pytest.importorskip("peft")
    folder, config = run
    loaded, given = tmp_path / "loaded", tmp_path / "given"
    save_checkpoint(loaded, load_config(config), tied=False)
    architecture = load_runtime("llava_onevision").architecture
    settings = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=r".*language_model.*\.(o_proj|up_proj)",
        modules_to_save=["multi_modal_projector"],
        init_lora_weights=False,
    )
    theirs = peft.get_peft_model(architecture.from_pretrained(loaded), settings)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01)
    theirs.save_pretrained(given)
    lora = {"targets": ["*.o_proj", "*.up_proj"], "rank": 4, "alpha": 6}
    model = {"path": str(loaded), "adapter": str(given), "lora": lora, "freeze": ["vision"]}
    plan = plan_file(folder, llm_tp=2, llm_dp=2, vision_dp=2, sharding=sharding)
    kept = {"precision": "fp32", "steps": 2, "lr": 1e-30, "weight_decay": 0.0}  # what is read is what is written
    train(folder, config | {"model": model}, plan, tmp_path / "train", **kept)
    written, merged = load_file(tmp_path / "train/adapter/adapter_model.safetensors"), theirs.merge_and_unload()
    assert written.keys() == load_file(given / "adapter_model.safetensors").keys()
    for name, values in load_file(given / "adapter_model.safetensors").items():
        assert torch.equal(values, written[name]), name
    ours = architecture.from_pretrained(tmp_path / "train/model").state_dict()
    assert all((ours[name] - values).abs().max() < 1e-6 for name, values in merged.state_dict().items())

    train(folder, config | {"model": model}, plan, tmp_path / "train", **kept | {"lr": 0.1})
    after = load_file(tmp_path / "train/adapter/adapter_model.safetensors")
    assert all(torch.equal(values, written[name]) == ("projector" in name) for name, values in after.items())
    assert "`train.lr` was 1e-30 and is 0.1" in (tmp_path / "train/log").read_text()


def test_three_modules_train_and_what_they_leave_hears(omni_run, tmp_path):
    folder, config = omni_run
    family = "qwen2_5_omni_thinker"
    example = yaml.safe_load((EXAMPLES / "qwen2_5_omni_cpu.yaml").read_text(encoding="utf-8"))
    grids = (Grid(module=name, num_ranks=1, rank_offset=rank) for rank, name in enumerate(("vision", "audio", "llm")))
    plan = tmp_path / "plan.yaml"
    disjoint = Plan(placement="disjoint", grids=tuple(grids), num_microbatches=2)
    plan.write_text(yaml.safe_dump({"plan": disjoint.to_dict()}))
    chosen = {"steps": 2, "precision": "fp32", "lr": example["train"]["lr"]}
    steps = train(folder, config | {"model": example["model"]}, plan, tmp_path / "train", **chosen)
    assert [step["step"] for step in steps] == [0, 1]

    spec, runtime = load_model_spec(load_config(example).model), load_runtime(family)
    written = tmp_path / "train/model"
    model, found = runtime.architecture.from_pretrained(written, output_loading_info=True)
    assert not any(found.values()), found
    tokenizer, sounds = ChatTokenizer(written, spec.rules), runtime.processors["audio"](spec, written)
    extractor = AutoFeatureExtractor.from_pretrained(written)
    assert extractor.to_dict() == sounds.processor.to_dict()
    assert model.config.audio_start_token_id == AutoTokenizer.from_pretrained(written).audio_bos_token_id
    samples = np.random.default_rng(0).normal(size=40_000).astype(np.float32)
    heard = extractor(samples, sampling_rate=16_000, return_attention_mask=True, return_tensors="pt")
    inputs = {"input_features": heard["input_features"], "feature_attention_mask": heard["attention_mask"]}
    count = spec.rules.audio(2.5, None)
    (text,) = tokenizer.encode([[Turn("user", spec.rules.in_text("audio", count)), Turn("assistant", "A")]])
    ids, is_target = expand_text(text, [count.num_tokens], 10_000)
    prompt = torch.from_numpy(ids[: is_target.argmax()])[None]
    made = model.generate(input_ids=prompt, **inputs, max_new_tokens=3, do_sample=False)
    with torch.no_grad():
        logits = model(input_ids=made, attention_mask=torch.ones_like(made), **inputs).logits[0]
    num_asked = prompt.shape[1]
    assert made[0, num_asked:].tolist() == logits.argmax(dim=-1)[num_asked - 1 : -1].tolist()
