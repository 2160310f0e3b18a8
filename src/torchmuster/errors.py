"""Every error that torchmuster raises on purpose, and the exit code each one ends a command with.

::

    MusterError                    exit 1   something was tried and failed
    ├── Impossible                 exit 2   what was asked for cannot be had here
    │   ├── ConfigError                     settings are wrong (carries every mistake, not the first)
    │   ├── NoSuchDevice                    an id, UUID or prefix names no device, or several
    │   ├── TooFewDevices                   fewer devices meet the conditions than were asked for
    │   ├── CudaAlreadyInitialised          too late to choose GPUs in this process
    │   ├── NotTrusted                      a machine that joined does not do this for its host
    │   └── NoSuchRun                       a run id or folder that does not exist
    ├── MachineLost                         a machine of the run can no longer be heard
    ├── OutOfMemory                         a rank asked for more memory than it can have
    └── NotNow                     exit 3   it exists, but something else is using it at the moment
        └── DevicesBusy                     GPUs claimed or in use; waiting can help

An error says what was asked, what is true, and what to do: ``what``, ``why`` and ``fix``.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class ExitCode(enum.IntEnum):
    """What a ``muster`` command's exit status means. Frozen: scripts rely on it."""

    GOOD = 0
    FAILED = 1
    IMPOSSIBLE = 2
    NOT_NOW = 3
    SAVED = 75
    INTERRUPTED = 130


EXIT_CODE_MEANINGS: dict[ExitCode, str] = {
    ExitCode.GOOD: "done, and nothing is wrong",
    ExitCode.FAILED: "tried and failed, or a check found a failure",
    ExitCode.IMPOSSIBLE: "the request cannot be met here: wrong usage, wrong settings, too few GPUs",
    ExitCode.NOT_NOW: "what was asked for exists but is in use; --wait or a later try can succeed",
    ExitCode.SAVED: "saved at a request to end; start it again to go on",
    ExitCode.INTERRUPTED: "stopped by Ctrl-C",
}


class MusterError(Exception):
    """The root of the tree. ``str()`` gives all three parts, ready to print."""

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
    """What was asked for cannot be had on this machine with these settings."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One wrong setting: where it was written (``config.yaml:3:5``), what is wrong, how to mend it."""

    where: str
    what: str
    fix: str = ""


class ConfigError(Impossible):
    """Settings that cannot be used. Carries every mistake found, in the order they were written."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        count = "a mistake" if len(self.mistakes) == 1 else f"{len(self.mistakes)} mistakes"
        lines = [
            f"{mistake.where}: {mistake.what}" + (f"; {mistake.fix}" if mistake.fix else "")
            for mistake in self.mistakes
        ]
        super().__init__(f"the settings have {count}", why="\n".join(lines))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[Sequence[Mistake]]]:
        return type(self), (self.mistakes,)  # so that it can cross from one process to another


class NoSuchDevice(Impossible):
    """An id, UUID or prefix that names no device, or more than one."""


class TooFewDevices(Impossible):
    """Fewer devices meet the conditions than were asked for, and waiting would not change that."""


class CudaAlreadyInitialised(Impossible):
    """CUDA has already read ``CUDA_VISIBLE_DEVICES`` in this process; changing it now does nothing."""


class NotTrusted(Impossible):
    """A machine that joined refuses what its host asked for; ``muster join --trust-host`` allows it."""


class NoSuchRun(Impossible):
    """A run id or folder that does not exist."""


class MachineLost(MusterError):
    """A machine of a run that can no longer be heard."""


class OutOfMemory(MusterError):
    """A rank asked for more memory than it can have."""


class NotNow(MusterError):
    """What was asked for exists but is in use at the moment."""

    exit_code = ExitCode.NOT_NOW


class DevicesBusy(NotNow):
    """Enough devices exist, but others have claimed them or run processes on them."""
