"""The sidecar process of the notebook's kernel that launches its ranks, like ``muster run``.

It is a separate process because the launcher handles signals, and the kernel has its own handlers.
Both exchange lines of JSON over this process's standard input and output. When the kernel exits for
any reason, the ranks are stopped.
"""

import asyncio
import contextlib
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from torchmuster.errors import MusterError
from torchmuster.finding import Finding, from_error
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.console import TerminalConsole
from torchmuster.launch.launcher.launch import launch
from torchmuster.launch.launcher.run import JobOutcome, Run
from torchmuster.launch.transports.channel import Transport
from torchmuster.launch.transports.local import LocalTransport
from torchmuster.notebook.launcher import (
    Ended,
    EndLauncher,
    FromLauncher,
    HostsFound,
    Interrupt,
    LauncherOrder,
    Printed,
    Said,
    ToLauncher,
    WorldReady,
)
from torchmuster.runfolder import RunFolder

_LOOK_EVERY_S = 1.0
_PIECE_BYTES = 65536


class _ToKernel(TerminalConsole):
    """A console that sends everything to the kernel."""

    def __init__(self, run: RunFolder, tell: Callable[[FromLauncher], None]) -> None:
        super().__init__(run)
        self._tell = tell

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """Do nothing."""
        yield

    def world(self, size: int) -> None:
        """Send the number of ranks."""
        self._tell(WorldReady(size))

    def say(self, text: str, *, in_log_only: bool = False) -> None:
        """Send a message of the launcher."""
        if not in_log_only:
            self._tell(Said(text))

    def output(self, rank: int, text: str) -> None:
        """Send lines of a rank's log."""
        self._tell(Printed(rank, text))

    def show(self, findings: Sequence[Finding]) -> None:
        """Send a finding."""
        if findings:
            self._tell(HostsFound(tuple(findings)))

    def finish(self) -> None:
        """Do nothing."""


class _Kernel:
    """The kernel's side: its requests, and whether it is alive."""

    def __init__(self, asked: int, told: IO[bytes]) -> None:
        self._asked = asked
        self._told = told
        self._parent = os.getppid()
        self._turn = threading.Lock()
        self._unread = b""

    def tell(self, event: FromLauncher) -> None:
        """Send to the kernel; its exit is noticed elsewhere."""
        with self._turn, contextlib.suppress(OSError):
            self._told.write(msgspec.json.encode(event) + b"\n")
            self._told.flush()

    def line(self) -> bytes:
        """Wait for the next line; empty after the kernel has exited.

        The pipe may stay open: a forked child of the kernel may hold it.
        """
        while b"\n" not in self._unread:
            readable, _, _ = select.select([self._asked], [], [], _LOOK_EVERY_S)
            piece = os.read(self._asked, _PIECE_BYTES) if readable else None
            if piece == b"" or os.getppid() != self._parent:
                return b""
            self._unread += piece or b""
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def obey(self, runner: Run, loop: asyncio.AbstractEventLoop) -> None:
        """Process the kernel's requests in a thread until it exits."""
        with contextlib.suppress(RuntimeError):  # the ranks and the loop have stopped
            while line := self.line():
                match msgspec.json.decode(line, type=ToLauncher):
                    case Interrupt():
                        loop.call_soon_threadsafe(runner.pass_on, "SIGINT")
                    case EndLauncher():
                        loop.call_soon_threadsafe(runner.stop, "stopped by the notebook")
            loop.call_soon_threadsafe(runner.stop, "the notebook's kernel exited")


class _KernelRun(Run):
    """A run that a notebook's kernel can interrupt and stop."""

    def __init__(
        self,
        kernel: _Kernel,
        spec: JobSpec,
        transport: Transport,
        console: TerminalConsole,
        run: RunFolder,
    ) -> None:
        super().__init__(spec, transport, console, run)
        self._kernel = kernel

    async def run(self, on_phase: Callable[[str], None]) -> JobOutcome:
        """Obey the kernel while the job runs."""
        arguments = (self, asyncio.get_running_loop())
        threading.Thread(target=self._kernel.obey, args=arguments, daemon=True).start()
        return await super().run(on_phase)


def main() -> int:
    """Launch the job that the first line describes; return the exit code."""
    kernel = _Kernel(sys.stdin.fileno(), sys.stdout.buffer)
    line = kernel.line()
    if not line:
        return 0
    order = msgspec.json.decode(line, type=LauncherOrder)

    run = RunFolder(Path(order.run))
    try:
        transport = LocalTransport(socket.gethostname())
        console = _ToKernel(run, kernel.tell)
        code = launch(_KernelRun(kernel, order.spec, transport, console, run), console)
    except MusterError as error:
        kernel.tell(HostsFound(tuple(from_error(error))))
        code = error.exit_code
    kernel.tell(Ended(int(code)))
    return code


if __name__ == "__main__":
    sys.exit(main())
