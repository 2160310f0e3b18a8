"""The node agent: executes the launcher's messages, and stops everything when they no longer arrive."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from torchmuster.errors import ExitCode, Impossible, MusterError
from torchmuster.launch import fingerprint, protocol
from torchmuster.launch.job import GRACE_VARIABLE, USUAL_GRACE_S
from torchmuster.launch.network import interfaces, listening, reach
from torchmuster.launch.node import device_lease, output, process_cleanup, supervisor
from torchmuster.launch.node.attempt import RunningAttempt
from torchmuster.launch.node.connection import AgentConnection
from torchmuster.launch.node.ranks import NodeShare, StoreProcess, host_environment
from torchmuster.launch.node.sidecar import Sidecar
from torchmuster.redaction import printable
from torchmuster.runfolder import RunFolder

_ALIVE_EVERY_S = 2.0
_LOOK_EVERY_S = 0.25
# For the ranks of a node agent whose user pressed Ctrl-C: they cannot save without the other hosts.
_LEAVE_GRACE_S = 2.0
# Timeout until the launcher's Prepare message sets another one.
_SILENT_AT_FIRST_S = 12.0
# Ranks that cannot even be killed are left behind after this long.
_GONE_WITHIN_S = 5.0


@dataclass(kw_only=True)
class _AgentJob:
    """The job prepared on this host."""

    prepare: protocol.Prepare
    holding: device_lease.DeviceLease
    logs: Path


class NodeAgent:
    """Runs the ranks of a run on one host."""

    def __init__(
        self,
        connection: AgentConnection,
        *,
        system: str = sys.platform,
        folder: Path | None = None,
        tell: Callable[[str], None] | None = None,
        is_local: bool = False,
    ) -> None:
        """Serve ``connection``; with ``folder``, the script runs there and not in the launcher's folder.

        ``tell`` prints to this node agent's own terminal, if it has one. With ``is_local``, the launcher is on this host: the pipe closes when
        it exits, so that silence only shows that it is busy.
        """
        self._connection = connection
        self._system = system
        self._own_folder = folder
        self._tell = tell or (lambda _: None)
        self._own_terminal = tell is not None
        self._heard_s = self._sent_s = time.monotonic()
        self._lost_after_s: float | None = None if is_local else _SILENT_AT_FIRST_S
        self._job: _AgentJob | None = None
        self._port: listening.OpenPort | None = None
        self._socket: socket.socket | None = None
        self._attempt = -1  # the last requested attempt
        self._trying: asyncio.Task[protocol.Reached] | None = None
        self._running: RunningAttempt | None = None
        self._store: StoreProcess | None = None  # of the ranks, on the first host
        self._sidecar: Sidecar | None = None
        self._ending = False  # because of a signal
        self._has_left = False  # its user pressed Ctrl-C
        self._turn = asyncio.Lock()  # serialises starting and stopping of ranks
        self._folder = folder_of_node()
        self._tasks: set[asyncio.Task[None]] = set()
        self.why_exited = ""  # why it exited, for this terminal
        self.signalled = False  # a signal to this process was the cause
        self.released = False  # by the launcher, because the run is over

    async def run(self) -> int:
        """Serve the launcher until the run is over or the launcher is gone."""
        over = asyncio.get_running_loop().create_future()
        ending = self._handle_signals(over)
        background = [
            asyncio.create_task(self._say_alive()),
            asyncio.create_task(self._notice_silence(over)),
            asyncio.create_task(self._serve(over)),
        ]
        try:
            hello = protocol.Hello(protocol=protocol.PROTOCOL, record=fingerprint.this_node())
            await self._send(hello)
            return int(await over)
        finally:
            for task in background:
                task.cancel()
            await self._end_all()
            for number in ending:
                asyncio.get_running_loop().remove_signal_handler(number)

    def _handle_signals(self, over: "asyncio.Future[int]") -> list[int]:
        """Handle the signals to this process; return those that end it.

        A scheduler's warning must not end it either when no ranks run, and after this node agent.
        """
        loop = asyncio.get_running_loop()
        ending = []
        for name in ("SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1", "SIGUSR2"):
            number = getattr(signal, name, None)
            if number is None or signal.getsignal(number) is signal.SIG_IGN:  # as under nohup
                continue
            with contextlib.suppress(NotImplementedError):  # Windows
                if name in ("SIGUSR1", "SIGUSR2"):
                    loop.add_signal_handler(number, self._pass_warning_on, name)
                else:
                    loop.add_signal_handler(number, self._signalled, over, name)
                    ending.append(number)
        return ending

    def _signalled(self, over: "asyncio.Future[int]", name: str) -> None:
        self.signalled = True
        if name == "SIGINT" and self._own_terminal:
            self._has_left = True
            self._give_up(over, "left the run after Ctrl-C", ExitCode.INTERRUPTED)
        elif self._running is None:
            self._give_up(over, name)
        elif not self._ending:
            self._ending = True
            self._do(self._end_with_grace(self._running, over, name))

    def _pass_warning_on(self, name: str) -> None:
        """Forward a warning that a scheduler sent to this process (Slurm's --signal without B:)."""
        if self._running is not None:
            self._running.pass_on(name, only_if_handled=True)

    async def _end_with_grace(
        self, running: RunningAttempt, over: "asyncio.Future[int]", name: str
    ) -> None:
        """Stop the ranks as the launcher would: a scheduler signals every process that it knows."""
        running.stop(self._grace_s(), name)
        await running.reported.wait()
        self._give_up(over, name)

    def _grace_s(self) -> float:
        """Return how long the ranks of the job may take to save and exit."""
        environment = {} if self._job is None else self._job.prepare.environment
        return float(environment.get(GRACE_VARIABLE, USUAL_GRACE_S))

    def _give_up(
        self, over: "asyncio.Future[int]", why: str, code: ExitCode = ExitCode.FAILED
    ) -> None:
        self.why_exited = self.why_exited or why
        if not over.done():
            over.set_result(code)

    async def _serve(self, over: "asyncio.Future[int]") -> None:
        while True:
            try:
                message = await self._connection.receive()
            except Exception as error:  # ``UnreadableMessage``, and any other decoding error
                self._give_up(over, f"cannot decode the launcher's message: {error}")
                return
            self._heard_s = time.monotonic()
            match message:
                case None:  # the launcher was killed: its ranks save and stop
                    self._give_up(over, "the launcher is gone")
                    return
                case protocol.Leave():
                    self.why_exited = message.text
                    self.released = True
                    if not over.done():
                        over.set_result(message.exit_code)
                    return
                case protocol.Alive():
                    pass
                case protocol.Prepare():
                    self._do(self._prepare(message))
                case protocol.Listen():
                    self._do(self._listen(message))
                case protocol.Reach():
                    self._do(self._reach(message))
                case protocol.Start():
                    self._do(self._start(message))
                case protocol.Stop():
                    self._do(self._stop(message))
                case protocol.Signal():
                    self._do(self._pass_on(message))
                case protocol.DumpStacks():
                    self._do(self._dump_stacks(message))
                case protocol.Relay() if message.token is not None:
                    self._do(self._start_sidecar(message.token))
                case protocol.Relay() if self._sidecar is not None:
                    self._sidecar.pass_on(message.text)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except MusterError as error:
                await self._send(protocol.Done(trouble=trouble_of(error)))
            except Exception as error:  # every error must reach the launcher
                text = f"{type(error).__name__}: {error}"
                unexpected = MusterError(f"the node agent failed: {text}")
                await self._send(protocol.Done(trouble=trouble_of(unexpected)))

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prepare(self, message: protocol.Prepare) -> None:
        self._lost_after_s = message.lost_after_s
        if self._own_folder is not None:
            message = msgspec.structs.replace(message, folder=str(self._own_folder))
        self._tell(f"will run in {message.folder}: {printable(message.command)}")
        if not Path(message.folder).is_dir():
            raise Impossible(
                f"folder {message.folder} does not exist on this host",
                why="the script runs in the same folder on every host",
                fix="copy the code to that folder there, or start from a folder that all hosts have",
            )
        if self._job is not None:  # after a restart, or for another command: keep the devices
            self._job.prepare = message
            await self._tell_prepared()
            return
        loop = asyncio.get_running_loop()

        def on_wait(error: MusterError) -> None:
            waiting = self._send(protocol.Alive(waiting_for=error.why or error.what))
            asyncio.run_coroutine_threadsafe(waiting, loop)

        # Before the devices are claimed: if it fails, they stay free.
        logs = await asyncio.to_thread(output.create_log_folder, message.run)
        held = await asyncio.to_thread(device_lease.lease_devices, message, on_wait)
        self._job = _AgentJob(prepare=message, holding=held, logs=logs)
        interfaces.check_socket_variables({**os.environ, **message.environment})
        await self._tell_prepared()

    async def _tell_prepared(self) -> None:
        assert self._job is not None
        prepare, held = self._job.prepare, self._job.holding
        code = None
        if not prepare.alone:
            code = await asyncio.to_thread(
                fingerprint.take_fingerprint, prepare.command, prepare.module, prepare.folder
            )
        await self._send(
            protocol.Prepared(
                ranks=held.ranks,
                devices=held.devices,
                fingerprint=code,
                logs=str(self._job.logs),
                sees_run=RunFolder(Path(prepare.run or "")).marker.is_file(),
            )
        )

    async def _listen(self, message: protocol.Listen) -> None:
        async with self._turn:
            heard = await self._open_port(message)
        await self._send(heard)

    async def _open_port(self, message: protocol.Listen) -> protocol.Listening:
        assert self._job is not None
        await self._forget_port()
        if self._job.prepare.alone:
            self._socket = listening.open_loopback(message.port or 0)
            here = protocol.Address(address="127.0.0.1", interface="lo")
            return protocol.Listening(
                port=self._socket.getsockname()[1], addresses=(here,), reason="loopback only"
            )
        opened = listening.open_port(message.port, message.address)
        self._port = opened.value
        await self._port.answer(message.nonce)
        return protocol.Listening(
            port=self._port.port, addresses=self._port.addresses, reason=opened.reason
        )

    async def _reach(self, message: protocol.Reach) -> None:
        self._trying = asyncio.create_task(reach.try_all_calls(message))
        await asyncio.wait({self._trying})
        if not self._trying.cancelled():  # as it is after a stop request
            await self._send(self._trying.result())

    async def _start(self, message: protocol.Start) -> None:
        async with self._turn:
            self._attempt = message.attempt
            await self._start_running(message)
        await self._send(protocol.Done())

    async def _start_running(self, message: protocol.Start) -> None:
        assert self._job is not None
        if self._port is not None:
            if message.node_rank == 0:
                self._socket = await self._port.keep(message.address)
            else:  # it was open only for the reachability test
                await self._port.close()
            self._port = None
        records = self._folder / f"attempt-{message.attempt}"
        records.mkdir()
        listener, self._socket = self._socket, None
        prepare, held = self._job.prepare, self._job.holding
        share = NodeShare(
            prepare=prepare,
            start=message,
            ranks=held.ranks,
            logs=self._job.logs,
            records=records,
            system=self._system,
        )
        environment = host_environment(prepare, os.environ, held.variables, held.threads)
        if message.interface:
            environment |= interfaces.socket_variables(message.interface, environment)
        await self._serve_store(listener, message.address, environment, share)
        running = RunningAttempt(
            share, environment, self._send, store=self._store, keep_sessions=self._other_sessions
        )
        await running.start()
        self._running = running
        self._do(self._watch(running))

    async def _serve_store(
        self,
        listener: socket.socket | None,
        address: str,
        environment: Mapping[str, str],
        share: NodeShare,
    ) -> None:
        """Have the store of the ranks here, if this is the first host, and nowhere else."""
        if listener is None or not share.has_store_process:
            if self._store is not None:
                await self._store.end()
                self._store = None
        else:
            if self._store is None or not self._store.is_alive:
                self._store = await StoreProcess.start(self._folder, environment)
            self._store.serve(listener, address)
        if listener is not None:
            listener.close()  # the store has its own copy

    def _other_sessions(self) -> list[int]:
        """Return the sessions of processes that outlive an attempt."""
        return [process.pid for process in (self._sidecar, self._store) if process is not None]

    async def _watch(self, running: RunningAttempt) -> None:
        try:
            ended = await running.watch()
        except Exception as error:  # after any error, no process may keep running unwatched
            assert self._job is not None
            token = self._job.prepare.token
            await asyncio.to_thread(
                process_cleanup.end_attempt,
                token,
                within_s=_GONE_WITHIN_S,
                keep_sessions=self._other_sessions(),
            )
            text = f"the node agent failed: {type(error).__name__}: {error}"
            ended = protocol.Ended(attempt=self._attempt, good=False, text=text)
        self._running = None
        await self._send(ended)
        running.reported.set()

    async def _stop(self, message: protocol.Stop) -> None:
        if self._trying is not None:
            self._trying.cancel()
        async with self._turn:
            if self._running is not None:
                self._running.stop(message.grace_s)
                return
            await self._forget_port()
        # Nothing runs, as requested.
        await self._send(protocol.Ended(attempt=message.attempt, good=True))

    async def _pass_on(self, message: protocol.Signal) -> None:
        if self._running is not None:
            self._running.pass_on(message.name)

    async def _dump_stacks(self, message: protocol.DumpStacks) -> None:
        if self._running is not None:
            await self._running.examine(message)
        await self._send(protocol.Done(dumped_stacks=True))

    async def _start_sidecar(self, token: str) -> None:
        if self._sidecar is not None:
            await self._sidecar.end()
        self._sidecar = await Sidecar.begin(token, self._folder, self._send)
        await self._send(protocol.Done())

    async def _say_alive(self) -> None:
        while True:
            await asyncio.sleep(_ALIVE_EVERY_S)
            if time.monotonic() - self._sent_s > _ALIVE_EVERY_S / 2:
                await self._send(protocol.Alive())

    async def _send(self, message: protocol.FromAgent) -> None:
        self._sent_s = time.monotonic()
        await self._connection.send(message)

    async def _notice_silence(self, over: "asyncio.Future[int]") -> None:
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(_LOOK_EVERY_S)
            # Time in which this process itself was blocked does not count.
            self._heard_s += time.monotonic() - began_s - _LOOK_EVERY_S
            silent_s = time.monotonic() - self._heard_s
            if self._lost_after_s is not None and silent_s > self._lost_after_s:
                self._give_up(over, f"no message from the launcher for {silent_s:.0f} s")
                return

    async def _forget_port(self) -> None:
        if self._port is not None:
            await self._port.close()
            self._port = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _end_all(self) -> None:
        """Stop the ranks, release the devices, and remove all files."""
        await self._turn.acquire()  # never released: nothing starts any more
        grace_s = _LEAVE_GRACE_S if self._has_left else self._grace_s()
        if self._running is not None:
            self._running.stop(grace_s)
        if self._sidecar is not None:
            await self._sidecar.end()
        if self._running is not None:
            with contextlib.suppress(TimeoutError):  # the supervisor keeps trying
                await asyncio.wait_for(self._running.gone.wait(), grace_s + _GONE_WITHIN_S)
        await self._forget_port()
        if self._store is not None:
            await self._store.end()
        if self._job is not None:
            self._job.holding.release()
        shutil.rmtree(self._folder, ignore_errors=True)
        await self._connection.close()


def folder_of_node() -> Path:
    """Return the folder that the supervisor has created for this node agent, or create one."""
    folder = os.environ.pop(supervisor.FOLDER_VARIABLE, None)
    if folder is not None:
        return Path(folder)
    return Path(tempfile.mkdtemp(prefix=supervisor.FOLDER_PREFIX))


def trouble_of(error: MusterError) -> protocol.Trouble:
    """Return an error as a message for the launcher."""
    return protocol.Trouble(
        name=error.name,
        what=error.what,
        why=error.why,
        fix=error.fix,
        exit_code=int(error.exit_code),
    )
