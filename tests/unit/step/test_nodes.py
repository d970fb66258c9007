"""Workers tile the world, every rank of a node takes part in it, and nodes come in one order everywhere."""

from drawn_plans import plans
from hypothesis import given, settings
from small_plans import disjoint

from dflop.plan import Grid, Plan
from dflop.step import Node, Worker, nodes_of, stages_of, workers_of

properties = settings(max_examples=300)


@properties
@given(plans())
def test_workers_follow_each_other_without_a_gap_and_cover_the_world(plan):
    rank = 0
    for worker in workers_of(plan):
        assert worker.first_rank == rank
        rank += worker.num_ranks
    assert rank == plan.world_size


@properties
@given(plans())
def test_a_node_is_carried_by_exactly_its_own_ranks(plan):
    """A grid says which ranks a replica of a stage has; chunk c of rank s is stage c * pp + s."""
    workers = workers_of(plan)
    for index, node in enumerate(nodes_of(plan)):
        grid = plan.grid(node.module)
        first = grid.first_rank(node.pp_stage % grid.pp, node.dp_rank)
        carriers = [worker for worker in workers if index in worker.nodes]
        ranks = [rank for worker in carriers for rank in range(worker.first_rank, worker.first_rank + worker.num_ranks)]
        assert ranks == list(range(first, first + grid.tp))


@properties
@given(plans())
def test_replicas_of_a_stage_are_nodes_one_after_the_other(plan):
    nodes = nodes_of(plan)
    assert len(set(nodes)) == len(nodes)
    assert [node for stage in stages_of(plan) for node in nodes[stage.first_node : stage.first_node + stage.dp]] == [
        Node(stage.module, stage.pp_stage, replica) for stage in stages_of(plan) for replica in range(stage.dp)
    ]


def test_the_encoder_comes_first_then_the_llms_stages_by_replica():
    plan = disjoint(llm_pp=2, llm_dp=2, num_microbatches=1)
    assert nodes_of(plan) == (
        Node("vision", 0, 0),
        Node("llm", 0, 0),
        Node("llm", 0, 1),
        Node("llm", 1, 0),
        Node("llm", 1, 1),
    )
    assert workers_of(plan) == tuple(Worker(rank, 1, (rank,)) for rank in range(5))


def test_where_modules_share_ranks_workers_are_as_large_as_the_smaller_groups():
    """Of an LLM at tp 4 and an encoder at tp 2, every pair of ranks carries an encoder and a half of an LLM node."""
    plan = Plan(
        placement="colocated",
        grids=(Grid(module="vision", num_ranks=8, tp=2), Grid(module="llm", num_ranks=8, tp=4, pp=2)),
        num_microbatches=1,
    )
    assert workers_of(plan) == (
        Worker(0, 2, (0, 4)),
        Worker(2, 2, (1, 4)),
        Worker(4, 2, (2, 5)),
        Worker(6, 2, (3, 5)),
    )
