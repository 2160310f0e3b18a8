"""A probe program (``host_probe.py``) on a host, reached without a node agent: through a pipe, or through ssh."""

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from typing import IO

from torchmuster.diagnose.probe_client import HOST_PROBE, ProbeClient
from torchmuster.finding import Finding, Status
from torchmuster.launch.transports.ssh import diagnose_ssh, is_this_host, require_ssh, ssh_command

_LONGEST_LINE = 2**26  # an answer is one line
_EXIT_WITHIN_S = 5.0
_ERRORS_KEPT = 4000


class HostConnection(ProbeClient):
    """The probe program of one host; the request is data, the command is always the same."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, python: str, errors: IO[bytes]
    ) -> None:
        super().__init__(name)
        self._process = process
        self._python = python
        self._errors = errors
        self.trouble: Finding | None = None  # why it exited, once it has

    async def send_line(self, line: str) -> None:
        """Write a line."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{line}\n".encode())
            await self._process.stdin.drain()

    async def receive_line(self) -> str:
        """Return the next line; raise ``MachineLost`` at the end of the output."""
        assert self._process.stdout is not None
        line = b""
        with contextlib.suppress(ValueError):  # a line that is too long
            line = await self._process.stdout.readline()
        if line:
            return line.decode(errors="replace")
        await self.close()
        self._errors.seek(0)
        errors = self._errors.read()[-_ERRORS_KEPT:].decode(errors="replace")
        code = self._process.returncode or 0
        cause = diagnose_ssh(self.name, self._python, code, errors)
        self.trouble = Finding(
            name=cause.name,
            status=Status.FAILURE,
            what=cause.what,
            why=cause.why,
            fix=cause.fix,
            evidence=cause.evidence,
        )
        raise self.lost(f"it exited with code {code}\n{cause.evidence}".strip())

    async def close(self) -> None:
        """Close the pipe, which makes the program exit."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _EXIT_WITHIN_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


@contextlib.asynccontextmanager
async def connected(host: str, python: str) -> AsyncIterator[HostConnection]:
    """Start the probe program on a host; on this host without ssh."""
    program = (python, "-m", HOST_PROBE)
    if is_this_host(host):
        command = [sys.executable, *program[1:]]
    else:
        require_ssh()
        command = ssh_command(host, program)
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=_LONGEST_LINE,
            start_new_session=True,  # only muster gets Ctrl-C
        )
        connection = HostConnection(host, process, python, errors)
        try:
            yield connection
        finally:
            await connection.close()
