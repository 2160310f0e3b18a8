"""Results of checks that nobody made: groups of any size, with faults where they are wanted."""

import random

from torchmuster.diagnose.links.model import End, Figures, Link, Problem
from torchmuster.diagnose.rank_record import Matmul, Operation, Pair, RankRecord, Values
from torchmuster.diagnose.result import GroupResult, Machine
from torchmuster.finding import Finding, Status

WRONG = Values(compared=1000, wrong=1, place=7, got=3.0, expected=2.0)
RIGHT = Values(compared=1000)


def machine(place: int, name: str | None = None, **changes: object) -> Machine:
    fields: dict[str, object] = {
        "name": name or f"node{place + 1}",
        "place": place,
        "host": f"node{place + 1}",
        "system": "linux",
        "python": "3.11.7",
        "torch": "2.13.0+cpu",
        "torchmuster": "0.1.0",
        "cores": 2,
        "addresses": (f"10.77.0.{place + 11}",),
        "clock_offset_s": 0.001,
        "ranks": 1,
    }
    return Machine(**{**fields, **changes})  # type: ignore[arg-type]


def link(source: Machine, target: Machine, bytes_per_s: float = 1.2e9, problem: str = "") -> Link:
    figures = None
    if not problem:
        figures = Figures(bytes_per_s=bytes_per_s, round_trip_s=0.0002)
    return Link(source=_end(source), target=_end(target), problem=Problem(problem), figures=figures)


def _end(one: Machine) -> End:
    return End(name=one.name, place=one.place, system="linux", address=f"10.77.0.{one.place}")


def rank(number: int, size: int = 2, **changes: object) -> RankRecord:
    fields: dict[str, object] = {
        "rank": number,
        "world_size": size,
        "host": f"node{number + 1}",
        "node": number,
        "local_rank": 0,
        "device": "cpu",
        "device_name": "Some CPU",
        "backend": "gloo",
        "stage": "end",
        "matmuls": (Matmul(precision="float32", flops_per_s=150e9, values=RIGHT),),
        "operations": (Operation(name="all-reduce", values=RIGHT),),
        "pairs": tuple(
            Pair(peer=peer, values=RIGHT, bytes_per_s=1e9) for peer in range(size) if peer != number
        ),
        "ended": True,
    }
    return RankRecord(**{**fields, **changes})  # type: ignore[arg-type]


def group(count: int, *, pairs_each: int | None = None, **changes: object) -> GroupResult:
    """Return a healthy group; in a large one each machine measures only some of its links."""
    maker = random.Random(1)
    machines = [machine(place) for place in range(count)]
    reach = count if pairs_each is None else pairs_each + 1
    links = [
        link(source, machines[(source.place + step) % count], 1.2e9 * maker.uniform(0.8, 1.0))
        for source in machines
        for step in range(1, reach)
    ]
    fields: dict[str, object] = {
        "machines": tuple(machines),
        "findings": (),
        "links": tuple(links),
        "seconds": 12.3,
    }
    return GroupResult(**{**fields, **changes})  # type: ignore[arg-type]


FINDING = Finding(
    name="blocked-dropped",
    status=Status.FAILURE,
    what="node1 does not reach node3",
    why="packets vanish",
    fix="sudo ufw allow from 10.77.0.11",
    evidence="timeout after 3 s",
)
