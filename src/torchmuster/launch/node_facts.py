"""What this machine says of itself at roll-call: quickly, and also where torch is broken."""

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torchmuster import __version__
from torchmuster.devices.processes import user_of_this_process
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.launch import protocol
from torchmuster.launch.network import interfaces as network_interfaces
from torchmuster.launch.network.interfaces import Interface

LEAST_TORCH = "2.12"  # also in pyproject.toml; docs/versions.md has what was run
_VERSION = re.compile(r"^__version__\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


def this_node(*, interfaces: Sequence[Interface] | None = None) -> protocol.NodeRecord:
    """Return the record of this machine and this process."""
    return protocol.NodeRecord(
        host=socket.gethostname(),
        user=user_of_this_process(),
        pid=os.getpid(),
        system=sys.platform,
        machine=platform.machine(),
        python=platform.python_version(),
        torch=torch_version(),
        torchmuster=__version__,
        cores=usable_cores().value,
        clock_unix_s=time.time(),
        addresses=tuple(network_interfaces.candidates(interfaces)),
    )


def torch_too_old(version: str) -> bool:
    """Say whether a version of torch is below the least that torchmuster works with."""
    return _numbers(version) < _numbers(LEAST_TORCH)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:2]]


def torch_version(folders: Sequence[str] | None = None) -> str | None:
    """Return torch's version as ``import torch`` would find it, without the seconds that takes.

    The version file is read because the package's metadata leaves out the ``+cu126`` of some builds.
    ``folders`` are searched instead of Python's own.
    """
    try:
        found = importlib.machinery.PathFinder.find_spec("torch", folders)
        if found is None and folders is None:
            found = importlib.util.find_spec("torch")  # as developers of torch install it
        if found is None or found.origin is None:  # a folder that an uninstall has left behind
            return None
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
        match = _VERSION.search(text)
        return match[1] if match else importlib.metadata.version("torch")
    except Exception:  # a broken installation, in whatever way, is not an installed torch
        return None
