"""A check: a question about a host, and the function that answers it.

Checks are data. Each file in ``machine/`` holds the checks of one subject, in a tuple ``CHECKS``. They are
independent of each other, read only what ``Surroundings`` provides, and need neither torch nor
root.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path

from torchmuster.devices import snapshot
from torchmuster.devices.model import Node
from torchmuster.finding import Finding

# Without persistence mode, drivers initialize their GPUs one by one.
LOOK_WITHIN_S = 20.0


class DevicesSilent(Exception):
    """The drivers of the accelerators do not respond; other checks continue without them."""

    def __init__(self, within_s: float = LOOK_WITHIN_S) -> None:
        super().__init__(f"the accelerators' drivers did not respond within {within_s:g} s")


def _package_folders() -> tuple[Path, ...]:
    """Return Python's search path for packages, without the working folder."""
    here = Path.cwd()
    return tuple(Path(item) for item in sys.path if item and Path(item) != here)


def once(take: Callable[[], Node], *, within_s: float = LOOK_WITHIN_S) -> Callable[[], Node]:
    """Return a function that takes one device snapshot and shares it among all checks.

    It raises ``DevicesSilent`` in all of them after the timeout.
    """
    lock, begun_s, taken = threading.Lock(), list[float](), Future[Node]()

    def work() -> None:
        try:
            taken.set_result(take())
        except Exception as error:
            taken.set_exception(error)

    def look() -> Node:
        with lock:
            if not begun_s:
                begun_s.append(time.monotonic())
                threading.Thread(target=work, name="look at the devices", daemon=True).start()
        wait([taken], timeout=max(0.0, begun_s[0] + within_s - time.monotonic()))
        if not taken.done():
            raise DevicesSilent(within_s)
        return taken.result()

    return look


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The host as a check sees it; tests replace it.

    Files are read by their usual path (``/proc/meminfo``) below ``root``. ``outputs`` maps command
    lines to recorded outputs of another system; if it is set, no program is started. ``look`` takes
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
    look: Callable[[], Node] = field(default_factory=lambda: once(snapshot.take_snapshot))

    def path(self, usual: str) -> Path:
        """Return the path of a file of the host: ``/proc/meminfo`` below the root."""
        return self.root / usual.lstrip("/")

    def text(self, usual: str) -> str | None:
        """Return the contents of a file; None if it does not exist or is not readable."""
        try:
            return self.path(usual).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def output(self, words: Sequence[str], *, within_s: float = 3.0) -> str | None:
        """Return what a program prints on stdout; None if it is missing, fails or times out."""
        if self.outputs is not None:
            return self.outputs.get(" ".join(words))
        try:
            done = subprocess.run(
                list(words),
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

    If nothing is wrong, it yields one finding with status OK and a short summary. ``systems`` are
    values of ``sys.platform``; empty means all. A check that does not finish within ``deadline_s``
    is abandoned and reported (see ``host_checks.py``).
    """

    name: str
    asks: str
    run: Callable[[Surroundings], Iterable[Finding]]
    systems: tuple[str, ...] = ()
    deadline_s: float = LOOK_WITHIN_S + 5
