"""Read the GPU of an Apple-silicon Mac, which torch calls ``mps``. There is at most one.

It uses system memory, so the CPU's record has the memory in use, not this one.
"""

import platform
import subprocess
from collections.abc import Callable

from torchmuster.devices.model import Device, DeviceKind

# Full path, because an ssh command often runs without /usr/sbin in PATH.
_SYSCTL = "/usr/sbin/sysctl"
_TIMEOUT_S = 2.0

Run = Callable[[list[str]], str]


def run_command(arguments: list[str]) -> str:
    """Run a command and return its output; raise if it fails or takes too long."""
    done = subprocess.run(
        arguments, capture_output=True, check=True, text=True, timeout=_TIMEOUT_S, errors="replace"
    )
    return done.stdout


def sysctl(key: str, run: Run = run_command) -> str | None:
    """Return one value of macOS's sysctl, or None if it cannot be read."""
    try:
        return run([_SYSCTL, "-n", key]).strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def read_apple(
    system: str | None = None, machine: str | None = None, run: Run = run_command
) -> list[Device]:
    """Return the Apple GPU, or an empty list on any other host."""
    if (system or platform.system()) != "Darwin" or (machine or platform.machine()) != "arm64":
        return []
    memory = sysctl("hw.memsize", run)
    device = Device(
        kind=DeviceKind.MPS,
        index=0,
        uuid="MPS-0",
        name=sysctl("machdep.cpu.brand_string", run) or "Apple GPU",
        total_bytes=int(memory) if memory and memory.isdecimal() else None,
    )
    return [device]
