"""Room for connections: the limit is raised as far as needed and allowed, and never lowered."""

import resource

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.errors import Impossible
from torchmuster.launch.transports.channel import make_room_for


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The limit of a machine that allows 1024 files, and 4096 to those who ask."""
    current = [1024, 4096]

    def change(kind: int, wanted: tuple[int, int]) -> None:
        assert kind == resource.RLIMIT_NOFILE
        assert wanted[0] <= wanted[1] == 4096
        current[:] = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(current))
    monkeypatch.setattr(resource, "setrlimit", change)
    return current


def test_a_few_machines_change_nothing(limits: list[int]) -> None:
    assert make_room_for(100, wanted=200) == 200
    assert limits == [1024, 4096]


def test_many_machines_raise_the_limit_and_the_line_takes_what_is_left(
    limits: list[int],
) -> None:
    assert make_room_for(3000, wanted=3000) == 4096 - 3000 - 256
    assert limits == [4096, 4096]


def test_too_many_machines_are_refused_with_the_command_that_helps(
    limits: list[int], snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(Impossible) as caught:
        make_room_for(10_000, wanted=0)
    assert caught.value.what == snapshot
    assert caught.value.fix.startswith("sudo prlimit --pid $$ --nofile=10256")
    assert limits == [1024, 4096]
