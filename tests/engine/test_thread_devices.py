"""Threads of ours use the rank's GPU: a new thread starts with GPU 0."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fake_accelerator import FakeAccelerator
from patience import GIVE_UP_S
from torchmuster.diagnose.probes.in_time import in_time
from torchmuster.launch.rank import collectives, heartbeat
from torchmuster.launch.rank.heartbeat import HeartbeatWriter

pytestmark = pytest.mark.engine

GPU = torch.device("cuda", 3)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeAccelerator:
    return FakeAccelerator().install(monkeypatch)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An NCCL group whose device the script has not named, unless a test sets it."""
    group = SimpleNamespace(bound_device_id=None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=group))
    return group


def run_in_thread(work: Any, name: str) -> None:
    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join(GIVE_UP_S)


def test_work_with_a_time_limit_uses_the_gpu_of_its_rank(
    gpus: FakeAccelerator, group: SimpleNamespace
) -> None:
    torch.accelerator.set_device_index(3)
    in_time(lambda: torch.accelerator.synchronize(), GIVE_UP_S)
    assert [call.name for call in gpus.calls_of("in-time")] == ["set_device_index", "synchronize"]
    assert gpus.calls_of("in-time")[0].argument == 3


def test_work_before_there_is_a_group_touches_no_gpu(gpus: FakeAccelerator) -> None:
    assert in_time(lambda: 7, GIVE_UP_S) == 7
    assert gpus.calls == []


# ---- the heartbeat


class Recorders:
    """Flight recorders that note who reads the entries, and when."""

    def __init__(self, gpus: FakeAccelerator, records: Path) -> None:
        self._gpus = gpus
        self._heartbeat = records / "rank-3.heartbeat.json"
        self.beats: list[int] = []  # the last one written when the entries were read
        self.blocks: threading.Event | None = None
        self.entered = threading.Event()

    def __call__(self, **options: bool) -> bytes:
        pg_status = {"0": {"last_enqueued_collective": 7, "last_completed_collective": 6}}
        if options == {"includeCollectives": False}:
            return json.dumps({"pg_status": pg_status}).encode()
        self._gpus.note("Event.query")
        self.beats.append(json.loads(self._heartbeat.read_text())["beat"])
        self.entered.set()
        blocks, self.blocks = self.blocks, None  # only the first read blocks
        if blocks is not None:
            blocks.wait(GIVE_UP_S)
        entry = {"process_group": ["0", "default"], "collective_seq_id": 7}
        return json.dumps({"entries": [entry], "pg_status": pg_status}).encode()


@pytest.fixture
def recorders(
    gpus: FakeAccelerator,
    group: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Recorders:
    found = Recorders(gpus, tmp_path)
    monkeypatch.setattr(collectives, "flight_recorders", lambda: {"gloo": found})
    monkeypatch.setattr(collectives, "group_names", lambda: ["0"])
    monkeypatch.setattr(heartbeat, "_STILL_AFTER_S", 0.0)
    return found


def test_a_heartbeat_is_written_before_the_collectives_are_read_on_the_ranks_gpu(
    recorders: Recorders, gpus: FakeAccelerator, group: SimpleNamespace, tmp_path: Path
) -> None:
    group.bound_device_id = GPU
    writer = HeartbeatWriter(3, tmp_path)
    writer.beat()
    run_in_thread(writer.beat, "heartbeat")
    assert recorders.beats == [2]
    assert [call.name for call in gpus.calls_of("heartbeat")] == ["set_device_index", "Event.query"]
    assert gpus.calls_of("heartbeat")[0].argument == 3
    written = json.loads((tmp_path / "rank-3.heartbeat.json").read_text())
    assert (written["beat"], written["begun"]) == (2, {"0": 7})
    assert [one["number"] for one in written["waits"]] == [7]


def test_the_gpu_of_a_group_without_device_is_that_of_its_first_step_or_of_the_local_rank(
    recorders: Recorders,
    gpus: FakeAccelerator,
    group: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    for recorded, index in ((None, 2), (torch.device("cpu"), 2), (GPU, 3)):
        gpus.calls.clear()
        monkeypatch.setattr(heartbeat, "_recorded_device", lambda recorded=recorded: recorded)
        writer = HeartbeatWriter(3, tmp_path)
        writer.beat()
        writer.beat()
        assert [call.name for call in gpus.calls] == ["set_device_index", "Event.query"]
        assert gpus.calls[0].argument == index


def test_a_recorder_that_blocks_is_read_once(
    recorders: Recorders, group: SimpleNamespace, tmp_path: Path
) -> None:
    group.bound_device_id = GPU
    blocks = recorders.blocks = threading.Event()
    writer = HeartbeatWriter(3, tmp_path)
    writer.beat()
    blocked = threading.Thread(target=writer.beat)
    blocked.start()
    assert recorders.entered.wait(GIVE_UP_S)
    (tmp_path / "rank-3.examine").touch()
    writer.beat()  # of the thread that a fork has started instead
    assert (tmp_path / "rank-3.stacks.txt").exists()
    assert not (tmp_path / "rank-3.examine").exists()
    assert len(recorders.beats) == 1
    blocks.set()
    blocked.join(GIVE_UP_S)
    assert writer._read_collectives()
    assert len(recorders.beats) == 2
