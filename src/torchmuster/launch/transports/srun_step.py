"""A Slurm step: one running srun, what it and its tasks print, and which tasks have exited (see srun.py)."""

import asyncio
import contextlib
import re
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from torchmuster.launch.schedulers.slurm.allocation import expand_hostlist

_LABELLED = re.compile(r" *(\d+): (.*)")
# srun: error: node2: task 1: Killed
_ENDED = re.compile(r"srun: error: \S+: tasks? ([\d,-]+): (.*)")
# srun prints this on clusters without CPU binding; it is harmless.
_HARMLESS = "cluster configuration lacks support for cpu binding"
_LINES_KEPT = 20
# srun may report a task's exit before its last output has been read.
_LAST_WORDS_S = 0.5


class SrunStep:
    """One srun and the node agents that it started; its task *n* is at ``places[n]``.

    ``on_end`` is called for each place whose task has exited.
    """

    def __init__(
        self, places: Sequence[int], nodes: Sequence[str], on_end: Callable[[int], None]
    ) -> None:
        self.places = tuple(places)
        self._nodes = nodes
        self._on_end = on_end
        self._joined: set[int] = set()
        self._ended: dict[int, str] = {}  # place -> how
        self._reports: dict[int, asyncio.Event] = {}  # of the places that are waited for
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
        if place not in self._ended:
            event = self._reports.setdefault(place, asyncio.Event())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), within_s)

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
        for place in self.places:
            self._end(place, f"srun exited with code {code}")

    async def _listen(self, stream: asyncio.StreamReader) -> None:
        while line := await _line_of(stream):
            text = line.decode(errors="replace").rstrip()
            labelled = _LABELLED.fullmatch(text)
            if labelled and int(labelled[1]) < len(self.places):
                place = self.places[int(labelled[1])]
                self._output.setdefault(place, deque(maxlen=_LINES_KEPT)).append(labelled[2])
            elif _HARMLESS not in text:
                self._srun_output.append(text)
                if ended := _ENDED.match(text):
                    self._note_ends(ended[1], ended[2])

    def _note_ends(self, tasks: str, how: str) -> None:
        for task in _numbers(tasks):
            if task < len(self.places):
                later = asyncio.get_running_loop().call_later
                later(_LAST_WORDS_S, self._end, self.places[task], how)

    def _end(self, place: int, how: str) -> None:
        if place in self._ended:
            return
        self._ended[place] = how
        if (report := self._reports.get(place)) is not None:
            report.set()
        self._on_end(place)


async def _line_of(stream: asyncio.StreamReader) -> bytes:
    """Return the next line; of one that is too long, nothing but its end."""
    while True:
        try:
            return await stream.readline()
        except ValueError:
            continue


def _numbers(text: str) -> list[int]:
    """Parse srun's list of tasks: ``1,4-6``."""
    with contextlib.suppress(ValueError):
        return [int(name) for name in expand_hostlist(f"[{text}]")]
    return []
