"""All checks of a host, in display order: devices and software, then the host, then the network."""

import importlib

from torchmuster.diagnose.check import Check

_MODULES = (
    "accelerators",
    "torch_build",
    "packages",
    "variables",
    "processors",
    "memory",
    "shared_memory",
    "limits",
    "storage",
    "names",
    "network_interfaces",
    "infiniband",
    "firewall",
    "ports",
    "platforms",
)


def load() -> list[Check]:
    """Import the modules of the checks, and return all checks."""
    checks: list[Check] = []
    for name in _MODULES:
        checks += importlib.import_module(f"torchmuster.diagnose.machine.{name}").CHECKS
    return checks
