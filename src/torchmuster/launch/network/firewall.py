"""Commands that open a port in the common firewalls of each system."""

import ipaddress

_ALF = "/usr/libexec/ApplicationFirewall/socketfilterfw"
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def open_command(system: str, port: int | tuple[int, int], *, source: str | None = None) -> str:
    """Return the command that opens a TCP port, or a range of ports (first, last).

    ``system`` is as in ``sys.platform``. Linux gets a line for each common firewall, because only root
    can see which one is active. ``source`` is the allowed address or network; None allows all.
    """
    first, last = port if isinstance(port, tuple) else (port, port)
    network = None if source is None else ipaddress.ip_network(source, strict=False)
    if system == "win32":
        return _powershell(_range(first, last, "-"), network)
    if system == "darwin":  # its firewall allows programs, not ports
        return (
            f'sudo {_ALF} --add "$(command -v python3)"\n'
            f'sudo {_ALF} --unblockapp "$(command -v python3)"'
        )
    colon, dash = _range(first, last, ":"), _range(first, last, "-")
    return "\n".join(
        [
            f"{_ufw(colon, network)}  # Ubuntu",
            f"{_firewalld(dash, network)}  # Fedora, RHEL, SUSE",
            f"{_iptables(colon, network)}  # others",
        ]
    )


def open_command_anywhere(port: int) -> str:
    """Return the commands that open a TCP port on a host whose system is unknown."""
    windows, linux = open_command("win32", port), open_command("linux", port)
    return f"{linux}\n{windows}  # Windows"


def _powershell(ports: str, network: _Network | None) -> str:
    remote = f" -RemoteAddress {network}" if network else ""
    return (
        f'New-NetFirewallRule -DisplayName "torchmuster {ports}" -Direction Inbound '
        f"-LocalPort {ports} -Protocol TCP{remote} -Action Allow"
    )


def _ufw(ports: str, network: _Network | None) -> str:
    if network:
        return f"sudo ufw allow from {network} to any port {ports} proto tcp"
    return f"sudo ufw allow {ports}/tcp"


def _firewalld(ports: str, network: _Network | None) -> str:
    if network:
        rule = (
            f'rule family="ipv{network.version}" source address="{network}" '
            f'port port="{ports}" protocol="tcp" accept'
        )
        return f"sudo firewall-cmd --add-rich-rule='{rule}'"
    return f"sudo firewall-cmd --add-port={ports}/tcp"


def _iptables(ports: str, network: _Network | None) -> str:
    program = "iptables" if network is None or network.version == 4 else "ip6tables"
    from_there = f"-s {network} " if network else ""
    return f"sudo {program} -I INPUT {from_there}-p tcp --dport {ports} -j ACCEPT"


def _range(first: int, last: int, mark: str) -> str:
    return str(first) if first == last else f"{first}{mark}{last}"
