"""The checks of GPUs that need no torch, really measured on a host with GPUs of the NVML stub, without and with their fault."""

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nvml_stub import SCENARIO_VARIABLE, scenarios
from nvml_stub.scenarios import Scenario
from torchmuster.selftest.check import Outcome, Place
from torchmuster.selftest.checks import devices

# Answers as nvidia-smi does, from the scenario.
NVIDIA_SMI = f"""#!{sys.executable}
import json, os, sys
with open(os.environ[{SCENARIO_VARIABLE!r}]) as file:
    scenario = json.load(file)
gpus = scenario["devices"]
values = {{
    "uuid": lambda at, gpu: gpu["uuid"],
    "name": lambda at, gpu: gpu["name"],
    "memory.total": lambda at, gpu: gpu["memory"]["total"] // 2**20,
    "pci.bus_id": lambda at, gpu: gpu["pci_bus_id"],
    "enforced.power.limit": lambda at, gpu: f"{{gpu['power_limit_mw'] / 1000:.2f}}",
    "index": lambda at, gpu: at,
    "driver_version": lambda at, gpu: scenario["driver"]["version"],
}}
if sys.argv[1] == "topo":
    def link(a, b):
        lanes = [one["lanes"] for one in gpus[a].get("nvlinks", ()) if one["to"] in ("switch", b)]
        level = scenario["topology"][a][b]
        return " X " if a == b else f"NV{{lanes[0]}}" if lanes else {{10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}}[level]
    names = [f"GPU{{at}}" for at in range(len(gpus))]
    print("\\t\\x1b[4m" + "\\t".join(names) + "\\tNIC0\\tCPU Affinity\\tNUMA Affinity\\x1b[0m")
    for a, name in enumerate(names):
        print("\\t".join([name, *(link(a, b) for b in range(len(gpus))), "SYS", "0-15", "N/A"]))
    print("NIC0\\t" + "\\t".join(["SYS"] * len(gpus)) + "\\t X ")
    print("\\nLegend:\\n\\n  X    = Self\\n  SYS  = Connection traversing PCIe")
else:
    fields = sys.argv[1].removeprefix("--query-gpu=").split(",")
    for at, gpu in enumerate(gpus):
        print(", ".join(str(values[field](at, gpu)) for field in fields))
"""


def one_gpu() -> Scenario:
    scenario = scenarios.eight_a100_idle()
    return {**scenario, "devices": scenario["devices"][:1], "topology": [[0]]}


@pytest.fixture
def place(
    machine: Callable[[Scenario], Path],
    own_machine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Scenario], Place]:
    """Return a function that puts the self-test on a host."""
    programs = own_machine / "bin"
    programs.mkdir()
    program = programs / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    _open_to_other_users(own_machine)

    def on(scenario: Scenario) -> Place:
        machine(scenario).chmod(0o644)
        folder = own_machine / "selftest"
        folder.mkdir(mode=0o700)
        return Place(device="cpu", ranks=2, has=frozenset({"nvml"}), folder=str(folder))

    return on


def _open_to_other_users(folder: Path) -> None:
    """Let other users pass pytest's folders."""
    ours = itertools.takewhile(
        lambda one: one.name.startswith(("pytest-", "popen-", "test_")), (folder, *folder.parents)
    )
    for one in ours:
        one.chmod(one.stat().st_mode | 0o011)


def outcome(check: str, place: Place, *, planted: bool = False) -> Outcome:
    (found,) = (one for one in devices.CHECKS if one.id == check)
    return found.judge(found.measure(place, planted))


@pytest.mark.parametrize(
    ("scenario", "gpus", "links"),
    [
        (scenarios.eight_a100_idle, 8, 28),
        (scenarios.mixed_consumer, 4, 6),
        (one_gpu, 1, 0),
    ],
)
def test_the_inventory_is_that_of_nvidia_smi(
    place: Callable[[Scenario], Place],
    scenario: Callable[[], Scenario],
    gpus: int,
    links: int,
) -> None:
    here = place(scenario())
    good = outcome("inventory", here)
    assert good.confirmed, good.says
    assert good.figures == {"gpus": gpus, "links": links, "differences": 0}
    planted = outcome("inventory", here, planted=True)
    assert not planted.confirmed
    assert planted.figures["differences"] == 1
    assert "memory_mib" in planted.says


@pytest.mark.parametrize("scenario", [scenarios.eight_a100_idle, one_gpu])
def test_claims_hold_against_another_user(
    place: Callable[[Scenario], Place], scenario: Callable[[], Scenario]
) -> None:
    here = place(scenario())
    good = outcome("claims", here)
    assert good.confirmed, good.says
    assert good.figures == {
        "second_user": os.geteuid() == 0,
        "other_gpu": scenario is not one_gpu,
    }
    planted = outcome("claims", here, planted=True)
    assert not planted.confirmed
    assert "got a GPU that is claimed" in planted.says  # and not refused for another reason


@pytest.mark.parametrize("scenario", [scenarios.eight_a100, one_gpu])
def test_the_exporter_serves_what_nvml_reports(
    place: Callable[[Scenario], Place], scenario: Callable[[], Scenario]
) -> None:
    made = scenario()
    here = place(made)
    good = outcome("exporter", here)
    assert good.confirmed, good.says
    assert good.figures == {"values": 6 * len(made["devices"]), "wrong": 0}
    assert not outcome("exporter", here, planted=True).confirmed
