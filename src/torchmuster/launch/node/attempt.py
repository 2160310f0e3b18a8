"""One attempt of a host's ranks: start, output, heartbeats, stop and report."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from torchmuster.launch import protocol
from torchmuster.launch.job import GRACE_VARIABLE
from torchmuster.launch.node import failures, process_cleanup, stack_dump, supervisor
from torchmuster.launch.node.heartbeats import HeartbeatReader, MetricsReader
from torchmuster.launch.node.memory_evidence import MemoryPeaks, MemoryWatch
from torchmuster.launch.node.ranks import NodeShare, RankExit, RankProcess, StoreProcess

_BATCH_OUTPUT_S = 0.05
_LOOK_AT_OUTPUT_S = 1.0
# So that one rank's output does not delay the others'.
_PIECES_AT_A_TIME = 16
_LAST_OUTPUT_WITHIN_S = 2.0
_SAMPLE_EVERY_S = 1.0
_HEARTBEATS_EVERY_S = 2.0
_KILL_WITHIN_S = 5.0
# How long the pipes of the ranks may stay open once no process of the attempt is alive.
_OUTPUT_WITHIN_S = 2.0
# With more ranks than this, only the output of rank 0 is sent; the others' is in their logs.
_MANY_RANKS = 64

Send = Callable[[protocol.FromAgent], Awaitable[None]]


class RunningAttempt:
    """An attempt of this host's ranks."""

    def __init__(
        self,
        share: NodeShare,
        environment: Mapping[str, str],
        send: Send,
        *,
        store: StoreProcess | None = None,
        keep_sessions: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """``store`` is that of the ranks, on the first host; ``keep_sessions`` returns the sessions of processes that are not of this attempt."""
        self._share = share
        self._keep_sessions = keep_sessions
        self._environment = environment
        self._send = send
        self._store = store
        self._ranks: list[RankProcess] = []
        self._memory = MemoryWatch.begin()
        self._peaks = MemoryPeaks()
        self._heartbeats = HeartbeatReader(share.records, share.rank_numbers)
        self._metrics = MetricsReader(share.records, 0) if 0 in share.rank_numbers else None
        self._new_output = asyncio.Event()
        self._failed_first = False  # a rank failed before any request to stop
        self._stop_requested = False
        self._kill_at_s: float | None = None
        self._kill_timer: asyncio.TimerHandle | None = None
        self._beyond_kill = asyncio.Event()  # the ranks were killed, but some do not exit
        self._stop_signal = ""
        self._killed: tuple[int, ...] = ()
        self.gone = asyncio.Event()  # none of its processes is alive
        self.reported = asyncio.Event()  # the launcher has received the report

    async def start(self) -> None:
        """Start the ranks."""
        share = self._share
        loop = asyncio.get_running_loop()
        try:
            for local_rank in range(share.ranks):
                rank = await RankProcess.start(share, local_rank, self._environment)
                rank.output.notify(loop, self._new_output)
                self._ranks.append(rank)
        except BaseException:  # no more processes or memory: none of them may stay
            self._kill()
            raise

    def stop(self, grace_s: float, stop_signal: str = "") -> None:
        """Ask the ranks to stop, and kill them after the grace period. A later call can only shorten it.

        ``stop_signal`` is the signal of a request that did not come from the launcher.
        """
        if not self._failed_first and not self._stop_requested:
            self._stop_signal = stop_signal
        self._stop_requested = True
        self._end_within(grace_s)

    def pass_on(self, name: str, *, only_if_handled: bool = False) -> None:
        """Send a signal to the ranks, and only to them; a scheduler's warning would kill those that do not handle it."""
        number = signal.Signals[name]
        for rank in self._ranks:
            if not only_if_handled or rank.handles(number):
                rank.send_signal(number)

    async def examine(self, message: protocol.DumpStacks) -> None:
        """Send the stack dumps of the requested ranks."""
        ranks = [rank for rank in self._ranks if rank.rank in message.ranks]
        for evidence in await stack_dump.dump_stacks(self._share.records, ranks):
            await self._send(evidence)

    async def watch(self) -> protocol.Ended:
        """Return when no process of this attempt is alive and its output has been sent."""
        over = asyncio.Event()
        reporting = [
            asyncio.create_task(self._send_output(over)),
            asyncio.create_task(self._send_signs(over)),
        ]
        waiting = asyncio.create_task(self._wait_for_ranks())
        await asyncio.wait({waiting, *reporting}, return_when=asyncio.FIRST_COMPLETED)
        for task in reporting:
            if task.done():  # it has failed, and its error ends the attempt
                task.result()
        trouble = await waiting
        left = await asyncio.to_thread(
            process_cleanup.end_attempt,
            self._share.prepare.token,
            within_s=_KILL_WITHIN_S,
            keep_sessions=self._keep_sessions(),
        )
        if not left:
            self.gone.set()
        await asyncio.to_thread(self._wait_for_output)
        over.set()
        await asyncio.gather(*reporting)
        if left:
            trouble.append(f"processes that could not be killed: {left}")
        return self._report(trouble)

    def _end_within(self, grace_s: float) -> None:
        """Send SIGTERM, once, and kill what is alive after the grace period."""
        kill_at_s = time.monotonic() + grace_s
        if self._kill_at_s is None:
            for rank in self._ranks:
                rank.terminate()
        elif kill_at_s >= self._kill_at_s:
            return
        self._kill_at_s = kill_at_s
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self._kill_timer = asyncio.get_running_loop().call_later(grace_s, self._kill)

    def _kill(self) -> None:
        living = [rank for rank in self._ranks if rank.is_alive]
        self._killed = tuple(rank.rank for rank in living)
        for rank in living:
            rank.send_signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        asyncio.get_running_loop().call_later(_KILL_WITHIN_S, self._beyond_kill.set)

    async def _wait_for_ranks(self) -> list[str]:
        """Wait until all ranks have exited, and stop the others when one fails; return other trouble."""
        trouble = []
        stores = set()
        if self._store is not None:
            stores = {asyncio.create_task(self._store.wait())}
        waiting = {asyncio.create_task(rank.wait()) for rank in self._ranks}
        stuck = asyncio.create_task(self._beyond_kill.wait())
        while waiting and not stuck.done():
            done, _ = await asyncio.wait(
                {*waiting, *stores, stuck}, return_when=asyncio.FIRST_COMPLETED
            )
            if done & stores:
                stores = set()
                assert self._store is not None
                trouble.append(self._store.failure())
                self._end_after_failure()
            if any(rank.exit is not None and rank.exit.code != 0 for rank in self._ranks):
                self._end_after_failure()
            waiting -= done
        for task in (*waiting, *stores, stuck):
            task.cancel()
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        return trouble

    def _end_after_failure(self) -> None:
        self._failed_first = self._failed_first or not self._stop_requested
        if self._kill_at_s is None:
            self._end_within(float(self._environment[GRACE_VARIABLE]))

    def _wait_for_output(self) -> None:
        deadline_s = time.monotonic() + _OUTPUT_WITHIN_S
        for rank in self._ranks:
            rank.output.ended.wait(max(0.0, deadline_s - time.monotonic()))

    async def _send_output(self, over: asyncio.Event) -> None:
        """Send the ranks' new lines; waits while the launcher does not read."""
        while not over.is_set():
            for rank in self._shown_ranks:
                for _ in range(_PIECES_AT_A_TIME):
                    if not await self._send_piece(rank):
                        break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._new_output.wait(), _LOOK_AT_OUTPUT_S)
            self._new_output.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), _BATCH_OUTPUT_S)
        # What a slow launcher does not take soon is only in the logs.
        deadline_s = time.monotonic() + _LAST_OUTPUT_WITHIN_S
        for rank in self._shown_ranks:
            while await self._send_piece(rank, last=True):
                if time.monotonic() > deadline_s:
                    rank.output.skip_to_end()

    @property
    def _shown_ranks(self) -> Sequence[RankProcess]:
        if self._share.start.world_size <= _MANY_RANKS:
            return self._ranks
        return [rank for rank in self._ranks if rank.rank == 0]

    async def _send_piece(self, rank: RankProcess, *, last: bool = False) -> bool:
        text = rank.output.take(last=last)
        if text:
            await self._send(protocol.Output(rank=rank.rank, text=text))
        return bool(text)

    async def _send_signs(self, over: asyncio.Event) -> None:
        """Send heartbeats and what rank 0 recorded, and sample the ranks' memory."""
        sent_s = 0.0
        while not over.is_set():
            self._peaks.sample(rank.pid for rank in self._ranks if rank.is_alive)
            if time.monotonic() - sent_s > _HEARTBEATS_EVERY_S:
                sent_s = time.monotonic()
                supervisor.reap_orphans()
                await self._send_heartbeats()
                await self._send_metrics()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), _SAMPLE_EVERY_S)
        await self._send_metrics()

    async def _send_heartbeats(self) -> None:
        # In a thread: finding a rank's children means reading all processes of the host.
        heartbeats = await asyncio.to_thread(self._heartbeats.read)
        stopping = self._stopping_now()
        if not heartbeats and stopping is None:
            return
        attempt = self._share.start.attempt
        await self._send(
            protocol.Heartbeats(attempt=attempt, heartbeats=heartbeats, stopping=stopping)
        )

    async def _send_metrics(self) -> None:
        """Send what rank 0 recorded, if it runs here."""
        if self._metrics is None:
            return
        while text := self._metrics.new_lines():
            await self._send(protocol.Output(rank=0, text=text, file=protocol.RECORDED))

    def _stopping_now(self) -> protocol.Stopping | None:
        """Return the ranks that were asked to stop and have not, and how long they have left."""
        if self._kill_at_s is None:
            return None
        living = tuple(rank.rank for rank in self._ranks if rank.is_alive)
        left_s = max(0.0, self._kill_at_s - time.monotonic())
        return protocol.Stopping(ranks=living, left_s=left_s, stop_signal=self._stop_signal)

    def _report(self, trouble: Sequence[str]) -> protocol.Ended:
        share = self._share
        # Then ranks that ended by our signals have not failed.
        stopped = bool(trouble) or (self._stop_requested and not self._failed_first)
        failing = [rank for rank in self._ranks if not (stopped and _ended_by_us(rank.exit))]
        failed = failures.failures_of(failing, share.records, self._memory, self._peaks)
        reasons = list(trouble)
        if stopped and not failed and not trouble:
            reasons.append("the ranks were stopped by SIGTERM")
        finished = failures.ranks_finished(share.records, share.rank_numbers) if failed else []
        return protocol.Ended(
            attempt=share.start.attempt,
            good=not (failed or reasons),
            failures=tuple(failed),
            finished=tuple(finished),
            text="\n".join(reasons),
            killed=self._killed,
            stop_signal=self._stop_signal,
        )


def _ended_by_us(rank_exit: RankExit | None) -> bool:
    """Return whether a rank ended by the signals with which we stop it."""
    if rank_exit is None:
        return True
    return rank_exit.code in (-signal.SIGTERM, -getattr(signal, "SIGKILL", signal.SIGTERM))
