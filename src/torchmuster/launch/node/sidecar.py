"""A sidecar process: one of our programs that runs next to the node agent and exchanges messages with the launcher.

The lines of its standard input and output are sent as ``relay`` messages; its standard error is kept for the
report of a failure. Process cleanup finds it by the run's token, like every process of the run.
"""

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Awaitable, Callable

from torchmuster.errors import Impossible
from torchmuster.launch import protocol
from torchmuster.launch.node.process_cleanup import TOKEN_VARIABLE

# A launcher may start only our own programs.
_OURS = re.compile(r"torchmuster(\.[a-z]\w*)+", re.ASCII)
_KEPT_WORDS = 4000
# It exits when its input closes; if not, it is killed.
_END_WITHIN_S = 1.0
# A process that waits for a dead disk or driver cannot be killed; it is left behind after this long.
_GONE_WITHIN_S = 2.0
# Half of the message limit: JSON in JSON has its quotation marks escaped.
_LONGEST_LINE = protocol.MESSAGE_LIMIT // 2

Send = Callable[[protocol.FromAgent], Awaitable[None]]


class Sidecar:
    """A running sidecar process."""

    def __init__(self, process: asyncio.subprocess.Process, send: Send) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._send = send
        self._errors = b""
        self._telling = asyncio.create_task(self._tell())

    @classmethod
    async def begin(cls, message: protocol.Relay, send: Send) -> "Sidecar":
        """Start the program; raises ``Impossible`` if it is not ours."""
        if not _OURS.fullmatch(message.program):
            raise Impossible(
                f"{message.program!r} is not a torchmuster program",
                why="a node agent starts no other sidecar processes",
            )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", message.program),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            # Its own token: cleaning up the ranks does not kill it.
            env={**os.environ, TOKEN_VARIABLE: f"{message.token}.program"},
            start_new_session=True,
            limit=_LONGEST_LINE,
        )
        return cls(process, send)

    @property
    def pid(self) -> int:
        """The program's process id."""
        return self._process.pid

    def pass_on(self, text: str) -> None:
        """Send the program a line; ignored if it has exited, which was reported."""
        with contextlib.suppress(OSError, RuntimeError):
            self._stdin.write(text.encode("utf-8", errors="replace") + b"\n")

    async def end(self) -> bool:
        """Close the program's input, kill it soon after, and return whether it is gone."""
        with contextlib.suppress(OSError, RuntimeError):
            self._stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _END_WITHIN_S)
        self._telling.cancel()
        await asyncio.gather(self._telling, return_exceptions=True)
        self._kill()
        try:
            await asyncio.wait_for(self._process.wait(), _GONE_WITHIN_S)
        except TimeoutError:
            return False
        return True

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def _tell(self) -> None:
        """Forward the program's output, and finally its exit."""
        relaying = asyncio.create_task(self._relay())
        keeping = asyncio.create_task(self._keep_errors())
        try:
            await self._process.wait()
            # Its child processes may keep the output open: do not wait for them.
            await asyncio.wait({relaying, keeping}, timeout=_END_WITHIN_S)
        finally:
            relaying.cancel()
            keeping.cancel()
        errors = self._errors.decode("utf-8", errors="replace").strip()
        code = self._process.returncode
        await self._send(protocol.Relay(text=errors, is_last=True, exit_code=code))

    async def _relay(self) -> None:
        try:
            while line := await self._stdout.readline():
                text = line.rstrip(b"\r\n").decode("utf-8", errors="replace")
                await self._send(protocol.Relay(text=text))
        except ValueError:
            self._errors += b"\nit wrote a line that is too long"
            self._kill()

    async def _keep_errors(self) -> None:
        while data := await self._stderr.read(4096):
            self._errors = (self._errors + data)[-_KEPT_WORDS:]
