"""Containers, virtual machines and WSL, by what they leave in files and words."""

from pathlib import Path

import pytest

from made_up_machine import all_well, made_up_machine, only
from torchmuster.diagnose.machine.virtualisation import CHECKS
from torchmuster.finding import Status
from torchmuster.launch.network.interfaces import Interface

(CHECK,) = CHECKS
WSL2 = {"proc/sys/kernel/osrelease": "5.15.153.1-microsoft-standard-WSL2\n"}


@pytest.fixture(autouse=True)
def on_a_lan(monkeypatch: pytest.MonkeyPatch) -> None:
    set_address(monkeypatch, "10.0.0.5")


def set_address(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    known = (Interface(name="eth0", up=True, addresses=(address,)),)
    monkeypatch.setattr("torchmuster.launch.network.interfaces.read_interfaces", lambda: known)


@pytest.mark.parametrize(
    ("files", "environment", "seen"),
    [
        ({}, {}, "no container or virtual machine detected"),
        ({"proc/1/cgroup": "0::/init.scope\n"}, {}, "no container or"),
        ({".dockerenv": ""}, {}, "in a Docker container"),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "in a Kubernetes pod"),
        ({"run/.containerenv": ""}, {}, "in a Podman container"),
        ({"run/systemd/container": "systemd-nspawn"}, {}, "in a systemd-nspawn container"),
        ({"proc/1/cgroup": "1:cpu:/docker/0123\n"}, {}, "in a Docker container"),
        ({}, {"container": "lxc"}, "in an LXC container"),
        ({}, {"APPTAINER_CONTAINER": "/x.sif"}, "in an Apptainer container"),
        (
            {
                ".dockerenv": "",
                "proc/cpuinfo": "flags : fpu hypervisor\n",
                "sys/class/dmi/id/sys_vendor": "Amazon EC2\n",
                "sys/class/dmi/id/product_name": "p4d.24xlarge\n",
            },
            {},
            "in a Docker container on a virtual machine (Amazon EC2)",
        ),
        ({"proc/cpuinfo": "flags : fpu hypervisor\n"}, {}, "in a virtual machine"),
    ],
)
def test_what_it_runs_in(
    tmp_path: Path, files: dict[str, object], environment: dict[str, str], seen: str
) -> None:
    machine = made_up_machine(tmp_path, files, environment=environment)
    assert all_well(CHECK, machine).startswith(seen)


def test_dockers_own_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_address(monkeypatch, "172.17.0.2")
    finding = only(CHECK, made_up_machine(tmp_path, {".dockerenv": ""}))
    assert (finding.name, finding.status) == ("container-network", Status.NOTE)
    assert "docker run --network=host" in finding.fix
    all_well(CHECK, made_up_machine(tmp_path / "no-container"))


@pytest.mark.parametrize("mode", ["nat\n", None])
def test_wsl2_behind_windows(tmp_path: Path, mode: str | None) -> None:
    outputs = {"wslinfo --networking-mode": mode} if mode else {}
    finding = only(CHECK, made_up_machine(tmp_path, WSL2, outputs=outputs))
    assert (finding.name, finding.status) == ("wsl2-nat", Status.NOTE)
    lines = finding.fix.splitlines()
    assert lines[1:3] == ["[wsl2]", "networkingMode=mirrored"]
    assert "wsl --shutdown" in lines
    assert any(line.startswith("New-NetFirewallRule") for line in lines)
    assert any(line.startswith("New-NetFirewallHyperVRule") for line in lines)


def test_wsl2_beside_windows(tmp_path: Path) -> None:
    outputs = {"wslinfo --networking-mode": "mirrored\n"}
    finding = only(CHECK, made_up_machine(tmp_path, WSL2, outputs=outputs))
    assert (finding.name, finding.status) == ("wsl2-mirrored", Status.NOTE)
    assert "networkingMode" not in finding.fix


def test_wsl1(tmp_path: Path) -> None:
    files = {"proc/sys/kernel/osrelease": "4.4.0-19041-Microsoft\n"}
    finding = only(CHECK, made_up_machine(tmp_path, files))
    assert (finding.name, finding.status) == ("wsl1", Status.WARNING)
    assert finding.fix.startswith("wsl --set-version Ubuntu 2")
