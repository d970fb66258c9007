"""Orders are written as torch writes them, and read back what was written."""

import pytest
from drawn_plans import llm_alone, plans
from hypothesis import given
from torch.distributed.pipelining.schedules import _Action

from dflop.pipeline import actions_of, format_actions, parse_actions
from dflop.runtime import UserError


@given(plans())
def test_what_is_written_reads_back(plan):
    assert parse_actions(format_actions(actions_of(plan))) == actions_of(plan)


@given(plans())
def test_torch_reads_every_cell_alike(plan):
    for row, line in zip(actions_of(plan), format_actions(actions_of(plan)).splitlines(), strict=True):
        for action, cell in zip(row, line.split(","), strict=True):
            read = _Action.from_str(cell)
            assert (read.stage_index, read.computation_type.value, read.microbatch_index) == action


def test_a_schedule_reads_as_one_row_a_stage():
    assert format_actions(actions_of(llm_alone(2, 2, "zb_h1"))) == (
        "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"
    )


def test_bubbles_are_skipped():
    assert parse_actions("0F0,,0B0\n,1F0,1B0\n") == actions_of(llm_alone(2, 1))


@pytest.mark.parametrize("cell", ["0X3", "F3", "0F", "0SEND_F1", "0F3 1B2"])
def test_a_cell_that_is_no_computation_is_named_with_its_row(cell):
    with pytest.raises(UserError, match=f"row 1 of the schedule holds '{cell}'"):
        parse_actions(f"0F0\n0F0,{cell}\n")
