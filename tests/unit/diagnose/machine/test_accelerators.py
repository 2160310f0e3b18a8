"""GPUs that are lost, failing, hot, badly linked or closed, on machines that the NVML stand-in plays."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from torchmuster.diagnose.check import Surroundings
from torchmuster.diagnose.machine.accelerators import CHECKS
from torchmuster.finding import Finding, Status

STATE, HEALTH = CHECKS
Machine = Callable[[Scenario], Path]


def findings() -> list[Finding]:
    here = Surroundings()
    return [*STATE.run(here), *HEALTH.run(here)]


def told(scenario: Scenario, machine: Machine) -> list[Finding]:
    """What is said of a machine beyond what is well."""
    machine(scenario)
    return [one for one in findings() if one.status is not Status.OK]


def idle_a100s(**changes: Any) -> Scenario:
    """Eight A100s with nobody on them; number 3 changed."""
    scenario = scenarios.eight_a100_idle()
    scenario["devices"][3].update(changes)
    return scenario


@pytest.mark.parametrize("scenario", [scenarios.eight_a100_idle, scenarios.no_gpus])
def test_healthy_machines_have_nothing_to_say(
    scenario: Callable[[], Scenario], machine: Machine
) -> None:
    assert told(scenario(), machine) == []


@pytest.mark.parametrize(
    "scenario",
    [scenarios.eight_a100, scenarios.mixed_consumer, scenarios.mig, scenarios.sixty_four],
)
def test_machines_in_use_have_nothing_above_a_note(
    scenario: Callable[[], Scenario], machine: Machine
) -> None:
    assert {one.status for one in told(scenario(), machine)} <= {Status.NOTE}


@pytest.mark.parametrize(
    ("scenario", "name"),
    [
        (scenarios.lost_at_handle, "gpu-unreachable"),
        (scenarios.driver_mismatch, "driver-library-mismatch"),
    ],
)
def test_what_the_look_itself_finds_is_passed_on(
    scenario: Callable[[], Scenario], name: str, machine: Machine
) -> None:
    (found,) = told(scenario(), machine)
    assert (found.name, found.status) == (name, Status.FAILURE)


def test_uncorrected_memory_errors(machine: Machine) -> None:
    ecc = {"enabled": True, "corrected": 0, "uncorrected": 2}
    (found,) = told(idle_a100s(ecc=ecc), machine)
    assert found.name == "ecc-uncorrected"
    assert found.what.startswith("GPU 3 ")


def test_rows_of_memory_that_wait_for_a_reset(machine: Machine) -> None:
    rows = {"correctable": 0, "uncorrectable": 1, "pending": 1, "failure": 0}
    (found,) = told(idle_a100s(remapped_rows=rows), machine)
    assert (found.name, found.status) == ("gpu-memory-repair-pending", Status.WARNING)
    assert "sudo nvidia-smi -r -i 3" in found.fix


def test_a_gpu_that_lets_nobody_compute(machine: Machine) -> None:
    (found,) = told(idle_a100s(compute_mode=2), machine)
    assert (found.name, found.status) == ("gpu-compute-prohibited", Status.FAILURE)
    assert found.fix == "sudo nvidia-smi -i 3 -c DEFAULT"


def test_nvlinks_that_are_down(machine: Machine) -> None:
    links = [{"to": "switch", "lanes": 10}, {"to": "switch", "lanes": 2, "active": False}]
    (found,) = told(idle_a100s(nvlinks=links), machine)
    assert (found.name, found.status) == ("nvlink-down", Status.WARNING)
    assert "10 of 12" in found.what
    assert found.fix.startswith("nvidia-smi nvlink --status -i 3")


def test_all_nvlinks_of_a_board_are_down(machine: Machine) -> None:
    scenario = scenarios.eight_a100_idle()
    for device in scenario["devices"]:
        device["nvlinks"][0]["active"] = False
    (found,) = told(scenario, machine)
    assert found.name == "nvlink-all-down"
    assert "GPUs 0-7" in found.what
    assert found.fix == "sudo systemctl restart nvidia-fabricmanager"


def test_a_narrow_pcie_link(machine: Machine) -> None:
    pcie = {"generation": 4, "max_generation": 4, "width": 4, "max_width": 16}
    (found,) = told(idle_a100s(pcie=pcie), machine)
    assert (found.name, found.status) == ("pcie-degraded", Status.NOTE)
    assert "GPU 3 uses 4 of 16" in found.what


@pytest.mark.parametrize(
    ("action", "fix"), [(1, "nvidia-smi -r -i 3"), (2, "sudo reboot"), (4, "nvidia-smi -r -i 3")]
)
def test_what_the_driver_asks_for_is_told(machine: Machine, action: int, fix: str) -> None:
    (asked,) = told(idle_a100s(recovery_action=action), machine)
    assert (asked.name, asked.status) == ("gpu-needs-recovery", Status.FAILURE)
    assert fix in asked.fix
    assert told(idle_a100s(recovery_action=0), machine) == []
