"""Links between machines that do not exist: all good, but for what a test says."""

from dataclasses import replace
from typing import Any

import msgspec

from torchmuster.diagnose.links.model import End, Figures, Link, Problem

GOOD = Figures(
    bytes_per_s=1.1e9,
    round_trip_s=0.0001,
)


def end(place: int, **changed: Any) -> End:
    known = End(
        name=f"node{place + 1}",
        place=place,
        system="linux",
        address=f"10.0.0.{place + 1}",
        interface="eth0",
        network="10.0.0.0/24",
        mtu_bytes=1500,
        rendezvous_port=29400 if place == 0 else None,
    )
    return replace(known, **changed)


class Group:
    """All links of a group; ``group[0, 1] = {...}`` changes one direction."""

    def __init__(self, count: int, **ends: Any) -> None:
        self.ends = [end(place, **ends) for place in range(count)]
        self._links = {
            (one.place, other.place): Link(
                source=one,
                target=other,
                problem=Problem.NONE,
                rendezvous_problem=Problem.NONE if other.place == 0 else None,
                port=40000,
                figures=GOOD,
            )
            for one in self.ends
            for other in self.ends
            if one is not other
        }

    def change(self, one: int, other: int, /, **changed: Any) -> "Group":
        for name in ("problem", "rendezvous_problem"):
            if name in changed:
                changed[name] = Problem(changed[name])
        self._links[one, other] = replace(self._links[one, other], **changed)
        return self

    def figures(self, one: int, other: int, **changed: Any) -> "Group":
        figures = msgspec.structs.replace(GOOD, **changed)
        return self.change(one, other, figures=figures).change(other, one, figures=figures)

    @property
    def links(self) -> list[Link]:
        return list(self._links.values())
