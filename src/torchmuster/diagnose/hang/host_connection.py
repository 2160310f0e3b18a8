"""A probe program (``host_probe.py``) on a host, reached without a node agent: through a pipe, or through ssh."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

from torchmuster.diagnose.probe_client import HOST_PROBE, ProbeClient
from torchmuster.finding import Finding, Status
from torchmuster.launch.transports.ssh import diagnose_ssh, is_this_host, require_ssh, ssh_command

_LONGEST_LINE = 2**26  # an answer is one line
_EXIT_WITHIN_S = 5.0
_ERRORS_KEPT = 4000


class HostConnection(ProbeClient):
    """The probe program of one host; the request is data, the command is always the same."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, python: str) -> None:
        super().__init__(name, self._write)
        self._process = process
        self._python = python
        self._errors = b""
        self.trouble: Finding | None = None  # why ssh exited, once it has
        self._reading_errors = asyncio.create_task(self._read_errors())
        self._listening = asyncio.create_task(self._listen())

    async def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{line}\n".encode())
            await self._process.stdin.drain()

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # a line that is too long
            async for line in self._process.stdout:
                self.hear(line.decode(errors="replace"))
        code = await self._process.wait()
        await asyncio.wait({self._reading_errors}, timeout=_EXIT_WITHIN_S)
        errors = self._errors.decode(errors="replace")
        diagnosis = diagnose_ssh(self.name, self._python, code, errors)
        self.trouble = Finding(
            name=diagnosis.name,
            status=Status.FAILURE,
            what=diagnosis.what,
            why=diagnosis.why,
            fix=diagnosis.fix,
            evidence=diagnosis.evidence,
        )
        self.end(f"it exited with code {code}\n{diagnosis.evidence}".strip())

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self._errors = (self._errors + line)[-_ERRORS_KEPT:]

    async def close(self) -> None:
        """Close the pipe, which makes the program exit."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_EXIT_WITHIN_S):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
            self._listening.cancel()
            self._reading_errors.cancel()
            await asyncio.gather(self._listening, self._reading_errors, return_exceptions=True)


@contextlib.asynccontextmanager
async def connected(host: str, python: str) -> AsyncIterator[HostConnection]:
    """Start the probe program on a host; on this host without ssh."""
    program = (python, "-m", HOST_PROBE)
    if is_this_host(host):
        command = [sys.executable, *program[1:]]
    else:
        require_ssh()
        command = ssh_command(host, program)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_LONGEST_LINE,
        start_new_session=True,  # only muster gets Ctrl-C
    )
    connection = HostConnection(host, process, python)
    try:
        yield connection
    finally:
        await connection.close()
