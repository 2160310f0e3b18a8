"""Windows and macOS: what torch supports there, and settings that interrupt a long run."""

import re
from collections.abc import Iterator

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.finding import Finding, Status

_FILE_SYSTEM = "HKLM\\SYSTEM\\CurrentControlSet\\Control\\FileSystem"
_MACS_FILES = 256
_POWER = re.compile(r"Current AC Power Setting Index: 0x([0-9a-fA-F]+)")
_SLEEP = re.compile(r"^\s*sleep\s+(\d+)", re.MULTILINE)


def windows(surroundings: Surroundings) -> Iterator[Finding]:
    """Report the limits of Windows, and check long paths and sleep."""
    yield Finding(
        name="windows-gloo-only",
        status=Status.NOTE,
        what="on Windows torch supports gloo only, not NCCL",
        why="ranks on GPUs then exchange gradients through host memory, which is slow; Linux in "
        "WSL 2 has NCCL and uses the same GPUs",
        fix="wsl --install  # in PowerShell as administrator",
    )
    query = ["reg", "query", _FILE_SYSTEM, "/v", "LongPathsEnabled"]
    if re.search(r"LongPathsEnabled\s+REG_DWORD\s+0x0\b", surroundings.output(query) or ""):
        yield Finding(
            name="windows-long-paths",
            status=Status.NOTE,
            what="paths are limited to 260 characters",
            why="caches of torch.compile and of models use longer paths and fail with “No such "
            "file”",
            fix=f"reg add {_FILE_SYSTEM} /v LongPathsEnabled /t REG_DWORD /d 1 /f  # as administrator",
        )
    yield from _windows_sleep(surroundings)


def _windows_sleep(surroundings: Surroundings) -> Iterator[Finding]:
    query = ["powercfg", "/query", "SCHEME_CURRENT", "SUB_SLEEP", "STANDBYIDLE"]
    found = _POWER.search(surroundings.output(query) or "")
    idle_s = int(found[1], 16) if found else 0
    if idle_s:
        yield _sleeps(
            "Windows", idle_s // 60, "powercfg /change standby-timeout-ac 0", evidence=found
        )


def macos(surroundings: Surroundings) -> Iterator[Finding]:
    """Report the limits of macOS, and check sleep and open files."""
    yield Finding(
        name="macos-gloo-only",
        status=Status.NOTE,
        what="on macOS, multiple ranks run on the CPU only (gloo)",
        why="the GPU (mps) has no collectives; a single process can train on it",
        fix="muster run --device cpu --ranks 2 train.py",
    )
    yield Finding(
        name="macos-spawn",
        status=Status.NOTE,
        what="on macOS DataLoader workers import your script again (spawn)",
        why="code outside this guard runs again in each worker and fails with “An attempt has "
        "been made to start a new process before the current process has finished its bootstrapping”",
        fix='if __name__ == "__main__":',
    )
    found = _SLEEP.search(surroundings.output(["pmset", "-g"]) or "")
    if found and int(found[1]):
        yield _sleeps("macOS", int(found[1]), "caffeinate -i muster run …", evidence=found)
    limits = (surroundings.output(["launchctl", "limit", "maxfiles"]) or "").split()
    if len(limits) > 1 and limits[1].isdecimal() and int(limits[1]) <= _MACS_FILES:
        yield Finding(
            name="macos-open-files",
            status=Status.NOTE,
            what=f"a process may have only {limits[1]} files open",
            why="DataLoader workers pass each tensor as an open file and fail with “Too many open "
            "files”",
            fix="ulimit -n 4096",
            evidence="launchctl limit maxfiles: " + " ".join(limits),
        )


def _sleeps(system: str, minutes: int, fix: str, *, evidence: re.Match[str] | None) -> Finding:
    after = "a minute" if minutes == 1 else f"{minutes} minutes"
    return Finding(
        name="machine-sleeps",
        status=Status.NOTE,
        what=f"{system} puts this host to sleep after {after} without user input",
        why="training stops, and the launcher declares this host lost",
        fix=fix,
        evidence=evidence[0].strip() if evidence else "",
    )


CHECKS = (
    Check(
        name="windows",
        asks="What is different on Windows?",
        run=windows,
        systems=("win32",),
    ),
    Check(
        name="macos",
        asks="What is different on macOS?",
        run=macos,
        systems=("darwin",),
    ),
)
