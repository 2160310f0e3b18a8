"""The command that opens a port, for the firewall that a machine has."""

import ipaddress
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

Kind = Literal["ufw", "firewalld", "nft", "iptables"]

_UFW_SETTINGS = Path("etc/ufw/ufw.conf")
_ALF = "/usr/libexec/ApplicationFirewall/socketfilterfw"


def open_command(
    system: str,
    port: int | tuple[int, int],
    *,
    kind: Kind | None = None,
    source: str | None = None,
) -> str:
    """Return the command that lets others reach a TCP port, or the first to the last port of a range.

    ``system`` is as in ``sys.platform``; ``kind`` is the firewall of a Linux machine, and where it is
    not known each usual one gets its line. ``source`` is the address or network that is let in; None
    lets in all.
    """
    first, last = port if isinstance(port, tuple) else (port, port)
    network = None if source is None else ipaddress.ip_network(source, strict=False)
    if system == "win32":
        return _powershell(_range(first, last, "-"), network)
    if system == "darwin":  # its firewall knows programs, not ports
        return (
            f'sudo {_ALF} --add "$(command -v python3)"\n'
            f'sudo {_ALF} --unblockapp "$(command -v python3)"'
        )
    if kind is not None:
        return _linux(kind, first, last, network)
    choices: tuple[tuple[Kind, str], ...] = (
        ("ufw", "Ubuntu"),
        ("firewalld", "Fedora, RHEL, SUSE"),
        ("iptables", "others"),
    )
    return "\n".join(f"{_linux(one, first, last, network)}  # {who}" for one, who in choices)


_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _powershell(ports: str, network: _Network | None) -> str:
    remote = f" -RemoteAddress {network}" if network else ""
    return (
        f'New-NetFirewallRule -DisplayName "torchmuster {ports}" -Direction Inbound '
        f"-LocalPort {ports} -Protocol TCP{remote} -Action Allow"
    )


def _linux(kind: Kind, first: int, last: int, network: _Network | None) -> str:
    colon, dash = _range(first, last, ":"), _range(first, last, "-")
    if kind == "ufw":
        if network:
            return f"sudo ufw allow from {network} to any port {colon} proto tcp"
        return f"sudo ufw allow {colon}/tcp"
    if kind == "firewalld":
        if network:
            rule = (
                f'rule family="ipv{network.version}" source address="{network}" '
                f'port port="{dash}" protocol="tcp" accept'
            )
            return f"sudo firewall-cmd --add-rich-rule='{rule}'"
        return f"sudo firewall-cmd --add-port={dash}/tcp"
    if kind == "nft":
        word = "ip" if network is None or network.version == 4 else "ip6"
        from_there = f"{word} saddr {network} " if network else ""
        return f"sudo nft insert rule inet filter input {from_there}tcp dport {dash} accept"
    program = "iptables" if network is None or network.version == 4 else "ip6tables"
    from_there = f"-s {network} " if network else ""
    return f"sudo {program} -I INPUT {from_there}-p tcp --dport {colon} -j ACCEPT"


def _range(first: int, last: int, mark: str) -> str:
    return str(first) if first == last else f"{first}{mark}{last}"


def is_active(service: str) -> bool:
    """Ask systemd whether a service is running; anybody may ask."""
    try:
        asked = subprocess.run(
            ["systemctl", "is-active", "--quiet", service], capture_output=True, timeout=5
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return asked.returncode == 0


def detect(
    which: Callable[[str], str | None] = shutil.which,
    *,
    root: Path = Path("/"),
    active: Callable[[str], bool] = is_active,
) -> Kind | None:
    """Return which firewall this Linux machine has in use, as far as can be told without being root.

    The rules themselves are shown only to root, so this goes by which front end is switched on, and
    after that by which tools are there.
    """
    if which("ufw") and _ufw_is_enabled(root):
        return "ufw"
    if which("firewall-cmd") and active("firewalld"):
        return "firewalld"
    if which("nft") and active("nftables"):
        return "nft"
    tools: Sequence[Kind] = ("iptables", "nft")
    return next((tool for tool in tools if which(tool)), None)


def _ufw_is_enabled(root: Path) -> bool:
    try:
        lines = (root / _UFW_SETTINGS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any(line.replace(" ", "").lower() == "enabled=yes" for line in lines)
