"""A Slurm step: one running srun and the channels to its node agents (see srun.py)."""

import asyncio
import contextlib
import re
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Mapping, Sequence

from torchmuster.launch import protocol
from torchmuster.launch.schedulers.slurm.allocation import expand_hostlist
from torchmuster.launch.transports.channel import Arrive
from torchmuster.launch.transports.local import FIRST_WORDS

_LABELLED = re.compile(rb" *(\d+): (.*)", re.DOTALL)
# srun: error: node2: task 1: Killed
_ENDED = re.compile(r"srun: error: \S+: tasks? ([\d,-]+): (.*)")
# srun prints this on clusters without CPU binding; it is harmless.
_HARMLESS = "cluster configuration lacks support for cpu binding"
_LINES_KEPT = 20
# srun may report a task's exit before its last output has been read.
_LAST_WORDS_S = 0.5


class SrunChannel:
    """The launcher's end of the connection to one node agent."""

    def __init__(self, step: "SrunStep", place: int) -> None:
        self._step = step
        self._place = place
        self._assembler = protocol.FrameAssembler()
        self._inbox: asyncio.Queue[protocol.FromAgent | protocol.UnreadableMessage | None] = (
            asyncio.Queue()
        )
        self._open = True

    async def send(self, message: protocol.ToAgent) -> None:
        """Send a message; on a closed channel this does nothing."""
        if self._open:
            await self._step.send(self._place, protocol.to_lines(message))

    async def receive(self) -> protocol.FromAgent | None:
        """Return the next message, or None when the node agent is gone."""
        message = await self._inbox.get()
        if message is None:
            self._inbox.put_nowait(None)  # later calls return None too
        elif isinstance(message, protocol.UnreadableMessage):
            raise message
        return message

    def why_closed(self) -> str:
        """Return the last output of srun and the node agent."""
        return self._step.last_words(self._place)

    async def close(self) -> None:
        """Close the channel; the node agent exits when the launcher is silent."""
        self.end()

    def end(self) -> None:
        """Mark the channel as closed: no more messages arrive."""
        if self._open:
            self._open = False
            self._inbox.put_nowait(None)

    def hear(self, line: bytes) -> None:
        """Process a line that the node agent wrote."""
        if not self._open:
            return
        try:
            whole = self._assembler.add(line)
            if whole is not None:
                self._inbox.put_nowait(protocol.decode_from_agent(whole))
        except protocol.UnreadableMessage as error:
            self._inbox.put_nowait(error)


class SrunStep:
    """One srun and the node agents that it started; its task *n* is at ``places[n]``."""

    def __init__(self, places: Sequence[int], nodes: Sequence[str], arrive: Arrive) -> None:
        self.places = tuple(places)
        self._nodes = nodes
        self._arrive = arrive
        self._channels: dict[int, SrunChannel] = {}
        self._ended: dict[int, str] = {}  # place -> how
        self._said: dict[int, deque[str]] = {}  # place -> last lines of its standard error
        self._srun_said: deque[str] = deque(maxlen=_LINES_KEPT)
        self._outbox: list[tuple[int, bytes]] = []
        self._writing = asyncio.Lock()
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self.since = time.monotonic()
        self.over = False

    async def start(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start srun in its own session, so that only the launcher gets Ctrl-C."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *words,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self._srun_said.append(f"srun: {error.strerror}")
            self.over = True
            return
        self._reading = asyncio.create_task(self._read(self._process))

    async def send(self, place: int, lines: bytes) -> None:
        """Write to one node agent; a message sent to all at the same time is written once."""
        self._outbox.append((place, lines))
        await asyncio.sleep(0)  # other callers may be about to send the same message
        async with self._writing:
            stdin = self._process.stdin if self._process else None
            messages, self._outbox = self._outbox, []
            if not messages or stdin is None or stdin.is_closing() or self.over:
                return
            here = [place for place in self.places if place not in self._ended]
            stdin.write(b"".join(addressed(messages, here)))
            with contextlib.suppress(ConnectionError):  # the reader reports the end
                await stdin.drain()

    async def close(self, patience_s: float) -> None:
        """Close the node agents' input so that they exit; kill those that do not."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        for end in (None, process.terminate, process.kill):
            if end is not None:
                with contextlib.suppress(ProcessLookupError):
                    end()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), patience_s)
                break
        if self._reading is not None:
            await self._reading

    def arrived(self, place: int) -> bool:
        """Return whether the node agent of a place has sent a message."""
        return place in self._channels

    def missing(self, place: int) -> bool:
        """Return whether the node agent of a place will never send a message."""
        return not self.arrived(place) and (self.over or place in self._ended)

    def last_words(self, place: int) -> str:
        """Return how the task of a place exited and its last output."""
        node = self._nodes[place]
        about = [line for line in self._srun_said if re.search(rf"\b{re.escape(node)}\b", line)]
        said = [*self._said.get(place, ()), *(about or self._srun_said)]
        return "\n".join(dict.fromkeys(said)) or self._ended.get(
            place, "srun exited without an error message"
        )

    @property
    def srun_words(self) -> str:
        """The last line printed by srun itself."""
        return self._srun_said[-1] if self._srun_said else ""

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        await asyncio.gather(self._read_out(process.stdout), self._read_err(process.stderr))
        code = await process.wait()
        self.over = True
        for place in self.places:
            self._end(place, f"srun exited with code {code}")

    async def _read_out(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            labelled = _LABELLED.fullmatch(line)
            if labelled is None or int(labelled[1]) >= len(self.places):
                self._srun_said.append(line.decode(errors="replace").rstrip())
                continue
            place = self.places[int(labelled[1])]
            if place not in self._channels:
                if not labelled[2].startswith(FIRST_WORDS):
                    self._keep(place, labelled[2].decode(errors="replace").rstrip())
                    continue
                self._said.pop(
                    place, None
                )  # output from before the start is not the cause of an exit
                self._channels[place] = SrunChannel(self, place)
                self._arrive(place, self._channels[place])
            self._channels[place].hear(labelled[2])

    async def _read_err(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            text = line.decode(errors="replace").rstrip()
            labelled = re.match(r" *(\d+): (.*)", text)
            if labelled and int(labelled[1]) < len(self.places):
                place = self.places[int(labelled[1])]
                self._keep(place, labelled[2])
                continue
            if _HARMLESS in text:
                continue
            self._srun_said.append(text)
            if ended := _ENDED.match(text):
                for task in _numbers(ended[1]):
                    if task < len(self.places):
                        later = asyncio.get_running_loop().call_later
                        later(_LAST_WORDS_S, self._end, self.places[task], ended[2])

    def _keep(self, place: int, text: str) -> None:
        self._said.setdefault(place, deque(maxlen=_LINES_KEPT)).append(text)

    def _end(self, place: int, how: str) -> None:
        self._ended.setdefault(place, how)
        if place in self._channels:
            self._channels[place].end()


def addressed(messages: Sequence[tuple[int, bytes]], here: Sequence[int]) -> list[bytes]:
    """Prefix every line with its place; ``*`` where all connected places get the same message.

    The order of messages is kept for each place.
    """
    queues: dict[int, deque[bytes]] = {}
    for place, lines in messages:
        queues.setdefault(place, deque()).append(lines)
    written: list[bytes] = []
    while any(queues.values()):
        heads = {queue[0] if queue else b"" for queue in queues.values()}
        if len(heads) == 1 and len(here) > 1 and set(queues) >= set(here):
            written.append(_prefixed(b"* ", heads.pop()))
            for queue in queues.values():
                queue.popleft()
            continue
        place = next(place for place, queue in queues.items() if queue)
        written.append(_prefixed(b"%d " % place, queues[place].popleft()))
    return written


def _prefixed(prefix: bytes, lines: bytes) -> bytes:
    return b"".join(prefix + line for line in lines.splitlines(keepends=True))


def _numbers(text: str) -> list[int]:
    """Parse srun's list of tasks: ``1,4-6``."""
    with contextlib.suppress(ValueError):
        return [int(name) for name in expand_hostlist(f"[{text}]")]
    return []
