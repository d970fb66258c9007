"""Free memory is the machine's, or what is left of the control group's share."""

import pytest

from dflop.base.process_memory import available_bytes


@pytest.mark.parametrize(("most", "now", "left"), [("3000000", "1000000", 2e6), ("max", "1000000", None)])
def test_a_control_group_limits_what_is_available(tmp_path, most, now, left):
    (tmp_path / "memory.max").write_text(most + "\n")
    (tmp_path / "memory.current").write_text(now + "\n")
    free = available_bytes(tmp_path / "nothing here")
    assert free > 2e6
    assert available_bytes(tmp_path) == pytest.approx(free if left is None else left, rel=0.2)
