"""Run one rank of a plan on fake tensors, to compare the memory that it holds with the memory model.

The rank's stages, optimiser and instruction list are those of training. Tensors have shapes but no values
(`FakeTensorMode`), and there are no other ranks (torch's `fake` process group). So a plan for a thousand GPUs is
checked in a minute on a laptop. The storages of all operations' results are counted while they live.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dflop.base import UserError
from dflop.checks.of_plan import MadeUpLoad, PlanToCheck
from dflop.config import Config
from dflop.costs import CostModel
from dflop.costs.live_bytes import LiveBytes
from dflop.loading.dataset import LoadedMedia, segments_of
from dflop.loading.shared_samples import SampleGroup, row_runs, shared_features
from dflop.models import ModelSpec, load_model_spec, load_runtime
from dflop.models.microbatch import MediumLayout, TextBatch
from dflop.models.precision import COMPUTES_IN
from dflop.plan import Plan
from dflop.schedule import MEMORY_CATEGORIES, Assignment, StepSchedule, tensor_bytes
from dflop.search import pricer_of
from dflop.shapes import HOW_DRAWN, MediaSizes, SampleShapes
from dflop.shapes.shares import SampleDivider
from dflop.step import Node, Op, Program, StepInstructions, make_program
from dflop.step.nodes import worker_of
from dflop.step.receiving import FreshTensors, NoStreams, Slots
from dflop.step.run import run_instructions
from dflop.train.feed import sample_group, samples_of
from dflop.train.node_work import TRAINING, make_works
from dflop.train.rank_model import RankModel, build_rank_model
from dflop.train.topology import Topology, place_in_world
from dflop.train.undecodable import Undecodable

__all__ = ["CheckedRank", "check", "check_rank"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRank:
    """The predicted and the tracked bytes of a rank, by `MEMORY_CATEGORIES`. Activations are all bytes at the peak of a
    step that are in no other category."""

    rank: int
    nodes: tuple[Node, ...]
    predicted: dict[str, float]
    tracked: dict[str, float]


def check(asked: PlanToCheck) -> str:
    """A rank's predicted and tracked GiB, a row for each category."""
    checked = check_rank(asked.config, asked.plan, asked.costs, asked.load, asked.rank)
    held = " + ".join(f"{node.module} stage {node.pp_stage} replica {node.dp_rank}" for node in checked.nodes)
    lines = [f"rank {checked.rank}: {held}", "", f"{'GiB':12}{'predicted':>12}{'tracked':>12}{'ratio':>9}"]
    # Of other layers than those tracked, activations and so the sum are not alike.
    unlike = () if asked.config.layers_of_costs == "eager" else ("activations", "together")
    predicted, tracked = (sizes | {"together": sum(sizes.values())} for sizes in (checked.predicted, checked.tracked))
    for row, size in predicted.items():
        ratio = f"{size / tracked[row]:9.3f}" if tracked[row] and row not in unlike else ""
        lines.append(f"{row:12}{size / 2**30:12.4g}{tracked[row] / 2**30:12.4g}{ratio}")
    if unlike:
        lines.append(
            f"no ratio of activations: the costs are of {asked.config.layers_of_costs} layers, and tracked were eager "
            "ones, which keep more; to hold like against like, give costs made with `train.compile: off`"
        )
    return "\n".join(lines)


def check_rank(config: Config, plan: Plan, costs: CostModel, load: MadeUpLoad, rank: int | None) -> CheckedRank:
    """Build a rank and carry out one step. If `rank` is None, the rank that is predicted to hold most is taken. This
    process must not be in a process group.

    Raises:
        UserError: for a rank that the plan does not have, or a precision that cannot be checked.
    """
    if config.train.precision == "fp64":
        raise UserError("`train.precision: fp64` is for comparisons, and its memory is not checked; use fp32 or bf16")
    spec, trained = load_model_spec(config.model), config.model.trained
    program = make_program(plan, trained)
    pricer = pricer_of(plan, config, spec, costs)
    shapes = _samples(spec, plan, load, config)
    # A bucket each; the shares of a sample are on neighbouring replicas.
    group, place = np.divmod(np.arange(len(shapes)), plan.grid("llm").cp)
    group, microbatch = np.divmod(group, plan.num_microbatches)
    assignment = pricer.assign(shapes, group * plan.grid("llm").cp + place, microbatch)
    held = tensor_bytes(pricer, shapes, assignment)
    if rank is None:
        rank = program.workers[int(sum(held.values()).argmax())].first_rank
    elif not 0 <= rank < plan.world_size:
        raise UserError(f"rank {rank}: the plan has ranks 0 to {plan.world_size - 1}")
    place = worker_of(program.workers, rank)
    dtype = COMPUTES_IN[config.train.precision]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    try:
        topology = place_in_world(program, torch.device("cpu"), dtype, dist.HashStore())
        with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
            model = build_rank_model(config, plan, topology, dtype, is_empty=True)
            live.peak = 0  # the peak of building does not count
            _run(config, plan, program, topology, model, spec, load, shapes, assignment)
            tracked = _tracked(model, live.peak)
    finally:
        dist.destroy_process_group()
    return CheckedRank(
        rank=rank,
        nodes=tuple(program.nodes[node] for node in program.workers[place].nodes),
        predicted={category: float(held[category][place]) for category in MEMORY_CATEGORIES},
        tracked=tracked,
    )


def _samples(spec: ModelSpec, plan: Plan, load: MadeUpLoad, config: Config) -> SampleShapes:
    """The shapes of one sample for each bucket (microbatch and LLM replica); where replicas share samples, of one so
    many times as large for all of their buckets, divided into a share for each."""
    cp, side = plan.grid("llm").cp, load.picture_side
    num_samples, num_pictures = plan.num_buckets // cp, load.num_pictures * cp
    sees = np.array([["image" in encoder.media for encoder in spec.encoders]])
    picture = spec.rules.image(side, side, num_pictures)
    items, tokens = num_pictures * picture.num_items, num_pictures * picture.num_tokens
    names = np.array([f"made up {number}" for number in range(num_samples)], dtype=object)
    whole = SampleShapes(
        encoders=tuple(encoder.name for encoder in spec.encoders),
        sample_id=names,
        source=names,
        row=np.arange(num_samples),
        num_items=np.repeat(items * sees, num_samples, axis=0),
        sum_sq_items=np.repeat(num_pictures * picture.sum_sq_items * sees, num_samples, axis=0),
        kept_tokens=np.repeat(tokens * sees, num_samples, axis=0),
        llm_tokens=np.full(num_samples, tokens + cp * load.text_tokens),
        target_tokens=np.full(num_samples, cp * load.text_tokens),
        media=MediaSizes(
            np.tile(np.array([side, side, 0, 0, 0, 0], np.int32), (num_samples * num_pictures, 1)),
            np.full(num_samples, num_pictures),
        ),
    )
    return SampleDivider(spec, config.data.audio).divided(whole, np.full(num_samples, cp))


def _run(
    config: Config,
    plan: Plan,
    program: Program,
    topology: Topology,
    model: RankModel,
    spec: ModelSpec,
    load: MadeUpLoad,
    shapes: SampleShapes,
    assignment: Assignment,
) -> None:
    """Carry out all instructions of a step of the rank; the update after them is left out."""
    schedule = _schedule(program, shapes, assignment)
    instructions = StepInstructions(plan, program, config.model.trained, topology.rank).of(assignment.slots)
    forwards = [(program.nodes[item.node], item.microbatch) for item in instructions if item.op is Op.FORWARD]
    inputs = _inputs(plan, spec, model, load, schedule, forwards, program)
    works = make_works(config, plan, model, program, inputs, topology.store)
    # An LLM waits for a word from the ranks that decode for it, which are not here.
    others = Undecodable(topology.store)
    for node in program.nodes:
        if node.module != "llm" and node.pp_stage == 0:
            for microbatch in range(program.num_microbatches):
                others.tell(f"{TRAINING}/{schedule.step}", microbatch, node, ())
    for work in works.values():
        work.begin_step(schedule)
    links, is_cuda = topology.links, config.cluster.device == "cuda"
    receiver = Slots(links.device, links.dtype, NoStreams()) if is_cuda else _OnTime(links.device, links.dtype)
    run_instructions(instructions, works, replace(links, receiver=receiver))


class _OnTime(FreshTensors):
    """Memory of messages on a CPU. What is sent arrives while its rank computes once more."""

    def lets_go(self, sent: dist.Work) -> bool:
        return True


def _schedule(program: Program, shapes: SampleShapes, assignment: Assignment) -> StepSchedule:
    nothing = np.zeros((len(program.nodes), program.num_microbatches))
    return StepSchedule(
        step=0,
        **{name: getattr(shapes, name) for name in SampleShapes.__dataclass_fields__ if name not in HOW_DRAWN},
        **{name: getattr(assignment, name) for name in Assignment.__dataclass_fields__},
        position=np.zeros(len(shapes), dtype=np.int64),
        forward_s=nothing,
        backward_s=nothing,
        extrapolated=nothing > 0,
        step_s=0.0,
        idle=0.0,
        idle_of_worker=np.zeros(len(program.workers)),
        lower_bound_s=0.0,
        policy="made up",
        status="",
        num_beyond_memory=0,
        deciding_s=0.0,
    )


def _inputs(
    plan: Plan,
    spec: ModelSpec,
    model: RankModel,
    load: MadeUpLoad,
    schedule: StepSchedule,
    forwards: Iterable[tuple[Node, int]],
    program: Program,
) -> Iterator[LoadedMedia | TextBatch]:
    """The inputs of the rank's forwards that read records, as loaders would give them."""
    side = load.picture_side
    picture = spec.rules.image(side, side, load.num_pictures * plan.grid("llm").cp)
    runtime = load_runtime(spec.family)
    pictures = (MediumLayout("image", picture.num_items, side, side, picture.grid),) * load.num_pictures
    stages = {(program.nodes[built.index].module, built.node.pp_stage): built.stage for built in model.nodes}
    for node, microbatch in forwards:
        if not stages[node.module, node.pp_stage].reads_records:
            continue
        chosen = samples_of(schedule, node, microbatch)
        if node.module == "llm":
            yield _text(plan, schedule, chosen, sample_group(schedule, node, microbatch, plan.grid("llm").cp))
            continue
        num_samples = int(chosen.sum())
        shape = (num_samples * len(pictures) * picture.num_items, *model.processors[node.module].item_shape)
        kept = tuple(schedule.kept_tokens[chosen, schedule.encoders.index(node.module)].tolist())
        # Without memory: in training the items are in the host's, and here they would count as the device's.
        yield LoadedMedia(
            batch=runtime.encoder_batch(
                spec,
                node.module,
                items=torch.zeros(1).expand(shape) if num_samples else None,
                media=(pictures,) * num_samples,
                kept_tokens=kept,
            )
        )


def _text(plan: Plan, schedule: StepSchedule, chosen: np.ndarray, group: SampleGroup | None) -> TextBatch:
    """The text of these samples, with zeros as tokens. The features' positions come first, then those of text."""
    llm_tokens = schedule.sample_tokens[chosen].tolist()
    _, segment_ends = segments_of(llm_tokens, group)
    num_tokens, features, shared = segment_ends.ends[-1], [], None
    if group:
        (sample,) = group.own
        ends = np.cumsum([0, *np.sum(sample.kept_tokens, axis=0)])
        slots = [[np.arange(*ends[place : place + 2]) for place in range(len(schedule.encoders))]]
        kept, ranks = (own[chosen].tolist() for own in (schedule.kept_tokens, schedule.encoder_rank))
        shared = shared_features(row_runs(llm_tokens, group), slots, kept, ranks, group)
    for place, encoder in enumerate(schedule.encoders):
        ranks, kept = schedule.encoder_rank[chosen, place], schedule.kept_tokens[chosen, place]
        features += [torch.arange(int(kept[ranks == rank].sum())) for rank in range(plan.grid(encoder).dp)]
    num_targets = int(schedule.target_tokens[chosen].sum())
    return TextBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        position_ids=torch.zeros(num_tokens, dtype=torch.int64),
        segment_ends=segment_ends,
        feature_positions=tuple(features),
        target_positions=torch.zeros(num_targets, dtype=torch.int64),
        target_ids=torch.zeros(num_targets, dtype=torch.int64),
        shared_features=shared,
    )


def _tracked(model: RankModel, peak_bytes: int) -> dict[str, float]:
    """The tracked bytes by category, for a step with a peak of `peak_bytes` bytes of tensors."""
    parameters = _bytes_of(parameter for node in model.nodes for parameter in node.stage.parameters())
    gradients = _bytes_of(
        parameter.grad for node in model.nodes for parameter in node.stage.parameters() if parameter.grad is not None
    )
    states = chain.from_iterable(node.optimizer.state_on_device for node in model.nodes)
    optimizer = _bytes_of(states, but=[parameter for node in model.nodes for parameter in node.stage.parameters()])
    return {
        "parameters": float(parameters),
        "gradients": float(gradients),
        "optimizer": float(optimizer),
        "activations": float(peak_bytes - parameters - gradients - optimizer),
    }


def _bytes_of(tensors: Iterable[torch.Tensor], but: Iterable[torch.Tensor] = ()) -> int:
    """The bytes of the tensors' storages, each counted once, without the storages of tensors in `but`."""
    sizes = {storage._cdata: storage.nbytes() for storage in map(_storage, tensors)}
    left_out = {_storage(tensor)._cdata for tensor in but}
    return sum(size for key, size in sizes.items() if key not in left_out)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()
