"""What flight recorders of several ranks say together: gloo's own dumps, and such as NCCL writes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchmuster.finding import Finding
from torchmuster.launch.hangs import flight_recorder
from torchmuster.launch.hangs.flight_recorder import analyse_flight_records, read_flight_record

Dump = dict[str, Any]


def gloo(*calls: tuple[str, list[int], bool], group: str = "0", first: int = 1) -> Dump:
    """Return a dump as torch 2.13 writes it for gloo: the state never changes, the members are unknown."""
    return {
        "version": "2.10",
        "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}},
        "entries": [
            entry(f"gloo:{op}", shape, number, group, retired=done, state="scheduled")
            for number, (op, shape, done) in enumerate(calls, first)
        ],
    }


def nccl(*calls: tuple[str, list[int], bool], ranks: str = "[0, 1, 2]", first: int = 1) -> Dump:
    """Return a dump with the fields that torch's source gives NCCL; none was ever run here."""
    states = {True: "completed", False: "started"}
    return {
        "version": "2.10",
        "pg_config": {"0": {"desc": "default_pg", "name": "0", "ranks": ranks}},
        "entries": [
            entry(f"nccl:{op}", shape, number, "0", retired=False, state=states[done])
            for number, (op, shape, done) in enumerate(calls, first)
        ],
    }


def entry(name: str, shape: list[int], number: int, group: str, **more: object) -> Dump:
    return {
        "profiling_name": name,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "process_group": [group, "default_pg"],
        "input_sizes": [shape] if shape else [],
        "input_dtypes": ["Float"] if shape else [],
        **more,
    }


DONE = ("all_reduce", [8], True)
WAITS = ("all_reduce", [8], False)
Make = Callable[..., Dump]
both = pytest.mark.parametrize("make", [gloo, nccl])


def one(dumps: dict[int, Dump]) -> Finding:
    (finding,) = analyse_flight_records(dumps)
    return finding


@both
def test_the_first_collective_that_differs_is_named_with_who_called_what(make: Make) -> None:
    barrier: tuple[str, list[int], bool] = ("barrier", [], False)
    finding = one({0: make(DONE, WAITS), 1: make(DONE, barrier), 2: make(DONE, WAITS)})
    assert finding.name == "collectives-differ"


@both
def test_shapes_that_differ_are_named(make: Make) -> None:
    finding = one({0: make(WAITS), 1: make(("all_reduce", [9], False))})
    assert finding.name == "collectives-differ"


@both
def test_where_shapes_may_differ_they_are_no_trouble(make: Make) -> None:
    assert (
        analyse_flight_records({0: make(("gather", [8], True)), 1: make(("gather", [9], True))})
        == []
    )


@both
def test_a_rank_that_is_late_calls_nothing_different(make: Make) -> None:
    assert analyse_flight_records({0: make(DONE, WAITS), 1: make(DONE, WAITS), 2: make(DONE)}) == []


def test_what_was_dropped_from_a_full_recorder_is_not_missed() -> None:
    assert analyse_flight_records({0: gloo(DONE, DONE, first=99), 1: gloo(DONE, first=100)}) == []


def test_messages_between_two_ranks_are_left_out() -> None:
    message = entry("gloo:send 0->1", [8], 7, "0", retired=False) | {"is_p2p": True}
    assert analyse_flight_records({0: {"entries": [message]}, 1: {"entries": []}}) == []


@pytest.mark.parametrize(
    "text", ["", "no JSON", "[]", "7", '{"entries": 3}', '{"entries": [7, {}, {"is_p2p": 1}]}']
)
def test_what_is_not_a_dump_says_nothing(text: str) -> None:
    assert analyse_flight_records({0: read_flight_record(text), 1: read_flight_record(text)}) == []


def test_dumps_recorded_of_real_ranks() -> None:
    recorded = json.loads(Path(__file__).with_name("gloo_dumps.json").read_text(encoding="utf-8"))
    found = {
        kind: analyse_flight_records({int(rank): dump for rank, dump in dumps.items()})
        for kind, dumps in recorded.items()
    }
    assert {kind: [one.name for one in findings] for kind, findings in found.items()} == {
        "asleep": [],
        "order": ["collectives-differ"],
    }


@pytest.mark.parametrize(
    "text", ["", "[]", "[" * 100_000, b"\xff", '{"pg_config": ' + "[" * 100_000]
)
def test_what_is_not_a_dump_is_an_empty_one(text: str | bytes) -> None:
    assert flight_recorder.read_flight_record(text) == {}
