"""Hot spares (``--spares``): hosts that have joined and passed the checks, and wait to replace a host that fails.

A spare takes the node rank of the host that it replaces, so it runs the same ranks. Its node agent has leased its devices and imported
torch. The complete host test runs when a spare joins; just before it is taken, only the checks that read the current state of
the host run again, because versions, code and torch cannot have changed since.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from torchmuster.decision import Decision
from torchmuster.errors import MusterError
from torchmuster.finding import Finding, Status
from torchmuster.known_errors.explain import explain_text
from torchmuster.launch import protocol
from torchmuster.launch.history import run_state
from torchmuster.launch.launcher.node_handle import NodeHandle, Stopped
from torchmuster.launch.launcher.node_registry import NodeRegistry
from torchmuster.runfolder import RunFolder
from torchmuster.units import plural

# A host that failed this often in a run is not taken again.
MOST_FAILURES = 2
_LOOK_EVERY_S = 1.0
# Known errors that another host does not have: the GPU is broken.
_BROKEN_GPU = frozenset({"gpu-fell-off-bus", "ecc-error"})

Prepare = Callable[[Sequence[NodeHandle]], Awaitable[None]]


class Examine(Protocol):
    """Test the health of a host."""

    async def __call__(self, node: NodeHandle, *, whole: bool) -> Sequence[Finding]:
        """Return the findings: of the ``whole`` test, or of the checks that take less than a second."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A spare as the choice sees it; ``unfit`` is why it cannot be taken."""

    place: int
    name: str
    ranks: int | None
    failures: int = 0
    unfit: str = ""


def choose_spare(candidates: Sequence[Candidate], *, ranks: int | None) -> Decision[int | None]:
    """Return the place of the spare to take, or None; the reason says why others are not taken.

    The spare must have as many ranks as the host that it replaces. Of several, the one with the fewest failures is taken, then the
    first in the order of the hosts.
    """
    refused = [f"{one.name} {why}" for one in candidates if (why := _why_not(one, ranks))]
    fit = [one for one in candidates if not _why_not(one, ranks)]
    if fit:
        best = min(fit, key=lambda one: (one.failures, one.place))
        return Decision(value=best.place, reason="; ".join(refused))
    return Decision(value=None, reason="; ".join(refused) or "no spare has joined")


def _why_not(candidate: Candidate, ranks: int | None) -> str:
    if candidate.failures >= MOST_FAILURES:
        return f"failed {_times(candidate.failures)} in this run"
    if candidate.unfit:
        return candidate.unfit
    if ranks is not None and candidate.ranks is not None and candidate.ranks != ranks:
        return f"has {plural(candidate.ranks, 'rank')}, not {ranks}"
    return ""


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def broken_hosts(nodes: Sequence[NodeHandle]) -> dict[int, str]:
    """Return the places of the hosts to replace, each with the reason: lost hosts, and hosts with a broken GPU."""
    found = {}
    for node in nodes:
        if node.lost:
            found[node.place] = node.lost
        elif node.ended and (why := _broken_gpu(node.ended, node.name)):
            found[node.place] = why
    return found


def _broken_gpu(ended: protocol.Ended, host: str) -> str:
    for failure in ended.failures:
        text = "\n".join((failure.error, failure.traceback, failure.last_lines))
        for known in explain_text(text, host=host):
            if known.name in _BROKEN_GPU:
                return known.what
    return ""


def takeover_text(
    host: str, why: str, spare: str, *, lost: bool, ranks: range | None, left: int
) -> str:
    """Return ``host c is lost: …; spare e takes its place (ranks 16-23), 1 spare left``."""
    state = "is lost" if lost else "failed"
    held = ""
    if ranks is not None:
        held = f" (rank {ranks[0]})" if len(ranks) == 1 else f" (ranks {ranks[0]}-{ranks[-1]})"
    left_text = "no spare left" if not left else f"{plural(left, 'spare')} left"
    return f"host {host} {state}: {why}; spare {spare} takes its place{held}, {left_text}"


class SparePool:
    """The spares of a run: tests those that join, and lets them replace hosts that fail."""

    def __init__(
        self,
        registry: NodeRegistry,
        run: RunFolder,
        *,
        say: Callable[[str], None],
        prepare: Prepare,
        is_running: Callable[[], bool],
        examine: Examine | None = None,
    ) -> None:
        self._registry = registry
        self._run = run
        self._say = say
        self._prepare = prepare
        self._is_running = is_running
        self._examine = examine
        self._failures: Counter[int] = Counter()
        self._tested: set[str] = set()  # the node agents that passed the whole test
        self._lost: set[str] = set()  # the node agents whose loss was reported
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "SparePool":
        """Start testing the spares that join."""
        self._task = asyncio.create_task(self._look_after_them())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop."""
        await self._pause()

    async def take_over(self, broken: Mapping[int, str]) -> None:
        """Let spares replace these hosts, and hosts that are missing; each reason says why the host is replaced.

        A host for which there is no spare keeps its place: the caller waits for it, or continues with fewer hosts.
        """
        missing = [place for place in self._registry.missing if place not in broken]
        if not broken and not (missing and self._candidates()):
            return
        await self._pause()
        self._failures.update(broken.keys())
        try:
            for place in missing:
                if self._candidates():
                    await self._replace(place, "it has not joined")
            for place, why in broken.items():
                await self._replace(place, why)
        finally:
            self._task = asyncio.create_task(self._look_after_them())

    async def _replace(self, place: int, why: str) -> None:
        registry = self._registry
        name, ranks = registry.name_of(place), registry.ranks_of(place)
        node = registry.at(place)
        lost = node is None or bool(node.lost)
        if node is not None:
            self._tested.discard(node.part)
        chosen = await self._choose(len(ranks) if ranks is not None else None)
        if chosen.value is None:
            what = f"no spare can replace {name}: {chosen.reason}"
            self._say(what)
            await self._note(run_state.TAKEOVER, what=what, host=name, spare=None, why=why)
            return
        spare = registry.name_of(chosen.value)
        await registry.replace(place, chosen.value)
        left = len([one for one in self._candidates() if not _why_not(one, None)])
        text = takeover_text(name, why, spare, lost=lost, ranks=ranks, left=left)
        what = f"{text} ({chosen.reason})" if chosen.reason else text
        self._say(what)
        held = [] if ranks is None else [ranks[0], ranks[-1]]
        facts = {"host": name, "spare": spare, "why": why, "ranks": held, "spares_left": left}
        await self._note(run_state.TAKEOVER, what=what, **facts)
        if self._failures[place] >= MOST_FAILURES:
            await self._give_up(place)

    async def _give_up(self, place: int) -> None:
        """Do not call a host back that failed too often."""
        await self._registry.abandon(place)
        name = self._registry.name_of(place)
        why = f"it failed {_times(self._failures[place])} in this run"
        what = f"{name} is not used again: {why}"
        self._say(what)
        await self._note(run_state.SPARE_REFUSED, what=what, host=name, why=why)

    async def _choose(self, ranks: int | None) -> Decision[int | None]:
        """Choose a spare that passes its last check."""
        unfit: dict[int, str] = {}
        while True:
            chosen = choose_spare(self._candidates(unfit), ranks=ranks)
            if chosen.value is None:
                return chosen
            node = self._registry.at(chosen.value)
            assert node is not None
            if not (why := await self._why_unfit(node)):
                return chosen
            unfit[chosen.value] = f"is not healthy: {why}"
            await self._refuse(node, why)

    def _candidates(self, unfit: Mapping[int, str] | None = None) -> list[Candidate]:
        return [
            Candidate(
                place=node.place,
                name=node.name,
                ranks=node.prepared.ranks if node.prepared else None,
                failures=self._failures[node.place],
                unfit=(unfit or {}).get(node.place, ""),
            )
            for node in self._registry.spares
        ]

    async def _why_unfit(self, node: NodeHandle) -> str:
        """Prepare and test a host, as far as that was not done yet; return why it cannot be a spare."""
        whole = node.part not in self._tested
        try:
            if node.prepared is None:
                await self._prepare([node])
            found = await self._examine(node, whole=whole) if self._examine else ()
        except MusterError as error:
            return error.what
        except Stopped:
            raise
        except Exception as error:  # whatever is wrong with it, it cannot be a spare
            return f"its test failed: {type(error).__name__}: {error}"
        bad = [finding for finding in found if finding.status is Status.FAILURE]
        if not bad:
            self._tested.add(node.part)
        return bad[0].what if bad else ""

    async def _refuse(self, node: NodeHandle, why: str) -> None:
        what = f"{node.name} is not a spare: {why}"
        self._say(what)
        await self._note(run_state.SPARE_REFUSED, what=what, host=node.name, why=why)
        await self._registry.send_away(node)
        self._registry.call_spares_again()

    async def _pause(self) -> None:
        if self._task is not None:
            self._task.cancel()
            # Neither its error nor its cancellation is ours.
            await asyncio.wait({self._task})
            self._task = None

    async def _look_after_them(self) -> None:
        """Test the spares that join, and call back those that are lost."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            for node in self._registry.call_spares_again():
                if node.part not in self._lost:
                    self._lost.add(node.part)
                    if node.part in self._tested:
                        what = f"spare {node.name} is lost: {node.lost}"
                        self._say(what)
                        await self._note(
                            run_state.SPARE_LOST, what=what, host=node.name, why=node.lost
                        )
            # Until the attempt runs, the hosts answer to its start and accept no other request.
            if not self._is_running():
                continue
            for node in self._registry.spares:
                if node.part not in self._tested:
                    await self._admit(node)

    async def _admit(self, node: NodeHandle) -> None:
        began_s = time.monotonic()
        if self._failures[node.place] >= MOST_FAILURES:
            await self._give_up(node.place)
        elif why := await self._why_unfit(node):
            await self._refuse(node, why)
        else:
            took = f"{time.monotonic() - began_s:.1f} s"
            what = f"spare {node.name} is ready: host test passed in {took}"
            self._say(what)
            await self._note(run_state.SPARE_READY, what=what, host=node.name)

    async def _note(self, event: str, **facts: object) -> None:
        await asyncio.to_thread(run_state.log_event, self._run, event, **facts)
