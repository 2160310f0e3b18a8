"""How the launcher speaks: the ranks' lines on standard output, its own on standard error.

Everything is also written to the run's ``console.log``, which is what ``muster attach`` shows. All of it
is written by threads: a terminal that is paused must not hold up the launcher, whose silence the other
machines would take for its end.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from torchmuster.finding import Finding, render
from torchmuster.launch.launcher.console import Console, Folder, harmless
from torchmuster.runfolder import RunFolder

# What the ranks wrote before comes first, unless their terminal takes nothing for so long.
_CATCH_UP_WITHIN_S = 0.3


class TerminalVoice:
    """Speaks to a terminal and to the run's console log.

    ``colour`` is for what the ranks write (standard output), ``own_colour`` for the launcher's own words.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        colour: bool = False,
        own_colour: bool = False,
        width: int = 100,
    ) -> None:
        self._run = run
        self._colour = colour
        self._own_colour = own_colour
        self._width = width
        self._ranks: Console | None = None
        self._own: Console | None = None
        self._log: Console | None = None
        self._stream: TextIO | None = None

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """Show what is said for as long as the run goes on, and at its end what is left."""
        with (
            self._run.console.open("a", encoding="utf-8", errors="replace") as self._stream,
            self._console(sys.stderr) as self._own,
        ):
            try:
                yield
            finally:
                self.finish()
                self._own = self._stream = None

    def world(self, size: int) -> None:
        """Learn how many ranks there are; an attempt may have other ones than the one before."""
        self.finish()
        assert self._stream is not None
        self._ranks = self._console(sys.stdout, size, colour=self._colour).__enter__()
        self._log = self._console(self._stream, size).__enter__()

    def say(self, text: str) -> None:
        """Say something of the launcher's own."""
        self._print([f"muster: {harmless(line, colour=False)}" for line in text.splitlines()])

    def output(self, rank: int, text: str) -> None:
        """Show what a rank wrote."""
        for console in (self._ranks, self._log):
            if console is not None:
                console.output(rank, text)

    def show(self, findings: Sequence[Finding]) -> None:
        """Show findings."""
        if findings:
            findings = [_harmless(one) for one in findings]
            plain = render(findings, width=self._width)
            text = render(findings, width=self._width, colour=self._own_colour)
            self._print(text.splitlines(), plain.splitlines())

    def finish(self) -> None:
        """Show the last of what the ranks wrote."""
        for console in (self._ranks, self._log):
            if console is not None:
                console.close()
        self._ranks = self._log = None

    def _console(self, stream: TextIO, ranks: int = 1, *, colour: bool = False) -> Console:
        return Console(Folder(ranks, logs=str(self._run.logs), colour=colour), stream)

    def _print(self, lines: Sequence[str], plain: Sequence[str] | None = None) -> None:
        if self._ranks is not None:
            self._ranks.catch_up(_CATCH_UP_WITHIN_S)
        if self._own is not None:
            for line in lines:
                self._own.say(line)
            self._own.catch_up(_CATCH_UP_WITHIN_S)
        for line in plain or lines:
            if self._log is not None:
                self._log.say(line)
            elif self._stream is not None:
                with contextlib.suppress(OSError):  # a full disk must not end the run
                    self._stream.write(f"{line}\n")
                    self._stream.flush()


def _harmless(finding: Finding) -> Finding:
    """Return a finding that cannot steer a terminal: parts of it may be other machines' words."""

    def clean(text: str) -> str:
        return "\n".join(harmless(line, colour=False) for line in text.split("\n"))

    return dataclasses.replace(
        finding,
        what=clean(finding.what),
        why=clean(finding.why),
        fix=clean(finding.fix),
        evidence=clean(finding.evidence),
    )
