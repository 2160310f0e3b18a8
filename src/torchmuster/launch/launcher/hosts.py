"""The hosts of a run: which have joined, which of them run the ranks, and which wait to replace one.

Hosts join through a transport. An attempt runs on the hosts that ``choose_hosts`` names; hosts beyond the wanted number are
spares. A host that was lost is connected again in the background. All costs are linear in the number of hosts.
"""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torchmuster.errors import MachineLost, MusterError, NotNow
from torchmuster.finding import Finding, from_error
from torchmuster.launch import protocol
from torchmuster.launch.job import JobSpec, NodeCounts
from torchmuster.launch.launcher.host import ConnectedHost, error_from
from torchmuster.launch.launcher.waiting import BackgroundTasks, Waiting
from torchmuster.launch.transports.channel import Channel, Transport

# A host that failed this often in a run is taken only if there are too few others.
MOST_FAILURES = 2
# The node agent of this host is a child process: its death is noticed at once, and under load it may need long.
LOCAL_WITHIN_S = 1800.0
_SHOWN_HERE, _SHOWN_MISSING = 12, 8
# The interval at which lost hosts are connected again.
_RECONNECT_EVERY_S = 2.0
# Hosts that join at the same time are handled together.
_LOOK_EVERY_S = 0.05
_ALIVE_EVERY_S = 2.0
# A host that is not prepared yet waits for 12 s.
_ALIVE_AT_LEAST_EVERY_S = 4.0
_LOOK_FOR_SILENCE_EVERY_S = 0.5
_DEAF_S = 0.02
# A lost host does not receive the release message, so waiting longer is useless.
_LET_GO_WITHIN_S = 3.0
_LEAVE_WITHIN_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A host that may run ranks: its place in the user's order, and how often it failed in this run."""

    place: int
    ranks: int | None = None  # None: not known yet
    failures: int = 0


def choose_hosts(
    present: Sequence[Candidate], wanted: NodeCounts, before: Sequence[Candidate]
) -> list[int] | None:
    """Return the places of the hosts of the next attempt, in the order of their node ranks; None if they are too few.

    ``before`` are the hosts of the last attempt as they were chosen. A host that has not failed since then keeps its node rank.
    The others are replaced by hosts with as many ranks: those with the fewest failures first, then in the user's order. A
    range of hosts (``--nodes 2:4``) is filled up with any host.
    """
    usable = {host.place: host for host in present if host.failures < MOST_FAILURES}
    if len(usable) < wanted.least:
        usable = {host.place: host for host in present}
    staying = set()
    for host in before:
        same = usable.get(host.place)
        if same is not None and same.failures == host.failures:
            staying.add(host.place)
    free = [host for host in usable.values() if host.place not in staying]
    free.sort(key=lambda host: (host.failures, host.place))
    chosen = []
    for host in before:
        if host.place in staying:
            chosen.append(host.place)
            continue
        fitting = [other for other in free if _fits(other, host)]
        if fitting:
            chosen.append(fitting[0].place)
            free.remove(fitting[0])
    if wanted.least < wanted.most:
        chosen += [host.place for host in free[: wanted.most - len(chosen)]]
    return chosen if len(chosen) >= wanted.least else None


def _fits(host: Candidate, former: Candidate) -> bool:
    return None in (host.ranks, former.ranks) or host.ranks == former.ranks


class Hosts:
    """The hosts of a run as they join, leave and come back."""

    def __init__(
        self,
        spec: JobSpec,
        transport: Transport,
        waiting: Waiting,
        *,
        token: str,
        on_message: Callable[[ConnectedHost, protocol.FromAgent], None],
    ) -> None:
        count = len(transport.places)
        most = count - spec.spares
        self.wanted = NodeCounts(least=spec.min_nodes or most, most=most)
        self.in_use: list[ConnectedHost] = []  # of the attempt, in the order of their node ranks
        # The hosts of the last attempt as they were chosen; at first those without the spares.
        self.before = [Candidate(place=place) for place in range(most)]
        self._transport = transport
        self._waiting = waiting
        self._token = token
        self._on_message = on_message
        limits = spec.limits
        is_remote = count > 1 or bool(spec.hosts)
        self._join_s = limits.join_s if is_remote else max(limits.join_s, LOCAL_WITHIN_S)
        # A pipe to this host closes by itself; only a network connection can go silent.
        self._lost_after_s = limits.lost_after_s if is_remote else None
        self._return_s = limits.return_s
        self._by_place: dict[int, ConnectedHost] = {}
        self._failures: Counter[int] = Counter()
        self._refusals: dict[int, MusterError] = {}
        self._arrivals = 0
        self._background = BackgroundTasks()
        self._has_begun = False
        self._reconnecting: dict[int, asyncio.Task[None]] = {}  # by place

    # ---- who is here

    @property
    def all(self) -> list[ConnectedHost]:
        """All hosts that have connected, in the user's order; some may be lost."""
        return [self._by_place[place] for place in sorted(self._by_place)]

    @property
    def idle(self) -> list[ConnectedHost]:
        """The hosts that have joined and run no ranks."""
        used = {id(host) for host in self.in_use}
        return [host for host in self.all if host.is_here and id(host) not in used]

    @property
    def missing(self) -> list[str]:
        """The names of the hosts that the attempt would have, but runs without."""
        if len(self.in_use) == self.wanted.most:
            return []
        used = {host.place for host in self.in_use}
        names = self._transport.places
        return [names[place] for place in range(len(names)) if place not in used]

    def at(self, place: int) -> ConnectedHost | None:
        """Return the host at this place, if it has connected."""
        return self._by_place.get(place)

    def name_of(self, place: int) -> str:
        """Return the display name of the host at this place."""
        return self._transport.places[place]

    def describe(self) -> str:
        """Return which hosts have joined: ``2 of 3 joined: a ok, b ok, c missing (…)``."""
        names = self._transport.places
        missing = self._missing()
        here = sorted(set(range(len(names))).difference(missing))
        shown = [f"{names[place]} ok" for place in here[:_SHOWN_HERE]]
        if len(here) > _SHOWN_HERE:
            shown.append(f"… {len(here) - _SHOWN_HERE:,} more ok")
        for place in missing[:_SHOWN_MISSING]:
            trouble = self._transport.gave_up(place)
            why = trouble.why if trouble else self._transport.waiting_for(place)
            shown.append(f"{names[place]} missing ({why})")
        if len(missing) > _SHOWN_MISSING:
            shown.append(f"… {len(missing) - _SHOWN_MISSING:,} more missing")
        return f"{len(here):,} of {len(names):,} joined: {', '.join(shown)}"

    # ---- which of them run ranks

    def choose(self) -> list[int] | None:
        """Return the places of the hosts for the next attempt; None if too few are here."""
        here = [self._candidate(host) for host in self._by_place.values() if host.is_here]
        return choose_hosts(here, self.wanted, self.before)

    def take(self, places: Sequence[int]) -> list[ConnectedHost]:
        """Let these hosts run the next attempt, in this order; return them."""
        self.in_use = [self._by_place[place] for place in places]
        self.before = [self._candidate(host) for host in self.in_use]
        return self.in_use

    def free(self, broken: Iterable[int] = ()) -> None:
        """End the attempt; the hosts at these places have failed in it."""
        self._failures.update(list(broken))
        self.in_use = []

    def _candidate(self, host: ConnectedHost) -> Candidate:
        ranks = None if host.prepared is None else host.prepared.ranks
        return Candidate(place=host.place, ranks=ranks, failures=self._failures[host.place])

    # ---- joining

    def arrive(self, place: int, channel: Channel) -> None:
        """Register a host that has connected."""
        # A lost node agent that is still killing its ranks must not kill those of its successor.
        part = f"{self._token}.{place}.{self._arrivals}"
        self._arrivals += 1
        host = ConnectedHost(
            place,
            self._transport.places[place],
            channel,
            part,
            on_message=self._on_message,
            on_change=self._waiting.change,
        )
        host.listen()
        self._by_place[place] = host
        self._refusals.pop(place, None)
        if self._arrivals == 1:
            self._background.start(self._send_heartbeats())
        self._background.start(self._greet(host))

    async def wait(self) -> None:
        """Wait until the hosts of an attempt are here: at first for all hosts, later for as many as are needed."""
        if not self._has_begun:
            await self._reconnect(self._lost(self._missing()))
        async with self._waiting.reporting(self.describe):
            await self._wait()
        if not self._has_begun:
            self._has_begun = True
            self._background.start(self._reconnect_lost())

    async def _wait(self) -> None:
        first = not self._has_begun
        began_s = complete_s = time.monotonic()
        while missing := self._missing():
            if first:
                await self._reconnect(self._rejoining(missing))
            now_s = time.monotonic()
            waited_s = now_s - began_s
            if first and missing[0] < self.wanted.most:
                complete_s = now_s
            if first and now_s - complete_s > self._return_s:
                return  # only spares are missing
            is_late = waited_s > (self._join_s if first else self._return_s)
            may_be_fewer = is_late or (first and all(map(self._why_absent, missing)))
            if may_be_fewer or not first:
                chosen = self.choose()
                if chosen is not None and (may_be_fewer or len(chosen) == self.wanted.most):
                    return
            self._raise_refusal(missing, is_late=waited_s > self._join_s)
            if waited_s > self._join_s:
                raise NotNow(
                    self.describe(),
                    why=f"not enough hosts joined within {self._join_s:.0f} s",
                    fix="start the missing hosts, or wait longer: --set launch.join_timeout=10m",
                )
            await self._waiting.something_new(0.2)
            await asyncio.sleep(_LOOK_EVERY_S if len(missing) > 1 else 0)

    def _missing(self) -> list[int]:
        return [place for place in range(len(self._transport.places)) if not self._is_here(place)]

    def _is_here(self, place: int) -> bool:
        host = self._by_place.get(place)
        return host is not None and host.is_here

    def _why_absent(self, place: int) -> MusterError | None:
        """Return why a host will not join; None if it may, or has."""
        if place in self._refusals:
            return self._refusals[place]
        host, trouble = self._by_place.get(place), self._transport.gave_up(place)
        if trouble is not None:
            return error_from(trouble)
        if host is None or not host.is_lost or self._transport.rejoins(place):
            return None
        return MachineLost(f"{self.name_of(place)} is lost", why=host.why_lost or "")

    def _lost(self, places: Iterable[int]) -> list[ConnectedHost]:
        hosts = [self._by_place.get(place) for place in places]
        return [host for host in hosts if host is not None and host.is_lost]

    def _rejoining(self, places: Iterable[int]) -> list[ConnectedHost]:
        """Return the lost hosts whose places are for those that replace them."""
        return [host for host in self._lost(places) if self._transport.rejoins(host.place)]

    def _raise_refusal(self, missing: Sequence[int], *, is_late: bool) -> None:
        """Raise the error of a host without which the run cannot go on.

        A host that was lost is tried again once the run has begun, until the time to join ``is_late``.
        """
        errors = []
        for place in missing:
            error = self._why_absent(place)
            if error is not None and place in self._refusals:
                raise error
            if error is not None:
                errors.append(error)
        are_enough = len(self._transport.places) - len(errors) >= self.wanted.least
        if errors and (is_late or not (self._has_begun or are_enough)):
            raise errors[0]

    async def _greet(self, host: ConnectedHost) -> None:
        try:
            hello = await host.hear(protocol.Hello, within_s=self._join_s)
        except MachineLost:
            pass
        except MusterError as error:
            self._refusals[host.place] = error
        else:
            if hello.protocol != protocol.PROTOCOL:
                from torchmuster.launch.launcher import compare_nodes

                trouble = compare_nodes.other_protocol(host.name, hello)
                self._refusals[host.place] = error_from(trouble)
            else:
                host.join(hello.record)
        self._waiting.change()

    async def gather(self) -> dict[int, Finding]:
        """Wait until every host has joined or failed to; return the failures by place."""
        deadline = time.monotonic() + self._join_s
        async with self._waiting.reporting(self.describe):
            while not all(map(self._why_absent, self._missing())) and time.monotonic() < deadline:
                await self._reconnect(self._rejoining(self._missing()))
                await self._waiting.something_new(0.2)
        absent = {}
        for place in self._missing():
            trouble = self._transport.gave_up(place)
            error = self._why_absent(place) or MusterError(
                f"{self.name_of(place)} did not join within {self._join_s:.0f} s",
                why=self._transport.waiting_for(place),
                fix="start it, or wait longer: --set launch.join_timeout=10m",
            )
            [finding] = from_error(error)
            name = "host-missing" if type(error) is MusterError else finding.name
            absent[place] = replace(finding, name=trouble.name if trouble else name)
        return absent

    # ---- coming back, and leaving

    async def send_away(self, host: ConnectedHost) -> None:
        """Release a host that cannot run ranks; it is connected again later."""
        host.lose("it cannot run ranks")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(host.close(), _LET_GO_WITHIN_S)

    async def _reconnect_lost(self) -> None:
        """Reconnect to lost hosts while the run lasts."""
        while True:
            used = {host.place for host in self.in_use}
            places = []
            for place in self._missing():
                has_failed_often = self._failures[place] >= MOST_FAILURES
                if place not in used and not (has_failed_often and self.choose() is not None):
                    places.append(place)
            for host in self._lost(places):
                self._background.start(self._reconnect([host]))
            for place in places:
                if place not in self._by_place and self._transport.gave_up(place) is not None:
                    self._background.start(self._transport.reopen(place))
            await asyncio.sleep(_RECONNECT_EVERY_S)

    async def _reconnect(self, hosts: Sequence[ConnectedHost]) -> None:
        """Release lost hosts, and connect them again."""
        for host in hosts:
            if host.place not in self._reconnecting:
                task = asyncio.create_task(self._connect_again(host))
                self._reconnecting[host.place] = task
        await asyncio.gather(*[self._reconnecting[host.place] for host in hosts])

    async def _connect_again(self, host: ConnectedHost) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(host.close(), _LET_GO_WITHIN_S)
            if self._by_place.get(host.place) is host:  # else it has rejoined by itself
                del self._by_place[host.place]
                await self._transport.reopen(host.place)
        finally:
            del self._reconnecting[host.place]

    async def leave(self, exit_code: int, text: str) -> None:
        """Notify every node agent that the run is over, and release all hosts."""
        message = protocol.Leave(exit_code=exit_code, text=text)

        async def leave(host: ConnectedHost) -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(host.channel.send(message), _LEAVE_WITHIN_S)
            await host.close()

        await self.close()
        # A host that cannot be released must not block the others.
        leaving = [leave(host) for host in self._by_place.values()]
        await asyncio.gather(*leaving, return_exceptions=True)
        await self._transport.close()

    async def close(self) -> None:
        """Stop the heartbeats and all waiting tasks."""
        await self._background.close()
        tasks = list(self._reconnecting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_heartbeats(self) -> None:
        """Send heartbeats to every host, and declare hosts without heartbeats lost."""
        # A host that hears nothing for this long declares the launcher lost: it gets three chances.
        every_s = min(max(_ALIVE_EVERY_S, (self._lost_after_s or 0.0) / 3), _ALIVE_AT_LEAST_EVERY_S)
        last_s = -math.inf
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(_LOOK_FOR_SILENCE_EVERY_S)
            # Time in which this process was blocked does not count as silence.
            deaf_s = time.monotonic() - began_s - _LOOK_FOR_SILENCE_EVERY_S
            hosts = [host for host in self._by_place.values() if not host.is_lost]
            for host in hosts:
                if deaf_s > _DEAF_S:
                    host.heard_s += deaf_s
                if began_s >= last_s + every_s:
                    host.channel.say_alive()
                if self._lost_after_s is not None:
                    host.notice_silence(self._lost_after_s)
            if began_s >= last_s + every_s:
                last_s = began_s
