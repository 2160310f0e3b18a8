"""InfiniBand and RoCE ports: down, flapping, or with bit errors, from the kernel's counters.

NVRx's and Meta's node checks read the same counters: ``link_downed`` counts how often a port lost
its link, ``symbol_error`` the bit errors on its cable. Both count since the driver was loaded.
"""

from collections.abc import Iterator

from torchmuster.devices.readers.sysfs import read_integer, read_names, read_text
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding

_ADAPTERS = "/sys/class/infiniband"
_DAY_S = 86400.0
# By counter: the most per day of a port without faults, and the finding. The InfiniBand specification allows
# 10 symbol errors per hour; a switch that was rebooted now and then is no fault.
_COUNTERS = {
    "link_downed": (1, "infiniband-link-flaps"),
    "symbol_error": (240, "infiniband-symbol-errors"),
}


def check_infiniband(surroundings: Surroundings) -> Iterator[Finding]:
    """Check the ports of InfiniBand and RoCE adapters."""
    root = surroundings.path(_ADAPTERS)
    uptime_s = float((surroundings.text("/proc/uptime") or "0").split()[0])
    days = max(1.0, uptime_s / _DAY_S)
    states = {}
    for adapter in read_names(root):
        for number in read_names(root / adapter / "ports"):
            folder, port = root / adapter / "ports" / number, f"{adapter} port {number}"
            states[port] = (read_text(folder / "state") or "").partition(": ")[2]
            for counter, (most, name) in _COUNTERS.items():
                file = folder / "counters" / counter
                count = read_integer(file) or 0
                if count / days > most:
                    yield finding(name, port=port, count=count, file=file)
    if states and "ACTIVE" not in states.values():
        yield finding("infiniband-down", states=states)


CHECKS = (
    Check(
        name="infiniband",
        asks="Are the InfiniBand ports active, without link losses or symbol errors?",
        run=check_infiniband,
        systems=("linux",),
    ),
)
