"""Hosts that join while the ranks run: spares, and hosts that come back.

Each is prepared, so that the next attempt can take it at once. Where a run goes on with fewer hosts than wanted and its ranks
can save, a host that comes back ends the attempt: the ranks save, and all hosts continue.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from torchmuster.errors import MachineLost, MusterError
from torchmuster.launch.history import run_state
from torchmuster.launch.launcher.host import ConnectedHost
from torchmuster.launch.launcher.hosts import Hosts
from torchmuster.runfolder import RunFolder
from torchmuster.units import name_several

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0


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

    async def choose(self, lost: Mapping[int, str]) -> list[ConnectedHost]:
        """Wait for the hosts of the next attempt, prepare those that are new, and return them in rank order.

        ``lost`` are the places of the hosts that were lost in the last attempt, and why.
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
            for former, place in zip(before, places, strict=True):
                if former.place != place:
                    host, spare = hosts.name_of(former.place), hosts.name_of(place)
                    why = lost.get(former.place, "it has not joined")
                    what = f"host {host} is lost: {why}; spare {spare} takes its place"
                    await self._note(run_state.TAKEOVER, what, host=host, spare=spare, why=why)
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
                await self._hosts.send_away(host)
        return failed

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
