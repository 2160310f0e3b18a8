"""The program of ``muster check`` beside the node agent, which exchanges lines with the launcher.

The lines of its standard input and output are sent as ``relay`` messages; its standard error is kept for the
report of a failure. Process cleanup finds it by the run's token, like every process of the run.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from torchmuster.launch import protocol
from torchmuster.launch.node.process_cleanup import TOKEN_VARIABLE

_PROGRAM = "torchmuster.diagnose.host_probe"
_ERRORS_KEPT = 4000
# It exits when its input closes; if not, it is killed. What waits for a dead disk or driver is left behind after this long.
_GONE_WITHIN_S = 2.0
# Half of the message limit: JSON in JSON has its quotation marks escaped.
_LONGEST_LINE = protocol.MESSAGE_LIMIT // 2

Send = Callable[[protocol.FromAgent], Awaitable[None]]


class Sidecar:
    """The running program."""

    def __init__(self, process: asyncio.subprocess.Process, errors: Path, send: Send) -> None:
        self._process = process
        self._errors = errors
        self._send = send
        self._relaying = asyncio.create_task(self._relay())

    @classmethod
    async def begin(cls, token: str, folder: Path, send: Send) -> "Sidecar":
        """Start the program; its standard error goes into a file in ``folder``."""
        errors = folder / "sidecar.log"
        with errors.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _PROGRAM),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                # Its own token: cleaning up the ranks does not kill it.
                env={**os.environ, TOKEN_VARIABLE: f"{token}.program"},
                start_new_session=True,
                limit=_LONGEST_LINE,
            )
        return cls(process, errors, send)

    @property
    def pid(self) -> int:
        """The program's process id."""
        return self._process.pid

    def pass_on(self, text: str) -> None:
        """Send the program a line; ignored if it has exited, which was reported."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, RuntimeError):
            self._process.stdin.write(text.encode("utf-8", errors="replace") + b"\n")

    async def end(self) -> None:
        """Kill the program: it has nothing to save."""
        self._relaying.cancel()
        await asyncio.gather(self._relaying, return_exceptions=True)
        self._kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _GONE_WITHIN_S)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _relay(self) -> None:
        """Send the program's lines, and finally its exit."""
        assert self._process.stdout is not None
        trouble = ""
        try:
            while line := await self._process.stdout.readline():
                text = line.rstrip(b"\r\n").decode("utf-8", errors="replace")
                await self._send(protocol.Relay(text=text))
        except ValueError:
            trouble = "it wrote a line that is too long"
            self._kill()
        code = await self._process.wait()
        errors = self._errors.read_text(encoding="utf-8", errors="replace")[-_ERRORS_KEPT:]
        text = f"{errors}\n{trouble}".strip()
        await self._send(protocol.Relay(text=text, is_last=True, exit_code=code))
