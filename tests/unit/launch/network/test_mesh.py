import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import Impossible
from torchmuster.launch.network import reach
from torchmuster.launch.network.reach import NodeAddress, ReachCall

A, B, C = (
    NodeAddress(name=name, system="linux", address=f"10.0.0.{last}")
    for name, last in (("a", 2), ("b", 10), ("c", 3))
)


def call(
    caller: NodeAddress, called: NodeAddress, problem: str = "", port: int = 40_000
) -> ReachCall:
    return ReachCall(caller=caller, called=called, port=port, problem=problem)


def check(*calls: ReachCall, both_ways: bool = False) -> str:
    return reach.check_reachability(calls, both_ways=both_ways, port=29400, timeout_s=5)


def test_all_reach_each_other() -> None:
    assert check(call(A, B), call(B, A), both_ways=True) == ""


def test_the_direction_that_gloo_needs(snapshot: SnapshotAssertion) -> None:
    with pytest.raises(Impossible) as refusal:
        check(call(A, B), call(B, A, "refused"))
    assert "ufw allow from 10.0.0.10/32 " in refusal.value.fix
    assert str(refusal.value) == snapshot


def test_the_direction_that_only_nccl_needs(snapshot: SnapshotAssertion) -> None:
    assert check(call(A, B, "timeout"), call(B, A)) == snapshot
    with pytest.raises(Impossible) as refusal:
        check(call(A, B, "timeout"), call(B, A), both_ways=True)
    assert refusal.value.what == snapshot


def test_addresses_are_compared_as_numbers_as_gloo_does() -> None:
    assert reach.gloo_calls(B, C)  # 10.0.0.10 is the greater one, though "10.0.0.3" is as text
    assert not reach.gloo_calls(C, B)


def test_a_system_that_gives_out_other_ports() -> None:
    with pytest.raises(Impossible) as refusal:
        check(call(B, A, "timeout", port=5_000))
    assert "1024:65535" in refusal.value.fix


def test_of_many_only_a_few_are_told() -> None:
    with pytest.raises(Impossible) as refusal:
        check(*(call(B, A, "timeout") for _ in range(9)))
    lines = refusal.value.why.splitlines()
    assert len(lines) == 6
    assert lines[-2] == "and 5 more"
    assert refusal.value.fix.count("sudo ufw allow ") == 4


@pytest.mark.parametrize("count", [2, 3, 9, 10, 1000])
def test_everybody_but_the_first_is_called_by_all_or_by_enough(count: int) -> None:
    calls = [(caller, one) for caller in range(count) for one in reach.called_by(caller, count)]
    assert len(set(calls)) == len(calls)
    assert all(caller != one and one != 0 for caller, one in calls)
    for one in range(1, count):
        callers = [caller for caller, called in calls if called == one]
        assert len(callers) == min(count - 1, reach.CALLERS)
