"""Results of checks that nobody made: groups of any size, with faults where they are wanted."""

from typing import Any

from msgspec.structs import replace

from torchmuster.diagnose.links.model import Link, LinkHost, Problem, Speed
from torchmuster.diagnose.rank_record import Matmul, Operation, Pair, RankRecord, Values
from torchmuster.diagnose.result import Machine
from torchmuster.finding import Finding, Status
from torchmuster.launch.protocol import NodeRecord

WRONG = Values(compared=1000, wrong=1, place=7, got=3.0, expected=2.0)
RIGHT = Values(compared=1000)


def machine(place: int, name: str | None = None, **changes: Any) -> Machine:
    name = name or f"node{place + 1}"
    record = NodeRecord(
        host=name,
        system="linux",
        python="3.11.7",
        torch="2.13.0+cpu",
        torchmuster="0.1.0",
        cores=2,
        clock_unix_s=0.0,
        addresses=(),
    )
    known = Machine(name=name, place=place, record=record, clock_offset_s=0.001, ranks=1)
    return replace(known, **changes)


def link(source: Machine, target: Machine, bytes_per_s: float = 1.2e9, problem: str = "") -> Link:
    speed = None if problem else Speed(bytes_per_s=bytes_per_s)
    return Link(
        source=_link_host(source), target=_link_host(target), problem=Problem(problem), speed=speed
    )


def _link_host(one: Machine) -> LinkHost:
    return LinkHost(name=one.name, place=one.place, system="linux")


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


FINDING = Finding(
    name="blocked-dropped",
    status=Status.FAILURE,
    what="node1 does not reach node3",
    why="packets vanish",
    fix="sudo ufw allow from 10.77.0.11",
    evidence="timeout after 3 s",
)
