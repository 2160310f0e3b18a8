"""Meetings of real machines: the examiners of both sides are asked to call the other side."""

import asyncio
from collections.abc import Collection, Sequence
from itertools import product

from torchmuster.diagnose.links.messages import Call, Target
from torchmuster.diagnose.links.opening import Found, ask_to_call
from torchmuster.diagnose.rounds import Pair
from torchmuster.diagnose.search.model import Meeting, Outcome, Seen

# Where many meet, a call without an answer is made again: of so many one fails by chance.
TRIES = 3
# A machine calls so many at a time, since each call takes a socket at both ends.
MOST_CALLS = 200


class CallingTester:
    """A tester. It sees who does not reach whom, in either direction; nothing is measured.

    ``addresses`` are those at which the machines are called, in the order of ``found``. The links in
    ``left_out`` are known to be bad.
    """

    def __init__(
        self,
        found: Sequence[Found],
        addresses: Sequence[str | None],
        *,
        nonce: str,
        timeout_s: float,
        left_out: frozenset[Pair] = frozenset(),
    ) -> None:
        self._found = found
        self._addresses = addresses
        self._nonce = nonce
        self._timeout_s = timeout_s
        self._left_out = left_out

    async def test(
        self, meetings: Sequence[Meeting], *, without: frozenset[Pair]
    ) -> Sequence[Outcome]:
        """Hold one round of meetings at the same time."""
        left_out = without | self._left_out
        return await asyncio.gather(*(self._hold(meeting, left_out) for meeting in meetings))

    async def _hold(self, meeting: Meeting, left_out: frozenset[Pair]) -> Outcome:
        pairs = [_pair(link) for link in product(*meeting) if _pair(link) not in left_out]
        calls = [call for one, other in pairs for call in ((one, other), (other, one))]
        for _ in range(1 if len(pairs) == 1 else TRIES):
            calls = await self._unanswered(calls)
            if not calls:
                return Outcome()
        return Outcome(seen=Seen.FAILED, blamed=frozenset(map(_pair, calls)))

    async def _unanswered(self, calls: Sequence[Pair]) -> list[Pair]:
        """Make calls, and return those that got no answer."""
        by_caller: dict[int, list[int]] = {}
        for caller, called in calls:
            by_caller.setdefault(caller, []).append(called)
        unanswered = await asyncio.gather(*(self._call(*item) for item in by_caller.items()))
        return [call for of_caller in unanswered for call in of_caller]

    async def _call(self, caller: int, called: Collection[int]) -> list[Pair]:
        # Each begins with another one, so that nobody is called by all at once.
        ahead = sorted(called, key=lambda one: (one - caller) % len(self._found))
        unanswered: list[Pair] = []
        for start in range(0, len(ahead), MOST_CALLS):
            some = ahead[start : start + MOST_CALLS]
            call = Call(
                nonce=self._nonce,
                targets=tuple(map(self._target, some)),
                timeout_s=self._timeout_s,
            )
            results = await ask_to_call(self._found[caller].examiner, call)
            unanswered += [
                (caller, one) for one, result in zip(some, results, strict=True) if result.problem
            ]
        return unanswered

    def _target(self, place: int) -> Target:
        served, address = self._found[place].served, self._addresses[place]
        assert served is not None
        assert address is not None
        return Target(address=address, port=served.port)


def _pair(link: tuple[int, int]) -> Pair:
    return min(link), max(link)
