"""Messages between ranks: nccl-tests' factors, the slowest rank's time, and what the report says of it."""

import dataclasses
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from torchmuster.bench import collectives, record
from torchmuster.bench.bandwidth import bus_bytes_s
from torchmuster.bench.collectives import (
    CollectivesRequest,
    CollectiveTimes,
    MeasuredCollective,
    Timed,
)
from torchmuster.bench.collectives_report import collectives_report
from torchmuster.bench.environment import Environment
from torchmuster.errors import Impossible
from torchmuster.finding import Finding, Status
from torchmuster.plan.hardware import cluster_file as hardware_given

SIZES = (1024, 4096, 16384, 65536, 262144)
ASKED = CollectivesRequest(operations=("all-reduce",), sizes_bytes=SIZES, rounds=9, device="cpu")
HERE = Environment(
    host="gpu-server",
    system="Linux",
    cpu="a processor",
    cores=2,
    threads=None,
    memory_bytes=None,
    devices=(),
    driver=None,
    torch="2.13.0",
    python="3.12",
    torchmuster="0",
)


def answer(
    rank: int,
    *,
    slower: float = 1.0,
    wrong: int = 0,
    operation: str = "all-reduce",
    host: str = "gpu-server",
) -> CollectiveTimes:
    return CollectiveTimes(
        rank=rank,
        host=host,
        device="cpu",
        backend="gloo",
        timed=tuple(
            Timed(
                operation=operation,
                size_bytes=size,
                seconds=tuple(slower * (1e-4 + size / 1e9) for _ in range(9)),
                compared=size // 4,
                wrong=wrong,
                first_wrong="place 3 has 7, and must have 8" if wrong else "",
            )
            for size in SIZES
        ),
    )


def findings(measured: MeasuredCollective) -> dict[str, Finding]:
    made = collectives_report(
        measured, ASKED, environment=HERE, date="2026-01-31T12:00:00+00:00", took_s=5
    )
    return {one.name: one for one in made.findings}


@pytest.mark.parametrize(
    ("operation", "two", "four"),
    [
        ("all-reduce", 1.0, 1.5),
        ("all-gather", 0.5, 0.75),
        ("reduce-scatter", 0.5, 0.75),
        ("all-to-all", 0.5, 0.75),
        ("send-receive", 1.0, 1.0),
    ],
)
def test_bus_bandwidth_has_the_factors_of_nccl_tests(
    operation: str, two: float, four: float
) -> None:
    assert bus_bytes_s(operation, 1000, 1e-6, 2) == pytest.approx(two * 1e9)
    assert bus_bytes_s(operation, 1000, 1e-6, 4) == pytest.approx(four * 1e9)


def test_a_message_takes_what_it_takes_on_the_slowest_rank() -> None:
    measured = collectives.join_rank_times([answer(0), answer(1, slower=3.0), answer(2)])
    assert measured.ranks == 3
    assert measured.times["all-reduce"][1024][0] == pytest.approx(3 * (1e-4 + 1024 / 1e9))


def test_the_slowest_rank_may_be_another_one_in_each_round() -> None:
    one = dataclasses.replace(answer(0).timed[0], seconds=(1.0, 5.0))
    other = dataclasses.replace(one, seconds=(4.0, 2.0))
    measured = collectives.join_rank_times(
        [
            dataclasses.replace(answer(0), timed=(one,)),
            dataclasses.replace(answer(1), timed=(other,)),
        ]
    )
    assert measured.times["all-reduce"][1024] == (4.0, 5.0)


def test_the_report_ends_in_latency_bandwidth_and_where_half_of_it_is_reached(
    snapshot: SnapshotAssertion,
) -> None:
    made = collectives_report(
        collectives.join_rank_times([answer(0), answer(1)]),
        ASKED,
        environment=HERE,
        date="2026-01-31T12:00:00+00:00",
        took_s=5,
    )
    said = {one.name: one.what for one in made.findings}
    assert said == snapshot
    line = made.record.facts["lines"]["all-reduce"]
    assert line["latency_s"] == pytest.approx(1e-4)
    assert line["bytes_s"] == pytest.approx(1e9)
    assert made.record.series[0].labels == {
        "operation": "all-reduce",
        "size_bytes": 1024,
        "ranks": 2,
    }
    assert all("<svg" in one.svg for one in made.pictures)


def test_one_wrong_value_is_a_failure_that_names_the_rank() -> None:
    found = findings(collectives.join_rank_times([answer(0), answer(1, wrong=1)]))["values"]
    assert found.status is Status.FAILURE
    assert "on rank 1" in found.what
    assert "place 3 has 7, and must have 8" in found.evidence
    assert "muster check" in found.fix


def test_more_ranks_than_cores_are_said() -> None:
    assert "crowded" not in findings(collectives.join_rank_times([answer(0), answer(1)]))
    found = findings(collectives.join_rank_times([answer(rank) for rank in range(4)]))["crowded"]
    assert found.what == "4 ranks share 2 cores"
    assert "--ranks 2" in found.fix


def test_one_rank_has_nobody_to_talk_to() -> None:
    with pytest.raises(Impossible, match="with one rank") as raised:
        collectives.check_collectives_request(ASKED, ranks=1)
    assert raised.value.fix == "--ranks 2 or more"


def test_messages_that_cannot_be_shared_are_refused(snapshot: SnapshotAssertion) -> None:
    tiny = dataclasses.replace(ASKED, sizes_bytes=(8,))
    with pytest.raises(Impossible, match="8 bytes") as refused:
        collectives.check_collectives_request(tiny, ranks=4)
    assert refused.value == snapshot


def test_sizes_go_up_by_a_factor_and_end_with_the_largest() -> None:
    assert collectives.sizes_between(1024, 20000) == (1024, 4096, 16384, 20000)
    assert collectives.sizes_between(1024, 1024) == (1024,)
    with pytest.raises(Impossible, match="no sizes between 2048 and 1024"):
        collectives.sizes_between(2048, 1024)


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")])
def test_plans_can_be_made_with_links_as_they_were_measured(
    tmp_path: Path, hosts: tuple[str, str]
) -> None:
    sent = [answer(rank, operation="send-receive", host=host) for rank, host in enumerate(hosts)]
    made = collectives_report(
        collectives.join_rank_times(sent),
        ASKED,
        environment=HERE,
        date="2026-01-31T12:00:00",
        took_s=5,
    )
    record.write_record(tmp_path / "record.json", made.record)
    (tmp_path / "cluster.yaml").write_text(
        "machines: 2\ncards_per_machine: 2\ncard: T4\ncheck: record.json\n", encoding="utf-8"
    )
    hardware = hardware_given.parse_hardware(str(tmp_path / "cluster.yaml"))
    near = hosts[0] == hosts[1]
    link, other = (hardware.within, hardware.between) if near else (hardware.between, hardware.within)  # fmt: skip
    assert link.latency_s == pytest.approx(1e-4)
    assert link.bytes_s == pytest.approx(1e9 if near else 5e8)  # two cards share a network
    assert "measured by muster bench" in link.source
    assert "measured" not in other.source
