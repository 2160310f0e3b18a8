"""What ``muster top`` knows: which rank is on which GPU, who else is, and in which order ranks come."""

import dataclasses
from pathlib import Path

import pytest

from made_up_runs import NOW
from torchmuster.devices.model import DeviceProcess
from torchmuster.monitor import catalogue
from torchmuster.monitor.views.top_picture import ORDERS, RankRow, TopWatch, ordered_rows
from unit.monitor.made_up_top import (
    FIRST_PID,
    gpu,
    heartbeat,
    look,
    machine,
    on_machine,
    running,
    with_gpus,
)


def test_ranks_and_their_gpus_are_brought_together(tmp_path: Path) -> None:
    running(tmp_path, heartbeat(0), heartbeat(1))
    picture = look(tmp_path, with_gpus(3))
    assert [one.ranks for one in picture.devices] == [[("llm", 0)], [("llm", 1)], []]
    assert [one.gpu for one in picture.ranks] == ["0", "1"]
    assert picture.ranks[0].device_bytes == 70 * 2**30
    assert picture.ranks[0].device_busy == 0.9
    assert [one.pid for one in picture.devices[2].others] == [FIRST_PID + 2]
    assert picture.runs[0].values[catalogue.STEPS] == 10
    assert picture.host.values[catalogue.HOST_MEMORY] > 0


def test_a_rank_on_two_gpus(tmp_path: Path) -> None:
    running(tmp_path, heartbeat(0))
    node = machine(gpu(0, pid=FIRST_PID), gpu(1, pid=FIRST_PID, utilization_percent=None))
    (rank,) = look(tmp_path, node).ranks
    assert rank.gpu == "0,1"
    assert rank.device_bytes == 140 * 2**30
    assert rank.device_busy == 0.9


def test_without_a_gpu_there_are_the_ranks_and_the_machine(tmp_path: Path) -> None:
    running(tmp_path, heartbeat(0))
    picture = look(tmp_path, machine())
    assert picture.devices == []
    assert picture.ranks[0].gpu == ""
    assert picture.ranks[0].device_busy is None
    assert picture.host.name == "a"


def test_without_a_run_there_are_the_gpus(tmp_path: Path) -> None:
    picture = look(tmp_path, with_gpus(1))
    assert (len(picture.devices), picture.ranks, picture.runs) == (1, [], [])


def test_a_process_with_a_ranks_number_on_another_machine_is_not_that_rank(tmp_path: Path) -> None:
    run = running(tmp_path, heartbeat(0), host="b.cluster")
    picture = look(tmp_path, with_gpus(1))
    assert picture.ranks[0].gpu == ""
    assert picture.devices[0].ranks == []
    on_machine(run, heartbeat(0), host="a.cluster")
    assert look(tmp_path, with_gpus(1)).ranks[0].gpu == "0", "the same machine, with its domain"


def test_gpus_of_the_runs_other_machines_are_shown_as_these_told_of_them(tmp_path: Path) -> None:
    run = running(tmp_path, heartbeat(0))
    there = gpu(0, host="b", pid=FIRST_PID + 1)
    on_machine(run, heartbeat(1), host="b", devices=(there,))
    # This machine's are looked at, however many files tell of it.
    on_machine(run, heartbeat(0), host="a", devices=(gpu(7, host="old"),))
    picture = look(tmp_path, with_gpus(1))
    assert [(one.host, one.device.uuid) for one in picture.devices] == [
        ("a", "GPU-a-0"),
        ("b", "GPU-b-0"),
    ]
    assert [(one.host, one.gpu) for one in picture.ranks] == [("a", "0"), ("b", "0")]
    assert picture.hosts == ["a", "b"]


def test_one_run_among_several(tmp_path: Path) -> None:
    first = running(tmp_path, heartbeat(0), name="one")
    running(tmp_path, heartbeat(0, pid=1), name="two")
    assert {one.job for one in look(tmp_path, machine()).ranks} == {"one", "two"}
    picture = look(tmp_path, machine(), only=first)
    assert [one.job for one in picture.ranks] == ["one"]
    assert [one.id for one in picture.runs] == [first.id]


def test_the_rank_that_holds_up_the_others(tmp_path: Path) -> None:
    heartbeats = [heartbeat(rank, communication_share=0.5) for rank in range(4)]
    running(tmp_path, *heartbeats[:2], heartbeat(2, communication_share=0.1), heartbeats[3])
    assert [one.holds_up for one in look(tmp_path, machine()).ranks] == [False, False, True, False]


def test_how_busy_a_gpu_was_is_remembered(tmp_path: Path) -> None:
    nodes = iter([with_gpus(1), machine(gpu(0, utilization_percent=None)), with_gpus(2)])
    watch = TopWatch(tmp_path, lambda: next(nodes))
    pictures = [watch.look(NOW + second) for second in range(3)]
    assert pictures[-1].devices[0].busy_percents == (90, 0, 90)
    assert pictures[-1].devices[1].busy_percents == (90,)


def test_alerts_are_raised_here_as_well(tmp_path: Path) -> None:
    node = machine(gpu(0, xid_errors=((79, 1),)))
    (alert,) = look(tmp_path, node).alerts
    assert alert.alert.name == "MusterGpuError"
    assert "GPU-a-0 (Xid 79)" in alert.summary


def test_windows_of_a_desktop_do_not_compute(tmp_path: Path) -> None:
    window = DeviceProcess(pid=5, compute=False, memory_bytes=1)
    (row,) = look(tmp_path, machine(gpu(0, processes=(window,)))).devices
    assert row.others == []


def _ranks(**values: list[object]) -> list[RankRow]:
    count = len(next(iter(values.values())))
    return [
        RankRow(
            job="llm",
            run="r",
            host="a",
            heartbeat=heartbeat(rank, **{name: several[rank] for name, several in values.items()}),
        )
        for rank in range(count)
    ]


@pytest.mark.parametrize(
    ("order", "values"),
    [
        ("step", {"step": [5, None, 9, 9]}),
        ("silent", {"silent_s": [5.0, 0.0, 9.0, 9.0]}),
        ("data", {"data_share": [0.5, None, 0.9, 0.9]}),
        ("others", {"communication_share": [0.5, None, 0.9, 0.9]}),
        ("cpus", {"busy": [0.5, None, 0.9, 0.9]}),
        ("memory", {"memory_bytes": [5, None, 9, 9]}),
    ],
)
def test_the_most_comes_first_and_what_is_not_known_last(
    order: str, values: dict[str, list[object]]
) -> None:
    ranks = _ranks(**values)
    assert [one.heartbeat.rank for one in ordered_rows(ranks, order)] == [2, 3, 0, 1]
    backwards = [one.heartbeat.rank for one in ordered_rows(ranks, order, reverse=True)]
    assert backwards == ([1, 0, 2, 3] if order == "silent" else [0, 2, 3, 1])


def test_ranks_are_counted_upwards_and_busy_ones_downwards() -> None:
    ranks = _ranks(step=[1, 1, 1])
    ranks[2] = dataclasses.replace(ranks[2], devices=[gpu(0)])
    ranks[1] = dataclasses.replace(ranks[1], devices=[gpu(1, pid=1)])
    assert [one.heartbeat.rank for one in ordered_rows(ranks, "rank")] == [0, 1, 2]
    assert [one.heartbeat.rank for one in ordered_rows(ranks, "rank", reverse=True)] == [2, 1, 0]
    assert [one.heartbeat.rank for one in ordered_rows(ranks, "busy")] == [1, 2, 0]
    assert all(len(ordered_rows(ranks, order)) == 3 for order in ORDERS)
