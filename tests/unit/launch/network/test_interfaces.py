"""Which addresses a machine tells others, on machines that do not exist and on this one."""

from collections.abc import Sequence

import pytest

from torchmuster.launch.network import interfaces
from torchmuster.launch.network.interfaces import Interface


def nic(name: str, *addresses: str, up: bool = True) -> Interface:
    return Interface(name=name, up=up, addresses=addresses)


LO = nic("lo", "127.0.0.1", "::1")
ETH0 = nic("eth0", "10.0.0.5", "fd00::5", "fe80::5")
DOCKER = nic("docker0", "172.17.0.1")
SERVER = [LO, DOCKER, nic("wg0", "10.9.0.5"), ETH0, nic("eth1", "192.168.7.5", up=False)]


def addresses(machine: Sequence[Interface]) -> list[str]:
    return [one.address for one in interfaces.interface_candidates(machine)]


def test_ordinary_interfaces_come_first_then_vpns_then_bridges_and_never_loopback() -> None:
    assert addresses(SERVER) == ["10.0.0.5", "fd00::5", "10.9.0.5", "172.17.0.1"]


@pytest.mark.parametrize(
    ("later", "earlier"),
    [
        *((bridge, "tun0") for bridge in ("docker0", "br-1a2b", "virbr0", "veth12", "cni0")),
        *((bridge, "wg0") for bridge in ("flannel.1", "kube-bridge", "vmnet8", "vEthernet (WSL)")),
        *((vpn, "wlan0") for vpn in ("tun0", "tap1", "wg0", "tailscale0", "utun4")),
    ],
)
def test_bridges_come_after_vpns_and_vpns_after_ordinary_interfaces(
    later: str, earlier: str
) -> None:
    machine = [nic(later, "172.17.0.1"), nic(earlier, "10.0.0.5")]
    assert addresses(machine) == ["10.0.0.5", "172.17.0.1"]


def test_an_address_that_a_machine_gave_itself_comes_last() -> None:
    machine = [nic("eth0", "169.254.7.7"), DOCKER]
    assert addresses(machine) == ["172.17.0.1", "169.254.7.7"]


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
    assert interfaces.is_local(word, SERVER, resolve=nobody_knows) is local


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


@pytest.mark.parametrize(
    ("gloo", "unusable"),
    [
        ("eth0", None),
        ("eth0,docker0", None),
        ("", None),
        ("ens5", "ens5"),
        ("eth0,eth1", "eth1"),  # down
        ("eth", "eth"),
        ("^lo", "^lo"),  # NCCL's syntax
    ],
)
def test_gloo_takes_names_of_interfaces_that_are_up(gloo: str, unusable: str | None) -> None:
    findings = interfaces.socket_findings({"GLOO_SOCKET_IFNAME": gloo}, SERVER)
    if unusable is None:
        assert findings == []
    else:
        [finding] = findings
        assert finding.name == "socket-interface"
        assert finding.why.startswith(f"{unusable} is not")
        assert "unset GLOO_SOCKET_IFNAME" in finding.fix
