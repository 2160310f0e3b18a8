"""The firewall: rules as iptables and nft print them, and what may be seen without being root."""

import json
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from syrupy.assertion import SnapshotAssertion

from made_up_machine import all_well, found, made_up_machine, only
from torchmuster.diagnose.check import Surroundings
from torchmuster.diagnose.machine.firewall import CHECKS, closing_rule, from_iptables, from_nftables
from torchmuster.finding import Status

LINUX, WINDOWS, MACOS = CHECKS
RECORDED = Path(__file__).with_name("recorded")
OPEN = "-P INPUT ACCEPT\n-P FORWARD ACCEPT\n-P OUTPUT ACCEPT\n"
SHUT = OPEN.replace("INPUT ACCEPT", "INPUT DROP")
BOTH = {"firewall-meeting-closed", "firewall-ranks-closed"}


def iptables(ports: str, source: str = "10.0.0.0/24") -> str:
    return f"sudo iptables -I INPUT -s {source} -p tcp --dport {ports} -j ACCEPT"


def ufw(ports: str) -> str:
    return f"sudo ufw allow from 10.0.0.0/24 to any port {ports} proto tcp"


def firewalld(ports: str) -> str:
    rule = (
        f'rule family="ipv4" source address="10.0.0.0/24" port port="{ports}" protocol="tcp" accept'
    )
    return f"sudo firewall-cmd --add-rich-rule='{rule}'"


@pytest.fixture(autouse=True)
def own_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is 10.0.0.5 in a network of 256."""
    have_address(monkeypatch, "10.0.0.5", "255.255.255.0")


def have_address(monkeypatch: pytest.MonkeyPatch, address: str, netmask: str | None) -> None:
    item = SimpleNamespace(family=socket.AF_INET, address=address, netmask=netmask)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [item]})
    monkeypatch.setattr(
        psutil, "net_if_stats", lambda: {"eth0": SimpleNamespace(isup=True, speed=1000)}
    )


def recorded(name: str) -> str:
    return (RECORDED / name).read_text(encoding="utf-8")


def machine(
    root: Path,
    rules: str | None = OPEN,
    nft: str | None = None,
    files: dict[str, object] | None = None,
) -> Surroundings:
    told = {"iptables -S": rules, "nft -j list ruleset": nft}
    outputs = {words: text for words, text in told.items() if text is not None}
    return made_up_machine(root, files, outputs=outputs)


def test_no_rules(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    seen = all_well(LINUX, machine(tmp_path, OPEN, '{"nftables": [{"metainfo": {}}]}'))
    assert seen == snapshot


def test_without_root_nothing_is_claimed(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    seen = all_well(LINUX, machine(tmp_path, None))
    assert seen == snapshot


@pytest.mark.parametrize(
    ("files", "manager", "fix"),
    [
        ({"etc/ufw/ufw.conf": "# /etc\nENABLED=yes\n"}, "ufw", ufw("29400")),
        ({"run/firewalld.pid": "812"}, "firewalld", firewalld("29400")),
    ],
    ids=["ufw", "firewalld"],
)
def test_without_root_it_is_said_which_firewall_is_on(
    tmp_path: Path,
    files: dict[str, object],
    manager: str,
    fix: str,
    snapshot: SnapshotAssertion,
) -> None:
    finding = only(LINUX, machine(tmp_path, None, files=files))
    assert (finding.name, finding.status) == ("firewall-on", Status.NOTE)
    assert f"({manager})" in finding.what
    assert finding.fix.splitlines()[-1] == fix
    assert finding == snapshot


def test_one_port_is_closed(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    rule = "-A INPUT -p tcp -m multiport --dports 29400 -j DROP"
    finding = only(LINUX, machine(tmp_path, f"{OPEN}{rule}\n"))
    assert (finding.name, finding.status) == ("firewall-meeting-closed", Status.NOTE)
    assert finding.fix == iptables("29400")
    assert rule in finding.evidence
    assert finding == snapshot


@pytest.mark.parametrize("netmask", ["255.255.255.255", None])
def test_where_the_own_network_is_not_known_it_is_left_open_and_the_port_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, netmask: str | None
) -> None:
    have_address(monkeypatch, "10.0.0.5", netmask)  # as in some clouds
    finding = only(LINUX, machine(tmp_path, f"{OPEN}-A INPUT -p tcp --dport 29400 -j DROP\n"))
    assert finding.fix == iptables("29400", source="NETWORK")


def test_all_but_some_ports_are_closed(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    rule = (
        "-A INPUT -p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN -m multiport ! --dports 2222,29400 "
        "-j REJECT --reject-with icmp-admin-prohibited"
    )
    finding = only(LINUX, machine(tmp_path, f"{OPEN}{rule}\n"))
    assert finding.name == "firewall-ranks-closed"
    assert finding.fix == iptables("32768:60999")
    assert finding == snapshot


def test_the_ports_of_ranks_are_those_that_the_system_gives_out(tmp_path: Path) -> None:
    rules = f"{SHUT}-A INPUT -p tcp -m tcp --dport 50000:50100 -j ACCEPT\n"
    files: dict[str, object] = {"proc/sys/net/ipv4/ip_local_port_range": "50000\t50100\n"}
    assert set(found(LINUX, machine(tmp_path, rules, files=files))) == {"firewall-meeting-closed"}


@pytest.mark.parametrize(
    "rules",
    [
        # Who calls, and chance, are not known here.
        f"{OPEN}-A INPUT -s 10.0.0.9/32 -j DROP\n",
        f"{OPEN}-A INPUT -m statistic --mode random --probability 0.05 -j DROP\n",
        f"{OPEN}-A INPUT ! -i eth0 -j DROP\n",
        f"{SHUT}-A INPUT -s 10.0.0.0/8 -j ACCEPT\n",
        f"{SHUT}-A INPUT ! -p udp -j ACCEPT\n",
        # What is not about new TCP connections.
        f"{OPEN}-A INPUT -p udp -j DROP\n",
        f"{OPEN}-A INPUT -i lo -j DROP\n",
        f"{OPEN}-A INPUT -m addrtype --dst-type MULTICAST -j DROP\n",
        f"{OPEN}-A INPUT -m conntrack --ctstate INVALID -j DROP\n",
        f"{OPEN}-A INPUT -p tcp -m tcp --tcp-flags ALL NONE -j DROP\n",
        f"{OPEN}-A INPUT -p tcp -m tcp --dport 23 -j REJECT --reject-with tcp-reset\n",
        # The first that matches counts.
        f"{SHUT}-A INPUT -p tcp -j ACCEPT\n-A INPUT -j DROP\n",
        # A chain that is left before its end.
        f"{OPEN}-N C\n-A INPUT -j C\n-A C -p tcp -j RETURN\n-A C -j DROP\n",
        f"{OPEN}-N C\n-A INPUT -j C\n-A C -s 10.0.0.9 -j RETURN\n-A C -j DROP\n",
        f"{OPEN}-N C\n-A INPUT -s 10.0.0.9 -j C\n-A C -j DROP\n",
        f"{OPEN}-N C\n-A INPUT -g C\n-A INPUT -j DROP\n",
    ],
)
def test_what_is_not_certain_to_close_is_not_complained_of(tmp_path: Path, rules: str) -> None:
    all_well(LINUX, machine(tmp_path, rules))


@pytest.mark.parametrize(
    "rules",
    [
        f"{OPEN}-A INPUT ! -i lo -p tcp -j DROP\n",
        f"{SHUT}-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT\n",
        f"{SHUT}-A INPUT -i lo -j ACCEPT\n-A INPUT -m state --state ESTABLISHED -j ACCEPT\n",
        f"{OPEN}-N C\n-A INPUT -j C\n-A C -j LOG --log-prefix x\n-A C -j DROP\n",
        f"{OPEN}-N C\n-A INPUT -p tcp -g C\n-A C -p tcp -m tcp --dport 22 -j ACCEPT\n-A C -j DROP\n",
        f"{OPEN}-A INPUT -j A\n-N A\n-A A -j A\n-A INPUT -j DROP\n",  # a loop ends
    ],
)
def test_what_closes_all(tmp_path: Path, rules: str) -> None:
    assert set(found(LINUX, machine(tmp_path, rules))) == BOTH


def test_ufw(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    rules = recorded("ufw.iptables.txt")
    files: dict[str, object] = {"etc/ufw/ufw.conf": "ENABLED=yes\n"}
    findings = found(LINUX, machine(tmp_path, rules, files=files))
    assert set(findings) == BOTH
    assert findings["firewall-meeting-closed"].fix == ufw("29400")
    assert findings["firewall-ranks-closed"].fix == ufw("32768:60999")
    opened = f"{rules}-A ufw-user-input -p tcp -m multiport --dports 29400,32768:60999 -j ACCEPT\n"
    assert all_well(LINUX, machine(tmp_path, opened, files=files)) == snapshot


def test_firewalld(tmp_path: Path) -> None:
    rules = recorded("firewalld.nft.json")
    files: dict[str, object] = {"run/firewalld.pid": "812"}
    findings = found(LINUX, machine(tmp_path, OPEN, rules, files))
    assert set(findings) == BOTH
    assert findings["firewall-ranks-closed"].fix == firewalld("32768-60999")
    opened = json.loads(rules)
    allow = {
        "op": "==",
        "left": {"payload": {"protocol": "tcp", "field": "dport"}},
        "right": {"set": [29400, {"range": [32768, 60999]}]},
    }
    rule = {"family": "inet", "table": "firewalld", "chain": "filter_IN_public_allow"}
    opened["nftables"].append({"rule": {**rule, "expr": [{"match": allow}, {"accept": None}]}})
    all_well(LINUX, machine(tmp_path, OPEN, json.dumps(opened), files))


def test_nftables_alone(tmp_path: Path) -> None:
    finding = only(LINUX, machine(tmp_path, None, recorded("nftables.nft.json")))
    assert finding.name == "firewall-ranks-closed"
    assert finding.fix.startswith("sudo nft insert rule inet filter ")
    assert finding.fix.endswith("ip saddr 10.0.0.0/24 tcp dport 32768-60999 accept")
    assert finding.evidence == "inet filter input: policy drop"


def test_ports_are_told_apart() -> None:
    tables = from_nftables(recorded("nftables.nft.json"))
    assert [closing_rule(tables, port) is None for port in (22, 29400, 29411)] == [
        True,
        True,
        False,
    ]
    # Somebody is let in at 443.
    assert closing_rule(tables, 443) is None
    ufw = from_iptables(recorded("ufw.iptables.txt"))
    assert closing_rule([ufw], 22) is None
    reason = closing_rule([ufw], 445)
    assert reason is not None
    assert reason.rule == "-A ufw-skip-to-policy-input -j DROP"


def test_all_but_loopback_in_nftables() -> None:
    rules = json.loads(
        recorded("nftables.nft.json").replace('"policy": "drop"', '"policy": "accept"')
    )
    match = {"op": "!=", "left": {"meta": {"key": "iifname"}}, "right": "lo"}
    rule = {"family": "inet", "table": "filter", "chain": "input"}
    rules["nftables"].append({"rule": {**rule, "expr": [{"match": match}, {"drop": None}]}})
    reason = closing_rule(from_nftables(json.dumps(rules)), 50000)
    assert reason is not None
    assert (reason.verdict, reason.rule) == ("drop", "input: iifname lo drop")


@pytest.mark.parametrize("text", ["", "no json", "[]", '{"nftables": [{}]}'])
def test_what_cannot_be_read_is_no_firewall(text: str) -> None:
    assert from_nftables(text) == []


def test_windows(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    facts = json.loads(recorded("windows_11.json"))
    finding = only(WINDOWS, made_up_machine(tmp_path, **facts))
    assert (finding.name, finding.status) == ("firewall-on", Status.NOTE)
    assert 'New-NetFirewallRule -DisplayName "torchmuster 29400"' in finding.fix
    assert finding.fix.count("-RemoteAddress 10.0.0.0/24") == 2
    assert finding == snapshot
    all_well(WINDOWS, made_up_machine(tmp_path, system="win32"))


def test_macos(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    facts = json.loads(recorded("macos_15.json"))
    finding = only(MACOS, made_up_machine(tmp_path, **facts))
    assert (finding.name, finding.status) == ("firewall-on", Status.NOTE)
    assert "socketfilterfw --unblockapp" in finding.fix
    assert finding == snapshot
    command = "/usr/libexec/ApplicationFirewall/socketfilterfw --getglobalstate"
    off = {command: "Firewall is disabled. (State = 0)\n"}
    all_well(MACOS, made_up_machine(tmp_path, system="darwin", outputs=off))
