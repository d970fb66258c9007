"""Programs of every placement and schedule, carried out over gloo with toy stages, against the same sums in one go.

Ranks carry several nodes: a monolithic encoder beside the LLM's first stage, colocated encoders beside every stage,
an interleaved LLM's chunks; and backwards are split where the schedule splits them.
"""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import spawn

from dflop.plan import Grid, Plan
from dflop.plan.trained import TrainedSet
from dflop.step import Node, Program, check_program, make_program
from dflop.step.receiving import NoStreams, Receiver, Slots
from dflop.step.run import run_instructions
from dflop.train.first_messages import meet_peers
from dflop.train.topology import place_in_world

pytestmark = pytest.mark.serial

WIDTH, TEXT_TOKENS = 5, 3


def plan_of(
    placement: str,
    schedule: str = "1f1b",
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    encoders: dict[str, int] | None = None,
    encoder_tp: int = 1,
    num_microbatches: int = 4,
    num_chunks: int = 1,
) -> Plan:
    """`encoders` gives each encoder's ranks where the placement does not; `tp` is the LLM's."""
    grids, offset = [], 0
    for module, num_ranks in (encoders or {"vision": encoder_tp}).items():
        shared = {"colocated": tp * pp * dp, "monolithic": tp * dp}.get(placement)
        own = {"num_ranks": shared or num_ranks, "rank_offset": 0 if shared else offset}
        grids.append(Grid(module=module, tp=encoder_tp, **own))
        offset += 0 if shared else num_ranks
    grids.append(Grid(module="llm", num_ranks=tp * pp * dp, tp=tp, pp=pp, rank_offset=offset))
    return Plan(
        placement=placement,
        grids=tuple(grids),
        num_microbatches=num_microbatches,
        schedule=schedule,
        num_chunks=num_chunks,
    )


PLANS = {
    1: [plan_of("colocated"), plan_of("monolithic"), plan_of("monolithic", "gpipe")],
    2: [
        plan_of("disjoint"),
        plan_of("colocated", pp=2),
        plan_of("colocated", dp=2),
        plan_of("colocated", "interleaved_1f1b", pp=2, num_chunks=3),
        plan_of("monolithic", pp=2),
        plan_of("monolithic", "interleaved_1f1b", pp=2, num_chunks=2),
    ],
    3: [
        plan_of("disjoint", pp=2, num_microbatches=5),
        plan_of("disjoint", "interleaved_1f1b", pp=2, num_chunks=2),
        plan_of("disjoint", encoders={"vision": 1, "audio": 1}),
        plan_of("colocated", pp=3, num_microbatches=5),
        plan_of("monolithic", pp=3),
        plan_of("disjoint", tp=2),
        plan_of("disjoint", encoder_tp=2),
    ],
    4: [
        plan_of("disjoint", dp=2, encoders={"vision": 2}),
        plan_of("disjoint", dp=3),
        plan_of("disjoint", encoders={"vision": 3}),
        plan_of("colocated", tp=2, dp=2, encoder_tp=4),
        plan_of("colocated", tp=4, encoder_tp=2),
        plan_of("colocated", tp=2, pp=2),
        plan_of("monolithic", tp=2, pp=2, encoder_tp=2),
        plan_of("colocated", pp=2, dp=2, encoders={"vision": 0, "audio": 0}),
        plan_of("monolithic", pp=2, dp=2, encoders={"vision": 0, "audio": 0}),
    ],
    5: [
        plan_of("disjoint", dp=4),
        plan_of("disjoint", encoders={"vision": 4}),
        plan_of("disjoint", dp=2, encoders={"vision": 3}),
        plan_of("disjoint", tp=4),
    ],
    8: [
        plan_of("colocated", tp=2, dp=4, encoder_tp=4),
        plan_of("colocated", tp=4, dp=2, encoder_tp=2),
        plan_of("colocated", tp=4, pp=2, encoder_tp=2),
    ],
}
FROZEN = plan_of("colocated", pp=2), ("vision",)


def num_tokens(module: str, source: int, target: int, microbatch: int) -> int:
    """Of what an encoder's replica has for a replica of the LLM; nothing now and then. Two replicas have 0 and 3, 1 and
    2 for two of the LLM, and one has 1, 3 and 2 for three."""
    return ((0, 3, 1, 2), (1, 3, 2, 0))[microbatch % 2][(2 * source + target + (module == "audio")) % 4]


def drawn(*shape: int, seed: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def weight_of(node: Node) -> torch.Tensor:
    return drawn(WIDTH, WIDTH, seed=(len(node.module), node.pp_stage)).requires_grad_()


def media(node: Node, target: Node, microbatch: int) -> torch.Tensor | None:
    count = num_tokens(node.module, node.dp_rank, target.dp_rank, microbatch)
    seed = (len(node.module), node.dp_rank, target.dp_rank, microbatch)
    return drawn(count, WIDTH, seed=seed) if count else None


def text(node: Node, microbatch: int) -> torch.Tensor:
    return drawn(TEXT_TOKENS, WIDTH, seed=(99, node.dp_rank, microbatch))


class ToyWork:
    """tanh(x W) on every stage; the last one's loss is the sum of squares."""

    def __init__(self, program: Program, own: int, replicas: dist.ProcessGroup) -> None:
        self.program, self.own, self.node = program, own, program.nodes[own]
        self.incoming = [number for number, edge in enumerate(program.edges) if edge.target == own]
        self.outgoing = [number for number, edge in enumerate(program.edges) if edge.source == own]
        self.weight, self.replicas = weight_of(self.node), replicas
        self.weight.grad = torch.zeros_like(self.weight)
        self.loss, self.prepared, self.kept = 0.0, [], {}

    def edge_shape(self, microbatch, edge):
        edge = self.program.edges[edge]
        source, target = self.program.nodes[edge.source], self.program.nodes[edge.target]
        if source.module != "llm":
            count = num_tokens(source.module, source.dp_rank, target.dp_rank, microbatch)
        else:
            count = TEXT_TOKENS + sum(
                num_tokens(node.module, node.dp_rank, target.dp_rank, microbatch)
                for node in encoders_of(self.program, target)
            )
        return (count, WIDTH) if count else None

    def prepare(self, microbatch):
        self.prepared.append(microbatch)

    def forward(self, microbatch, received):
        leaves = {edge: tensor.requires_grad_() for edge, tensor in sorted(received.items())}
        if self.node.module != "llm":
            inputs = {
                edge: media(self.node, self.program.nodes[self.program.edges[edge].target], microbatch)
                for edge in self.outgoing
            }
            outputs = {edge: torch.tanh(own @ self.weight) for edge, own in inputs.items() if own is not None}
        else:
            own = [text(self.node, microbatch)] if self.node.pp_stage == 0 else []
            output = torch.tanh(torch.cat([*own, *leaves.values()]) @ self.weight)
            outputs = dict.fromkeys(self.outgoing, output) if self.outgoing else {-1: output.square().sum()}
        self.kept[microbatch] = leaves, outputs
        if -1 in outputs:
            self.loss += outputs[-1].item()
            return {}
        return {edge: output.detach() for edge, output in outputs.items()}

    def backward(self, microbatch, received):
        leaves, outputs = self.kept.pop(microbatch)
        if not outputs:
            return {}
        gradients = [received.get(edge) for edge in outputs]
        of_weight, *found = torch.autograd.grad(list(outputs.values()), [self.weight, *leaves.values()], gradients)
        self.weight.grad += of_weight
        return dict(zip(leaves, found, strict=True))

    def sync_gradients(self):
        dist.all_reduce(self.weight.grad, group=self.replicas)


def encoders_of(program: Program, llm: Node) -> list[Node]:
    """The encoders' nodes that feed a replica of the LLM, in the order of their edges."""
    first = program.nodes.index(Node("llm", 0, llm.dp_rank))
    return [program.nodes[edge.source] for edge in program.edges if edge.is_bridge and edge.target == first]


def in_one_go(plan: Plan, program: Program) -> tuple[float, dict[tuple[str, int], torch.Tensor]]:
    """The loss, and each stage's gradient, without any pipeline."""
    weights = {(node.module, node.pp_stage): weight_of(node) for node in program.nodes}
    loss = torch.zeros((), dtype=torch.float64)
    for replica in range(plan.grid("llm").dp):
        llm = Node("llm", 0, replica)
        for microbatch in range(plan.num_microbatches):
            parts = [media(node, llm, microbatch) for node in encoders_of(program, llm)]
            features = [
                torch.tanh(part @ weights[node.module, 0])
                for node, part in zip(encoders_of(program, llm), parts, strict=True)
                if part is not None
            ]
            hidden = torch.cat([text(llm, microbatch), *features])
            for stage in range(plan.num_stages("llm")):
                hidden = torch.tanh(hidden @ weights["llm", stage])
            loss = loss + hidden.square().sum()
    loss.backward()
    return loss.item(), {stage: weight.grad for stage, weight in weights.items()}


def _run_plans(rank: int, world_size: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    for plan in PLANS[world_size]:
        _run(plan)
        _run(plan, receiver=Slots(torch.device("cpu"), torch.float64, NoStreams()))  # as on GPUs
    if world_size == FROZEN[0].world_size:
        _run(*FROZEN)
    dist.destroy_process_group()


def _run(plan: Plan, frozen: tuple[str, ...] = (), receiver: Receiver | None = None) -> None:
    program = make_program(plan, TrainedSet(frozen))
    check_program(plan, program, TrainedSet(frozen))
    topology = place_in_world(program, torch.device("cpu"), torch.float64, dist.HashStore())
    works = {own: ToyWork(program, own, topology.replicas[own]) for own in topology.nodes}
    links = dataclasses.replace(topology.links, receiver=receiver) if receiver else topology.links
    meet_peers(links)
    spans = run_instructions(topology.instructions, works, links)
    expected_loss, expected = in_one_go(plan, program)
    # All ranks of a node compute the same, and so their losses are one.
    losses = [work.loss for own, work in works.items() if topology.tensor[own].is_first]
    loss = torch.tensor(sum(losses), dtype=torch.float64)
    dist.all_reduce(loss)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12), plan
    for work in works.values():
        node = work.node
        assert work.prepared == list(range(plan.num_microbatches)), plan
        if node.module not in frozen:
            assert not work.kept
            torch.testing.assert_close(work.weight.grad, expected[node.module, node.pp_stage], rtol=1e-12, atol=1e-12)
    assert {span.node for span in spans} == set(works)


@pytest.mark.parametrize("world_size", PLANS)
def test_ranks_that_carry_several_nodes_compute_what_one_process_computes(world_size, tmp_path):
    spawn(_run_plans, (world_size, str(tmp_path / "store")), nprocs=world_size)
