"""Windows and macOS: what torch can and cannot do there, and settings that end a long run."""

import re
from collections.abc import Iterator

from torchmuster.diagnose.check import Check, Surroundings
from torchmuster.finding import Finding, Status

_FILE_SYSTEM = "HKLM\\SYSTEM\\CurrentControlSet\\Control\\FileSystem"
_MACS_FILES = 256
_POWER = re.compile(r"Current AC Power Setting Index: 0x([0-9a-fA-F]+)")
_SLEEP = re.compile(r"^\s*sleep\s+(\d+)", re.MULTILINE)


def windows(surroundings: Surroundings) -> Iterator[Finding]:
    """Say what holds on every Windows, and look at long paths and sleep."""
    yield Finding(
        name="windows-gloo-only",
        status=Status.NOTE,
        what="on Windows torch has gloo only, no NCCL",
        why="ranks on GPUs then exchange gradients through the processor's memory, which is slow; Linux "
        "inside WSL 2 has NCCL, and uses the same GPUs",
        fix="wsl --install  # in PowerShell as administrator",
    )
    query = ["reg", "query", _FILE_SYSTEM, "/v", "LongPathsEnabled"]
    if re.search(r"LongPathsEnabled\s+REG_DWORD\s+0x0\b", surroundings.output(query) or ""):
        yield Finding(
            name="windows-long-paths",
            status=Status.NOTE,
            what="paths may have only 260 characters",
            why="caches of torch.compile and of models have longer ones, and end with “No such file”",
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
    """Say what holds on every Mac, and look at sleep and open files."""
    yield Finding(
        name="macos-gloo-only",
        status=Status.NOTE,
        what="on macOS several ranks work together on the processor only (gloo)",
        why="the GPU (mps) has no collectives; one process may train on it",
        fix="muster run --device cpu --ranks 2 train.py",
    )
    yield Finding(
        name="macos-spawn",
        status=Status.NOTE,
        what="on macOS DataLoader workers start your script anew (spawn)",
        why="what is not below the line runs once more in each worker, and ends with “An attempt has "
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
            why="DataLoader workers hand over each tensor as an open file and end with “Too many open "
            "files”",
            fix="ulimit -n 4096",
            evidence="launchctl limit maxfiles: " + " ".join(limits),
        )


def _sleeps(system: str, minutes: int, fix: str, *, evidence: re.Match[str] | None) -> Finding:
    after = "a minute" if minutes == 1 else f"{minutes} minutes"
    return Finding(
        name="machine-sleeps",
        status=Status.NOTE,
        what=f"{system} puts this machine to sleep after {after} without a key press",
        why="training stops, and the other machines of a run take this one for lost",
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
