"""The launcher's hang monitor: tells a hang once, has it examined, keeps what comes, ends what cannot end well."""

import asyncio
import functools
import logging
from collections.abc import Awaitable
from pathlib import Path

import pytest

from torchmuster.finding import Finding
from torchmuster.launch import protocol
from torchmuster.launch.hangs.detector import HangWatch
from torchmuster.launch.heartbeat import Heartbeat, PendingCollective
from torchmuster.launch.history import evidence, run_state
from torchmuster.launch.launcher import hang_monitor as hang_monitor_module
from torchmuster.launch.launcher.hang_monitor import HangMonitor, devices_of
from torchmuster.launch.launcher.host import ConnectedHost
from torchmuster.runfolder import RunFolder, create_run_folder


class FakeChannel:
    """A machine that takes in what it is told."""

    def __init__(self) -> None:
        self.sent: list[protocol.ToAgent] = []

    async def send(self, message: protocol.ToAgent) -> None:
        self.sent.append(message)


class Scene(logging.Handler):
    """Two machines with a rank each, and what the launcher said of them."""

    def __init__(self, folder: Path, devices: tuple[str, ...] = ("CPU",)) -> None:
        super().__init__()
        self.run: RunFolder = create_run_folder(folder, "test")
        self.channels = [FakeChannel(), FakeChannel()]
        self.nodes = [
            ConnectedHost(place, name, channel, "part")  # type: ignore[arg-type]
            for place, (name, channel) in enumerate(zip("ab", self.channels, strict=True))
        ]
        for node in self.nodes:
            node.prepared = protocol.Prepared(ranks=1, devices=devices, fingerprint=None)
        self.said: list[str] = []
        self.shown: list[Finding] = []
        self.tasks: list[asyncio.Future[None]] = []
        self.hang_monitor: HangMonitor

    def begin(self, end_after_s: float | None = None) -> None:
        logging.getLogger("torchmuster.launch").addHandler(self)
        logging.getLogger("torchmuster.launch").setLevel(logging.INFO)
        self.hang_monitor = HangMonitor(
            self.nodes,
            self.run,
            later=self._later,
            end_after_s=end_after_s,
        )

    def emit(self, record: logging.LogRecord) -> None:
        findings = getattr(record, "findings", None)
        if findings is None:
            self.said.append(record.getMessage())
        else:
            self.shown.extend(findings)

    def _later(self, work: Awaitable[None]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def settle(self) -> None:
        while left := [task for task in self.tasks if not task.done()]:
            await asyncio.wait(left)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    made = functools.partial(HangWatch, lambda: now[0])
    monkeypatch.setattr(hang_monitor_module, "HangWatch", made)
    return now


def pass_time(it: Scene, clock: list[float], seconds: int, *, different: bool) -> None:
    """Let rank 0 wait, and rank 1 sleep, or wait in something else."""
    for _ in range(seconds // 2):
        clock[0] += 2
        for rank, node in enumerate(it.nodes):
            waits = rank == 0 or different
            operation = "all_reduce" if rank == 0 else "barrier"
            called = PendingCollective(group="0", number=9, operation=operation)
            heartbeat = Heartbeat(
                rank=rank,
                pid=100 + rank,
                beat=int(clock[0]),
                moves=3,
                doing=operation if waits else "time.sleep",
                place="train.py:8 in step",
                waiting=waits,
                begun={"0": 9},
                waits=(called,) if waits else (),
                state="S",
                busy=0.0,
            )
            it.hang_monitor.hear(node, protocol.Heartbeats(attempt=0, heartbeats=(heartbeat,)))
        it.hang_monitor.look()


def test_a_hang_is_told_examined_and_kept(tmp_path: Path, clock: list[float]) -> None:
    async def scene() -> Scene:
        it = Scene(tmp_path)
        it.begin()
        pass_time(it, clock, 30, different=False)
        assert [one.name for one in it.shown] == ["rank-elsewhere"]
        assert it.hang_monitor.finding is it.shown[0]
        await asyncio.sleep(0)
        while not it.channels[1].sent:
            await asyncio.sleep(0.01)
        for rank, node in enumerate(it.nodes):
            secret = "token=hf_0123456789abcdefghij"
            say = functools.partial(it.hang_monitor.hear, node)
            say(protocol.Output(rank=rank, file="stacks.txt", text=f"stack of {rank} {secret}"))
            say(protocol.Output(rank=rank, file="../../evil", text="not a name of ours"))
            say(protocol.Done(dumped_stacks=True))
        await it.settle()
        return it

    it = asyncio.run(scene())
    for channel in it.channels:
        assert channel.sent == [protocol.DumpStacks(ranks=(1, 0))]
    folder = it.run.hang / "1"
    assert sorted(one.name for one in folder.iterdir()) == [
        "rank-0.stacks.txt",
        "rank-1.stacks.txt",
    ]
    assert (folder / "rank-1.stacks.txt").read_text() == "stack of 1 token=[redacted]"
    (told,) = evidence.read_hangs(it.run)
    assert told.folder == folder
    assert told.finding.name == "rank-elsewhere"
    assert told.finding.what.startswith("rank 1 on b ")
    (said,) = it.said
    assert str(folder) in said
    assert [one.name for one in run_state.read_events(it.run)] == ["hang"]


def test_what_goes_on_is_told_again_in_short_and_the_end_too(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_monitor_module, "_EXAMINED_WITHIN_S", 0.01)

    async def scene() -> Scene:
        it = Scene(tmp_path)
        it.begin()
        pass_time(it, clock, 70, different=False)
        assert it.shown[0].why
        assert len(it.shown) >= 2
        assert not any(one.why for one in it.shown[1:])
        assert not it.hang_monitor.must_end
        await it.settle()
        assert len(list(it.run.hang.iterdir())) == 1
        for rank, node in enumerate(it.nodes):
            moved = Heartbeat(rank=rank, pid=100 + rank, beat=1, moves=4, state="R", busy=1.0)
            it.hang_monitor.hear(node, protocol.Heartbeats(attempt=0, heartbeats=(moved,)))
        it.hang_monitor.look()
        return it

    it = asyncio.run(scene())
    assert it.shown[-1].name == "hang-over"
    assert it.hang_monitor.finding is None
    assert [one.name for one in run_state.read_events(it.run)] == ["hang", "hang-over"]


@pytest.mark.parametrize(("there", "kept"), [(19, 20), (20, 20)])
def test_hangs_of_earlier_attempts_count_among_those_that_are_kept(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch, there: int, kept: int
) -> None:
    monkeypatch.setattr(hang_monitor_module, "_EXAMINED_WITHIN_S", 0.01)

    async def scene() -> Scene:
        it = Scene(tmp_path)
        for number in range(there):
            (it.run.hang / str(number + 1)).mkdir(parents=True)
        it.begin()
        pass_time(it, clock, 30, different=False)
        await it.settle()
        return it

    it = asyncio.run(scene())
    assert len(list(it.run.hang.iterdir())) == kept
    assert [one.name for one in it.shown] == ["rank-elsewhere"]


@pytest.mark.parametrize(
    ("different", "end_after_s", "after", "ended"),
    [
        (True, None, 40, False),
        (True, None, 80, True),  # the ranks can never meet
        (False, None, 600, False),  # whoever sleeps may wake up
        (False, 40.0, 60, True),
        (True, float("inf"), 600, False),
    ],
)
def test_what_cannot_end_well_is_ended(
    tmp_path: Path,
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    different: bool,
    end_after_s: float | None,
    after: int,
    ended: bool,
) -> None:
    monkeypatch.setattr(hang_monitor_module, "_EXAMINED_WITHIN_S", 0.01)

    async def scene() -> bool:
        it = Scene(tmp_path)
        it.begin(end_after_s)
        pass_time(it, clock, after, different=different)
        await it.settle()
        return it.hang_monitor.must_end

    assert asyncio.run(scene()) is ended


def test_a_hang_monitor_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    class Broken(HangWatch):
        def hear(self, *_: object) -> None:
            raise ZeroDivisionError("oh")

    it = Scene(tmp_path)
    it.begin()
    it.hang_monitor._watch = Broken()
    for _ in range(2):
        it.hang_monitor.hear(it.nodes[0], protocol.Heartbeats(attempt=0, heartbeats=()))
    it.hang_monitor.look()
    (said,) = it.said  # once
    assert "ZeroDivisionError('oh')" in said


def test_ranks_are_named_with_the_gpu_they_have(tmp_path: Path) -> None:
    assert devices_of(Scene(tmp_path).nodes) == {}
    found = devices_of(Scene(tmp_path, ("GPU 1 A100",)).nodes)
    assert found == {0: "GPU 1 A100", 1: "GPU 1 A100"}
