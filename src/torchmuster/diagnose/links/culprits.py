"""Find the cause of links with the same fault: one host, or each link by itself.

If all links of a host are bad, the finding names the host and not its links.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from torchmuster.diagnose.links.model import End, Link, by_places

Kind = Literal["everywhere", "of", "into", "out of", "between", "from"]

# With fewer links, either end may be the cause.
_FEWEST_LINKS = 2


@dataclass(frozen=True, kw_only=True)
class LinkGroup:
    """Bad links with one cause; ``end`` is the host that causes it, if it is one."""

    kind: Kind
    links: tuple[Link, ...]
    end: End | None = None

    @property
    def words(self) -> str:
        """``the link from node1 to node2``, ``all links to node2``."""
        first = self.links[0]
        return {
            "everywhere": "all links of the group",
            "of": f"all links of {self.end.name if self.end else ''}",
            "into": f"all links to {self.end.name if self.end else ''}",
            "out of": f"all links from {self.end.name if self.end else ''}",
            "between": f"the link between {first.source.name} and {first.target.name}",
            "from": f"the link from {first.source.name} to {first.target.name}",
        }[self.kind]

    @property
    def is_one_link(self) -> bool:
        """Whether it is about a single link, in one direction or both."""
        return self.kind in ("between", "from")

    @property
    def suspects(self) -> list[End]:
        """The hosts to check: the one that causes it, or all ends of the links."""
        if self.end is not None:
            return [self.end]
        ends = [end for link in self.links for end in (link.source, link.target)]
        return list({end.place: end for end in ends}.values())

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts to check."""
        return tuple(end.name for end in self.suspects)


def grouped(bad: Sequence[Link], links: Sequence[Link]) -> list[LinkGroup]:
    """Group the bad links among all known ones so that as few causes as possible are named."""
    known = {link.places for link in links}
    left = by_places(bad)
    ends = {end.place: end for link in links for end in (link.source, link.target)}
    if len(ends) > _FEWEST_LINKS and left.keys() == known:
        return [LinkGroup(kind="everywhere", links=tuple(bad))]
    found: list[LinkGroup] = []
    all_bad = set(left)
    while blamed := _most_to_blame(left.keys(), all_bad, known, ends.values()):
        kind, end, places = blamed
        members = tuple(left.pop(one) for one in sorted(places))
        found.append(LinkGroup(kind=kind, links=members, end=end))
    while left:
        link = left.pop(next(iter(left)))
        back = left.pop((link.target.place, link.source.place), None)
        if back is None:
            found.append(LinkGroup(kind="from", links=(link,)))
        else:
            found.append(LinkGroup(kind="between", links=(link, back)))
    return found


_Places = set[tuple[int, int]]


def _most_to_blame(
    left: Set[tuple[int, int]], bad: _Places, known: _Places, ends: Iterable[End]
) -> tuple[Kind, End, _Places] | None:
    """Return the host whose links (in, out or both) are all bad and that explains the most links.

    A link between two such hosts is explained by either; only unexplained links count.
    """
    kinds: tuple[tuple[Kind, Callable[[int, tuple[int, int]], bool]], ...] = (
        ("of", lambda place, link: place in link),
        ("into", lambda place, link: place == link[1]),
        ("out of", lambda place, link: place == link[0]),
    )
    best: tuple[int, Kind, End, _Places] | None = None
    for end in ends:
        for kind, belongs in kinds:
            its = {link for link in known if belongs(end.place, link)}
            explains = its & left
            others = {place for link in explains for place in link} - {end.place}
            if len(others) < _FEWEST_LINKS or not its <= bad:
                continue
            if best is None or len(explains) > best[0]:
                best = len(explains), kind, end, explains
    return best[1:] if best else None
