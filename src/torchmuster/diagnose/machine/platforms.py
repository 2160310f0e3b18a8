"""What torch and other hosts can and cannot do with WSL 2, Windows and macOS."""

from collections.abc import Iterator

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.finding import Finding, Status
from torchmuster.launch.job import USUAL_PORT
from torchmuster.launch.network.firewall import open_command

_WSL_FIX = """\
# in %UserProfile%\\.wslconfig on Windows 11:
[wsl2]
networkingMode=mirrored
# then in PowerShell as administrator:
wsl --shutdown
"""

_ASKS = "What is different on this platform?"


def wsl(surroundings: Surroundings) -> Iterator[Finding]:
    """Report WSL 2 behind the NAT of Windows."""
    kernel = surroundings.text("/proc/sys/kernel/osrelease") or ""
    mode = (surroundings.output(["wslinfo", "--networking-mode"]) or "").strip().lower()
    if "microsoft" not in kernel.lower() or mode == "mirrored":
        return
    yield Finding(
        name="wsl2-nat",
        status=Status.NOTE,
        what="this is WSL 2 with NAT networking: other hosts cannot reach it",
        why="Windows hides it behind its own address (NAT); single-host runs work",
        fix=_WSL_FIX + open_command("win32", USUAL_PORT),
        evidence=f"wslinfo --networking-mode: {mode or 'unknown'}; {kernel.strip()}",
    )


def windows(surroundings: Surroundings) -> Iterator[Finding]:
    """Report what torch supports on Windows."""
    yield Finding(
        name="windows-gloo-only",
        status=Status.NOTE,
        what="on Windows torch supports gloo only, not NCCL",
        why="ranks on GPUs then exchange gradients through host memory, which is slow; Linux in "
        "WSL 2 has NCCL and uses the same GPUs",
        fix="wsl --install  # in PowerShell as administrator",
    )


def macos(surroundings: Surroundings) -> Iterator[Finding]:
    """Report what torch supports on macOS."""
    yield Finding(
        name="macos-gloo-only",
        status=Status.NOTE,
        what="on macOS, multiple ranks run on the CPU only (gloo)",
        why="the GPU (mps) has no collectives; a single process can train on it",
        fix="muster run --device cpu --ranks 2 train.py",
    )


CHECKS = (
    Check(name="platform", asks=_ASKS, run=wsl, systems=("linux",)),
    Check(name="platform", asks=_ASKS, run=windows, systems=("win32",)),
    Check(name="platform", asks=_ASKS, run=macos, systems=("darwin",)),
)
