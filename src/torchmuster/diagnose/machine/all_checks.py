"""The subjects of the checks and their modules; a module is imported on first use."""

import importlib
from collections.abc import Collection

from torchmuster.diagnose.check import Check

_HERE = "torchmuster.diagnose.machine"

# In display order: devices and software, then the host, then the network.
SUBJECTS = {
    "accelerators": f"{_HERE}.accelerators",
    "torch": f"{_HERE}.torch_build",
    "packages": f"{_HERE}.packages",
    "python": f"{_HERE}.python_environment",
    "variables": f"{_HERE}.variables",
    "processors": f"{_HERE}.processors",
    "memory": f"{_HERE}.memory",
    "shared-memory": f"{_HERE}.shared_memory",
    "limits": f"{_HERE}.limits",
    "storage": f"{_HERE}.storage",
    "names": f"{_HERE}.names",
    "network-interfaces": f"{_HERE}.network_interfaces",
    "infiniband": f"{_HERE}.infiniband",
    "firewall": f"{_HERE}.firewall",
    "ports": f"{_HERE}.ports",
    "platform": f"{_HERE}.platforms",
}


def by_subject(subjects: Collection[str] = ()) -> dict[str, tuple[Check, ...]]:
    """Return the checks of some subjects, or of all, in display order."""
    return {
        subject: importlib.import_module(module).CHECKS
        for subject, module in SUBJECTS.items()
        if not subjects or subject in subjects
    }


def load() -> list[Check]:
    """Return all checks."""
    return [check for checks in by_subject().values() for check in checks]
