"""The process beside the notebook's kernel that launches its ranks, like ``muster run``.

It is a process of its own because the launcher handles signals, and the kernel has its own handlers. When the kernel exits for
any reason, the ranks are stopped.
"""

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from torchmuster.errors import MusterError
from torchmuster.finding import Finding, from_error
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.console import TerminalConsole
from torchmuster.launch.launcher.launch import launch
from torchmuster.launch.launcher.run import JobOutcome, Run
from torchmuster.launch.transports.channel import Transport
from torchmuster.launch.transports.local import LocalTransport
from torchmuster.notebook.messages import (
    Ended,
    EndLauncher,
    Found,
    Interrupt,
    Launch,
    Message,
    Printed,
    Said,
    ToLauncher,
    WorldReady,
    receive,
    send,
)
from torchmuster.runfolder import RunFolder

_LOOK_EVERY_S = 1.0
_REQUEST = msgspec.msgpack.Decoder(ToLauncher)


class Kernel:
    """The connection to the notebook's kernel."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parent = os.getppid()
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send to the kernel; its exit is noticed elsewhere."""
        with self._lock:
            send(self._connection, message)

    def receive(self) -> ToLauncher | None:
        """Wait for the next request; None after the kernel has exited.

        The connection may stay open: a forked child of the kernel may hold it.
        """
        while not self._connection.poll(_LOOK_EVERY_S):
            if os.getppid() != self._parent:
                return None
        return receive(self._connection, _REQUEST)

    def obey(self, runner: Run, loop: asyncio.AbstractEventLoop) -> None:
        """Process the kernel's requests in a thread until it exits."""
        with contextlib.suppress(RuntimeError):  # the ranks and the loop have stopped
            while True:
                match self.receive():
                    case Interrupt():
                        loop.call_soon_threadsafe(runner.pass_on, "SIGINT")
                    case EndLauncher():
                        loop.call_soon_threadsafe(runner.stop, "stopped by the notebook")
                    case None:
                        break
            loop.call_soon_threadsafe(runner.stop, "the notebook's kernel exited")


class KernelConsole(TerminalConsole):
    """A console that sends everything to the kernel."""

    def __init__(self, run: RunFolder, kernel: Kernel) -> None:
        super().__init__(run)
        self._kernel = kernel

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """Do nothing."""
        yield

    def world(self, size: int) -> None:
        """Send the number of ranks."""
        self._kernel.send(WorldReady(size=size))

    def say(self, text: str, *, in_log_only: bool = False) -> None:
        """Send a message of the launcher."""
        if not in_log_only:
            self._kernel.send(Said(text=text))

    def output(self, rank: int, text: str) -> None:
        """Send lines of a rank's log."""
        self._kernel.send(Printed(rank=rank, text=text))

    def show(self, findings: Sequence[Finding]) -> None:
        """Send findings."""
        if findings:
            self._kernel.send(Found(findings=tuple(findings)))

    def finish(self) -> None:
        """Do nothing."""


class NotebookRun(Run):
    """A run that a notebook's kernel can interrupt and stop."""

    def __init__(
        self,
        kernel: Kernel,
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


def main(descriptor: str) -> None:
    """Launch the job that the first message describes."""
    kernel = Kernel(Connection(int(descriptor)))
    order = kernel.receive()
    if not isinstance(order, Launch):
        return
    run = RunFolder(Path(order.run))
    console = KernelConsole(run, kernel)
    try:
        transport = LocalTransport(socket.gethostname())
        launch(NotebookRun(kernel, order.spec, transport, console, run), console)
    except MusterError as error:
        kernel.send(Found(findings=tuple(from_error(error))))
    kernel.send(Ended())


if __name__ == "__main__":
    main(sys.argv[1])
