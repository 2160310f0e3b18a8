"""How GPUs are doing, read on demand: whatever a driver does not answer, the rest is read."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nvml_stub import scenarios
from nvml_stub.scenarios import Scenario
from torchmuster.devices.readers import nvml_health

_ASKED = sorted(
    {
        re.sub(r"(_v\d|V)$", "", one)
        for one in re.findall(
            r"measure_nvml\(pynvml\.(nvml\w+)", Path(nvml_health.__file__).read_text()
        )
    }
)


@pytest.mark.parametrize("code", [3, 4, 999])
@pytest.mark.parametrize("function", _ASKED)
def test_a_function_that_fails_leaves_the_rest(
    function: str, code: int, machine: Callable[[Scenario], Path]
) -> None:
    scenario = scenarios.eight_a100_idle()
    scenario["devices"][0]["errors"] = {function: code}
    machine(scenario)
    health = nvml_health.read_nvml_health()
    assert len(health) == 8
    second = list(health.values())[1]
    assert second.pcie_width == 16
    assert any(second.nvlinks)


def test_a_gpu_that_is_lost_is_left_out(machine: Callable[[Scenario], Path]) -> None:
    machine(scenarios.one_failing())
    told = nvml_health.read_nvml_health()
    assert scenarios.gpu_uuid(2) not in told
    assert len(told) > 0
