"""Links between machines that do not exist: all good, but for what a test says."""

import itertools
from typing import Any

from msgspec.structs import replace

from torchmuster.diagnose.links.model import Link, LinkHost, Problem, Speed
from torchmuster.launch.protocol import Address

GOOD = Speed(bytes_per_s=1.1e9)


def link_host(place: int, **changed: Any) -> LinkHost:
    known = LinkHost(
        name=f"node{place + 1}",
        place=place,
        system="linux",
        addresses=(Address(address=f"10.0.0.{place + 1}", interface="eth0"),),
        port=40000,
        rendezvous_port=29400 if place == 0 else None,
    )
    return replace(known, **changed)


class Group:
    """All links of a group, of which a test changes one direction or both."""

    def __init__(self, count: int, **hosts: Any) -> None:
        self.hosts = [link_host(place, **hosts) for place in range(count)]
        self._links: dict[tuple[int, int], Link] = {}
        for source, target in itertools.permutations(self.hosts, 2):
            self._links[source.place, target.place] = Link(
                source=source,
                target=target,
                problem=Problem.NONE,
                rendezvous_problem=Problem.NONE if target.place == 0 else None,
                address=target.addresses[0],
                source_address=source.addresses[0].address,
                speed=GOOD,
            )

    def change(self, source: int, target: int, /, **changed: Any) -> "Group":
        for name in ("problem", "rendezvous_problem"):
            if name in changed:
                changed[name] = Problem(changed[name])
        self._links[source, target] = replace(self._links[source, target], **changed)
        return self

    def speed(self, first: int, second: int, **changed: Any) -> "Group":
        speed = replace(GOOD, **changed)
        return self.change(first, second, speed=speed).change(second, first, speed=speed)

    @property
    def links(self) -> list[Link]:
        return list(self._links.values())
