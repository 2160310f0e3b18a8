"""Every error that torchmuster raises on purpose, and the exit code of each.

::

    MusterError                    exit 1   an operation failed
    ├── Impossible                 exit 2   the request cannot be met here
    │   ├── ConfigError                     settings are wrong (lists every mistake, not only the first)
    │   ├── NoSuchDevice                    an id, UUID or prefix names no device, or several
    │   ├── TooFewDevices                   fewer devices meet the conditions than requested
    │   ├── CudaAlreadyInitialized          too late to choose GPUs in this process
    │   └── NoSuchRun                       a run id or folder that does not exist
    ├── MachineLost                         a host of the run no longer sends heartbeats
    ├── OutOfMemory                         a rank requested more memory than is available
    └── NotNow                     exit 3   the resource exists, but is in use
        └── DevicesBusy                     GPUs claimed or in use; waiting can help

An error has three parts: what failed, the cause, and how to fix it (``what``, ``why``, ``fix``).
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class ExitCode(enum.IntEnum):
    """Exit codes of ``muster`` commands. Frozen: scripts rely on them."""

    GOOD = 0
    FAILED = 1
    IMPOSSIBLE = 2
    NOT_NOW = 3
    SAVED = 75
    INTERRUPTED = 130
    KILLED = 137
    TERMINATED = 143


EXIT_CODE_MEANINGS: dict[ExitCode, str] = {
    ExitCode.GOOD: "success: no failure was found",
    ExitCode.FAILED: "the command failed, or a check found a failure",
    ExitCode.IMPOSSIBLE: "the request cannot be met here: wrong usage, wrong settings, too few GPUs",
    ExitCode.NOT_NOW: "the requested resource is in use; add --wait or try again later",
    ExitCode.SAVED: "checkpointed after a stop request; rerun to resume",
    ExitCode.INTERRUPTED: "stopped by Ctrl-C",
    ExitCode.KILLED: "stopped by SIGTERM, but ranks had to be killed after the grace period (launch.grace)",
    ExitCode.TERMINATED: "stopped by SIGTERM: muster stop, a scheduler, or a closed terminal",
}


class MusterError(Exception):
    """Base class of all errors. ``str()`` gives all three parts, ready to print."""

    exit_code = ExitCode.FAILED

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

    @property
    def name(self) -> str:
        """The stable machine-readable name: the class name in kebab-case."""
        return "".join(f"-{c.lower()}" if c.isupper() else c for c in type(self).__name__)[1:]

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.why, self.fix) if part)


class Impossible(MusterError):
    """The request cannot be met on this machine with these settings."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One wrong setting: where it is (``config.yaml:3:5``), what is wrong, how to fix it."""

    where: str
    what: str
    fix: str = ""


class ConfigError(Impossible):
    """Invalid settings. Carries every mistake found, in the order of the settings file."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        count = "a mistake" if len(self.mistakes) == 1 else f"{len(self.mistakes)} mistakes"
        lines = [
            f"{mistake.where}: {mistake.what}" + (f"; {mistake.fix}" if mistake.fix else "")
            for mistake in self.mistakes
        ]
        super().__init__(f"the settings have {count}", why="\n".join(lines))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[Sequence[Mistake]]]:
        return type(self), (self.mistakes,)  # so that it can be pickled


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class NoSuchDevice(Impossible):
    """An id, UUID or prefix that names no device, or more than one."""


class TooFewDevices(Impossible):
    """Fewer devices meet the conditions than requested, and waiting would not change that."""


class CudaAlreadyInitialized(Impossible):
    """CUDA has already read ``CUDA_VISIBLE_DEVICES`` in this process: a change has no effect."""


class NoSuchRun(Impossible):
    """A run id or folder that does not exist."""


class MachineLost(MusterError):
    """A host of a run no longer sends heartbeats."""


class OutOfMemory(MusterError):
    """A rank requested more memory than is available."""


class NotNow(MusterError):
    """The requested resource exists but is in use."""

    exit_code = ExitCode.NOT_NOW


class DevicesBusy(NotNow):
    """Enough devices exist, but others have claimed them or run processes on them."""
