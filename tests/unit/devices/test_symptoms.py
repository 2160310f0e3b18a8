"""What a snapshot shows its owner without being asked."""

from collections.abc import Callable
from pathlib import Path

import pytest

from device_strategies import gpu, node
from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from torchmuster.devices import snapshot
from torchmuster.devices.model import Ecc
from torchmuster.devices.snapshot import symptoms_of
from torchmuster.finding import Status


@pytest.mark.parametrize("count", [1, 3])
def test_memory_errors_that_were_not_corrected(count: int) -> None:
    failing = gpu(2, ecc=Ecc(enabled=True, corrected=9, uncorrected=count))
    (finding,) = symptoms_of(node(failing))
    assert finding.name == "ecc-uncorrected"
    assert finding.status is Status.WARNING
    assert f" {count} " in finding.what
    assert finding.fix.startswith("sudo nvidia-smi -r -i 2 ")


@pytest.mark.parametrize(
    "ecc",
    [
        None,
        Ecc(enabled=False),
        Ecc(enabled=True, corrected=12, uncorrected=0),
        Ecc(enabled=True, corrected=None, uncorrected=None),
    ],
)
def test_errors_that_were_corrected_or_are_not_counted(ecc: Ecc | None) -> None:
    assert symptoms_of(node(gpu(0, ecc=ecc))) == ()


def test_a_gpu_that_is_slowed_down_by_heat() -> None:
    hot = gpu(
        1,
        temperature_c=91,
        slowdown_temperature_c=89,
        throttled_by=("power limit", "heat (hardware)"),
    )
    (finding,) = symptoms_of(node(hot))
    assert finding.name == "gpu-hot"
    assert finding.status is Status.WARNING
    assert "91 °C" in finding.what
    assert "89 °C" in finding.why
    assert "sudo nvidia-smi -i 1 -pl" in finding.fix
    assert finding.evidence == "heat (hardware)"


def test_a_look_at_the_machine_tells_its_symptoms(machine: Callable[[Scenario], Path]) -> None:
    scenario = scenarios.eight_a100_idle()
    scenario["devices"][5]["ecc"]["uncorrected"] = 2
    scenario["devices"][6]["throttle_reasons"] = 0x40
    scenario["devices"][7]["lost"] = True
    machine(scenario)
    names = [finding.name for finding in snapshot.take_snapshot().findings]
    assert names == ["gpu-unreachable", "ecc-uncorrected", "gpu-hot"]
