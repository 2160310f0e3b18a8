"""A Slurm step: one running srun, what it and its tasks print, and which tasks have exited (see srun.py)."""

import asyncio
import contextlib
import re
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Mapping, Sequence

_LABELLED = re.compile(r" *(\d+): (.*)")
# srun: error: node2: task 1: Killed
_ENDED = re.compile(r"srun: error: \S+: tasks? ([\d,-]+): (.*)")
# srun prints this on clusters without CPU binding; it is harmless.
_HARMLESS = "cluster configuration lacks support for cpu binding"
_LINES_KEPT = 20
# srun may report a task's exit before its last output has been read.
_LAST_WORDS_S = 0.5


class SrunStep:
    """One srun and the node agents that it started; its task *n* is at ``places[n]``."""

    def __init__(self, places: Sequence[int], nodes: Sequence[str]) -> None:
        self.places = tuple(places)
        self._nodes = nodes
        self._joined: set[int] = set()
        self._ended: dict[int, str] = {}  # place -> how
        self._reported = asyncio.Condition()
        self._output: dict[int, deque[str]] = {}  # place -> last lines of its output
        self._srun_output: deque[str] = deque(maxlen=_LINES_KEPT)
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self.since = time.monotonic()
        self.over = False

    async def start(
        self, command: Sequence[str], environment: Mapping[str, str], invitation: bytes
    ) -> None:
        """Start srun in its own session, so that only the launcher gets Ctrl-C; its tasks get the invitation."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self._srun_output.append(f"srun: {error.strerror}")
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

    def joined(self, place: int) -> None:
        """Record that the node agent of a place has connected."""
        self._joined.add(place)
        # Output from before that is not the cause of an exit.
        self._output.pop(place, None)

    def missing(self, place: int) -> bool:
        """Return whether the node agent of a place will never connect."""
        return place not in self._joined and (self.over or place in self._ended)

    def has_ended(self, place: int) -> bool:
        """Return whether the task of a place has exited."""
        return place in self._ended

    async def reported(self, place: int, within_s: float) -> None:
        """Wait until srun has reported how the task of a place exited, if it does soon."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s), self._reported:
                await self._reported.wait_for(lambda: place in self._ended)
        await asyncio.sleep(_LAST_WORDS_S)

    def last_output(self, place: int) -> str:
        """Return the last output of the task of a place and of srun, or how the task exited."""
        node = self._nodes[place]
        about = [line for line in self._srun_output if re.search(rf"\b{re.escape(node)}\b", line)]
        output = [*self._output.get(place, ()), *(about or self._srun_output)]
        return "\n".join(dict.fromkeys(output)) or self._ended.get(place, "")

    @property
    def srun_output(self) -> str:
        """The last line printed by srun itself."""
        return self._srun_output[-1] if self._srun_output else ""

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        await asyncio.gather(self._listen(process.stdout), self._listen(process.stderr))
        code = await process.wait()
        self.over = True
        await self._end(self.places, f"srun exited with code {code}")

    async def _listen(self, stream: asyncio.StreamReader) -> None:
        while line := await _line_of(stream):
            text = line.decode(errors="replace").rstrip()
            labelled = _LABELLED.fullmatch(text)
            if labelled and int(labelled[1]) < len(self.places):
                place = self.places[int(labelled[1])]
                self._output.setdefault(place, deque(maxlen=_LINES_KEPT)).append(labelled[2])
            elif _HARMLESS not in text:
                self._srun_output.append(text)
                ended = _ENDED.match(text)
                if ended is not None:
                    tasks = [task for task in _numbers(ended[1]) if task < len(self.places)]
                    await self._end([self.places[task] for task in tasks], ended[2])

    async def _end(self, places: Sequence[int], how: str) -> None:
        for place in places:
            self._ended.setdefault(place, how)
        async with self._reported:
            self._reported.notify_all()


async def _line_of(stream: asyncio.StreamReader) -> bytes:
    """Return the next line; of one that is too long, nothing but its end."""
    while True:
        try:
            return await stream.readline()
        except ValueError:
            continue


def _numbers(text: str) -> list[int]:
    """Parse srun's list of tasks: ``1,4-6``."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            numbers += range(int(first), int(last or first) + 1)
    return numbers
