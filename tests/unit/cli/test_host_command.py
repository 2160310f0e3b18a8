"""``muster host`` before anybody joins: how many machines it takes."""

import pytest
from syrupy.assertion import SnapshotAssertion

from muster_command import Muster
from torchmuster.cli import main
from torchmuster.launch.transports.join import code


@pytest.mark.parametrize("number", ["5000", str(code.MOST_PLACES)])
def test_as_many_machines_as_join_codes_can_name(number: str) -> None:
    options = main.root_parser(only="host").parse_args(["host", "--nnodes", number])
    assert options.nnodes.most == options.nnodes.least == int(number)


@pytest.mark.parametrize("number", ["0", "-1", "two", str(code.MOST_PLACES + 1)])
def test_other_numbers_are_refused(
    muster: Muster, number: str, snapshot: SnapshotAssertion
) -> None:
    result = muster("host", f"--nnodes={number}", "train.py")
    assert result.code == 2
    complaint = result.err.splitlines()[-1]
    assert f"argument --nnodes: '{number}'" in complaint
    assert complaint == snapshot
