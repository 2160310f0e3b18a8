"""The firewall of this host: which one is active. ``muster check`` tests whether it closes ports."""

import re
from collections.abc import Iterator

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding
from torchmuster.launch.job import USUAL_PORT
from torchmuster.launch.network.firewall import open_command

_EXAMPLE = "192.0.2.0/24"  # TEST-NET-1, which the user replaces
_ALF = "/usr/libexec/ApplicationFirewall/socketfilterfw"


def check_firewall(surroundings: Surroundings) -> Iterator[Finding]:
    """Report the active firewall, with the command that opens the rendezvous port."""
    manager = _manager(surroundings)
    if manager is not None:
        command = open_command(surroundings.system, USUAL_PORT, source=_EXAMPLE)
        command = command.replace(_EXAMPLE, "NETWORK")
        yield finding("firewall-on", manager=manager, port=USUAL_PORT, command=command)


def _manager(surroundings: Surroundings) -> str | None:
    if surroundings.system == "win32":
        profile = surroundings.output(["netsh", "advfirewall", "show", "currentprofile"]) or ""
        return "Windows firewall" if re.search(r"^State\s+ON", profile, re.MULTILINE) else None
    if surroundings.system == "darwin":
        state = surroundings.output([_ALF, "--getglobalstate"]) or ""
        return "macOS application firewall" if "enabled" in state else None
    settings = surroundings.text("/etc/ufw/ufw.conf") or ""
    if re.search(r"^ENABLED=yes", settings, re.MULTILINE | re.IGNORECASE):
        return "ufw"
    return "firewalld" if surroundings.path("/run/firewalld.pid").exists() else None


CHECKS = (
    Check(name="firewall", asks="Does the firewall allow the ports of a run?", run=check_firewall),
)
