"""Whether another rank's process has died, as far as one of the same machine can see."""

import os
import socket
from pathlib import Path

import psutil

_BOOT, _NUMBERING = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def address() -> str:
    """Return what this process can be found by on its machine."""
    return f"{_machine()} {os.getpid()}"


def has_died(address: str) -> bool:
    """Say whether a process of this machine is gone; nothing is known of those elsewhere."""
    machine, _, pid = address.rpartition(" ")
    return machine == _machine() and not psutil.pid_exists(int(pid))


def _machine() -> str:
    """Name this machine; containers may share their host's name, and number processes on their own."""
    try:
        return f"{_BOOT.read_text().strip()} {_NUMBERING.readlink()}"
    except OSError:  # not Linux
        return socket.gethostname()
