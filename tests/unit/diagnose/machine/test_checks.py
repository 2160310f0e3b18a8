"""The checks of a host, each with a fault: the finding, its severity, and what is in its fix."""

import json
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from device_strategies import gpu, node
from made_up_machine import IN_A_CGROUP, made_up_machine
from torchmuster.devices.readers import cpu
from torchmuster.diagnose.check import Surroundings
from torchmuster.diagnose.machine import all_checks, memory, names, ports
from torchmuster.finding import Finding, Status
from torchmuster.launch.network.interfaces import Interface
from torchmuster.units import GiB, MiB

CHECKS = {
    (check.name, system): check for check in all_checks.load() for system in check.systems or ("",)
}
CGROUP = "sys/fs/cgroup/pod"
WSL = {"proc/sys/kernel/osrelease": "5.15.153.1-microsoft-standard-WSL2\n"}
RECORDED = Path(__file__).with_name("recorded")


def run(check: str, surroundings: Surroundings) -> list[Finding]:
    return list((CHECKS.get((check, "")) or CHECKS[check, "linux"]).run(surroundings))


def the_only(check: str, surroundings: Surroundings) -> tuple[str, str, str]:
    """Return the name and the status of the only finding, and its texts."""
    (found,) = run(check, surroundings)
    assert found.why
    return found.name, found.status.value, f"{found.what}\n{found.fix}"


def port(state: str, downed: int = 0, errors: int = 0) -> dict[str, object]:
    """An InfiniBand port of a host that is up for ten days."""
    folder = "sys/class/infiniband/mlx5_0/ports/1"
    return {
        "proc/uptime": "864000.00 1.0\n",
        f"{folder}/state": f"{state}\n",
        f"{folder}/counters/link_downed": downed,
        f"{folder}/counters/symbol_error": errors,
    }


@pytest.mark.parametrize(
    ("check", "files", "name", "status", "text"),
    [
        (
            "infiniband",
            port("4: ACTIVE", downed=50),
            "infiniband-link-flaps",
            "warning",
            "mlx5_0 port 1",
        ),
        (
            "infiniband",
            port("4: ACTIVE", errors=9999),
            "infiniband-symbol-errors",
            "warning",
            "9,999",
        ),
        ("infiniband", port("1: DOWN"), "infiniband-down", "warning", "ibstat"),
        (
            "processors",
            IN_A_CGROUP | {f"{CGROUP}/cpu.max": "50000 100000"},
            "cpu-quota",
            "warning",
            "0.5",
        ),
        (
            "firewall",
            {"etc/ufw/ufw.conf": "ENABLED=yes\n"},
            "firewall-on",
            "note",
            "ufw allow from NETWORK",
        ),
        ("firewall", {"run/firewalld.pid": "812"}, "firewall-on", "note", 'address="NETWORK"'),
        ("platform", WSL, "wsl2-nat", "note", "networkingMode=mirrored"),
    ],
)
def test_files_of_the_host(
    check: str, files: Mapping[str, object], name: str, status: str, text: str, tmp_path: Path
) -> None:
    assert run(check, made_up_machine(tmp_path / "well")) == []
    found = the_only(check, made_up_machine(tmp_path / "faulty", files))
    assert found[:2] == (name, status)
    assert text in found[2]


@pytest.mark.parametrize(
    ("recorded", "fix"),
    [("windows_11.json", "New-NetFirewallRule"), ("macos_15.json", "--unblockapp")],
)
def test_the_firewalls_of_other_systems(recorded: str, fix: str, tmp_path: Path) -> None:
    facts = json.loads((RECORDED / recorded).read_text(encoding="utf-8"))
    (check,) = [check for check in all_checks.load() if check.name == "firewall"]
    (found,) = check.run(made_up_machine(tmp_path, **facts))
    assert fix in found.fix
    assert list(check.run(made_up_machine(tmp_path, system=facts["system"]))) == []


@pytest.mark.parametrize(
    ("check", "variable", "value", "name", "status"),
    [
        ("harmful-variables", "CUDA_LAUNCH_BLOCKING", "1", "harmful-variable", "warning"),
        ("harmful-variables", "TORCH_DISTRIBUTED_DEBUG", "DETAIL", "harmful-variable", "warning"),
        (
            "harmful-variables",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "0",
            "harmful-variable",
            "warning",
        ),
        ("harmful-variables", "NCCL_P2P_DISABLE", "1", "harmful-variable", "note"),
        ("threads", "OMP_NUM_THREADS", "4096", "too-many-threads", "warning"),
        ("threads", "MKL_NUM_THREADS", "many", "too-many-threads", "warning"),
        ("visible-devices", "CUDA_VISIBLE_DEVICES", "", "gpus-hidden", "warning"),
        ("visible-devices", "CUDA_VISIBLE_DEVICES", "-1", "gpus-hidden", "note"),
        (
            "visible-devices",
            "CUDA_VISIBLE_DEVICES",
            "0,7",
            "visible-devices-partly-ignored",
            "warning",
        ),
    ],
)
def test_variables(check: str, variable: str, value: str, name: str, status: str) -> None:
    def here(**environment: str) -> Surroundings:
        return Surroundings(environment=environment, take_snapshot=lambda: node(gpu(0), gpu(1)))

    assert run(check, here()) == run(check, here(TORCH_DISTRIBUTED_DEBUG="INFO")) == []
    found = the_only(check, here(**{variable: value}))
    assert found[:2] == (name, status)
    assert f"{variable}={value}" in found[2]


@pytest.mark.parametrize(
    ("limit", "soft", "files", "name", "status"),
    [
        (resource.RLIMIT_NOFILE, 256, {}, "open-files-low", "warning"),
        (resource.RLIMIT_NOFILE, 1024, {}, "open-files-low", "note"),
        (
            resource.RLIMIT_MEMLOCK,
            8 * MiB,
            {"dev/infiniband/uverbs0": ""},
            "locked-memory-low",
            "warning",
        ),
        (resource.RLIMIT_MEMLOCK, 8 * MiB, {}, None, None),
        (resource.RLIMIT_NOFILE, resource.RLIM_INFINITY, {}, None, None),
    ],
)
def test_limits(
    limit: int,
    soft: int,
    files: Mapping[str, object],
    name: str | None,
    status: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = {limit: (soft, 1048576)}
    unlimited = (resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits.get(which, unlimited))
    machine = made_up_machine(tmp_path, files)
    if name is None:
        assert run("limits", machine) == []
    else:
        found = the_only("limits", machine)
        assert found[:2] == (name, status)
        assert "docker run --ulimit" in found[2]


@pytest.mark.parametrize(
    ("limit", "free", "name", "status"),
    [
        ("max", 60 * GiB, None, None),
        (str(8 * GiB), 60 * GiB, "memory-limit", "note"),
        (str(700 * MiB), 60 * GiB, "memory-limit", "warning"),
        ("max", 100 * MiB, "memory-full", "warning"),
    ],
)
def test_memory(
    limit: str,
    free: int,
    name: str | None,
    status: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = cpu.MemoryRoom(total_bytes=64 * GiB, free_bytes=free)
    monkeypatch.setattr(memory, "host_memory", lambda: host)
    machine = made_up_machine(tmp_path, IN_A_CGROUP | {f"{CGROUP}/memory.max": limit})
    found = [(one.name, one.status.value) for one in run("memory", machine)]
    assert found == ([] if name is None else [(name, status)])


@pytest.mark.parametrize(
    ("total", "free", "name", "status"),
    [
        (8 * GiB, 8 * GiB, None, None),
        (64 * MiB, 64 * MiB, "shared-memory-small", "warning"),
        (8 * GiB, 0, "shared-memory-full", "failure"),
        (8 * GiB, 20 * MiB, "shared-memory-full", "warning"),
    ],
)
def test_shared_memory(
    total: int, free: int, name: str | None, status: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = SimpleNamespace(f_frsize=1, f_blocks=total, f_bavail=free)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    found = [(one.name, one.status.value) for one in run("shared-memory", Surroundings())]
    assert found == ([] if name is None else [(name, status)])


@pytest.mark.parametrize(
    ("free", "error", "name", "status"),
    [
        (500 * GiB, None, None, None),
        (100 * MiB, None, "run-folder-full", "warning"),
        (4096, None, "run-folder-full", "failure"),
        (500 * GiB, OSError(30, "Read-only file system"), "run-folder-not-writable", "failure"),
    ],
)
def test_the_folder_for_runs(
    free: int,
    error: OSError | None,
    name: str | None,
    status: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = SimpleNamespace(total=900 * GiB, free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    if error is not None:

        def refuse(**_: Any) -> Any:
            raise error

        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    found = run("run-folder", Surroundings(folder=tmp_path / "new" / "runs"))
    assert [(one.name, one.status.value) for one in found] == (
        [] if name is None else [(name, status)]
    )
    assert all("muster run --runs" in one.fix for one in found)


# ---- names, interfaces, ports

LOOPBACK = Interface(name="lo", up=True, addresses=("127.0.0.1", "::1"))
ETHERNET = Interface(name="eth0", up=True, addresses=("10.0.0.5",))
NETWORK = "torchmuster.launch.network.interfaces"


def have_interfaces(monkeypatch: pytest.MonkeyPatch, *interfaces: Interface) -> None:
    monkeypatch.setattr(f"{NETWORK}.read_interfaces", lambda: (LOOPBACK, *interfaces))


@pytest.mark.parametrize(
    ("addresses", "name", "status"),
    [
        (["10.0.0.5"], None, None),
        (["127.0.1.1", "10.0.0.5"], None, None),
        (["127.0.1.1"], "name-is-loopback", "note"),
        ([], "name-unresolvable", "warning"),
        (["10.0.0.99"], "name-leads-elsewhere", "warning"),
    ],
)
def test_the_own_name(
    addresses: Sequence[str],
    name: str | None,
    status: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have_interfaces(monkeypatch, ETHERNET)
    monkeypatch.setattr(f"{NETWORK}.resolve_host", lambda _: addresses)
    machine = made_up_machine(tmp_path, {"proc/sys/kernel/hostname": "node1\n"})
    if name is None:
        assert run("own-name", machine) == []
    else:
        found = the_only("own-name", machine)
        assert found[:2] == (name, status)
        assert "echo '10.0.0.5 node1' | sudo tee -a /etc/hosts" in found[2]


@pytest.mark.parametrize(
    ("own", "neighbour"), [("10.0.0.5", "10.0.0.13"), ("fd12::ff:5", "fd12::ff:d")]
)
def test_a_name_server_that_does_not_answer_for_another_host_of_the_network(
    own: str, neighbour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_interfaces(monkeypatch, Interface(name="eth0", up=True, addresses=(own,)))
    monkeypatch.setattr(names, "_SLOW_S", -1.0)
    asked: list[str] = []

    def name_of(address: tuple[str, int], flags: int) -> None:
        asked.append(address[0])
        if address[0] == neighbour:
            monkeypatch.setattr(names, "_SLOW_S", -1.0)
        else:
            monkeypatch.setattr(names, "_SLOW_S", 1e9)  # is in /etc/hosts
        raise OSError

    monkeypatch.setattr(socket, "getnameinfo", name_of)
    found = the_only("reverse-lookup", Surroundings())
    assert asked == [own, neighbour]
    assert found[:2] == ("reverse-lookup-slow", "warning")
    assert neighbour in found[2]


@pytest.mark.parametrize(
    ("interfaces", "flags", "name", "status"),
    [
        ([ETHERNET], {"eth0": "up,broadcast,running"}, None, None),
        ([], {}, "no-network", "note"),
        ([ETHERNET, "eno1"], {"eno1": "up,broadcast"}, "no-carrier", "note"),
        ([ETHERNET, "eno1"], {"eno1": "broadcast"}, None, None),
    ],
)
def test_interfaces(
    interfaces: Sequence[Any],
    flags: Mapping[str, str],
    name: str | None,
    status: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second = Interface(name="eno1", up=False, addresses=("192.168.7.5",))
    known = [second if one == "eno1" else one for one in interfaces]
    have_interfaces(monkeypatch, *known)
    states = {interface: SimpleNamespace(flags=text) for interface, text in flags.items()}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: states)
    found = run("interfaces", made_up_machine(tmp_path))
    assert [(one.name, one.status.value) for one in found] == (
        [] if name is None else [(name, status)]
    )


def test_a_bridge_without_members_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge = Interface(name="docker0", up=True, addresses=("172.17.0.1",))
    have_interfaces(monkeypatch, ETHERNET, bridge)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"docker0": SimpleNamespace(flags="up")})
    files = {"sys/class/net/docker0/bridge/bridge_id": ""}
    assert run("interfaces", made_up_machine(tmp_path, files)) == []


def test_ports_in_use_are_named_with_their_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        chosen = {"MASTER_PORT": str(server.getsockname()[1])}
        monkeypatch.setattr(ports, "USUAL_PORT", server.getsockname()[1])
        findings = run("ports", made_up_machine(tmp_path, environment=chosen))
        assert [one.name for one in findings] == ["port-taken", "master-port-taken"]
        assert [one.status for one in findings] == [Status.NOTE, Status.WARNING]
        assert f"pid {os.getpid()}" in findings[0].what
        in_a_run = made_up_machine(tmp_path, environment={**chosen, "RANK": "0"})
        assert run("ports", in_a_run) == []
