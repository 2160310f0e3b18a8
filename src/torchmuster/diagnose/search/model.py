"""The words of the search: meetings, what is seen of them, and what follows."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torchmuster.diagnose.rounds import Pair


class Meeting(NamedTuple):
    """Everybody on one side exchanges something with everybody on the other; a pair is one with one."""

    callers: Sequence[int]
    called: Sequence[int]


class Seen(enum.Enum):
    """How a meeting went. One bad link in it is enough to spoil it."""

    OK = "ok"
    FAILED = "failed"  # somebody got no answer within the deadline
    WRONG = "wrong"  # somebody got other values than were sent


class Outcome(NamedTuple):
    """What was seen of a meeting.

    ``ratio`` is the time it took by the time it should have taken. It counts for pairs alone: of very
    many links the slowest is always slow, by chance. ``blamed`` are the links that spoilt it, if the
    tester can tell.
    """

    seen: Seen = Seen.OK
    ratio: float = 1.0
    blamed: frozenset[Pair] = frozenset()


class Tester(Protocol):
    """Who holds the meetings: real machines, or a simulation."""

    async def test(
        self, meetings: Sequence[Meeting], *, without: frozenset[Pair]
    ) -> Sequence[Outcome]:
        """Hold one round of meetings at the same time, leaving out the links in ``without``.

        Nobody is in two meetings. The outcomes are in the order of the meetings. Where many meet,
        a call without an answer is made three times before it counts: of so many one fails by chance.
        """
        ...


class Fault(enum.Enum):
    """What can be wrong with a machine or a link."""

    DEAD = "dead"
    SLOW = "slow"
    CORRUPTING = "corrupting"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found, and what it took.

    ``undecided`` are machines about which nothing could be proven, since too few good ones were left
    to try them with. ``confidence`` is the least probability that nothing is missing among what was
    tried and nothing good accused, as long as the ``Assumptions`` hold.
    """

    bad_nodes: Mapping[int, Fault] = field(default_factory=dict)
    bad_links: Mapping[Pair, Fault] = field(default_factory=dict)
    undecided: tuple[int, ...] = ()
    rounds: int
    tests: int
    confidence: float
