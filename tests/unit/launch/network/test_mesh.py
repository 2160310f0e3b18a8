import pytest

from torchmuster.errors import Impossible
from torchmuster.launch.network import mesh
from torchmuster.launch.network.mesh import Call, Place

A, B, C = (
    Place(name=name, system="linux", address=f"10.0.0.{last}")
    for name, last in (("a", 2), ("b", 10), ("c", 3))
)


def call(caller: Place, called: Place, problem: str = "", port: int = 40_000) -> Call:
    return Call(caller=caller, called=called, port=port, problem=problem)


def check(*calls: Call, both_ways: bool = False) -> str:
    return mesh.check(calls, both_ways=both_ways, port=29400, timeout_s=5)


def test_all_reach_each_other() -> None:
    assert check(call(A, B), call(B, A), both_ways=True) == ""


def test_the_direction_that_gloo_needs() -> None:
    with pytest.raises(Impossible) as refusal:
        check(call(A, B), call(B, A, "refused"))
    assert refusal.value.what == "b does not reach a at the ports at which ranks talk"
    assert refusal.value.why == (
        "b to a (10.0.0.2, at port 40000 to try it): refused: a firewall rejects it, or the address "
        "leads to another machine\n"
        "ranks connect at ports that the system gives out; port 29400 is not enough"
    )
    assert refusal.value.fix.splitlines()[:2] == [
        "let b in at a:",
        "sudo ufw allow from 10.0.0.10/32 to any port 32768:60999 proto tcp  # Ubuntu",
    ]


def test_the_direction_that_only_nccl_needs() -> None:
    assert check(call(A, B, "timeout"), call(B, A)) == (
        "a does not reach b at the ports at which ranks talk; "
        "gloo does not need that direction, NCCL would"
    )
    with pytest.raises(Impossible, match="a does not reach b at the ports"):
        check(call(A, B, "timeout"), call(B, A), both_ways=True)


def test_addresses_are_compared_as_numbers_as_gloo_does() -> None:
    assert mesh.gloo_calls(B, C)  # 10.0.0.10 is the greater one, though "10.0.0.3" is as text
    assert not mesh.gloo_calls(C, B)


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
    assert refusal.value.fix.count("let b in at a:") == 4


@pytest.mark.parametrize("count", [2, 3, 9, 10, 1000])
def test_everybody_but_the_first_is_called_by_all_or_by_enough(count: int) -> None:
    calls = [(caller, one) for caller in range(count) for one in mesh.called_by(caller, count)]
    assert len(set(calls)) == len(calls)
    assert all(caller != one and one != 0 for caller, one in calls)
    for one in range(1, count):
        callers = [caller for caller, called in calls if called == one]
        assert len(callers) == min(count - 1, mesh.CALLERS)
