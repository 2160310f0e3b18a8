"""Which addresses a machine tells others, on machines that do not exist and on this one."""

from collections.abc import Sequence

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.finding import Finding, Status
from torchmuster.launch.network import interfaces
from torchmuster.launch.network.interfaces import Interface


def nic(name: str, *addresses: str, up: bool = True, speed: int = 0) -> Interface:
    return Interface(name=name, up=up, addresses=addresses, speed_mbits=speed)


LO = nic("lo", "127.0.0.1", "::1")
ETH0 = nic("eth0", "10.0.0.5", "fd00::5", "fe80::5")
DOCKER = nic("docker0", "172.17.0.1")
SERVER = [LO, DOCKER, nic("wg0", "10.9.0.5"), ETH0, nic("eth1", "192.168.7.5", up=False)]


def addresses(machine: Sequence[Interface]) -> list[str]:
    return [one.address for one in interfaces.interface_candidates(machine)]


def test_ordinary_interfaces_come_first_then_vpns_then_bridges_and_never_loopback() -> None:
    assert addresses(SERVER) == ["10.0.0.5", "fd00::5", "10.9.0.5", "172.17.0.1"]


@pytest.mark.parametrize(
    "bridge",
    [
        *("docker0", "br-1a2b", "virbr0", "veth12", "cni0", "flannel.1", "kube-bridge"),
        *("podman0", "lxcbr0", "vmnet8"),
        "vEthernet (WSL)",
    ],
)
def test_a_bridge_to_containers_comes_after_a_vpn(bridge: str) -> None:
    machine = [nic(bridge, "172.17.0.1"), nic("tun0", "10.8.0.2"), nic("enp3s0", "10.0.0.5")]
    assert addresses(machine) == ["10.0.0.5", "10.8.0.2", "172.17.0.1"]


@pytest.mark.parametrize("vpn", ["tun0", "tap1", "wg0", "tailscale0", "utun4"])
def test_a_vpn_comes_after_an_ordinary_interface(vpn: str) -> None:
    assert addresses([nic(vpn, "100.64.0.3"), nic("wlan0", "192.168.1.9")])[0] == "192.168.1.9"


def test_an_address_that_a_machine_gave_itself_comes_last() -> None:
    machine = [nic("eth0", "169.254.7.7"), DOCKER]
    assert addresses(machine) == ["172.17.0.1", "169.254.7.7"]


def test_of_ordinary_interfaces_the_fast_one_comes_first() -> None:
    machine = [nic("eth0", "10.0.0.5", speed=1000), nic("ib0", "10.1.0.5", speed=100_000)]
    assert addresses(machine) == ["10.1.0.5", "10.0.0.5"]


def test_interface_of_an_address() -> None:
    assert interfaces.interface_of("10.0.0.5", SERVER) == "eth0"
    assert interfaces.interface_of("fd00:0:0::5", SERVER) == "eth0"
    assert interfaces.interface_of("fe80::5%eth0", SERVER) == "eth0"
    assert interfaces.interface_of("10.0.0.6", SERVER) is None
    assert interfaces.interface_of("node1", SERVER) is None


def nobody_knows(name: str) -> list[str]:
    return []


@pytest.mark.parametrize(
    ("word", "local"),
    [
        ("10.0.0.5", True),
        ("[fd00::5]", True),
        ("192.168.7.5", True),
        ("127.0.1.1", True),
        ("10.0.0.6", False),
        ("localhost", True),
        ("elsewhere", False),
    ],
)
def test_is_local(word: str, local: bool) -> None:
    assert interfaces.is_local(word, SERVER, look_up=nobody_knows) is local


def test_this_machine_has_loopback_and_does_not_tell_it() -> None:
    machine = interfaces.read_interfaces()
    assert interfaces.interface_of("127.0.0.1", machine) is not None
    assert not any(address.startswith(("127.", "fe80", "::1")) for address in addresses(machine))
    assert interfaces.interface_candidates() == interfaces.interface_candidates(machine)


def test_each_library_is_told_the_interface_in_its_own_way_of_writing() -> None:
    assert interfaces.socket_variables("eth0", {}) == {
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "=eth0",
    }


def test_what_the_user_set_stays() -> None:
    environment = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": ""}
    assert interfaces.socket_variables("eth0", environment) == {"NCCL_SOCKET_IFNAME": "=eth0"}


def findings(
    *, gloo: str = "", nccl: str = "", alone: bool = False, gpus: bool = True
) -> list[Finding]:
    environment = {"GLOO_SOCKET_IFNAME": gloo, "NCCL_SOCKET_IFNAME": nccl}
    return interfaces.socket_findings(environment, SERVER, alone=alone, gpus=gpus)


def test_gloo_with_an_interface_that_is_not_there(snapshot: SnapshotAssertion) -> None:
    (finding,) = findings(gloo="ens5")
    assert (finding.name, finding.status) == ("socket-interface", Status.FAILURE)
    assert finding.what.startswith("GLOO_SOCKET_IFNAME=ens5 ")
    assert "export GLOO_SOCKET_IFNAME=eth0 " in finding.fix
    assert finding.as_json() == snapshot


@pytest.mark.parametrize("gloo", ["lo", "eth0,docker0", "eth1", "eth"])
def test_gloo_with_an_interface_that_leads_nowhere(gloo: str, snapshot: SnapshotAssertion) -> None:
    (finding,) = findings(gloo=gloo)
    assert (finding.name, finding.status) == ("socket-interface", Status.FAILURE)
    assert finding.what.startswith(f"GLOO_SOCKET_IFNAME={gloo} ")
    assert finding.why == snapshot


@pytest.mark.parametrize("nccl", ["=eth", "ens", "^lo,docker,wg,eth", "=lo", "^docker0", "docker"])
def test_nccl_with_an_interface_that_leads_nowhere(nccl: str, snapshot: SnapshotAssertion) -> None:
    (finding,) = findings(nccl=nccl)
    assert finding.name == "socket-interface"
    assert finding.what.startswith(f"NCCL_SOCKET_IFNAME={nccl} ")
    assert finding.why == snapshot
    assert "export NCCL_SOCKET_IFNAME==eth0" in finding.fix
