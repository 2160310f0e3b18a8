"""InfiniBand and RoCE ports: down, flapping, or with bit errors, from the kernel's counters.

NVRx's and Meta's node checks read the same counters: ``link_downed`` counts how often a port lost
its link, ``symbol_error`` the bit errors on its cable. Both count since the driver was loaded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torchmuster.devices.readers.sysfs import read_integer, read_names, read_text
from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.diagnose.texts import finding
from torchmuster.finding import Finding, Status

_PORTS = "/sys/class/infiniband"
# The limit of the InfiniBand specification for a cable without faults.
_SYMBOL_ERRORS_PER_HOUR = 10
# A switch that was rebooted now and then is no fault.
_LINK_DOWNED_PER_DAY = 1
_HOUR_S, _DAY_S = 3600.0, 86400.0


@dataclass(frozen=True, kw_only=True)
class Port:
    """One port of an adapter; unreadable counters are None."""

    adapter: str
    number: str
    state: str  # such as ACTIVE or DOWN
    link_layer: str  # InfiniBand or Ethernet, which may or may not use RoCE
    link_downed: int | None
    symbol_errors: int | None

    @property
    def name(self) -> str:
        """Such as ``mlx5_0 port 1``."""
        return f"{self.adapter} port {self.number}"

    @property
    def is_active(self) -> bool:
        """Whether data can pass."""
        return self.state == "ACTIVE"


def read_ports(surroundings: Surroundings) -> list[Port]:
    """Return the ports of all InfiniBand and RoCE adapters."""
    root = surroundings.path(_PORTS)
    ports = []
    for adapter in read_names(root):
        for number in read_names(root / adapter / "ports"):
            folder = root / adapter / "ports" / number
            ports.append(
                Port(
                    adapter=adapter,
                    number=number,
                    state=(read_text(folder / "state") or "").partition(": ")[2],
                    link_layer=read_text(folder / "link_layer") or "",
                    link_downed=read_integer(folder / "counters/link_downed"),
                    symbol_errors=read_integer(folder / "counters/symbol_error"),
                )
            )
    return ports


def check_infiniband(surroundings: Surroundings) -> Iterator[Finding]:
    """Check the ports of InfiniBand and RoCE adapters."""
    ports = read_ports(surroundings)
    findings = [*_inactive(ports), *_flapping(ports, surroundings), *_errors(ports, surroundings)]
    names = ", ".join(port.name for port in ports)
    seen = f"{names} active" if ports else "no InfiniBand"
    yield from findings or [Finding(name="infiniband", status=Status.OK, what=seen)]


def _inactive(ports: list[Port]) -> Iterator[Finding]:
    down = [port for port in ports if not port.is_active]
    if not down:
        return
    # One port of a two-port adapter is often unused.
    status = Status.NOTE
    why = (
        "NCCL uses the other ports; if this one should be used, a cable or the subnet manager is "
        "missing"
    )
    if len(down) == len(ports):
        status, why = Status.WARNING, "NCCL falls back to sockets, which are many times slower"
    states = ", ".join(f"{port.name} ({port.state.lower() or 'unknown'})" for port in down)
    yield finding("infiniband-down", status=status, states=states, why=why)


def _flapping(ports: list[Port], surroundings: Surroundings) -> Iterator[Finding]:
    days = max(1.0, _uptime_s(surroundings) / _DAY_S)
    for port in ports:
        downed = port.link_downed or 0
        if downed / days > _LINK_DOWNED_PER_DAY:
            yield finding(
                "infiniband-link-flaps",
                port=port.name,
                downed=downed,
                adapter=port.adapter,
                ports=_PORTS,
                number=port.number,
            )


def _errors(ports: list[Port], surroundings: Surroundings) -> Iterator[Finding]:
    hours = max(1.0, _uptime_s(surroundings) / _HOUR_S)
    for port in ports:
        errors = port.symbol_errors or 0
        if errors / hours > _SYMBOL_ERRORS_PER_HOUR:
            yield finding(
                "infiniband-symbol-errors",
                port=port.name,
                errors=errors,
                symbol_errors_per_hour=_SYMBOL_ERRORS_PER_HOUR,
                adapter=port.adapter,
                ports=_PORTS,
                number=port.number,
            )


def _uptime_s(surroundings: Surroundings) -> float:
    text = surroundings.text("/proc/uptime") or ""
    first = text.partition(" ")[0]
    try:
        return float(first)
    except ValueError:
        return 0.0


CHECKS = (
    Check(
        name="infiniband",
        asks="Are the InfiniBand ports active, without link losses or symbol errors?",
        run=check_infiniband,
        systems=("linux",),
    ),
)
