"""Machines that come while a run goes on without them: taken in at once where its ranks can save."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

from torchmuster.errors import MusterError
from torchmuster.launch.job import JobSpec
from torchmuster.launch.launcher.node_handle import Node
from torchmuster.launch.launcher.node_registry import RollCall
from torchmuster.launch.launcher.session import Session
from torchmuster.launch.network.reach import several

_LOOK_EVERY_S = 1.0


class Prepare(Protocol):
    """What has machines prepared, and compares them with the others."""

    async def __call__(self, nodes: Sequence[Node], *, again: bool) -> None:
        """Prepare them."""


class TakingIn:
    """Looks for newcomers for as long as an attempt lasts, and prepares them."""

    def __init__(
        self,
        spec: JobSpec,
        session: Session,
        *,
        say: Callable[[str], None],
        prepare: Prepare,
        is_running: Callable[[], bool],
    ) -> None:
        self._ranks_can_save = spec.checkpoints is not None
        self._session = session
        self._say = say
        self._prepare = prepare
        self._is_running = is_running
        self._task: asyncio.Task[None] | None = None
        self.asked_to_save = False

    async def __aenter__(self) -> None:
        """Begin to look, where somebody is missing."""
        if self._session.roll.left_out:
            self._task = asyncio.create_task(self._look())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Look no longer."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _look(self) -> None:
        session = self._session
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            # Before, the machines answer to the start of the attempt, and must not be asked anything else.
            new = [one for one in session.roll.newcomers if one.prepared is None]
            if not new or not self._is_running():
                continue
            ready = [node for node in new if await self._is_ready(node)]
            if not ready:
                continue
            who = several([node.name for node in ready])
            if self._ranks_can_save:
                self._say(f"{who} can take part: asking all ranks to save, to go on together")
                self.asked_to_save = True
                session.pass_on("SIGUSR1")
                return
            self._say(f"{who} can take part, and will after the next restart")

    async def _is_ready(self, node: Node) -> bool:
        try:
            await self._prepare([node], again=True)
        except MusterError as error:
            self._say(f"{node.name} came, but cannot take part: {error.what}")
            await self._session.roll.send_away(node)
            return False
        return True


def going_on(roll: RollCall, all_machines: int, global_batch_size: int | None) -> str:
    """Say with how many machines a run goes on: ``going on with 3 of 4 machines, without d``."""
    here = len(roll.nodes)
    without = f", without {several(roll.left_out)}" if roll.left_out else ""
    batch = "" if global_batch_size is None else f"; the global batch stays {global_batch_size:,}"
    return f"going on with {here:,} of {all_machines:,} machines{without}{batch}"
