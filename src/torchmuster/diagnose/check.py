"""A check: a question about a machine, what it costs to answer it, and what answers it.

Checks are data. Each file in ``machine/`` has those of one subject, in a tuple ``CHECKS``; they know
nothing of each other, look only at what ``Surroundings`` gives them, and need no torch and no root.
"""

import enum
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


class Cost(enum.IntEnum):
    """How long a check takes; dearer ones run only where they are asked for."""

    INSTANT = 0  # reads a few files
    SECONDS = 1  # starts a process, imports torch, sends packets


# Drivers of many GPUs wake them one by one if nothing keeps them awake.
LOOK_WITHIN_S = 20.0


class DevicesSilent(Exception):
    """The drivers of the accelerators do not answer; other checks go on without them."""

    def __init__(self, within_s: float = LOOK_WITHIN_S) -> None:
        super().__init__(f"the accelerators' drivers did not answer within {within_s:g} s")


def _package_folders() -> tuple[Path, ...]:
    """Return where Python looks for packages; the working folder is the script's, not Python's."""
    here = Path.cwd()
    return tuple(Path(one) for one in sys.path if one and Path(one) != here)


def once(take: Callable[[], Node], *, within_s: float = LOOK_WITHIN_S) -> Callable[[], Node]:
    """Share one look at the devices among all checks, whichever asks first.

    It raises ``DevicesSilent`` in all of them when the time is up.
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
    """The machine as a check sees it; a test gives it another one.

    Files are asked for by their usual path (``/proc/meminfo``) and found below ``root``. What programs
    say is asked for by their words; ``outputs`` answers instead of them, as recorded on a machine of
    another kind, and then no program is started at all. ``look`` takes one look at the accelerators
    and remembers it; ``package_folders`` are those of ``python``, in the order in which it searches.
    """

    system: str = sys.platform
    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: str = sys.executable
    folder: Path = field(default_factory=Path.cwd)  # where runs are to be written
    outputs: Mapping[str, str] | None = None
    package_folders: tuple[Path, ...] = field(default_factory=_package_folders)
    look: Callable[[], Node] = field(default_factory=lambda: once(snapshot.take_snapshot))

    def path(self, usual: str) -> Path:
        """Return where a file of the machine is: ``/proc/meminfo`` below the root."""
        return self.root / usual.lstrip("/")

    def text(self, usual: str) -> str | None:
        """Return what a file says; None if it does not exist or may not be read."""
        try:
            return self.path(usual).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def output(self, words: Sequence[str], *, within_s: float = 3.0) -> str | None:
        """Return what a program prints on stdout; None if it is not there, fails or is too slow."""
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
    """One question about a machine. ``run`` yields what is worth saying of the answer.

    Where nothing is wrong, that is one finding that is OK and says in a few words what was seen.
    ``systems`` are values of ``sys.platform``, and none means all. A check that does not end within
    ``deadline_s`` is given up and said to have been (see ``examination.py``).
    """

    name: str
    asks: str
    run: Callable[[Surroundings], Iterable[Finding]]
    cost: Cost = Cost.INSTANT
    systems: tuple[str, ...] = ()
    deadline_s: float = LOOK_WITHIN_S + 5
