"""Bad links with one cause: a host, or each link by itself (``diagnose/blame.py``)."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchmuster.diagnose.blame import Blamed, blame
from torchmuster.diagnose.links.model import End, Link, by_places


@dataclass(frozen=True, kw_only=True)
class LinkGroup:
    """Bad links with one cause; ``end`` is the host that causes it, if it is one."""

    kind: Blamed
    links: tuple[Link, ...]
    end: End | None = None

    @property
    def words(self) -> str:
        """``the link from node1 to node2``, ``all links to node2``."""
        first = self.links[0]
        end = self.end.name if self.end is not None else ""
        match self.kind:
            case Blamed.EVERYTHING:
                return "all links of the group"
            case Blamed.END:
                return f"all links of {end}"
            case Blamed.INTO:
                return f"all links to {end}"
            case Blamed.OUT_OF:
                return f"all links from {end}"
            case Blamed.LINK:
                return f"the link between {first.source.name} and {first.target.name}"
            case Blamed.DIRECTION:
                return f"the link from {first.source.name} to {first.target.name}"

    @property
    def suspects(self) -> list[End]:
        """The hosts to check: the one that causes it, or all ends of the links."""
        if self.end is not None:
            return [self.end]
        ends: dict[int, End] = {}
        for link in self.links:
            ends.setdefault(link.source.place, link.source)
            ends.setdefault(link.target.place, link.target)
        return list(ends.values())

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts to check."""
        return tuple(end.name for end in self.suspects)


def grouped(bad: Sequence[Link], links: Sequence[Link]) -> list[LinkGroup]:
    """Group the bad links among all known ones so that as few causes as possible are named."""
    known, wrong = by_places(links), by_places(bad)
    ends = {link.source.place: link.source for link in links}
    ends |= {link.target.place: link.target for link in links}
    groups = []
    for cause in blame(wrong.keys(), known.keys()):
        members = tuple(wrong[direction] for direction in cause.directions)
        end = None if cause.end is None else ends[cause.end]
        groups.append(LinkGroup(kind=cause.kind, links=members, end=end))
    return groups
