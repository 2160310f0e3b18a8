"""Fingerprint what would run on a host: the script and the Python files next to it.

Hosts that run different code fail late and with misleading errors, so fingerprints are compared before
anything starts.
"""

import hashlib
import importlib.metadata
import platform
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torchmuster import __version__
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.launch import protocol
from torchmuster.launch.network import interfaces as network_interfaces
from torchmuster.launch.network.interfaces import Interface

LEAST_TORCH = "2.12"  # also in pyproject.toml; docs/tested.md has what was run


def this_node(*, interfaces: Sequence[Interface] | None = None) -> protocol.NodeRecord:
    """Return the record of this host and this process."""
    return protocol.NodeRecord(
        host=socket.gethostname(),
        system=sys.platform,
        python=platform.python_version(),
        torch=torch_version(),
        torchmuster=__version__,
        cores=usable_cores().value,
        clock_unix_s=time.time(),
        addresses=tuple(network_interfaces.interface_candidates(interfaces)),
    )


def torch_too_old(version: str) -> bool:
    """Return whether a version of torch is older than torchmuster supports."""
    return _numbers(version) < _numbers(LEAST_TORCH)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:2]]


def torch_version() -> str | None:
    """Return the version of the installed torch, without importing it; None if there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def take_fingerprint(command: Sequence[str], module: bool, folder: str) -> protocol.Fingerprint:
    """Return the fingerprint of what a command would run in a folder, without running any of it."""
    script = Path(folder, command[0])
    if module:
        inside = Path(folder, *command[0].split("."))
        script = inside / "__main__.py"
        if not script.is_file():
            script = inside.with_name(f"{inside.name}.py")
    code = hashlib.sha256()
    for path in sorted(script.parent.glob("*.py")):
        code.update(f"{path.name}\0{_file_sha256(path)}\n".encode(errors="surrogateescape"))
    return protocol.Fingerprint(
        script_sha256=_file_sha256(script),
        code_sha256=code.hexdigest(),
    )


def _file_sha256(path: Path) -> str:
    """Return the hash of a file, "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
