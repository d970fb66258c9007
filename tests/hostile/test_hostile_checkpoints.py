"""A checkpoint that a stranger made runs none of the stranger's code, and a damaged index is refused in one line. So is
the config of a model that has values of other kinds."""

import json
import pickle
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from fuzzing import damaged, fuzz
from PIL import Image
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, metadata
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from dflop.base import UserError
from dflop.cli import main
from dflop.config import LoraConfig, ModelConfig
from dflop.models import check_adapter, load_model_spec, load_runtime
from dflop.models.adapter_files import is_adapter
from dflop.models.checkpoint import weights_digest
from dflop.models.family import family_names, family_of
from dflop.models.weights import load_adapter, load_weights
from dflop.shapes.record_media import RecordError
from dflop.shapes.records import Turn
from dflop.shapes.text import BUNDLED_TOKENIZER, ChatTokenizer
from dflop.train.adamw import Piece
from dflop.train.checkpoint import load_checkpoint, save_checkpoint
from dflop.train.checkpoint_index import IndexReader


class Optimizer:
    def pieces(self, parameter: torch.Tensor) -> list[Piece]:
        return [Piece(0, parameter.detach().flatten(), {})]

    def go_on_from(self, num_steps: int) -> None:
        pass


def part(value: float) -> SimpleNamespace:
    parameters = {
        str(dtype): nn.Parameter(torch.full((5, 4), value, dtype=dtype))
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    }
    return SimpleNamespace(parameters=parameters, shards={}, optimizer=Optimizer(), written_elsewhere=())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert save_checkpoint(folder, 1, [part(3.0)], {}) is None
        yield folder / "step-000001"
    finally:
        dist.destroy_process_group()


class Call:
    """As a pickle, a call of a function."""

    def __init__(self, function, *arguments: object) -> None:
        self._reduced = function, arguments

    def __reduce__(self):
        return self._reduced


def test_a_checkpoint_whose_index_calls_a_function_is_refused_and_the_function_is_not_called(checkpoint, tmp_path):
    read = part(0.0)
    load_checkpoint(checkpoint, [read])
    assert all(bool((values == 3).all()) for values in read.parameters.values())
    (tmp_path / "run.json").write_text(json.dumps({"step": 1}))
    code = f"open({str(tmp_path / 'called')!r}, 'w')"
    for function, arguments in ((exec, (code,)), (torch.load, ("other.pt",)), (getattr, ("", "join"))):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Call(function, *arguments)))
        with pytest.raises(
            UserError, match=rf"\.metadata: it names \S+\.{function.__name__}, as no checkpoint of dflop"
        ):
            load_checkpoint(tmp_path, [part(0.0)])
    assert not (tmp_path / "called").exists()


def test_an_index_that_an_early_python_3_11_has_written_is_read(checkpoint, tmp_path, monkeypatch):
    index = FileSystemReader(checkpoint).read_metadata()
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda own, _: (getattr, (type(own), own.name)))
    written = pickle.dumps(index)
    assert b"getattr" in written
    (tmp_path / ".metadata").write_bytes(written)
    assert IndexReader(tmp_path).read_metadata() == index
    for other in (Call(getattr, _MEM_FORMAT_ENCODING, "mro"), Call(getattr, torch.Size, "numel")):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(other))
        with pytest.raises(UserError, match=r"it names builtins\.getattr"):
            IndexReader(tmp_path).read_metadata()


def test_an_index_that_names_a_file_outside_the_checkpoint_is_refused(checkpoint, tmp_path):
    index = FileSystemReader(checkpoint).read_metadata()
    next(iter(index.storage_data.values())).relative_path = "../other/__0_0.distcp"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match=r"it names the file \.\./other/__0_0\.distcp"):
        IndexReader(tmp_path).read_metadata()


STRANGE = (-1, 0, 1, 2**31, 2**63, 2**100, 0.5, None, "", "x", b"x", (), [], {}, True, torch.float32)
STRANGE += (torch.Size((5, 4)), torch.Size((2**40, 2**40)))


def inner_values(value: object) -> list[tuple]:
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    return list((value if isinstance(value, dict) else getattr(value, "__dict__", {})).items())


def with_a_strange_value(content: bytes, rng: random.Random) -> bytes:
    """An index in which a value, at whatever depth, became another one; as a pickle that any reader can read."""
    index = value = pickle.loads(content)
    holders = []
    while (inner := inner_values(value)) and (not holders or rng.random() < 0.8):
        key, below = rng.choice(inner)
        holders.append((value, key))
        value = below
    new = rng.choice(STRANGE)
    for holder, key in reversed(holders):
        if isinstance(holder, tuple):  # is made anew
            new = (*holder[:key], new, *holder[key + 1 :])
            if isinstance(holder, torch.Size) and all(isinstance(size, int) and size < 2**63 for size in new):
                new = torch.Size(new)
        elif isinstance(holder, (dict, list)):
            holder[key] = new
            break
        else:
            object.__setattr__(holder, key, new)
            break
    try:
        return pickle.dumps(index)
    except (RuntimeError, TypeError):  # torch's classes do not pickle each value
        return content


@pytest.mark.parametrize("damage", [damaged, with_a_strange_value])
def test_a_checkpoint_with_a_damaged_index_is_refused_in_a_line_or_read(checkpoint, tmp_path, damage):
    """Its checksums may be right: somebody may have made it so."""
    folder, refusals = shutil.copytree(checkpoint, tmp_path / "step-000001"), set()

    def read(path: Path) -> None:
        try:
            load_checkpoint(folder, [part(0.0)])
        except UserError as error:
            refusals.add(str(error))

    fuzz({".metadata": (checkpoint / ".metadata").read_bytes()}, read, (), folder, damage=damage)
    assert refusals
    assert not [refusal for refusal in refusals if "\n" in refusal]


@pytest.mark.parametrize(
    "prefix",
    [
        b"\x96" + (1 << 40).to_bytes(8, "little") + b"0",  # an array of a terabyte
        b"}K\x01" + b"2\x86" * 40 + b"K\x01s0",  # a key that holds itself 2^40 times
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nK\x00\x85R}X\x01\x00\x00\x00xK\x01sb0",
    ],
    ids=["memory", "a hash without end", "an enumeration's member"],
)
def test_an_index_with_a_harmful_beginning_is_refused_at_once(checkpoint, tmp_path, prefix):
    own = (checkpoint / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(own[:2] + prefix + own[2:])
    with pytest.raises(UserError, match=r"\.metadata: it "):
        IndexReader(tmp_path).read_metadata()
    assert not hasattr(metadata._MEM_FORMAT_ENCODING(0), "x")


def test_an_index_that_changes_a_class_is_refused_and_the_class_is_as_it_was(checkpoint, tmp_path):
    """A prefix in front of a right index: it sets `Path.exists`, and drops what it made."""
    own = (checkpoint / ".metadata").read_bytes()
    state = pickle.dumps({"exists": "x"}, protocol=2)[2:-1]
    (tmp_path / ".metadata").write_bytes(own[:2] + b"cpathlib\nPosixPath\n" + state + b"b0" + own[2:])
    with pytest.raises(UserError, match=r"\.metadata: it sets attributes of what is no entry, as no"):
        IndexReader(tmp_path).read_metadata()
    assert callable(Path.exists)


def with_another_value(content: bytes, rng: random.Random) -> bytes:
    """A JSON object in which a value, at whatever depth, became another one."""
    whole = holder = json.loads(content)
    key = rng.choice(list(holder))
    while isinstance(holder[key], (dict, list)) and holder[key] and rng.random() < 0.8:
        holder = holder[key]
        key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    holder[key] = rng.choice((-1, 0, 1, 10**7, 2**70, 0.5, float("nan"), None, "", "x", [], {}, [1, 2], {"a": 1}, True))
    return json.dumps(whole).encode()


@pytest.mark.parametrize("family", family_names())
def test_a_config_of_a_model_with_values_of_other_kinds_is_read_or_refused(family, tmp_path):
    def read(path: Path) -> None:
        load_model_spec(ModelConfig(family=family, path=str(path.parent)))

    preset = family_of(family).presets["tiny"] | {"model_type": family}
    good = {"config.json": json.dumps(preset).encode()}
    fuzz(good, read, UserError, tmp_path, damage=with_another_value, num_files=100)
    (tmp_path / "config.json").write_text('{"a":' + "[" * 100_000)
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        read(tmp_path / "config.json")


@pytest.mark.parametrize("family", family_names())
def test_an_image_processor_of_another_order_makes_the_items_that_were_counted(family, tmp_path):
    spec = load_model_spec(ModelConfig(family=family, preset="tiny"))
    made, (height, width) = load_runtime(family).processors["vision"], (90, 130)
    huge = {"height": 10**6, "width": 10**6}
    fields = {"size": huge, "crop_size": huge, "patch_size": 10**6, "max_patches": 10**6}
    fields |= {
        "min_pixels": 10**12,
        "merge_size": 50,
        "image_grid_pinpoints": [[10**6, 10**6]],
        "image_mean": [0.1] * 3,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    picture = Image.new("RGB", (width, height))
    usual, own = made(spec), made(spec, tmp_path)
    shapes = [[items.shape for items in processor.images([picture])] for processor in (usual, own)]
    assert shapes[0] == shapes[1]
    assert list(own.processor.image_mean) == [0.1] * 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("image_mean", "red"), ("image_std", [1, 0, 1]), ("rescale_factor", 10**400), ("rescale_factor", 1e999)],
        *[("do_rescale", []), ("resample", 99), ("do_resize", False), ("do_center_crop", True)],
    ],
)
def test_an_image_processor_with_values_of_other_kinds_is_refused_in_a_line(key, value, tmp_path):
    spec = load_model_spec(ModelConfig(family="llava_onevision", preset="tiny"))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(UserError, match=f"preprocessor_config.json has `{key}`") as refused:
        load_runtime("llava_onevision").processors["vision"](spec, tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("processor_config.json", '{"image_processor": [1]}'),
        ("processor_config.json", '{"video_processor": "x"}'),
        ("preprocessor_config.json", "[1]"),
        ("model.safetensors.index.json", '{"weight_map": [1, 2]}'),
        ("model.safetensors.index.json", "{}"),
        ("model.safetensors", "\x05\0\0\0\0\0\0\0[1,2]"),
        ("config.json", '{"model_type": ["llava_onevision"]}'),
        ("config.json", '{"a":' * 3000 + "1" + "}" * 3000),
        ("config.json", '{"vision_config": {"image_size": 40000, "patch_size": 20000}}'),
    ],
)
def test_a_file_of_a_model_with_values_of_other_kinds_is_refused_in_a_line(
    name, content, tmp_path, monkeypatch, capsys
):
    fields = dict(family_of("llava_onevision").presets["tiny"])
    if "vision_config" in content:
        content = json.dumps(fields | json.loads(content))
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / name).write_text(content)
    (tmp_path / "train.json").write_text("[]")
    with pytest.raises(UserError, match=str(tmp_path)):
        load_model_spec(ModelConfig(family="llava_onevision", path=str(tmp_path)))
    command = ["shapes", tmp_path / "train.json", "--model", tmp_path, "--out", tmp_path / "shapes.duckdb"]
    monkeypatch.setattr("sys.argv", ["dflop", *map(str, command)])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert str(tmp_path) in said
    assert len(said.splitlines()) == 1


TEMPLATE = (BUNDLED_TOKENIZER / "chat_template.jinja").read_text()
TALK = [Turn("system", "Be brief."), Turn("user", "<image>\nWhat is it?"), Turn("assistant", "A dog, I think.")]


def model_folder(family: str) -> dict[str, bytes]:
    """The files of a model that are no weights, as Hugging Face writes them."""
    spec = load_model_spec(ModelConfig(family=family, preset="tiny"))
    images = json.loads(load_runtime(family).processors["vision"](spec).processor.to_json_string())
    tokens = json.loads((BUNDLED_TOKENIZER / "tokenizer_config.json").read_text())
    objects = {
        "config.json": family_of(family).presets["tiny"] | {"model_type": family},
        "preprocessor_config.json": images,
        "processor_config.json": {"processor_class": "Processor", "video_processor": images, "image_seq_length": None},
        "video_preprocessor_config.json": images,
        "tokenizer.json": json.loads((BUNDLED_TOKENIZER / "tokenizer.json").read_text()),
        "tokenizer_config.json": tokens | {"extra_special_tokens": {"image_token": "<image>"}},
        "special_tokens_map.json": {"eos_token": {"content": "<|im_end|>", "special": True}},
        "added_tokens.json": {"<image>": 5},
        "model.safetensors.index.json": {"metadata": {}, "weight_map": {"lm_head.weight": "model.safetensors"}},
    }
    return {name: json.dumps(value).encode() for name, value in objects.items()} | {
        "chat_template.jinja": TEMPLATE.encode(),
        "model.safetensors": safetensors.torch.save({"lm_head.weight": torch.zeros(4, 4)}),
    }


class Head(nn.Module):
    """A model of one tensor."""

    config = SimpleNamespace(tie_word_embeddings=False)

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(4, 4, bias=False)


def damaged_or_with_another_value(content: bytes, rng: random.Random) -> bytes:
    is_json = content.startswith(b'{"') and rng.random() < 0.7
    return (with_another_value if is_json else damaged)(content, rng)


@pytest.mark.parametrize("key", ["window_size", "tokens_per_second", "spatial_merge_size", "patch_size"])
def test_a_config_whose_values_are_used_by_rules_alone_is_refused_in_a_line(key, tmp_path):
    preset = family_of("qwen2_5_vl").presets["tiny"]
    config = preset | {"vision_config": preset["vision_config"] | {key: {"a": 1}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"the config.json of {tmp_path}, or its processor's, has a value that no qwen"):
        load_model_spec(ModelConfig(family="qwen2_5_vl", path=str(tmp_path)))


def test_a_config_without_a_number_of_layers_is_refused_in_a_line(tmp_path):
    preset = family_of("qwen2_5_vl").presets["tiny"]
    config = preset | {"text_config": preset["text_config"] | {"num_hidden_layers": None}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="`num_hidden_layers` is None; it must be 1 to"):
        load_model_spec(ModelConfig(family="qwen2_5_vl", path=str(tmp_path)))


def test_a_file_of_weights_that_is_cut_off_is_refused_in_a_line(tmp_path):
    content = safetensors.torch.save({"lm_head.weight": torch.zeros(4, 4)})
    (tmp_path / "model.safetensors").write_bytes(content)
    load_weights(Head(), tmp_path, (), {}, ("lm_head.weight",))
    (tmp_path / "model.safetensors").write_bytes(content[:-10])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read: .*; copy it again"):
        load_weights(Head(), tmp_path, (), {}, ("lm_head.weight",))


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl"])
def test_the_damaged_folder_of_a_model_is_read_or_refused_in_a_line(family, tmp_path):
    """Its config, tokenizer, template, processor and the index of its weights, as profiling and training read them."""
    good, folder, refusals = model_folder(family), tmp_path / "model", []
    folder.mkdir()
    picture = Image.new("RGB", (90, 60))

    def read(path: Path) -> None:
        for name, content in good.items():
            if name != path.name:
                (folder / name).write_bytes(content)
        try:
            spec = load_model_spec(ModelConfig(family=family, path=str(folder)))
            weights_digest(folder)
            load_weights(Head(), folder, (), {}, ("lm_head.weight",))
            tokenizer = ChatTokenizer(folder, spec.rules)
            (tokens,) = tokenizer.encode([TALK])
            assert tokenizer.count([TALK])[0].num_tokens == len(tokens.token_ids)
            processor = load_runtime(family).processors["vision"](spec, folder)
            (items,) = processor.images([picture])
            assert items.shape == (spec.rules.image(*picture.size, 1).num_items, *processor.item_shape)
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            (tmp_path / "out").mkdir()
            tokenizer.save(tmp_path / "out")
            processor.save(tmp_path / "out")
            tokenizer.save_template(tmp_path / "out")
        except (UserError, RecordError) as error:
            refusals.append(str(error))
            raise

    fuzz(good, read, (UserError, RecordError), folder, damage=damaged_or_with_another_value, num_files=80)
    assert refusals
    assert not [refusal for refusal in refusals if "\n" in refusal]


def test_a_damaged_adapter_is_read_or_refused(tmp_path):
    model = ModelConfig(adapter=str(tmp_path), lora=LoraConfig(targets=["*.q_proj"], rank=2, alpha=4.0))
    spec, runtime = load_model_spec(model), load_runtime("llava_onevision")
    how = {"layers": range(4), "seed": 0, "trained": model.trained}
    stage = runtime.build_stage(runtime.make_config(spec, {}, 0), "llm", **how)
    adapters = {f"base_model.model.{name}": own for name, own in stage.hf_state_dict().items() if is_adapter(name)}
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_rslora": False, "rank_pattern": {}}
    good = {"adapter_config.json": json.dumps(settings).encode()}
    good["adapter_model.safetensors"] = safetensors.torch.save(adapters)
    refusals = set()

    def read(path: Path) -> None:
        try:
            check_adapter(spec, model)
            load_adapter(stage.hf, tmp_path, runtime.weight_renamings, {})
        except UserError as error:
            refusals.add(str(error))
        finally:
            path.write_bytes(good[path.name])

    for name, content in good.items():
        (tmp_path / name).write_bytes(content)
    fuzz(good, read, (), tmp_path, damage=damaged_or_with_another_value, num_files=60)
    assert refusals
    assert not [refusal for refusal in refusals if "\n" in refusal]
