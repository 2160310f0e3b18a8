"""The node registry: which hosts have joined, which are missing and why. The cost is linear in the number of hosts."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable

from torchmuster.errors import MachineLost, MusterError, NotNow
from torchmuster.finding import Finding, Status, from_error
from torchmuster.launch import protocol
from torchmuster.launch.launcher import compare_nodes
from torchmuster.launch.launcher.node_handle import NodeHandle, WaitingMessages, error_from
from torchmuster.launch.network.reach import name_several
from torchmuster.launch.transports.channel import Channel, Transport

_SHOWN_HERE, _SHOWN_MISSING = 12, 8
# A lost host may come back: it is reconnected at this interval, and once the others continue
# without it, at growing intervals.
_CALL_AGAIN_AFTER_S = 1.0
_CALL_LEFT_OUT_AFTER_S, _CALL_LEFT_OUT_AT_LEAST_S = 5.0, 30.0
# Hosts that join at the same time are handled together.
_LOOK_EVERY_S = 0.05
_ALIVE_EVERY_S, _TURNS = 2.0, 8
# A host that is not prepared yet waits for 12 s.
_ALIVE_AT_LEAST_EVERY_S = 4.0
_SILENCE_TURNS = 2  # silence is looked for in every second turn
_DEAF_S = 0.02
# A lost host does not receive the release message, so waiting longer is useless.
_LET_GO_WITHIN_S = 3.0
_LEAVE_WITHIN_S = 3.0


class NodeRegistry:
    """The hosts of a run as they join, leave and rejoin.

    With ``enough``, that many hosts suffice: missing hosts are left out and may still join. The last ``spares`` hosts have no
    ranks until one of them replaces another host.
    """

    def __init__(
        self,
        transport: Transport,
        waiting: WaitingMessages,
        *,
        token: str,
        join_s: float,
        lost_after_s: float | None,
        on_output: Callable[[int, str], None],
        enough: int | None = None,
        return_s: float = 5.0,
        spares: int = 0,
    ) -> None:
        self._transport = transport
        # The place of the host with each node rank; all other hosts are spares.
        self._order = list(range(len(transport.places) - spares))
        self._has_spares = spares > 0
        self._waiting = waiting
        self._enough = enough
        self._return_s = return_s
        self._token = token
        self._join_s = join_s
        self._lost_after_s = lost_after_s
        self._on_output = on_output
        self._nodes: dict[int, NodeHandle] = {}
        self._arrivals = 0
        self._greetings: set[asyncio.Task[None]] = set()
        self._refusals: dict[int, MusterError] = {}
        self._care: asyncio.Task[None] | None = None
        self._left_out: dict[int, asyncio.Task[None]] = {}
        self._abandoned: set[int] = set()

    @property
    def nodes(self) -> list[NodeHandle]:
        """The participating hosts, in rank order."""
        return [
            self._nodes[one]
            for one in self._order
            if one in self._nodes and one not in self._left_out
        ]

    @property
    def left_out(self) -> list[str]:
        """The hosts that the others continue without."""
        names = self._transport.places
        return [names[place] for place in sorted(self._left_out) if place in self._order]

    @property
    def newcomers(self) -> list[NodeHandle]:
        """The left-out hosts that have joined since."""
        self._name_all()
        return [
            self._nodes[place]
            for place in sorted(self._left_out)
            if place in self._order and self._is_here(place)
        ]

    @property
    def spares(self) -> list[NodeHandle]:
        """The hosts without ranks that have joined."""
        if not self._has_spares:
            return []
        self._name_all()
        return [
            self._nodes[place]
            for place in sorted(self._nodes)
            if place not in self._order and self._is_here(place)
        ]

    @property
    def missing(self) -> list[int]:
        """The places of hosts with ranks that are not here, in the order of their node ranks."""
        return [place for place in self._order if not self._is_here(place)]

    def at(self, place: int) -> NodeHandle | None:
        """Return the host at this place, if it has joined."""
        return self._nodes.get(place)

    def name_of(self, place: int) -> str:
        """Return the display name of the host at this place."""
        return self._transport.places[place]

    def ranks_of(self, place: int) -> range | None:
        """Return the ranks of a host; None if not all hosts before it are prepared."""
        first = 0
        for one in self._order:
            node = self._nodes.get(one)
            if node is None or node.prepared is None:
                return None
            if one == place:
                return range(first, first + node.prepared.ranks)
            first += node.prepared.ranks
        return None

    async def replace(self, place: int, spare: int) -> None:
        """Let a spare take the node rank of a host; that host is reconnected in the background, as a spare."""
        await self._take_in([spare])
        self._order[self._order.index(place)] = spare
        node = self._nodes.get(place)
        if node is not None:
            node.lose("another host has its ranks")
        if place not in self._left_out:
            self._leave_out([place])

    async def abandon(self, place: int) -> None:
        """Release a host without ranks, and do not reconnect it."""
        await self._take_in([place])
        node = self._nodes.pop(place, None)
        self._abandoned.add(place)
        if node is not None:
            node.lose("it is not needed")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(node.close(), _LET_GO_WITHIN_S)

    def call_spares_again(self) -> list[NodeHandle]:
        """Reconnect the spares that are lost, in the background; return them."""
        lost = [
            node
            for place, node in self._nodes.items()
            if place not in self._order and node.lost and place not in self._abandoned
        ]
        self._leave_out(node.place for node in lost if node.place not in self._left_out)
        return lost

    def arrive(self, place: int, channel: Channel) -> None:
        """Register a host that has connected."""
        # A lost node agent that is still killing its ranks must not kill those of its successor.
        part = f"{self._token}.{place}.{self._arrivals}"
        self._arrivals += 1
        node = NodeHandle(place, f"machine {place + 1}", channel, part)
        node.listen(on_output=self._on_output, on_change=self._waiting.change)
        self._nodes[place] = node
        if self._care is None:
            self._care = asyncio.create_task(self._look_after_them())
        task = asyncio.create_task(self._greet(node))
        self._greetings.add(task)
        task.add_done_callback(self._greetings.discard)

    async def call(self, places: Iterable[int], *, again: bool = False) -> None:
        """Wait until these hosts have joined; with ``again``, reconnect those that failed to connect."""
        within_s = self._return_s if again else self._join_s
        began = complete_s = time.monotonic()
        missing = wanted = set(places)
        async with self._waiting.telling(self.words):
            while missing := {
                place
                for place in wanted
                # A host that has joined may be lost again while the others are still awaited.
                if not self._is_here(place) and (place in missing or self._transport.rejoins(place))
            }:
                await self._let_rejoin(missing)
                waited_s = time.monotonic() - began
                no_use = not again and all(self._will_not_come(place) for place in missing)
                if not missing.isdisjoint(self._order):
                    complete_s = time.monotonic()
                only_spares_s = time.monotonic() - complete_s
                late = waited_s > within_s or only_spares_s > self._return_s
                if self._are_enough(again=again) and (late or no_use):
                    self._leave_out(missing)
                    break
                self._raise_refusal(missing, again=again)
                until_s = began + self._join_s
                await self._deal_with_refused(missing, again=again, until_s=until_s)
                if waited_s > self._join_s:
                    who = "all hosts" if self._enough is None else "enough hosts"
                    raise NotNow(
                        self.words(),
                        why=f"not {who} joined within {self._join_s:.0f} s",
                        fix="start the missing hosts, or wait longer: --join-timeout 10m",
                    )
                await self._waiting.something_new(0.2)
                await asyncio.sleep(_LOOK_EVERY_S if len(missing) > 1 else 0)
        self._name_all()

    async def _let_rejoin(self, places: Iterable[int]) -> None:
        """Give the places of hosts that were lost to those that replace them."""
        for place in places:
            node = self._nodes.get(place)
            if node is not None and node.lost and self._transport.rejoins(place):
                await self._call_anew(node)

    def _are_enough(self, *, again: bool) -> bool:
        counted = self._order if again else self._nodes
        here = sum(self._is_here(place) for place in counted if place not in self._left_out)
        enough = self._needed(again=again)
        return enough is not None and here >= enough

    def _needed(self, *, again: bool) -> int | None:
        """Return how many hosts suffice; None: all of them. At first, a spare can replace a missing host."""
        if self._enough is None and self._has_spares and not again:
            return len(self._order)
        return self._enough

    def _can_be_enough(self, *, again: bool) -> bool:
        """Return whether enough hosts can still join, where not all are needed."""
        places = self._order if again else range(len(self._transport.places))
        hopeless = sum(self._will_not_come(place) for place in places)
        enough = self._needed(again=again)
        return enough is not None and len(places) - hopeless >= enough

    def _will_not_come(self, place: int) -> bool:
        node = self._nodes.get(place)
        lost = node is not None and bool(node.lost)
        return lost or place in self._left_out or self._transport.gave_up(place) is not None

    def _raise_refusal(self, missing: Iterable[int], *, again: bool) -> None:
        """Raise the error of a refused host; a lost host is skipped if enough others can join."""
        for place in missing:
            error = self._refusals.pop(place, None)
            if error is None and not again:
                error = self._lost_meanwhile(place)
            skipped = isinstance(error, MachineLost) and self._can_be_enough(again=again)
            if error is not None and not skipped:
                raise error

    def _lost_meanwhile(self, place: int) -> MachineLost | None:
        """Return the error of a host that had joined, was lost before all hosts have joined, and cannot rejoin."""
        node = self._nodes.get(place)
        if node is None or not node.lost or node.record is None or self._transport.rejoins(place):
            return None
        self._name_all()
        return MachineLost(f"{node.name} is lost", why=node.lost)

    def _leave_out(self, places: Iterable[int]) -> None:
        """Continue without these hosts; they are still reconnected from time to time."""
        for place in places:
            self._left_out[place] = asyncio.create_task(self._call_now_and_then(place))

    async def _call_now_and_then(self, place: int) -> None:
        pause_s = _CALL_LEFT_OUT_AFTER_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _CALL_LEFT_OUT_AT_LEAST_S)
            node = self._nodes.get(place)
            if node is not None and node.lost:
                await self._call_anew(node)
            elif node is None and self._transport.gave_up(place) is not None:
                await self._transport.reopen(place)

    async def _take_in(self, places: Iterable[int]) -> None:
        """Add back hosts that were left out."""
        tasks = [self._left_out.pop(place) for place in places if place in self._left_out]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def send_away(self, newcomer: NodeHandle) -> None:
        """Release a host that cannot rejoin; it is reconnected later."""
        newcomer.lose("it cannot rejoin")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(newcomer.close(), _LET_GO_WITHIN_S)

    async def gather(self) -> dict[int, Finding]:
        """Wait until every host has joined or failed to; return the failures by place."""
        deadline = time.monotonic() + self._join_s
        places = range(len(self._transport.places))
        absent = self._absent()
        async with self._waiting.telling(self.words):
            while missing := [
                place for place in places if place not in absent and not self._is_here(place)
            ]:
                if time.monotonic() > deadline:
                    break
                await self._waiting.something_new(0.2)
                absent = self._absent()
        self._name_all()
        for place in missing:
            absent[place] = Finding(
                name="host-missing",
                status=Status.FAILURE,
                what=f"{self._transport.places[place]} did not join within {self._join_s:.0f} s",
                why=self._transport.waiting_for(place),
                fix="start it, or wait longer: --join-timeout 10m",
            )
        return absent

    def _absent(self) -> dict[int, Finding]:
        """Return the hosts that are known not to join."""
        found = {place: from_error(error)[0] for place, error in self._refusals.items()}
        for place in range(len(self._transport.places)):
            trouble = self._transport.gave_up(place)
            if trouble is not None and not self._is_here(place):
                found[place] = Finding(
                    name=trouble.name,
                    status=Status.FAILURE,
                    what=trouble.what,
                    why=trouble.why,
                    fix=trouble.fix,
                    evidence=trouble.evidence,
                )
        return found

    async def call_back_the_lost(self) -> list[NodeHandle]:
        """Reconnect every host that is lost or not prepared; return those to be prepared."""
        self._refusals.clear()  # of the previous attempt
        new = [newcomer.place for newcomer in self.newcomers]
        await self._take_in(new)
        whole = {place for place, one in self._nodes.items() if one.prepared and not one.lost}
        lost = sorted(set(self._order).difference(whole, new, self._left_out))
        known = [self._nodes[place] for place in lost if place in self._nodes]

        def words() -> str:
            return f"closing the connections to {name_several([node.name for node in known])} to reconnect"

        async with self._waiting.telling(words):
            leaving = asyncio.gather(*(self._call_anew(node) for node in known))
            await self._waiting.unless_stopped(leaving)
        if lost:
            await self.call(lost, again=True)
        called = sorted({*lost, *new}.difference(whole, self._left_out))
        return [self._nodes[place] for place in called]

    async def _call_anew(self, node: NodeHandle) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LET_GO_WITHIN_S if node.lost else None):
                await node.close()
        if self._nodes.get(node.place) is node:  # else it has rejoined by itself
            del self._nodes[node.place]
            await self._transport.reopen(node.place)

    async def leave(self, exit_code: int, words: str) -> None:
        """Notify every node agent that the run is over, and release all hosts."""
        message = protocol.Leave(exit_code=exit_code, words=words)

        async def leave(node: NodeHandle) -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(node.channel.send(message), _LEAVE_WITHIN_S)
            await node.close()

        await self.close()
        # A host that cannot be released must not block the others.
        everybody = list(self._nodes.values())
        await asyncio.gather(*(leave(node) for node in everybody), return_exceptions=True)
        await self._transport.close()

    async def close(self) -> None:
        """Stop the heartbeats and all waiting tasks."""
        tasks = [*self._greetings, *self._left_out.values(), *filter(None, [self._care])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def words(self) -> str:
        """Return which hosts have joined: ``2 of 3 joined: a ok, b ok, c missing (…)``."""
        names = self._transport.places
        here = [place for place in range(len(names)) if self._is_here(place)]
        away = sorted(set(range(len(names))).difference(here))
        words = [f"{names[place]} ok" for place in here[:_SHOWN_HERE]]
        if len(here) > _SHOWN_HERE:
            words.append(f"… {len(here) - _SHOWN_HERE:,} more ok")
        for place in away[:_SHOWN_MISSING]:
            trouble = self._transport.gave_up(place)
            why = trouble.why if trouble else self._transport.waiting_for(place)
            words.append(f"{names[place]} missing ({why})")
        if len(away) > _SHOWN_MISSING:
            words.append(f"… {len(away) - _SHOWN_MISSING:,} more missing")
        return f"{len(here):,} of {len(names):,} joined: {', '.join(words)}"

    def _is_here(self, place: int) -> bool:
        node = self._nodes.get(place)
        return node is not None and node.record is not None and not node.lost

    async def _look_after_them(self) -> None:
        """Send heartbeats to every host, and declare hosts without heartbeats lost."""
        # A host that hears nothing for this long declares the launcher lost: it gets three chances.
        every_s = min(max(_ALIVE_EVERY_S, (self._lost_after_s or 0.0) / 3), _ALIVE_AT_LEAST_EVERY_S)
        pause_s = every_s / _TURNS
        for turn in itertools.count():
            began = time.monotonic()
            await asyncio.sleep(pause_s)
            # Time in which this process was blocked does not count as silence.
            deaf_s = time.monotonic() - began - pause_s
            nodes = list(self._nodes.values())
            for node in nodes if deaf_s > _DEAF_S else ():
                node.heard_s += deaf_s
            # Spread over several turns: there may be thousands of hosts.
            for node in nodes:
                if (node.place + turn) % _TURNS == 0:
                    node.say_alive()
            if self._lost_after_s is not None and turn % _SILENCE_TURNS == 0:
                for node in nodes:
                    node.notice_silence(self._lost_after_s)

    async def _greet(self, node: NodeHandle) -> None:
        try:
            hello = await node.hear(protocol.Hello, within_s=self._join_s)
        except MachineLost as error:
            if self._nodes.get(node.place) is node and not self._transport.rejoins(node.place):
                self._name_all()
                error.what = f"{node.name} is lost"
                self._refusals[node.place] = error
        except MusterError as error:
            self._refusals[node.place] = error
        else:
            if hello.protocol != protocol.PROTOCOL:
                self._name_all()
                trouble = compare_nodes.other_protocol(node.name, hello)
                self._refusals[node.place] = error_from(trouble)
            else:
                node.clock_offset_s = hello.record.clock_unix_s - time.time()
                node.record = hello.record
        self._waiting.change()

    async def _deal_with_refused(
        self, missing: Iterable[int], *, again: bool, until_s: float
    ) -> None:
        for place in missing:
            trouble = self._transport.gave_up(place)
            if trouble is None or (not again and self._can_be_enough(again=again)):
                continue
            if not again or time.monotonic() > until_s:
                raise error_from(trouble)
            await self._waiting.unless_stopped(asyncio.sleep(_CALL_AGAIN_AFTER_S))
            await self._transport.reopen(place)

    def _name_all(self) -> None:
        """Set the display names of all hosts; building a long list of names takes time."""
        names = self._transport.places
        for place, node in self._nodes.items():
            node.name = names[place]
