"""Reports: what every rank says of a step is what the first one takes, two steps later, without a wait."""

import numpy as np
import pytest
import torch.distributed as dist

from dflop.step import Op, Span
from dflop.train.step_times import StepReports


def spans_of(node: int, step: int) -> list[Span]:
    """Two microbatches' passes, of times that tell node, step, pass and microbatch apart, and a gradient sync."""
    base = 100 * step + 10 * node
    return [
        *(Span(Op.FORWARD, node, microbatch, 0.0, base + 1.0 + microbatch) for microbatch in (0, 1)),
        *(Span(Op.BACKWARD, node, microbatch, 0.0, base + 5.0 + microbatch) for microbatch in (1, 0)),
        Span(Op.SYNC_GRADIENTS, node, -1, 0.0, 9.0),
    ]


@pytest.fixture
def ranks() -> list[StepReports]:
    store = dist.HashStore()
    return [StepReports(store, rank, num_ranks=3, num_nodes=3, num_microbatches=2) for rank in range(3)]


def test_the_first_rank_takes_what_all_sent_when_the_next_step_but_one_begins(ranks):
    for step in range(12):
        measured = ranks[0].take(step)
        assert (measured is None) == (step < 2)
        if measured:
            assert measured.step == step - 2
            base = 100.0 * measured.step + 10.0 * np.arange(3)[:, None]
            np.testing.assert_array_equal(measured.forward_s, base + np.array([1.0, 2.0]))
            np.testing.assert_array_equal(measured.backward_s, base + np.array([5.0, 6.0]))
            assert 0 < measured.overhead < 1
        for index, reports in enumerate(ranks):
            reports.send(step, spans_of(index, step), step_s=100.0)


def test_steps_that_were_not_reported_are_not_waited_for(ranks):
    for step in range(8):
        measured = ranks[0].take(step)
        assert (measured is not None) == (step - 2 in (1, 4))
        if step in (1, 4):
            for index, reports in enumerate(ranks):
                reports.send(step, spans_of(index, step), step_s=100.0)


def test_a_rank_reports_every_node_that_it_carries():
    store = dist.HashStore()
    ranks = [StepReports(store, rank, num_ranks=2, num_nodes=3, num_microbatches=1) for rank in range(2)]
    backward = Span(Op.BACKWARD, 2, 0, 0.0, 7.0)
    ranks[0].send(0, [Span(Op.FORWARD, 0, 0, 0.0, 1.0), Span(Op.FORWARD, 2, 0, 0.0, 2.0), backward], step_s=100.0)
    ranks[1].send(0, [Span(Op.FORWARD, 1, 0, 0.0, 5.0), Span(Op.BACKWARD, 1, 0, 0.0, 6.0)], step_s=100.0)
    measured = ranks[0].take(2)
    assert measured.forward_s.tolist() == [[1.0], [5.0], [2.0]]
    assert measured.backward_s.tolist() == [[0.0], [6.0], [7.0]]


def test_passes_beside_which_gradients_or_parameters_are_on_their_way_are_not_reported():
    reports = StepReports(dist.HashStore(), 0, num_ranks=1, num_nodes=2, num_microbatches=2, overlaps=True)
    backwards = [Span(Op.BACKWARD, 1, microbatch, 0.0, 8.0) for microbatch in (0, 1)]
    reports.send(0, [*spans_of(0, 0), Span(Op.FORWARD, 1, 0, 0.0, 3.0), *backwards], step_s=100.0)
    measured = reports.take(2)
    assert measured.forward_s.tolist() == [[0.0, 2.0], [0.0, 0.0]]
    assert measured.backward_s.tolist() == [[5.0, 0.0], [8.0, 0.0]]
