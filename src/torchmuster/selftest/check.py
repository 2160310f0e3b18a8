"""A check of the self-test: what it measures, how its facts are judged, and the fault that shows it can fail."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torchmuster.errors import ExitCode, MusterError
from torchmuster.plan.proof import fresh_ranks

Facts = dict[str, Any]  # what a check measured: plain JSON
Figure = float | int | str | bool

_TAKEN = ("devices-busy", "not-now", "too-few-devices")  # names of errors
_MOST_OUTPUT = 2000  # characters of a failed command that an error shows


class NotHere(Exception):
    """A check cannot run on this host; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a check found: whether the expectation holds, in one line, with the figures behind it."""

    confirmed: bool
    says: str
    figures: Mapping[str, Figure] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Place:
    """The hardware that the checks may use, and the folder that they may write to.

    ``has`` contains the names of the hardware that is here, as ``Check.needs`` and the assumptions use them.
    """

    device: Literal["cpu", "gpu"]
    ranks: int  # GPUs to use; on the CPU, a number of processes
    has: frozenset[str]
    folder: str
    hosts: tuple[str, ...] = ()

    def on_ranks(
        self,
        program: str,
        work: str,
        *,
        planted: bool,
        ranks: int | None = None,
        environment: Mapping[str, str] | None = None,
        **more: Any,
    ) -> list[Facts]:
        """Run one function of a program in ``probes`` on fresh ranks; return what each rank measured."""
        count = self.ranks if ranks is None else ranks
        request = {"work": work, "planted": planted, "device": self.device, **more}
        ran = fresh_ranks.run_fresh_ranks(
            f"torchmuster.selftest.probes.{program}",
            json.dumps(request),
            ranks=count,
            device=self.device,
            folder=self.folder,
            name="selftest",
            environment=dict(environment or {}),
            typed=("selftest",),
        )
        if ran.trouble is not None and ran.trouble.name in _TAKEN:
            raise NotHere(f"the GPUs were taken meanwhile: {ran.trouble.what}")
        if ran.trouble is not None or len(ran.texts) != count:
            why = "" if ran.trouble is None else fresh_ranks.describe_failure(ran.trouble)
            raise MusterError(f"the ranks of this check failed ({work})", why=why)
        return [json.loads(ran.texts[rank]) for rank in range(count)]

    def muster(
        self,
        *words: str,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        accepted: Sequence[int] = (0,),
    ) -> str:
        """Run a command of muster and return what it prints on stdout; another exit code is an error."""
        done = subprocess.run(
            muster_command(*words),
            cwd=folder or self.folder,
            env=None if environment is None else dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode == ExitCode.NOT_NOW and ExitCode.NOT_NOW not in accepted:
            raise NotHere("the GPUs were taken meanwhile")
        if done.returncode not in accepted:
            raise MusterError(
                f"`muster {' '.join(words)}` ended with exit code {done.returncode}",
                why=(done.stderr or done.stdout)[-_MOST_OUTPUT:],
            )
        return done.stdout

    def scratch(self) -> Path:
        """Return a new folder, which is deleted with the others at the end."""
        return Path(tempfile.mkdtemp(dir=self.folder))


def muster_command(*words: str) -> list[str]:
    """Return the command line of a command of muster, in this Python."""
    return [sys.executable, "-m", "torchmuster", *words]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check.

    ``measure`` collects facts on the hardware; with ``planted`` true it plants the fault that ``fault`` describes, so that
    the check must fail. ``judge`` is a pure function of the facts.
    """

    id: str
    question: str
    fault: str
    needs: tuple[str, ...]  # all of them; empty: any host
    seconds: int  # typical duration
    measure: Callable[[Place, bool], Facts]
    judge: Callable[[Facts], Outcome]
