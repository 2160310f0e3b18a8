"""Which machines of a group can work together, as the links between them and their versions show."""

from collections.abc import Collection, Sequence

from torchmuster.diagnose.links.model import End, Link
from torchmuster.launch.launcher.node_handle import Node
from torchmuster.launch.network.reach import Place, gloo_calls


def able_together(nodes: Sequence[Node], apart: Collection[tuple[int, int]]) -> list[list[Node]]:
    """Divide machines into groups in which all can work together.

    ``apart`` are the places of two machines of which one does not reach the other.
    """
    groups: list[list[Node]] = []
    for node in nodes:
        for group in groups:
            if all(_fit(node, other, apart) for other in group):
                group.append(node)
                break
        else:
            groups.append([node])
    return groups


def _fit(one: Node, other: Node, apart: Collection[tuple[int, int]]) -> bool:
    places = one.place, other.place
    return places not in apart and places[::-1] not in apart and _kind(one) == _kind(other)


def _kind(node: Node) -> tuple[str, str]:
    assert node.record is not None
    return node.record.system, (node.record.torch or "").partition("+")[0]


def apart(links: Sequence[Link], *, both_ways: bool) -> set[tuple[int, int]]:
    """Return the places between which ranks would wait for each other in vain.

    ``both_ways`` is for NCCL; of two machines, only one calls the other for gloo.
    """
    return {link.places for link in links if _useless(link, both_ways=both_ways)}


def _useless(link: Link, *, both_ways: bool) -> bool:
    if link.meeting_problem or (link.figures is not None and link.figures.stalled):
        return True
    return bool(link.problem) and (both_ways or _gloo_calls(link.source, link.target))


def _gloo_calls(source: End, target: End) -> bool:
    if source.address is None or target.address is None:
        return True
    caller, called = (
        Place(name=one.name, system=one.system, address=one.address or "")
        for one in (source, target)
    )
    return gloo_calls(caller, called)


def reached(links: Sequence[Link]) -> set[int]:
    """Return the places that all who tried did reach."""
    tried = {link.target.place for link in links}
    return tried - {link.target.place for link in links if link.problem or link.meeting_problem}
