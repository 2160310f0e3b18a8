"""Fingerprint what would run on a host: the script and the code next to it.

Hosts that run different code fail late and with misleading errors, so fingerprints are compared before
anything starts. The code is every Python file below the script's folder. A folder that is too large (a
home directory) is skipped.
"""

import hashlib
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
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TypeVar

from torchmuster import __version__
from torchmuster.devices.readers.cpu import usable_cores
from torchmuster.launch import protocol
from torchmuster.launch.network import interfaces as network_interfaces
from torchmuster.launch.network.interfaces import Interface

LEAST_TORCH = "2.12"  # also in pyproject.toml; docs/tested.md has what was run
_VERSION = re.compile(r"^__version__\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
AnyPath = TypeVar("AnyPath", bound=PurePath)
# Installers do not affect a run, and often differ between otherwise equal hosts.
_FOREIGN_FOLDERS = {"__pycache__", "site-packages", "node_modules", "conda-meta"}
# A folder with one of these files is a virtual environment or a run folder, not code.
_MARKS = {"pyvenv.cfg", "conda-meta", "run.json"}


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


def torch_version(folders: Sequence[str] | None = None) -> str | None:
    """Return torch's version as ``import torch`` would find it, without importing torch.

    This reads the version file because the metadata of some builds omits the ``+cu126``.
    ``folders`` are searched instead of Python's own.
    """
    try:
        found = importlib.machinery.PathFinder.find_spec("torch", folders)
        if found is None and folders is None:
            found = importlib.util.find_spec("torch")  # an editable installation
        if found is None or found.origin is None:  # an empty folder left by an uninstall
            return None
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
        match = _VERSION.search(text)
        return match[1] if match else importlib.metadata.version("torch")
    except Exception:  # a broken installation counts as not installed
        return None


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits above which a folder is too large to fingerprint."""

    files: int = 2_000
    size_bytes: int = 50 * 2**20
    entries: int = 50_000
    seconds: float = 2.0


def take_fingerprint(
    command: Sequence[str], module: bool, folder: str, *, bounds: Bounds | None = None
) -> protocol.Fingerprint:
    """Return the fingerprint of what a command would run in a folder, without running any of it."""
    script: Path | None = Path(folder, command[0])
    if module:
        script = _module_file(command[0], folder)
    code_sha256 = ""
    if script is not None:
        code_sha256 = _code_of(
            code_folder(script, module, folder), bounds if bounds is not None else Bounds()
        )
    return protocol.Fingerprint(
        script_sha256=_file_sha256(script) if script is not None else "",
        code_sha256=code_sha256,
    )


def code_folder(script: AnyPath, module: bool, folder: str) -> AnyPath:
    """Return the folder from which a script imports its own code.

    That is the script's folder; for a module it is the working directory.
    """
    return type(script)(folder) if module else script.parent


def _module_file(name: str, folder: str) -> Path | None:
    """Return the file that ``python -m name`` would run in a folder; None if the module is installed elsewhere."""
    inside = Path(folder, *name.split("."))
    for file in (inside / "__main__.py", inside.with_name(f"{inside.name}.py")):
        if file.is_file():
            return file
    return None


def _file_sha256(path: Path) -> str:
    """Return the hash of a file, "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _code_of(folder: Path, bounds: Bounds) -> str:
    """Return the hash of all Python files below a folder, "" if they are too many."""
    until_s = time.monotonic() + bounds.seconds
    files: list[Path] = []
    size_bytes = entries = 0
    for parent, folders, names in os.walk(folder):
        if Path(parent) != folder and not _MARKS.isdisjoint([*folders, *names]):
            folders.clear()
            continue
        entries += len(folders) + len(names)
        folders[:] = [name for name in folders if not _is_foreign(name)]
        for name in names:
            if name.endswith(".py") and not name.startswith("."):
                files.append(Path(parent, name))
                size_bytes += _size_bytes(files[-1])
        is_too_large = len(files) > bounds.files or size_bytes > bounds.size_bytes
        if is_too_large or entries > bounds.entries or time.monotonic() > until_s:
            return ""
    whole = hashlib.sha256()
    for path in sorted(files):
        name = path.relative_to(folder).as_posix()
        whole.update(f"{name}\0{_file_sha256(path)}\n".encode(errors="surrogateescape"))
    return whole.hexdigest()


def _is_foreign(name: str) -> bool:
    return name.startswith(".") or name in _FOREIGN_FOLDERS


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
