"""Owner, command and CPU time of processes, looked up once for all devices."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import psutil

from torchmuster.devices.model import Device, DeviceProcess
from torchmuster.redaction import printable


def identify_process(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return the devices with every process's owner, command and times filled in."""
    pids = {process.pid for device in devices for process in device.processes}
    known = {pid: _read_process(pid) for pid in pids}
    return tuple(
        dataclasses.replace(
            device,
            processes=tuple(
                dataclasses.replace(process, **known[process.pid]) for process in device.processes
            ),
        )
        if device.processes
        else device
        for device in devices
    )


def _read_process(pid: int) -> dict[str, Any]:
    """Read what the system allows; a process that has exited or is hidden stays unidentified."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            cpu = process.cpu_times()
            return {
                "user": process.username(),
                "command": printable(process.cmdline() or [process.name()]),
                "started_unix_s": process.create_time(),
                "cpu_s": cpu.user + cpu.system,
            }
    except (psutil.Error, OSError):
        return {}


def user_of_this_process() -> str:
    """Return the user name of this process, or the uid if it has no name, as in containers."""
    return psutil.Process().username()


def user_with_uid(uid: int) -> str:
    """Return the name of the user with this id, or the id if it has no name; as in ``user_of_this_process``."""
    try:
        import pwd
    except ImportError:  # Windows
        return str(uid)
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def command_of_this_process() -> str:
    """Return this process's own command line, for display to others."""
    return printable(psutil.Process().cmdline())


def age_s(process: DeviceProcess, now: float | None = None) -> float | None:
    """Return how long a process has been running, in seconds."""
    if process.started_unix_s is None:
        return None
    return max((time.time() if now is None else now) - process.started_unix_s, 0.0)
