"""The transport to this host: a child process, reached through its standard input and output."""

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence

from torchmuster.launch import protocol
from torchmuster.launch.transports.channel import Arrive, Transport

# How a node agent's output begins; output of login scripts or Slurm prologs does not look like this.
FIRST_WORDS = b'={"kind":'
_KEPT_WORDS = 4000
_CLOSE_WITHIN_S = 12.0
_LAST_WORDS_WITHIN_S = 1.0
_ALIVE = protocol.to_line(protocol.Alive())
NODE_AGENT = ("-m", "torchmuster.launch.node.supervisor")


class PipeChannel:
    """The launcher's end of a pipe to a node agent."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self.first: protocol.FromAgent | None = (
            None  # received already; ``receive`` returns it once
        )
        self._understood = False
        self._errors = ""
        self._listening = asyncio.create_task(self._keep_errors())

    @classmethod
    async def open(
        cls, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> "PipeChannel":
        """Start a process in its own session, so that only the launcher gets Ctrl-C."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=protocol.MESSAGE_LIMIT,
            start_new_session=True,
            env=environment,
        )
        return cls(process)

    @property
    def exit_code(self) -> int | None:
        """The process's exit code, once it has one."""
        return self._process.returncode

    async def send(self, message: protocol.ToAgent) -> None:
        """Send a message; on a closed channel this does nothing."""
        with contextlib.suppress(OSError, RuntimeError):
            self._stdin.write(protocol.to_line(message))
            await self._stdin.drain()

    def say_alive(self) -> None:
        """Send a heartbeat, unless earlier messages are still being sent."""
        if not self._stdin.is_closing() and not self._stdin.transport.get_write_buffer_size():
            self._stdin.write(_ALIVE)

    async def receive(self) -> protocol.FromAgent | None:
        """Return the next message, or None when the node agent is gone."""
        first, self.first = self.first, None
        if first is not None:
            return first
        while line := await self._line():
            if not self._understood and not line.startswith(FIRST_WORDS):
                self._keep(line)
                continue
            self._understood = True
            return protocol.decode_from_agent(protocol.from_line(line))
        await self._process.wait()
        # Its child processes may keep its standard error open.
        await asyncio.wait({self._listening}, timeout=_LAST_WORDS_WITHIN_S)
        return None

    async def _line(self) -> bytes:
        try:
            return await self._stdout.readline()
        except ValueError:  # longer than any line of the protocol; the stream has dropped it
            raise protocol.UnreadableMessage("it sent a line that is too long") from None

    def why_closed(self) -> str:
        """Return the last error output of the process."""
        return self._errors.strip()

    async def close(self) -> None:
        """Close the pipe, so that the node agent stops everything and exits; wait with a timeout.

        If the caller cancels the wait, the process is killed too.
        """
        self._stdin.close()
        try:
            async with asyncio.timeout(_CLOSE_WITHIN_S):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            await self.kill()

    async def kill(self) -> None:
        """Kill the process."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._listening.cancel()

    async def _keep_errors(self) -> None:
        while data := await self._stderr.read(4096):
            self._keep(data)

    def _keep(self, data: bytes) -> None:
        self._errors = (self._errors + data.decode(errors="replace"))[-_KEPT_WORDS:]


class LocalTransport(Transport):
    """One place: this host."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._arrive: Arrive | None = None

    @property
    def places(self) -> Sequence[str]:
        """The name of this host."""
        return [self._name]

    async def open(self, arrive: Arrive) -> None:
        """Start the node agent."""
        self._arrive = arrive
        await self.reopen(0)

    async def reopen(self, place: int) -> None:
        """Start another node agent."""
        assert self._arrive is not None
        self._arrive(place, await PipeChannel.open([sys.executable, *NODE_AGENT, "--local"]))

    def waiting_for(self, place: int) -> str:
        """Return what is being waited for."""
        return "its node agent is starting"

    async def close(self) -> None:
        """Do nothing: the owner of the channel closes it."""
