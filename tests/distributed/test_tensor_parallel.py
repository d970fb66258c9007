"""A stage divided over two ranks is the stage: same outputs, same loss, same gradients, a half of the parameters.

Every case runs on the same two gloo processes, in float64 unless it says otherwise; the oracle is the undivided
stage in this process.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import spawn
from stage_cases import DEPTH, Case, build, forward
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from dflop.base import UserError
from dflop.costs.counted import CountedStage, counting
from dflop.costs.design import Point
from dflop.models import check_tp
from dflop.models.attention import PACKED, packed_attention
from dflop.models.compilation import replace_forwards
from dflop.models.stages import Stage
from dflop.models.tensor_group import Shard, TensorGroup

pytestmark = pytest.mark.serial

TP = 2


@dataclass
class Result:
    outputs: list[torch.Tensor]
    input_gradient: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    num_parameters: int
    held_bytes: int
    kept_bytes: int
    collectives: list[tuple[str, int]]


LLAMA = {"model_type": "llama", "attention_bias": True, "mlp_bias": True}
QWEN3 = {"model_type": "qwen3", "head_dim": 48}
INTERNVIT_6B = {"attention_bias": False, "use_qk_norm": True, "norm_type": "rms_norm"}
CASES = {
    "vision": Case(module="vision"),
    "vision, checkpointing": Case(module="vision", checkpointing=True),
    "vision, inner width not divisible": Case(module="vision", vision={"intermediate_size": 255}),
    "whole llm": Case(),
    "whole llm, checkpointing": Case(checkpointing=True),
    "whole llm, vocabulary not divisible": Case(text={"vocab_size": 1027}),
    "whole llm, inner width not divisible": Case(text={"intermediate_size": 353}),
    "whole llm, padding in the second half": Case(text={"pad_token_id": 700}),
    "whole llm, tokens not divisible": Case(num_tokens=39),
    "whole llm, tied": Case(tied=True, text={"tie_word_embeddings": True}),
    "whole llama with biases": Case(text=LLAMA),
    "first": Case(layers=range(2)),
    "middle": Case(layers=range(1, 3)),
    "middle, checkpointing": Case(layers=range(1, 3), checkpointing=True),
    "middle, tokens not divisible, checkpointing": Case(layers=range(1, 3), checkpointing=True, num_tokens=39),
    "last": Case(layers=range(3, DEPTH)),
    "embedding only": Case(layers=range(0)),
    "head only": Case(layers=range(DEPTH, DEPTH)),
    "head only, vocabulary not divisible": Case(layers=range(DEPTH, DEPTH), text={"vocab_size": 1027}),
    "whole llama with biases, tokens not divisible": Case(text=LLAMA, num_tokens=39),
    "whole qwen3": Case(text=QWEN3),
    "internvl vision": Case(family="internvl", module="vision"),
    "internvl vision, as in 6B": Case(family="internvl", module="vision", vision=INTERNVIT_6B),
    "internvl vision, as in 6B, checkpointing": Case(
        family="internvl", module="vision", vision=INTERNVIT_6B, checkpointing=True
    ),
    "internvl vision in bf16": Case(family="internvl", module="vision", precision="bf16"),
    "internvl llm": Case(family="internvl"),
    "qwen2_5_vl vision": Case(family="qwen2_5_vl", module="vision"),
    "qwen2_5_vl vision, checkpointing": Case(family="qwen2_5_vl", module="vision", checkpointing=True),
    "qwen2_5_vl vision in bf16": Case(family="qwen2_5_vl", module="vision", precision="bf16"),
    "qwen2_5_vl llm": Case(family="qwen2_5_vl"),
    "qwen3_vl vision": Case(family="qwen3_vl", module="vision"),
    "qwen3_vl vision, checkpointing": Case(family="qwen3_vl", module="vision", checkpointing=True),
    "qwen3_vl llm": Case(family="qwen3_vl"),
    "qwen3_vl llm, tokens not divisible": Case(family="qwen3_vl", num_tokens=39),
    "qwen3_vl llm, features go on": Case(family="qwen3_vl", layers=range(1, 2)),
    "qwen2_5_omni vision": Case(family="qwen2_5_omni_thinker", module="vision"),
    "qwen2_5_omni audio": Case(family="qwen2_5_omni_thinker", module="audio"),
    "qwen2_5_omni audio, checkpointing": Case(family="qwen2_5_omni_thinker", module="audio", checkpointing=True),
    "qwen2_5_omni audio in bf16": Case(family="qwen2_5_omni_thinker", module="audio", precision="bf16"),
    "qwen2_5_omni llm": Case(family="qwen2_5_omni_thinker"),
    "vision in bf16": Case(module="vision", precision="bf16"),
    "whole llm in bf16": Case(precision="bf16"),
    "whole llm in bf16, checkpointing": Case(precision="bf16", checkpointing=True),
}
COMPILED = ("middle, tokens not divisible, checkpointing",)
OF_TOKENS = ("all_gather_into_tensor", "reduce_scatter_tensor")
REFUSED = {
    "one key-value head": Case(layers=range(0), text={"num_key_value_heads": 1}),
    "an unknown layer": Case(text={"model_type": "mistral"}),
}


class Collectives(TorchDispatchMode):
    """Name and bytes of every collective."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.name().split("::")[1]
        if operation.namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            tensor = args[0][0] if isinstance(args[0], list) else args[0]
            self.seen.append((name, tensor.nbytes))
        return operation(*args, **(kwargs or {}))


def run(case: Case, stage: Stage) -> Result:
    generator = torch.Generator().manual_seed(2)
    dtype = next(stage.parameters()).dtype
    own = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with Collectives() as collectives:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            inputs, outputs = forward(case, stage, draw)
        kept_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
        torch.autograd.backward(outputs, [draw(*output.shape).to(output.dtype) for output in outputs])
    gradients = {name: parameter.grad for name, parameter in stage.named_hf_parameters().items()}
    for name in stage.partial_gradients():
        dist.all_reduce(gradients[name])
    return Result(
        outputs=[output.detach() for output in outputs],
        input_gradient=inputs.grad,
        gradients={name: whole(gradient, stage.shards.get(name)) for name, gradient in gradients.items()},
        num_parameters=sum(parameter.numel() for parameter in stage.parameters()),
        held_bytes=sum(parameter.untyped_storage().nbytes() for parameter in stage.parameters()),
        kept_bytes=kept_bytes,
        collectives=collectives.seen,
    )


def compiled_and_eager(case: Case, ranks: TensorGroup) -> list[list[torch.Tensor | None]]:
    """The outputs and all gradients of a rank's part, of compiled layers and of eager ones."""
    found = []
    for backend in ("aot_eager", None):
        stage, generator = build(case, ranks), torch.Generator().manual_seed(2)
        if backend:
            attention = torch.compiler.disable(packed_attention)  # as a GPU's kernel is
            AttentionInterface.register(PACKED, attention)
            replace_forwards(stage, partial(torch.compile, dynamic=True, backend=backend))
        inputs, outputs = forward(
            case, stage, lambda *shape, own=generator: torch.randn(shape, generator=own, dtype=torch.float64)
        )
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        AttentionInterface.register(PACKED, packed_attention)
        found.append([*outputs, inputs.grad, *(parameter.grad for parameter in stage.parameters())])
    return found


def whole(tensor: torch.Tensor | None, shard: Shard | None) -> torch.Tensor | None:
    """All ranks' parts of a tensor in one."""
    if tensor is None or shard is None:
        return tensor
    parts = [tensor] * TP
    dist.all_gather_object(parts, tensor)
    stacked = [part.unflatten(shard.dim, (shard.num_stacked, -1)) for part in parts]
    return torch.cat(stacked, shard.dim + 1).flatten(shard.dim, shard.dim + 1)


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), TP),
        rank=rank,
        world_size=TP,
    )
    ranks = TensorGroup(tuple(range(TP)), rank, dist.group.WORLD)
    results: dict[str, Result | str] = {}
    for name, case in (CASES | REFUSED).items():
        try:
            check_tp(case.spec, case.module, TP)
            stage = build(case, ranks)
        except UserError as error:
            results[name] = str(error)
        else:
            results[name] = run(case, stage)
    for name in COMPILED:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        results[f"{name}, compiled"] = compiled_and_eager(CASES[name], ranks)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, name
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def divided(tmp_path_factory) -> list[dict[str, Result | str]]:
    """Each rank's results."""
    folder = tmp_path_factory.mktemp("ranks")
    spawn(run_rank, (folder,), nprocs=TP)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(TP)]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_of_a_divided_stage_compute_what_eager_ones_do(divided, name):
    for of_rank in divided:
        for compiled, eager in zip(*of_rank[f"{name}, compiled"], strict=True):
            assert (compiled is None) == (eager is None)
            torch.testing.assert_close(compiled, eager, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_a_divided_stage_computes_what_the_whole_one_does(divided, name):
    case = CASES[name]
    whole = run(case, build(case))
    tolerance = 1e-12 if case.precision == "fp64" else 0.03

    # Some gradients are zero but for rounding: those of SigLIP's key biases, which softmax does not see.
    size = torch.stack([gradient.norm() for gradient in whole.gradients.values() if gradient is not None]).norm()

    def assert_same(ours: torch.Tensor, theirs: torch.Tensor, size: torch.Tensor, what: str) -> None:
        assert ours.dtype == theirs.dtype, what
        assert (ours - theirs).norm() <= tolerance * size, what

    for rank in (ranks[name] for ranks in divided):
        both = zip([*rank.outputs, rank.input_gradient], [*whole.outputs, whole.input_gradient], strict=True)
        for ours, theirs in both:
            assert type(ours) is torch.Tensor
            assert_same(ours, theirs, theirs.norm(), "an output or the input's gradient")
        assert rank.gradients.keys() == whole.gradients.keys()
        for parameter, theirs in whole.gradients.items():
            ours = rank.gradients[parameter]
            assert (ours is None) == (theirs is None), parameter
            if theirs is not None:
                assert_same(ours, theirs, size, parameter)


@pytest.mark.parametrize(
    "name",
    [
        "vision",
        "internvl vision",
        "internvl vision, as in 6B",
        "qwen2_5_vl vision",
        "qwen2_5_vl llm",
        "qwen3_vl vision",
        "qwen3_vl llm",
        "qwen2_5_omni vision",
        "qwen2_5_omni audio",
        "whole llm",
        "whole llm, tied",
        "whole llama with biases",
        "whole qwen3",
    ],
)
def test_a_rank_holds_the_parameters_that_analytic_costs_count(divided, name):
    case = CASES[name]
    with counting(TP) as ranks:
        frame = CountedStage(case.spec, case.module, 2, ranks).parameter_sizes()
    sizes = dict(frame.select("part", "parameter_bytes").rows())
    num_parameters = (DEPTH * sizes["layer"] + sizes["first"] + sizes["last"]) / 4
    for rank in (ranks[name] for ranks in divided):
        assert rank.num_parameters == num_parameters
        assert rank.held_bytes == 8 * rank.num_parameters, "a shard keeps the whole tensor alive"


@pytest.mark.parametrize("name", ["vision in bf16", "internvl vision in bf16", "whole llm in bf16"])
def test_ranks_keep_and_exchange_what_analytic_costs_count(divided, name):
    case = CASES[name]
    loads = {"num_items": 5} if case.module == "vision" else {"segments": (25, 15), "num_targets": 27}
    with counting(TP) as ranks:
        counted = CountedStage(case.spec, case.module, DEPTH, ranks).run(Point("whole", DEPTH, False, **loads))
    uncounted = 0
    if case.module == "llm":
        # Without a variable-length kernel the segments' outputs are copied into one tensor, which is kept as well.
        uncounted = DEPTH * 2 * 40 * 128 // TP + 7 * 2 * 128  # and features, of 7 tokens here
        # The head itself keeps log-probabilities, and autograd knows nothing of them.
        uncounted -= 4 * 27 * case.spec.hf_config["text_config"]["vocab_size"] // TP
    for rank in (ranks[name] for ranks in divided):
        of_kinds = Counter()
        for kind, size in rank.collectives:
            of_kinds[kind] += size
        reduced, gathered, cut = (of_kinds.pop(kind, 0) for kind in ("allreduce_", *OF_TOKENS))
        assert not of_kinds
        assert (gathered > 0) == (cut > 0) == (case.module == "llm"), "an encoder's ranks gather nothing"
        round_bytes = counted.forward.round_bytes + counted.backward.round_bytes
        assert 2 * reduced + TP * gathered + cut == round_bytes
        assert rank.kept_bytes - uncounted == pytest.approx(counted.saved_bytes, rel=1e-2)


def test_what_ranks_cannot_share_is_refused(divided):
    case = REFUSED["one key-value head"]
    with pytest.raises(UserError) as caught:
        check_tp(case.spec, "llm", TP)
    for rank in divided:
        assert rank["one key-value head"] == str(caught.value)
        assert rank["an unknown layer"] == "how to divide the layers of a 'mistral' among ranks is not known; use tp: 1"
