"""A Slurm step: one running srun, and the last lines that it and its tasks print (see srun.py)."""

import asyncio
import contextlib
import re
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import Mapping, Sequence

# srun prints this on clusters without CPU binding; it is harmless.
_HARMLESS = b"cluster configuration lacks support for cpu binding"
_LINES_KEPT = 20
_LOOK_EVERY_S = 0.05


class SrunStep:
    """One srun and the node agents that it started."""

    def __init__(self) -> None:
        self.since_s = time.monotonic()
        self.over = False
        self.output: deque[str] = deque(maxlen=_LINES_KEPT)
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(
        self, command: Sequence[str], environment: Mapping[str, str], invitation: bytes
    ) -> None:
        """Start srun in its own session, so that only the launcher gets Ctrl-C; its tasks get the invitation."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self.output.append(f"srun: {error.strerror}")
            self.over = True
            return
        self._reading = asyncio.create_task(self._read(self._process))
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # srun has exited, which its output explains
            self._process.stdin.write(invitation)
            await self._process.stdin.drain()

    async def close(self, patience_s: float) -> None:
        """Close the node agents' input so that they exit; kill those that do not."""
        process = self._process
        if process is None or process.stdin is None or self._reading is None:
            return
        process.stdin.close()
        for end in (None, process.terminate, process.kill):
            if end is not None:
                with contextlib.suppress(ProcessLookupError):
                    end()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    # Not process.wait: it also waits for whoever has inherited srun's output, and keeps it open.
                    while process.returncode is None:
                        await asyncio.sleep(_LOOK_EVERY_S)
                break
        # There is no public name for it; else Python reports at its exit that the pipe was open.
        process._transport.close()  # type: ignore[attr-defined]
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    def errors_of(self, node: str) -> list[str]:
        """Return how srun says that the task of a node ended: ``srun: error: node2: task 1: Killed``."""
        pattern = re.compile(rf"srun: error: {re.escape(node)}: tasks? ")
        return [line for line in self.output if pattern.match(line)]

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # too long; the stream has dropped it
                continue
            if not line:
                break
            if _HARMLESS not in line:
                self.output.append(line.decode(errors="replace").rstrip())
        code = await process.wait()
        self.output.append(f"srun exited with code {code}")
        self.over = True
