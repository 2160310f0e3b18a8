"""Hosts that join while the ranks run: spares, and hosts that come back.

Each is prepared, and a spare passes the host test, so that the next attempt can take it at once. Where a run goes on with fewer
hosts than wanted and its ranks can save, a host that comes back ends the attempt: the ranks save, and all hosts continue.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from torchmuster.errors import MachineLost, MusterError
from torchmuster.finding import Finding, Status
from torchmuster.known_errors.explain import explain_text
from torchmuster.launch import protocol
from torchmuster.launch.history import run_state
from torchmuster.launch.launcher.host import ConnectedHost
from torchmuster.launch.launcher.hosts import MOST_FAILURES, Candidate, Hosts
from torchmuster.launch.launcher.waiting import Stopped
from torchmuster.runfolder import RunFolder
from torchmuster.units import name_several, plural

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
# Known errors that another host does not have: the GPU is broken.
_BROKEN_GPU = frozenset({"gpu-fell-off-bus", "ecc-error"})


class Examine(Protocol):
    """Test the health of a host."""

    async def __call__(self, node: ConnectedHost, *, whole: bool) -> Sequence[Finding]:
        """Return the findings: of the ``whole`` test, or of the checks that take less than a second."""


def broken_hosts(nodes: Sequence[ConnectedHost]) -> dict[int, str]:
    """Return the places of the hosts that failed, each with the reason: lost hosts, and hosts with a broken GPU."""
    found = {}
    for node in nodes:
        why = node.why_lost or (_broken_gpu(node.ended, node.name) if node.ended else None)
        if why:
            found[node.place] = why
    return found


def _broken_gpu(ended: protocol.Ended, host: str) -> str | None:
    for failure in ended.failures:
        text = "\n".join((failure.error, failure.traceback, failure.last_lines))
        for known in explain_text(text, host=host):
            if known.name in _BROKEN_GPU:
                return known.what
    return None


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


class Newcomers:
    """Prepares and tests hosts that have joined, and says which spare replaces which host."""

    def __init__(
        self,
        hosts: Hosts,
        run: RunFolder,
        *,
        prepare: Callable[[Sequence[ConnectedHost]], Awaitable[None]],
        examine: Examine | None = None,
    ) -> None:
        """``examine`` tests hosts that replace another one."""
        self._hosts = hosts
        self._run = run
        self._prepare = prepare
        self._examine = examine
        self._tested: set[str] = set()  # the node agents that passed the whole test
        self._lost: set[str] = set()  # the node agents whose loss was reported

    # ---- before an attempt

    async def choose(self, broken: Mapping[int, str]) -> list[ConnectedHost]:
        """Wait for the hosts of the next attempt, prepare those that are new, and return them in rank order.

        ``broken`` are the hosts that failed in the last attempt, and why.
        """
        hosts, before = self._hosts, self._hosts.before
        if self._examine is not None and hosts.choose() is None:
            for place, why in broken.items():
                await self._note_not_replaced(place, why)
        while True:
            await hosts.wait()
            error = await self._prepare_idle()
            places = hosts.choose()
            if places is None:
                if error is not None:
                    raise error
                continue
            known = {host.place for host in before}
            if not await self._are_healthy([place for place in places if place not in known]):
                continue
            if hosts.wanted.least == hosts.wanted.most:
                await self._announce(before, places, broken)
            return hosts.take(places)

    async def _prepare_idle(self) -> MusterError | None:
        """Prepare the hosts that have not been yet; return the error of one that cannot be, which is released."""
        failed = None
        for host in self._hosts.idle:
            if host.prepared is None:
                try:
                    await self._prepare([host])
                except MachineLost:
                    pass  # it is connected again
                except MusterError as error:
                    failed = error
                    await self._refuse(host, error.what)
        return failed

    async def _are_healthy(self, spares: Sequence[int]) -> bool:
        for place in spares:
            host = self._hosts.at(place)
            assert host is not None
            why = await self._why_unfit(host)
            if why is not None:
                await self._refuse(host, why)
                return False
        return True

    async def _announce(
        self, before: Sequence[Candidate], places: Sequence[int], broken: Mapping[int, str]
    ) -> None:
        """Say and log which hosts are replaced, and which are not although they failed."""
        first_rank, chosen = 0, set(places)
        spares = [host.place for host in self._hosts.idle if host.place not in chosen]
        left = sum(self._hosts.failures_of(place) < MOST_FAILURES for place in spares)
        for former, place in zip(before, places, strict=True):
            count = former.ranks or 0
            ranks = range(first_rank, first_rank + count) if count else None
            first_rank += count
            name = self._hosts.name_of(former.place)
            why = broken.get(former.place, "it has not joined")
            if former.place == place:
                node = self._hosts.at(place)
                came_back = node is None or node.ended is None
                if self._examine is not None and place in broken and not came_back:
                    await self._note_not_replaced(place, why)
                continue
            spare = self._hosts.name_of(place)
            node = self._hosts.at(former.place)
            lost = node is None or node.is_lost
            what = takeover_text(name, why, spare, lost=lost, ranks=ranks, left=left)
            held = [ranks[0], ranks[-1]] if ranks else []
            facts = {"host": name, "spare": spare, "why": why, "ranks": held, "spares_left": left}
            await self._note(run_state.TAKEOVER, what, **facts)
            times = self._hosts.failures_of(former.place)
            if times >= MOST_FAILURES:
                why = f"it failed {times} times in this run"
                what = f"{name} is not used again: {why}"
                await self._note(run_state.SPARE_REFUSED, what, host=name, why=why)

    async def _note_not_replaced(self, place: int, why: str) -> None:
        name = self._hosts.name_of(place)
        what = f"no spare can replace {name}"
        await self._note(run_state.TAKEOVER, what, host=name, spare=None, why=why)

    # ---- while the ranks run

    @contextlib.asynccontextmanager
    async def looked_after(self, save: Callable[[], None] | None) -> AsyncIterator[None]:
        """Prepare and test the hosts that join while an attempt lasts.

        ``save`` asks the ranks to save and stop, so that a host that came back can take part; None if they cannot.
        """
        task = asyncio.create_task(self._prepare_newcomers(save))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _prepare_newcomers(self, save: Callable[[], None] | None) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self._report_lost()
            ready = []
            for host in self._hosts.idle:
                if host.part not in self._tested:
                    began_s = time.monotonic()
                    why = await self._why_unfit(host)
                    if why is not None:
                        await self._refuse(host, why)
                        continue
                    ready.append(host.name)
                    if self._examine is not None:
                        took_s = time.monotonic() - began_s
                        what = f"spare {host.name} is ready: host test passed in {took_s:.1f} s"
                        await self._note(run_state.SPARE_READY, what, host=host.name)
            if not ready or len(self._hosts.in_use) >= self._hosts.wanted.most:
                continue
            names = name_several(ready)
            if save is None:
                logger.info("%s can rejoin at the next restart", names)
                continue
            logger.info(
                "%s can rejoin: asking all ranks to save a checkpoint before the restart", names
            )
            save()
            return

    async def _report_lost(self) -> None:
        for host in self._hosts.all:
            if (
                host.is_lost
                and host.part in self._tested - self._lost
                and host not in self._hosts.in_use
            ):
                self._lost.add(host.part)
                what = f"spare {host.name} is lost: {host.why_lost}"
                await self._note(run_state.SPARE_LOST, what, host=host.name, why=host.why_lost)

    async def _why_unfit(self, host: ConnectedHost) -> str | None:
        """Prepare and test a host, as far as that was not done yet; return why it cannot run ranks."""
        is_new = host.part not in self._tested
        findings: Sequence[Finding] = ()
        try:
            if host.prepared is None:
                await self._prepare([host])
            if self._examine is not None:
                findings = await self._examine(host, whole=is_new)
        except MusterError as error:
            return error.what
        except Stopped:
            raise
        except Exception as error:  # whatever is wrong with it, it cannot be a spare
            return f"its test failed: {type(error).__name__}: {error}"
        bad = [finding.what for finding in findings if finding.status is Status.FAILURE]
        if bad:
            return bad[0]
        self._tested.add(host.part)
        return None

    async def _refuse(self, host: ConnectedHost, why: str) -> None:
        what = f"{host.name} connected, but cannot run ranks: {why}"
        await self._note(run_state.SPARE_REFUSED, what, host=host.name, why=why)
        await self._hosts.send_away(host, "it cannot run ranks")

    async def _note(self, event: str, what: str, **facts: object) -> None:
        await asyncio.to_thread(run_state.log_event, self._run, event, what=what, **facts)
        logger.info(what)
