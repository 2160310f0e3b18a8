"""What is known of exit codes: why a rank ends with one, what to do.

A table only; :mod:`torchmuster.launch.history.root_cause` reads it, and where there is an error's text asks
:mod:`torchmuster.known_errors`. ``{host}`` in a text is the machine's name. Negative exit codes are signals, by
their numbers on Linux whatever this machine is.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KnownExit:
    """An exit code that came without an error's text; ``name`` is that of the finding."""

    words: str
    why: str
    fix: str = ""
    name: str = "rank-failed"


_LESS_MEMORY = (
    "use fewer DataLoader workers, smaller batches or fewer ranks on {host}; or allow the job more: "
    "Slurm --mem, Kubernetes resources.limits.memory, docker --memory"
)
_MORE_SHARED_MEMORY = (
    "give it more shared memory: docker run --shm-size=8g (or --ipc=host), in Kubernetes an emptyDir "
    "of medium Memory at /dev/shm; or use DataLoader(num_workers=0)"
)
OUT_OF_MEMORY = KnownExit(
    name="rank-oom-killed",
    words="killed by the kernel: out of memory",
    why="the machine, or this job's share of it, had no memory left",
    fix=_LESS_MEMORY,
)

EXITS: dict[int, KnownExit] = {
    -9: KnownExit(
        name="rank-killed",
        words="killed (SIGKILL)",
        why="it was killed from outside: kill -9, a scheduler's limit, systemd-oomd or earlyoom",
        fix="ask the scheduler (sacct -j JOB), or journalctl and dmesg on {host}, who did it",
    ),
    -6: KnownExit(
        name="rank-crashed",
        words="aborted (SIGABRT)",
        why="a C++ library gave up, which Python cannot catch; the lines above tell more",
        fix="read the end of its log; TORCH_SHOW_CPP_STACKTRACES=1 shows where it was",
    ),
    -7: KnownExit(
        name="rank-crashed",
        words="bus error (SIGBUS)",
        why="it touched memory that could not be had: most often /dev/shm is full (DataLoader)",
        fix=_MORE_SHARED_MEMORY,
    ),
    -11: KnownExit(
        name="rank-crashed",
        words="segmentation fault (SIGSEGV)",
        why="native code touched memory that is not its own: a broken or mismatched extension",
        fix="the stack in its log names the library; reinstall it for this torch and Python",
    ),
    -4: KnownExit(
        name="rank-crashed",
        words="illegal instruction (SIGILL)",
        why="a library was built for a newer processor than the one of {host}",
        fix="install builds made for this processor on {host}",
    ),
    -8: KnownExit(
        name="rank-crashed",
        words="arithmetic fault (SIGFPE)",
        why="native code divided an integer by zero",
        fix="the stack in its log names the library",
    ),
    -15: KnownExit(
        name="rank-terminated",
        words="ended from outside (SIGTERM)",
        why="somebody asked it to end: a scheduler, a service manager, or kill",
        fix="ask the scheduler, or journalctl on {host}, who did it",
    ),
    -2: KnownExit(
        name="rank-terminated",
        words="interrupted (SIGINT)",
        why="somebody interrupted it: Ctrl-C, or kill -2",
    ),
    -10: KnownExit(
        name="rank-terminated",
        words="ended by SIGUSR1",
        why="a scheduler sends this signal as a warning, and the script has no handler for it",
        fix="signal.signal(signal.SIGUSR1, …) in the script, and save a checkpoint there",
    ),
    -12: KnownExit(
        name="rank-terminated",
        words="ended by SIGUSR2",
        why="a scheduler sends this signal as a warning, and the script has no handler for it",
        fix="signal.signal(signal.SIGUSR2, …) in the script, and save a checkpoint there",
    ),
    -24: KnownExit(
        name="rank-terminated",
        words="ended by SIGXCPU",
        why="its allowance of processor time (ulimit -t) was used up",
        fix="raise the limit on {host}: ulimit -t unlimited",
    ),
    0: KnownExit(
        words="ended early, with exit code 0",
        why="it ended well while others still needed it",
        fix="let all ranks do the same number of steps",
    ),
    1: KnownExit(
        words="exit code 1, without a traceback",
        why="the script ended itself, or a launcher inside it did, and hid the error",
        fix="read the end of its log",
    ),
    2: KnownExit(
        words="exit code 2",
        why="the script did not understand its arguments (argparse ends with 2)",
        fix="compare the arguments after the script's name with what it knows: python SCRIPT --help",
    ),
    126: KnownExit(
        words="exit code 126: not executable",
        why="a program was found on {host}, but may not be run",
        fix="chmod +x it on {host}, or see whether its disk is mounted noexec",
    ),
    127: KnownExit(
        words="exit code 127: command not found",
        why="a program that was called is not installed on {host}, or not in its PATH",
        fix="install it on {host}, or give its whole path",
    ),
}

NAMES = frozenset(one.name for one in (OUT_OF_MEMORY, *EXITS.values()))


def by_signal(exit_code: int) -> int:
    """Return -9 for 137, which is how shells report a signal; other codes as they are."""
    return 128 - exit_code if 128 < exit_code <= 128 + 64 else exit_code


def exit_of(exit_code: int) -> KnownExit:
    """Return what is known of an exit code."""
    code = by_signal(exit_code)
    if code in EXITS:
        return EXITS[code]
    if code < 0:
        return KnownExit(
            name="rank-terminated",
            words=f"ended by signal {-code}",
            why="somebody sent it this signal",
        )
    return KnownExit(
        words=f"exit code {exit_code}",
        why="the script ended itself with this code (sys.exit) and showed no traceback",
        fix="read the end of its log",
    )
