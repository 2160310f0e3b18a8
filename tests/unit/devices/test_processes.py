"""Who a process is, asked of the real system about this very process and its children."""

import getpass
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from device_strategies import gpu
from torchmuster.devices.model import DeviceProcess
from torchmuster.devices.processes import identify_process
from torchmuster.redaction import printable

# Waits until its input is closed, so that the tests need no clock.
WAITS = "import sys; print('up', flush=True); sys.stdin.read()"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, "-c", WAITS, "--api-key", "hunter2", "TOKEN=hunter3", "\x1b[31m!"]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "up\n"
        yield running
        running.communicate("")


def look_up(*pids: int) -> list[DeviceProcess]:
    listed = tuple(DeviceProcess(pid=pid, compute=True, memory_bytes=7) for pid in pids)
    (device,) = identify_process([gpu(0, processes=listed)])
    return list(device.processes)


def test_this_very_process_is_known() -> None:
    (this,) = look_up(os.getpid())
    assert this.user == getpass.getuser()
    assert this.command is not None
    assert this.command == printable(psutil.Process().cmdline())
    assert this.started_unix_s == psutil.Process().create_time()
    assert this.cpu_s is not None
    assert this.cpu_s > 0
    assert (this.compute, this.memory_bytes, this.idle_s) == (True, 7, None)


def test_a_childs_command_is_shown_without_secrets_and_control_characters(
    child: subprocess.Popen[str],
) -> None:
    (seen,) = look_up(child.pid)
    assert seen.user == getpass.getuser()
    assert seen.command is not None
    assert seen.command.startswith(f"{sys.executable} -c import sys; ")
    assert seen.command.endswith(
        " --api-key [redacted] TOKEN=[redacted] \N{REPLACEMENT CHARACTER}[31m!"
    )


def test_a_process_that_has_ended_leaves_only_its_pid(child: subprocess.Popen[str]) -> None:
    child.communicate("")
    assert look_up(child.pid) == [DeviceProcess(pid=child.pid, compute=True, memory_bytes=7)]


def test_a_process_on_several_devices_is_the_same_on_each(child: subprocess.Popen[str]) -> None:
    listed = DeviceProcess(pid=child.pid, compute=True)
    gone = DeviceProcess(pid=4_199_999, compute=False)
    devices = [gpu(0, processes=(listed, gone)), gpu(1), gpu(2, processes=(listed,))]
    first, idle, third = identify_process(devices)
    assert idle is devices[1]
    assert first.processes[0] == third.processes[0] != listed
    assert first.processes[1] == gone
