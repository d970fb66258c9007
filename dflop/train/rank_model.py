"""What a rank holds of the model: the stage of each node that the rank carries, and the stage's optimiser."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PretrainedConfig

from dflop.config import Config
from dflop.models import ModelSpec, check_tp, load_model_spec, load_runtime
from dflop.models.compilation import compile_layers, compiles_layers
from dflop.models.microbatch import MediaProcessor
from dflop.models.precision import compute_in, held_in
from dflop.models.stages import Stage
from dflop.models.tensor_group import Shard, TensorGroup
from dflop.plan import Plan
from dflop.plan.trained import EVERYTHING, TrainedSet
from dflop.shapes.text import ChatTokenizer, tokenizer_folder
from dflop.step import Instruction, Node, Op
from dflop.train.adamw import Rates, rates_of
from dflop.train.parameter_shards import ParameterShards, SharedPasses, Units
from dflop.train.sharded_optimizer import ShardedAdamW
from dflop.train.tied_embedding import TiedEmbedding
from dflop.train.topology import Topology

__all__ = ["NodeModel", "RankModel", "build_rank_model", "forwards_that_read"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NodeModel:
    """One node of the program on this rank.

    - `index`: of the node in the program.
    - `ranks`: the tensor-parallel ranks that share the node.
    - `optimizer`: over the node's replicas.
    - `parameters`: the stage's, by their names in the whole Hugging Face model. If replicas shard them, DTensors.
    - `shards`: which part of a parameter this rank and its replicas have, if they do not have the whole.
    - `dtype`: the dtype of computation.
    - `written_elsewhere`: names of parameters that another node or tensor-parallel rank writes to checkpoints.
    - `tied`: the matrix shared with the other end of the LLM's pipeline, if the head is tied to the embedding.
    - `shared`: runs the stage, if replicas shard its parameters.
    - `outside`: the parameters outside of layers, if replicas do not shard them.
    - `samples`: the replicas that may compute a sample together, where there are several.
    - `overlaps`: whether gradients are summed beside the step's last backward, and updated parameters sent back beside
      the next forward. On CPUs, where the same cores do both, nothing would be gained, and times of passes would hold
      both.
    """

    index: int
    node: Node
    stage: Stage
    ranks: TensorGroup
    optimizer: ShardedAdamW | ParameterShards
    parameters: dict[str, nn.Parameter]
    shards: Mapping[str, Shard]
    dtype: torch.dtype
    written_elsewhere: Collection[str] = ()
    tied: TiedEmbedding | None = None
    shared: SharedPasses | None = None
    outside: Collection[nn.Parameter] = ()
    samples: dist.ProcessGroup | None = None
    overlaps: bool

    def run(self, compute: Callable[[], dict[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
        """Run `compute`, which uses the stage; if replicas shard its parameters, together with these."""
        if self.shared:
            return self.shared.run(compute)
        self.optimizer.wait_for_parameters(self.outside)  # layers wait for their own
        return compute()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        if self.tied:
            self.tied.zero_grad()

    def summing(self, is_last: bool) -> AbstractContextManager[None]:
        """A context of a backward. In the step's last one, gradients begin to be summed (`ShardedAdamW.summing`).

        Replicas that shard parameters sum gradients inside each pass, and others may sum all of them behind it.
        """
        return nullcontext() if self.shared or not (is_last and self.overlaps) else self.optimizer.summing()

    def sum_gradients(self) -> None:
        """Sum the gradients over the node's replicas, and partial ones over its tensor-parallel ranks."""
        if self.tied:
            self.tied.give_gradient()
        self.optimizer.sum_gradients()

    def update(self, lr_factor: float, scale: float) -> None:
        """One step of the optimiser."""
        self.optimizer.step(lr_factor, scale)
        if not self.shared:
            tied = [self.tied.weight] if self.tied else []
            self.optimizer.wait_for_parameters(tied if self.overlaps else None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankModel:
    """The nodes of a rank, and what all nodes share: the model's spec, its Hugging Face config, each encoder's media
    processor, the tokenizer, and what of the model is trained."""

    nodes: tuple[NodeModel, ...]
    spec: ModelSpec
    hf_config: PretrainedConfig
    processors: Mapping[str, MediaProcessor]
    tokenizer: ChatTokenizer
    trained: TrainedSet = EVERYTHING

    def of(self, index: int) -> NodeModel:
        """The node with this index in the program."""
        return next(node for node in self.nodes if node.index == index)

    def norm_squared(self) -> float:
        """The squared norm of the summed gradients that this rank owns. The sum over all ranks is the model's."""
        return sum(node.optimizer.norm_squared() for node in self.nodes)

    def wait_for_parameters(self) -> None:
        """Wait until all parameters have the values of the last update."""
        for node in self.nodes:
            if not node.shared:
                node.optimizer.wait_for_parameters()

    def update(self, lr_factor: float, scale: float) -> None:
        """One step of the optimisers, with learning rates times `lr_factor` and the gradients times
        `scale`. With `overlaps`, updated parameters may come as late as the next forward needs them."""
        for node in self.nodes:
            node.update(lr_factor, scale)
        for node in self.nodes:
            if node.tied:
                node.tied.give_values()


def forwards_that_read(
    instructions: Sequence[Instruction], topology: Topology, model: RankModel
) -> tuple[tuple[Node, int], ...]:
    """Node and microbatch of each of the rank's forwards that reads records, in the order of a step's instructions."""
    return tuple(
        (topology.program.nodes[item.node], item.microbatch)
        for item in instructions
        if item.op is Op.FORWARD and model.of(item.node).stage.reads_records
    )


def build_rank_model(
    config: Config,
    plan: Plan,
    topology: Topology,
    dtype: torch.dtype,
    *,
    is_empty: bool = False,
    overlaps: bool | None = None,
) -> RankModel:
    """Build the stages of a rank's nodes, to compute in `dtype`, with weights from `model.weights` or `model.path`, or
    drawn from the seed, or with `is_empty` without values (`FamilyRuntime.build_stage`). For `overlaps` see
    `NodeModel`; None means True on GPUs and False elsewhere.

    Raises:
        UserError: for a model, tokenizer or checkpoint that cannot be read, or stages that cannot be built this way.
    """
    spec = load_model_spec(config.model)
    tokenizer = ChatTokenizer(tokenizer_folder(config.model), spec.rules)
    runtime = load_runtime(spec.family)
    hf_config = runtime.make_config(
        spec, tokenizer.placeholder_ids | tokenizer.special_ids, tokenizer.vocab_size(spec.media)
    )
    assert spec.has_tied_head or not hf_config.tie_word_embeddings, "the ends of a pipeline would have no group"
    runtime.check_trained(spec, hf_config, config.model.trained, config.train.part_names)
    checkpoint, weights = (
        Path(folder) if folder else None for folder in (config.model.path, config.model.weights or config.model.path)
    )
    overlaps = topology.device.type == "cuda" if overlaps is None else overlaps
    nodes: Sequence[NodeModel] = [
        _build_node(config, plan, topology, dtype, index, spec, hf_config, weights, is_empty, overlaps)
        for index in topology.nodes
    ]
    return RankModel(
        nodes=tuple(nodes),
        spec=spec,
        hf_config=hf_config,
        processors={encoder.name: runtime.processors[encoder.name](spec, checkpoint) for encoder in spec.encoders},
        tokenizer=tokenizer,
        trained=config.model.trained.among(spec.modules),
    )


def _build_node(
    config: Config,
    plan: Plan,
    topology: Topology,
    dtype: torch.dtype,
    index: int,
    spec: ModelSpec,
    hf_config: PretrainedConfig,
    checkpoint: Path | None,
    is_empty: bool,
    overlaps: bool,
) -> NodeModel:
    """One node."""
    node, ranks = topology.program.nodes[index], topology.tensor[index]
    stage, units = _build_stage(config, plan, topology, dtype, index, spec, hf_config, checkpoint, is_empty)
    stage.train_those(config.model.trained.includes)
    common = {"index": index, "node": node, "stage": stage, "ranks": ranks, "dtype": dtype}
    common |= {"shards": stage.shards, "overlaps": overlaps, "samples": topology.samples.get(index)}
    if not stage.is_trained:
        compute_in(stage, dtype)  # parameters that are never updated have no masters
    # Parameters that are whole on every tensor-parallel rank are counted and written by the first one.
    whole = [name for name in stage.named_hf_parameters() if ranks.size > 1 and name not in stage.shards]
    if units:
        shared = SharedPasses(stage, units, config.model.trained, _num_still(config, node, spec, stage.layers))
        return _with_shared_parameters(
            common, shared, topology, _rates(config, stage), whole, offloads=plan.offloads_optimizer
        )
    tied = topology.tied.get(index) if node.module == "llm" and hf_config.tie_word_embeddings else None
    embedding = TiedEmbedding(stage.hf.get_input_embeddings().weight, tied) if tied else None
    return _with_whole_parameters(
        common, embedding, topology, _rates(config, stage), whole, offloads=plan.offloads_optimizer
    )


def _num_still(config: Config, node: Node, spec: ModelSpec, layers: range) -> int:
    """How many of a stage's layers have no backward: its first ones."""
    return config.model.trained.among(spec.modules).ways(node.module).within(layers).num_still


def _rates(config: Config, stage: Stage) -> dict[nn.Parameter, Rates]:
    """The rates of a stage's trained parameters."""
    moments = tuple(config.train.betas), config.train.eps
    return {
        parameter: rates_of(parameter, Rates(*config.train.of_part(stage.plain_name(name)), *moments))
        for name, parameter in stage.named_hf_parameters().items()
        if parameter.requires_grad
    }


def _with_shared_parameters(
    common: dict[str, Any],
    shared: SharedPasses,
    topology: Topology,
    rates: Mapping[nn.Parameter, Rates],
    whole: Sequence[str],
    *,
    offloads: bool,
) -> NodeModel:
    """A node whose replicas share its parameters."""
    parameters = common["stage"].named_hf_parameters()
    optimizer = ParameterShards(
        list(parameters.values()),
        topology.sharers[common["index"]],
        topology.rank,
        rates=rates,
        offloads=offloads,
        **_over_tensor_ranks(common, whole),
    )
    return NodeModel(
        **common, optimizer=optimizer, parameters=parameters, shared=shared, written_elsewhere=_of_first(common, whole)
    )


def _of_first(common: dict[str, Any], whole: Sequence[str]) -> Sequence[str]:
    """Names of the parameters that the first of a node's tensor-parallel ranks writes for this one."""
    return () if common["ranks"].is_first else whole


def _over_tensor_ranks(common: dict[str, Any], whole: Sequence[str]) -> dict[str, Any]:
    """What an optimiser is told of the parameters that are whole on each of a node's tensor-parallel ranks."""
    stage, ranks = common["stage"], common["ranks"]
    parameters = stage.named_hf_parameters()
    return {
        "whole": [parameters[name] for name in whole],
        "counts_whole": ranks.is_first,
        "partial": [parameters[name] for name in stage.partial_gradients()],
        "tensor_ranks": ranks.group,
    }


def _with_whole_parameters(
    common: dict[str, Any],
    embedding: TiedEmbedding | None,
    topology: Topology,
    rates: Mapping[nn.Parameter, Rates],
    whole: Sequence[str],
    *,
    offloads: bool,
) -> NodeModel:
    """A node whose replicas hold its whole parameters, and share the optimiser's state."""
    stage, dtype = common["stage"], common["dtype"]
    parameters = stage.named_hf_parameters()
    copy = embedding.weight if embedding and embedding.is_copy else None
    layers = [stage.hf.get_submodule(name) for name in stage.layer_names]
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    outside = [parameter for parameter in parameters.values() if parameter not in inside]
    optimizer = ShardedAdamW(
        [parameter for parameter in parameters.values() if parameter is not copy],
        topology.replicas[common["index"]],
        rates=rates,
        computed_in=dtype,
        offloads=offloads,
        **_over_tensor_ranks(common, whole),
        complete_later=[embedding.weight] if embedding and not embedding.is_copy else (),
        needed_first=outside,
    )
    for layer in layers:
        of_layer = list(layer.parameters())
        layer.register_forward_pre_hook(lambda *_, of_layer=of_layer: optimizer.wait_for_parameters(of_layer))
    unread = [parameters[name] for name in stage.unread if name in parameters]  # they are written as they were read
    compute_in(stage, dtype, but=unread)  # of trained parameters only the tied copy, which no optimiser has converted
    return NodeModel(
        **common,
        optimizer=optimizer,
        parameters=parameters,
        tied=embedding,
        outside=outside,
        written_elsewhere={
            *_of_first(common, whole),
            *(name for name, parameter in parameters.items() if parameter is copy),
        },
    )


def _build_stage(
    config: Config,
    plan: Plan,
    topology: Topology,
    dtype: torch.dtype,
    index: int,
    spec: ModelSpec,
    hf_config: PretrainedConfig,
    checkpoint: Path | None,
    is_empty: bool,
) -> tuple[Stage, Units | None]:
    """A node's stage, compiled if that is wanted, and what shards its units, if replicas shard its parameters."""
    node, ranks, trained = topology.program.nodes[index], topology.tensor[index], config.model.trained
    check_tp(spec, node.module, ranks.size)
    units = None
    if plan.grid(node.module).gathers:
        units = Units(topology.sharers[index], dtype)
    num_layers = spec.module(node.module).num_layers
    layers = plan.layers_of(node.module, num_layers)[node.pp_stage]
    stage = load_runtime(spec.family).build_stage(
        hf_config,
        node.module,
        layers=layers,
        seed=config.seed,
        checkpoint=checkpoint,
        dtype=held_in(dtype) if trained.trains_weights(node.module) else dtype,  # frozen weights are never wider
        device=topology.device,
        num_recomputed=plan.recomputed_of(node.module, num_layers)[node.pp_stage],
        num_attention_kept=plan.attention_kept_of(node.module)[node.pp_stage],
        num_offloaded=plan.offloaded_of(node.module, num_layers)[node.pp_stage],
        num_still=_num_still(config, node, spec, layers),
        ranks=ranks,
        share=units.share if units else None,
        is_empty=is_empty,
        trained=trained,
        adapter=Path(config.model.adapter) if config.model.adapter else None,
    )
    if not is_empty and compiles_layers(config.train.compile, topology.device)[0]:
        compile_layers(stage)
    return stage, units
