"""Network namespaces of labs: named after the process that made them, so that no two clash."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from patience import GIVE_UP_S

# What lies in a folder here stands in /etc for programs in the namespace of that name.
NAMES = Path("/etc/netns")
_OURS = re.compile(r"muster(\d+)-\d+-\w+")


def prefix(number: int) -> str:
    """Return what the names of a lab of this process begin with."""
    return f"muster{os.getpid()}-{number}-"


def is_abandoned(name: str) -> bool:
    """Tell whether it was made by a process that is no more."""
    ours = _OURS.fullmatch(name)
    return ours is not None and not psutil.pid_exists(int(ours[1]))


def existing() -> list[str]:
    """Return the namespaces of all labs on this machine."""
    names = {path.name for folder in (Path("/run/netns"), NAMES) for path in folder.glob("*")}
    return sorted(name for name in names if _OURS.fullmatch(name))


def remove(name: str) -> None:
    """Kill what runs in this namespace, and remove it."""
    if Path("/run/netns", name).exists():
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        for pid in listed.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    shutil.rmtree(NAMES / name, ignore_errors=True)


def within(namespace: str) -> list[str]:
    """Return what to put before a command that lives in a namespace, and dies with this process."""
    return ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", namespace]


def tool(*words: str) -> str:
    """Run a tool of the machine, and return what it printed; failing is an error."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=GIVE_UP_S)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def await_true(what: str, true: Callable[[], bool], timeout_s: float = GIVE_UP_S) -> None:
    """Look every 10 ms until it is true; for what cannot be waited for."""
    end = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(f"after {timeout_s:g} s still not so: {what}")
        time.sleep(0.01)
