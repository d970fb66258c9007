"""What another trainer's own code makes of emitted files, for `test_trainers_parsers.py`; each in a process.

    PYTHONPATH=.trainers python tests/unit/search/trainers_parsers.py veomni 64/plan.yaml 56/other.yaml

A file lies in a folder named after its number of devices. The packages are installed without what they depend on, so
what only GPUs have is stood in for by nothing. Printed is READ, as the trainer reads it, a line of JSON a file.
"""

import ast
import json
import os
import shlex
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import yaml

# The last two: samples of a replica's microbatch, and of a step.
READ = ("tp", "pp", "cp", "copies", "shards", "samples", "all_samples")


def torchtitan(text: str, world_size: int) -> tuple[int, ...]:
    stand_in("wandb", "torchtitan.distributed.minimal_async_ep.kernels")
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed.parallel_dims import ParallelDims

    config = ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel", *words(text)])
    dims = ParallelDims.from_config(config.parallelism, world_size)
    training, of_pipeline = config.training, config.parallelism.pipeline_parallel_microbatch_size
    samples = of_pipeline if dims.pp > 1 else training.local_batch_size
    return dims.tp, dims.pp, dims.cp, dims.dp_replicate, dims.dp_shard, samples, training.global_batch_size


def veomni(text: str, world_size: int) -> tuple[int, ...]:
    without_init("veomni", "veomni.utils")
    stand_in("veomni.utils.helper")
    from veomni.arguments import arguments_types, parse_args

    # Which kernels there are is asked of packages for GPUs.
    arguments_types.ModelArguments._validate_implementations = lambda self: None
    arguments_types.OpsImplementationConfig._validate_implementations = lambda self: None
    config = yaml.safe_load(text) | {"model": {"config_path": "m", "model_path": "m"}, "data": {"train_path": "d"}}
    config["train"]["checkpoint"] = {"output_dir": "out"}
    Path("veomni.yaml").write_text(yaml.safe_dump(config))
    os.environ["WORLD_SIZE"], sys.argv[1:] = str(world_size), ["veomni.yaml"]
    train = parse_args(arguments_types.VeOmniArguments).train
    sizes, samples = train.accelerator, (train.micro_batch_size, train.global_batch_size)
    return 1, 1, sizes.ulysses_size, sizes.dp_replicate_size, sizes.dp_shard_size, *samples


def automodel(text: str, world_size: int) -> tuple[int, ...]:
    without_init("nemo_automodel", "nemo_automodel.components", "nemo_automodel.components.distributed")
    without_init("nemo_automodel.components.distributed.pipelining", "nemo_automodel.recipes")
    import torch.distributed as dist
    from nemo_automodel.components.distributed.mesh_utils import _create_fsdp2_device_mesh
    from nemo_automodel.recipes._dist_utils import parse_distributed_section
    from torch.testing._internal.distributed.fake_pg import FakeStore

    config = yaml.safe_load(text)
    parsed = parse_distributed_section(config["distributed"])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    mesh, _ = _create_fsdp2_device_mesh(parsed["parallelism_sizes"], world_size=world_size)
    dist.destroy_process_group()
    pp, copies, shards, cp, tp = mesh.mesh.shape
    pipeline, of_rank = parsed["pipeline_config"], config["step_scheduler"]["local_batch_size"]
    samples = pipeline.pp_microbatch_size if pipeline else of_rank
    return tp, pp, cp, copies, shards, samples, config["step_scheduler"]["global_batch_size"]


def megatron_bridge(text: str, world_size: int) -> tuple[int, ...]:
    """By Megatron Core's classes, which Megatron-Bridge fills; of its own ones, the names of fields."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = yaml.safe_load(text)
    shape = {"num_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "pipeline_dtype": torch.bfloat16}
    model, ddp = TransformerConfig(**shape, **config["model"]), DistributedDataParallelConfig(**config["ddp"])
    fields = fields_of("megatron/bridge/training/config.py", "TrainingConfig", "CheckpointConfig")
    assert {*config["train"], *config.get("checkpoint", {})} <= fields
    tp, pp, cp = model.tensor_model_parallel_size, model.pipeline_model_parallel_size, model.context_parallel_size
    copies = ddp.num_distributed_optimizer_instances
    samples = (config["train"]["micro_batch_size"], config["train"]["global_batch_size"])
    return tp, pp, cp, copies, world_size // (tp * pp * cp * copies), *samples


def ms_swift(text: str, world_size: int) -> tuple[int, ...]:
    """By the names of its arguments' fields: they cannot be imported without kernels for GPUs."""
    fields = fields_of("swift/megatron/arguments/megatron_args.py", "MegatronArguments", "MegatronTunerMixin")
    names = words(text)
    said = {name.removeprefix("--"): value for name, value in zip(names[::2], names[1::2], strict=True)}
    assert set(said) <= fields, set(said) - fields
    tp, pp = (int(said[f"{name}_model_parallel_size"]) for name in ("tensor", "pipeline"))
    cp = int(said.get("context_parallel_size", 1))
    samples = (int(said["micro_batch_size"]), int(said["global_batch_size"]))
    return tp, pp, cp, 1, world_size // (tp * pp * cp), *samples


def words(text: str) -> list[str]:
    """The flags as a shell hands them over."""
    return shlex.split(text.replace("\\\n", " "), comments=True)


def stand_in(*names: str) -> None:
    sys.modules |= {name: MagicMock(name=name) for name in names}


def without_init(*names: str) -> None:
    """Packages whose parts can be imported while their `__init__` is not run."""
    for name in names:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(found(name.replace(".", "/")))]


def found(path: str) -> Path:
    return next(folder / path for folder in map(Path, sys.path) if (folder / path).exists())


def fields_of(path: str, *classes: str) -> set[str]:
    tree = ast.parse(found(path).read_text(encoding="utf-8"))
    nodes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in classes]
    assert len(nodes) == len(classes)
    return {part.target.id for node in nodes for part in node.body if isinstance(part, ast.AnnAssign)}


if __name__ == "__main__":
    trainer, *files = sys.argv[1:]
    for file in map(Path, files):
        read = globals()[trainer](file.read_text(encoding="utf-8"), int(file.parent.name))
        print(json.dumps(dict(zip(READ, read, strict=True))))
