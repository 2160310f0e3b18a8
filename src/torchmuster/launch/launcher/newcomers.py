"""Hosts that join while the ranks run: spares, and hosts that come back.

Each is prepared, so that the next attempt can take it at once. Where a run goes on with fewer hosts than wanted and its ranks
can save, a host that comes back ends the attempt: the ranks save, and all hosts continue.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from torchmuster.errors import MachineLost, MusterError
from torchmuster.launch import protocol
from torchmuster.launch.history import run_state
from torchmuster.launch.launcher.console import rank_text
from torchmuster.launch.launcher.host import ConnectedHost
from torchmuster.launch.launcher.hosts import MOST_FAILURES, Candidate, Hosts
from torchmuster.runfolder import RunFolder
from torchmuster.units import name_several, plural

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
# Known errors that another host does not have: the GPU is broken.
_BROKEN_GPU = frozenset({"gpu-fell-off-bus", "ecc-error"})


def broken_hosts(hosts: Sequence[ConnectedHost]) -> dict[int, str]:
    """Return the places of the hosts that failed, each with the reason: lost hosts, and hosts with a broken GPU."""
    broken = {}
    for host in hosts:
        why = host.why_lost or (_broken_gpu(host.ended, host.name) if host.ended else None)
        if why:
            broken[host.place] = why
    return broken


def _broken_gpu(ended: protocol.Ended, host: str) -> str | None:
    from torchmuster.known_errors.explain import explain_text

    for failure in ended.failures:
        text = "\n".join((failure.error, failure.traceback, failure.last_lines))
        for known in explain_text(text, host=host):
            if known.name in _BROKEN_GPU:
                return known.what
    return None


class Newcomers:
    """Prepares hosts that have joined, and says which spare replaces which host."""

    def __init__(
        self,
        hosts: Hosts,
        run: RunFolder,
        *,
        prepare: Callable[[Sequence[ConnectedHost]], Awaitable[None]],
    ) -> None:
        self._hosts = hosts
        self._run = run
        self._prepare = prepare
        self._ready: set[str] = set()  # the node agents that were reported as spares

    async def choose(self, broken: Mapping[int, str]) -> list[ConnectedHost]:
        """Wait for the hosts of the next attempt, prepare those that are new, and return them in rank order.

        ``broken`` are the hosts that failed in the last attempt, and why.
        """
        hosts, before = self._hosts, self._hosts.before
        while True:
            await hosts.wait()
            error = await self._prepare_idle()
            places = hosts.choose()
            if places is not None:
                break
            if error is not None:
                raise error
        if hosts.wanted.least == hosts.wanted.most:
            await self._announce(before, places, broken)
        return hosts.take(places)

    async def _prepare_idle(self) -> MusterError | None:
        """Prepare the hosts that have not been yet; return the error of one that cannot be, which is released."""
        failed = None
        for host in self._hosts.idle:
            try:
                if host.prepared is None:
                    await self._prepare([host])
            except MachineLost:
                pass  # it is connected again
            except MusterError as error:
                failed = error
                what = f"{host.name} connected, but cannot run ranks: {error.what}"
                await self._note(run_state.SPARE_REFUSED, what, host=host.name, why=error.what)
                await self._hosts.send_away(host, "it cannot run ranks")
        return failed

    async def _announce(
        self, before: Sequence[Candidate], places: Sequence[int], broken: Mapping[int, str]
    ) -> None:
        """Say and log which hosts are replaced: ``host c is lost: …; spare e takes its place (ranks 16-23), 1 spare left``."""
        first_rank = 0
        spares = [host.place for host in self._hosts.idle if host.place not in places]
        left = sum(self._hosts.failures_of(place) < MOST_FAILURES for place in spares)
        for former, place in zip(before, places, strict=True):
            ranks = range(first_rank, first_rank + (former.ranks or 0))
            first_rank = ranks.stop
            if former.place == place:
                continue
            host, spare = self._hosts.name_of(former.place), self._hosts.name_of(place)
            replaced = self._hosts.at(former.place)
            state = "is lost" if replaced is None or replaced.is_lost else "failed"
            why = broken.get(former.place, "it has not joined")
            what = f"host {host} {state}: {why}; spare {spare} takes its place"
            if ranks:
                what += f" ({rank_text(ranks)})"
            what += f", {plural(left, 'spare')} left"
            held = [ranks[0], ranks[-1]] if ranks else []
            facts = {"host": host, "spare": spare, "why": why, "ranks": held, "spares_left": left}
            await self._note(run_state.TAKEOVER, what, **facts)

    # ---- while the ranks run

    @contextlib.asynccontextmanager
    async def looked_after(self, save: Callable[[], None] | None) -> AsyncIterator[None]:
        """Prepare the hosts that join while an attempt lasts.

        ``save`` asks the ranks to save and stop, so that a host that came back can take part; None if they cannot.
        """
        task = asyncio.create_task(self._prepare_newcomers(save))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _prepare_newcomers(self, save: Callable[[], None] | None) -> None:
        is_range = self._hosts.wanted.least < self._hosts.wanted.most
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self._prepare_idle()
            prepared = [host for host in self._hosts.idle if host.prepared is not None]
            ready = [host for host in prepared if host.part not in self._ready]
            for host in ready:
                self._ready.add(host.part)
                if not is_range:
                    what = f"spare {host.name} is ready"
                    await self._note(run_state.SPARE_READY, what, host=host.name)
            if not ready or len(self._hosts.in_use) >= self._hosts.wanted.most:
                continue
            names = name_several([host.name for host in ready])
            if save is None:
                logger.info(f"{names} can rejoin at the next restart")
                continue
            logger.info(f"{names} can rejoin: asking all ranks to save a checkpoint first")
            save()
            return

    async def _note(self, event: str, what: str, **facts: object) -> None:
        await asyncio.to_thread(run_state.log_event, self._run, event, what=what, **facts)
        logger.info(what)
