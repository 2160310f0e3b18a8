"""A check: a question about a host, and the function that answers it.

Checks are data. Each file in ``machine/`` holds the checks of one subject, in a tuple ``CHECKS``. They are
independent of each other, read only what ``Surroundings`` provides, and need neither torch nor
root.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from torchmuster.devices import snapshot
from torchmuster.devices.model import Node
from torchmuster.finding import Finding

# Without persistence mode, drivers initialize their GPUs one by one.
LOOK_WITHIN_S = 20.0


def _package_folders() -> tuple[Path, ...]:
    """Return Python's search path for packages, without the working folder."""
    here = Path.cwd()
    return tuple(Path(item) for item in sys.path if item and Path(item) != here)


class DevicesSilent(Exception):
    """The drivers of the accelerators do not respond; other checks continue without them."""


class SharedSnapshot:
    """One device snapshot that all checks share; it is taken in the background, on first use."""

    def __init__(self, take: Callable[[], Node], *, within_s: float = LOOK_WITHIN_S) -> None:
        self._take = take
        self._within_s = within_s
        self._begin = threading.Lock()
        self._node: Future[Node] | None = None

    def __call__(self) -> Node:
        """Return the snapshot; raise ``DevicesSilent`` if the drivers take too long."""
        with self._begin:
            if self._node is None:
                self._node = Future()
                threading.Thread(target=self._work, args=(self._node,), daemon=True).start()
        try:
            return self._node.result(timeout=self._within_s)
        except TimeoutError as error:
            raise DevicesSilent from error

    def _work(self, node: "Future[Node]") -> None:
        try:
            node.set_result(self._take())
        except Exception as error:
            node.set_exception(error)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The host as a check sees it; tests replace it.

    Files are read by their usual path (``/proc/meminfo``) below ``root``. ``outputs`` maps command
    lines to recorded outputs of another system; if it is set, no program is started. ``take_snapshot`` takes
    one snapshot of the accelerators and caches it; ``package_folders`` is the search path of
    ``python``.
    """

    system: str = sys.platform
    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: str = sys.executable
    folder: Path = field(default_factory=Path.cwd)  # the folder for runs
    outputs: Mapping[str, str] | None = None
    package_folders: tuple[Path, ...] = field(default_factory=_package_folders)
    take_snapshot: Callable[[], Node] = field(
        default_factory=lambda: SharedSnapshot(snapshot.take_snapshot)
    )

    def path(self, usual: str) -> Path:
        """Return the path of a file of the host: ``/proc/meminfo`` below the root."""
        return self.root / usual.lstrip("/")

    def text(self, usual: str) -> str | None:
        """Return the contents of a file; None if it does not exist or is not readable."""
        try:
            return self.path(usual).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def output(self, command: Sequence[str], *, within_s: float = 3.0) -> str | None:
        """Return what a program prints on stdout; None if it is missing, fails or times out."""
        if self.outputs is not None:
            return self.outputs.get(" ".join(command))
        try:
            done = subprocess.run(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=within_s,
                env=dict(self.environment) | {"LC_ALL": "C"},
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One question about a host. ``run`` yields the findings.

    If nothing is wrong, it yields nothing, or one finding with status OK. ``systems`` are
    values of ``sys.platform``; empty means all. A check that does not finish within ``deadline_s``
    is abandoned and reported (see ``host_checks.py``).
    """

    name: str
    asks: str
    run: Callable[[Surroundings], Iterable[Finding]]
    systems: tuple[str, ...] = ()
    deadline_s: float = LOOK_WITHIN_S + 5
