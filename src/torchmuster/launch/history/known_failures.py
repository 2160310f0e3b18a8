"""Known exit codes: their cause and fix.

This is only a table. :mod:`torchmuster.launch.history.root_cause` reads it; error texts are explained by
:mod:`torchmuster.known_errors` instead. ``{host}`` in a text is the host name. Negative exit codes are
signals, with Linux numbers on every platform.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KnownExit:
    """An exit code without an error text; ``name`` is the name of the finding."""

    text: str
    why: str
    fix: str = ""
    name: str = "rank-failed"


_LESS_MEMORY = (
    "use fewer DataLoader workers, smaller batches or fewer ranks on {host}; or raise the job's limit: "
    "Slurm --mem, Kubernetes resources.limits.memory, docker --memory"
)
_MORE_SHARED_MEMORY = (
    "give it more shared memory: docker run --shm-size=8g (or --ipc=host), in Kubernetes an emptyDir "
    "of medium Memory at /dev/shm; or use DataLoader(num_workers=0)"
)
OUT_OF_MEMORY = KnownExit(
    name="rank-oom-killed",
    text="killed by the kernel: out of memory",
    why="the host, or this job's memory limit, had no memory left",
    fix=_LESS_MEMORY,
)

EXITS: dict[int, KnownExit] = {
    -9: KnownExit(
        name="rank-killed",
        text="killed (SIGKILL)",
        why="another process killed it: kill -9, a scheduler's limit, systemd-oomd or earlyoom",
        fix="find out which one: sacct -j JOB, or journalctl and dmesg on {host}",
    ),
    -6: KnownExit(
        name="rank-crashed",
        text="aborted (SIGABRT)",
        why="a C++ library aborted, which Python cannot catch; see the lines above",
        fix="read the end of its log; TORCH_SHOW_CPP_STACKTRACES=1 shows where it aborted",
    ),
    -7: KnownExit(
        name="rank-crashed",
        text="bus error (SIGBUS)",
        why="it accessed memory that is not available: most often /dev/shm is full (DataLoader)",
        fix=_MORE_SHARED_MEMORY,
    ),
    -11: KnownExit(
        name="rank-crashed",
        text="segmentation fault (SIGSEGV)",
        why="native code accessed invalid memory: a broken or mismatched extension",
        fix="the stack trace in its log names the library; reinstall it for this torch and Python",
    ),
    -15: KnownExit(
        name="rank-terminated",
        text="terminated (SIGTERM)",
        why="a scheduler, a service manager or a user (kill) stopped it",
        fix="find out which one: the scheduler's log, or journalctl on {host}",
    ),
    -2: KnownExit(
        name="rank-terminated",
        text="interrupted (SIGINT)",
        why="a user interrupted it: Ctrl-C, or kill -2",
    ),
    -10: KnownExit(
        name="rank-terminated",
        text="terminated by SIGUSR1",
        why="a scheduler sends this signal as a warning, and the script has no handler for it",
        fix="signal.signal(signal.SIGUSR1, …) in the script, and save a checkpoint there",
    ),
    -12: KnownExit(
        name="rank-terminated",
        text="terminated by SIGUSR2",
        why="a scheduler sends this signal as a warning, and the script has no handler for it",
        fix="signal.signal(signal.SIGUSR2, …) in the script, and save a checkpoint there",
    ),
    0: KnownExit(
        text="exited early, with exit code 0",
        why="it finished while other ranks still needed it",
        fix="let all ranks run the same number of steps",
    ),
    1: KnownExit(
        text="exit code 1, without a traceback",
        why="the script, or a launcher inside it, exited without showing the error",
        fix="read the end of its log",
    ),
    2: KnownExit(
        text="exit code 2",
        why="the script rejected its arguments (argparse exits with 2)",
        fix="compare the arguments after the script's name with its help: python SCRIPT --help",
    ),
    127: KnownExit(
        text="exit code 127: command not found",
        why="a program that was called is not installed on {host}, or not in its PATH",
        fix="install it on {host}, or use its full path",
    ),
}

NAMES = frozenset(known.name for known in (OUT_OF_MEMORY, *EXITS.values()))


def by_signal(exit_code: int) -> int:
    """Return -9 for 137, which is how shells report a signal; other codes as they are."""
    return 128 - exit_code if 128 < exit_code <= 128 + 64 else exit_code


def exit_of(exit_code: int) -> KnownExit:
    """Return the known meaning of an exit code."""
    code = by_signal(exit_code)
    if code in EXITS:
        return EXITS[code]
    if code < 0:
        return KnownExit(
            name="rank-terminated",
            text=f"terminated by signal {-code}",
            why="another process sent it this signal",
        )
    return KnownExit(
        text=f"exit code {exit_code}",
        why="the script exited with this code (sys.exit) and showed no traceback",
        fix="read the end of its log",
    )
