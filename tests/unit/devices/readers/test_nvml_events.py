"""Critical errors of NVIDIA's cards: heard from the moment on that somebody listens, and never lost with the card."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from torchmuster.devices import snapshot
from torchmuster.devices.model import Node

Machine = Callable[[Scenario], Path]


def _heard(node: Node) -> list[tuple[tuple[int, int], ...] | None]:
    return [one.xid_errors for one in node.accelerators]


def _two(*xids: list[int]) -> Scenario:
    scenario = scenarios.eight_a100_idle()
    del scenario["devices"][2:]
    for gpu, numbers in zip(scenario["devices"], xids, strict=True):
        gpu["xids"] = numbers
    return scenario


def test_what_comes_while_it_listens_is_counted(machine: Machine) -> None:
    machine(_two([31], []))
    with snapshot.listening_to_events() as look:
        assert _heard(look()) == [(), ()]  # what came before does not count
        machine(_two([31, 31, 94, 31], [13]))
        assert _heard(look()) == [((31, 2), (94, 1)), ((13, 1),)]
        assert _heard(look()) == [((31, 2), (94, 1)), ((13, 1),)], "each is counted once"


def test_a_card_that_falls_off_the_bus_leaves_its_last_word(machine: Machine) -> None:
    machine(_two([], []))
    with snapshot.listening_to_events() as look:
        look()
        scenario = _two([], [79])
        scenario["devices"][1]["lost_after_calls"] = 3
        machine(scenario)
        node = look()
    assert node.accelerators[1].trouble == "GPU is lost"
    assert node.accelerators[1].xid_errors == ((79, 1),)


@pytest.mark.parametrize("code", [3, 999])
def test_a_card_without_events_is_read_all_the_same(machine: Machine, code: int) -> None:
    scenario = _two([], [])
    scenario["devices"][0]["errors"] = {"nvmlDeviceRegisterEvents": code}
    machine(scenario)
    with snapshot.listening_to_events() as look:
        assert _heard(look()) == [None, ()]


def test_a_driver_without_events_is_read_all_the_same(machine: Machine) -> None:
    scenario = _two([], [])
    scenario["driver"]["errors"] = {"nvmlEventSetCreate": 3}
    machine(scenario)
    with snapshot.listening_to_events() as look:
        assert _heard(look()) == [None, None]
        assert _heard(look()) == [None, None]


def test_a_driver_that_is_loaded_later_is_listened_to_then(machine: Machine) -> None:
    machine(scenarios.driver_not_loaded())
    with snapshot.listening_to_events() as look:
        assert look().accelerators == ()
        machine(_two([], []))
        assert _heard(look()) == [(), ()]
        machine(_two([48], []))
        assert _heard(look()) == [((48, 1),), ()]
