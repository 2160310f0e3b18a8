"""The course of a check, with machines that are played: what is done with whom, and what is told."""

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from patience import GIVE_UP_S
from torchmuster.diagnose import group, probing
from torchmuster.diagnose.group import GroupCheck
from torchmuster.diagnose.links.model import Link, LinkHost, Problem
from torchmuster.diagnose.rank_record import RankRecord, line_of
from torchmuster.diagnose.result import GroupResult
from torchmuster.errors import MusterError
from torchmuster.finding import Finding, Status
from torchmuster.launch import protocol
from torchmuster.launch.job import JobSpec, Limits
from torchmuster.launch.launcher.run import JobOutcome, Result
from torchmuster.launch.transports.channel import Arrive
from torchmuster.runfolder import RunFolder

SMALL = Finding(name="shm-small", status=Status.NOTE, what="/dev/shm is small", fix="mount it")
WELL = Finding(name="memory", status=Status.OK, what="8 GiB")


class Played:
    """A node agent, an examiner and ranks, which do what the test wants them to."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.torch: str | None = "2.13.0+cpu"
        self.clock_offset_s = 0.0
        self.finds = [SMALL, WELL]
        self.refuses: MusterError | None = None  # to give devices
        self.examiner_ends = False
        self.ranks_hang = False
        self.failure: protocol.Failure | None = None
        self.asked: list[protocol.ToAgent] = []
        self._says: asyncio.Queue[protocol.FromAgent | None] = asyncio.Queue()

    def hello(self) -> None:
        record = protocol.NodeRecord(
            host=f"h{self.place}",
            system="linux",
            python="3.11.7",
            torch=self.torch,
            torchmuster="0",
            cores=8,
            clock_unix_s=time.time() + self.clock_offset_s,
            addresses=(),
        )
        self._says.put_nowait(protocol.Hello(protocol=protocol.PROTOCOL, record=record))

    async def send(self, message: protocol.ToAgent) -> None:
        self.asked.append(message)
        for answer in self._answers(message):
            self._says.put_nowait(answer)

    async def receive(self) -> protocol.FromAgent | None:
        return await self._says.get()

    def say_alive(self) -> None:
        pass

    def why_closed(self) -> str:
        return ""

    async def close(self) -> None:
        pass

    def of(self, kind: type[protocol.Message]) -> list[Any]:
        return [one for one in self.asked if isinstance(one, kind)]

    def _answers(self, message: protocol.ToAgent) -> Sequence[protocol.FromAgent]:
        here = protocol.Address(address=f"10.0.0.{self.place + 1}", interface="eth0")
        match message:
            case protocol.Relay() if message.token is not None:
                return [protocol.Done()]
            case protocol.Relay() if self.examiner_ends:
                return [protocol.Relay(text="ImportError: psutil", is_last=True, exit_code=1)]
            case protocol.Relay():
                asked = json.loads(message.text)
                told = [finding.as_json() for finding in self.finds]
                return [protocol.Relay(text=json.dumps({"id": asked["id"], "answer": told}))]
            case protocol.Prepare() if self.refuses:
                error = self.refuses
                trouble = protocol.Trouble(name=error.name, what=error.what, fix=error.fix)
                return [protocol.Done(trouble=trouble)]
            case protocol.Prepare():
                code = protocol.Fingerprint(script_sha256="1", code_sha256="1")
                return [protocol.Prepared(ranks=1, devices=("CPU",), fingerprint=code)]
            case protocol.Listen():
                return [protocol.Listening(port=29400, addresses=(here,), reason="free")]
            case protocol.Reach():
                results = [
                    protocol.ReachResult(target=one, problem="", seconds=0.0, local=here)
                    for one in message.targets
                ]
                return [protocol.Reached(results=tuple(results))]
            case protocol.Start():
                return self._ranks(message)
            case protocol.Stop():
                return [protocol.Ended(attempt=message.attempt, good=True)]
        return []

    def _ranks(self, start: protocol.Start) -> Sequence[protocol.FromAgent]:
        started = protocol.Done()
        record = RankRecord(
            rank=start.first_rank,
            world_size=start.world_size,
            host=f"h{self.place}",
            node=start.node_rank,
            stage="end",
            ended=True,
        )
        if self.ranks_hang:
            return [started]
        if self.failure:
            ended = protocol.Ended(attempt=start.attempt, good=False, failures=(self.failure,))
            return [started, ended]
        output = protocol.Output(rank=start.first_rank, text=f"{line_of(record)}\nother words\n")
        ended = protocol.Ended(attempt=start.attempt, good=True)
        return [started, output, ended]


class PlayedTransport:
    """A way to machines of which some may not come."""

    def __init__(
        self, machines: Sequence[Played], absent: dict[int, protocol.Trouble | None]
    ) -> None:
        self._machines = machines
        self._absent = absent

    @property
    def places(self) -> Sequence[str]:
        return [f"node{one.place + 1}" for one in self._machines]

    async def open(self, arrive: Arrive) -> None:
        for one in self._machines:
            if one.place not in self._absent:
                one.hello()
                arrive(one.place, one)

    async def reopen(self, place: int) -> None:
        raise NotImplementedError

    def waiting_for(self, place: int) -> str:
        return "ssh is connecting"

    def gave_up(self, place: int) -> protocol.Trouble | None:
        return self._absent.get(place)

    def rejoins(self, place: int) -> bool:
        return False

    async def close(self) -> None:
        pass


class Said:
    def __init__(self) -> None:
        self.words: list[str] = []

    def say(self, text: str) -> None:
        self.words.append(text)

    def world(self, size: int) -> None: ...

    def output(self, rank: int, text: str) -> None: ...

    def show(self, findings: Sequence[Finding]) -> None: ...


class Scene:
    """Machines, the links between them, and a check of them."""

    def __init__(self, folder: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.machines = [Played(place) for place in range(count)]
        self.absent: dict[int, protocol.Trouble | None] = {}
        self.blocked: set[tuple[int, int]] = set()
        self.said: list[str] = []
        self.join_s = 10.0

        async def survey(examiners: Sequence[Any], **_: object) -> list[Link]:
            places = [one.place for one in examiners]
            return [self._link(one, other) for one in places for other in places if one != other]

        monkeypatch.setattr(group, "survey_links", survey)

    def _link(self, source: int, target: int) -> Link:
        ends = []
        for place in (source, target):
            ends.append(LinkHost(name=f"node{place + 1}", place=place, system="linux"))
        problem = Problem.TIMEOUT if (source, target) in self.blocked else Problem.NONE
        return Link(source=ends[0], target=ends[1], problem=problem)

    def play(
        self, *, quick: bool = False, transport: type[PlayedTransport] = PlayedTransport
    ) -> tuple[JobOutcome, GroupResult]:
        spec = JobSpec(
            name="check",
            command=(probing.PROGRAM,),
            module=True,
            folder=str(self.folder),
            limits=Limits(join_s=self.join_s),
        )
        console = Said()

        async def go() -> tuple[JobOutcome, GroupResult]:
            check = GroupCheck(
                spec,
                transport(self.machines, self.absent),
                console,
                RunFolder(self.folder),
                quick=quick,
            )
            outcome = await asyncio.wait_for(check.run(lambda _: None), GIVE_UP_S)
            assert check.result is not None
            return outcome, check.result

        outcome, result = asyncio.run(go())
        self.said = console.words
        return outcome, result


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, 3, monkeypatch)


def names(result: GroupResult, *, above_note: bool = True) -> list[str]:
    harmless = (Status.OK, Status.NOTE) if above_note else ()
    return [one.name for one in result.findings if one.status not in harmless]


def test_a_healthy_group_passes_and_all_of_it_is_looked_at(scene: Scene) -> None:
    outcome, result = scene.play()
    assert outcome.result is Result.FINISHED
    assert names(result) == []
    assert [(one.name, one.record and one.record.host, one.ranks) for one in result.machines] == [
        ("node1", "h0", 1),
        ("node2", "h1", 1),
        ("node3", "h2", 1),
    ]
    assert len(result.links) == 6
    # The machines are called what people call them, not what they call themselves.
    assert [(one.rank, one.host) for one in result.ranks] == [
        (0, "node1"),
        (1, "node2"),
        (2, "node3"),
    ]
    assert any(line.startswith("3 of 3 ") for line in scene.said)
    assert all(one.of(protocol.Leave) for one in scene.machines)
    # Ranks are swept away by their token, and the examiner is to stay.
    for one in scene.machines:
        assert {prepare.token for prepare in one.of(protocol.Prepare)} == {
            f"{one.of(protocol.Relay)[0].token}.ranks"
        }


def test_a_machine_that_does_not_come_is_a_finding_and_the_others_are_checked(
    scene: Scene,
) -> None:
    scene.absent[0] = trouble = protocol.Trouble(
        name="host-unreachable",
        what="cannot connect to host node1",
        why="no ssh server listens",
        fix="systemctl enable --now ssh",
    )
    outcome, result = scene.play()
    assert outcome.result is not Result.FINISHED
    (failure,) = [one for one in result.findings if one.status is Status.FAILURE]
    assert (failure.name, failure.what, failure.fix) == (trouble.name, trouble.what, trouble.fix)
    assert [one.missing for one in result.machines] == ["no ssh server listens", "", ""]
    assert [(one.rank, one.host) for one in result.ranks] == [(0, "node2"), (1, "node3")]


@pytest.mark.parametrize("blocked", [{(0, 2), (2, 0)}, {(0, 2)}, {(2, 0)}])
def test_where_a_link_is_blocked_ranks_run_without_one_of_its_ends(
    blocked: set[tuple[int, int]], scene: Scene
) -> None:
    scene.blocked = blocked
    outcome, result = scene.play()
    assert outcome.result is not Result.FINISHED
    (not_tried,) = result.not_tried
    assert not_tried.startswith("ranks on node")
    assert len(result.ranks) == 2
    assert any("node1" in one.what and "node3" in one.what for one in result.findings)


def test_a_machine_without_torch_is_left_out(scene: Scene) -> None:
    scene.machines[2].torch = None
    outcome, result = scene.play()
    assert outcome.result is not Result.FINISHED
    assert names(result) == ["torch-missing"]
    assert [len(one.of(protocol.Start)) for one in scene.machines] == [1, 1, 0]


def test_different_versions_of_torch_run_no_ranks(scene: Scene) -> None:
    scene.machines[1].torch = "2.14.0"
    _, result = scene.play()
    assert names(result) == ["torch-version"]
    assert [len(one.of(protocol.Start)) for one in scene.machines] == [0, 0, 0]
    assert "torch differ" in result.not_tried[0]


def test_a_machine_without_free_devices_is_named_and_the_others_run(scene: Scene) -> None:
    scene.machines[1].refuses = MusterError("GPU 0 is in use", fix="--wait")
    _, result = scene.play()
    (failure,) = [one for one in result.findings if one.status is Status.FAILURE]
    assert (failure.what, failure.fix) == ("node2: GPU 0 is in use", "--wait")
    assert [one.host for one in result.ranks] == ["node1", "node3"]


def test_a_machine_that_cannot_be_examined_is_named_with_its_last_words(scene: Scene) -> None:
    scene.machines[2].examiner_ends = True
    _, result = scene.play()
    (failure,) = [one for one in result.findings if one.status is Status.FAILURE]
    assert failure.what.startswith("node3 ")
    assert failure.why.endswith("ImportError: psutil")


def test_ranks_that_hang_are_ended_and_named(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "DEADLINE_S", 0.5)
    scene.machines[1].ranks_hang = True
    outcome, result = scene.play()
    assert outcome.result is not Result.FINISHED
    assert any("rank 1" in one.what and "hang" in one.name for one in result.findings)
    assert all(one.of(protocol.Stop) for one in scene.machines if one.ranks_hang)


def test_a_rank_that_fails_is_told_as_in_a_run(scene: Scene) -> None:
    scene.machines[1].failure = protocol.Failure(
        rank=1, exit_code=1, ago_s=0.0, error="ImportError: libnccl.so.2"
    )
    _, result = scene.play()
    assert names(result) == ["rank-failed"]
    (failure,) = [one for one in result.findings if one.status is Status.FAILURE]
    assert failure.what.startswith("rank 1 on node2 ")


def test_a_machine_that_has_not_come_in_time_is_a_finding(scene: Scene) -> None:
    scene.absent[1] = None
    scene.join_s = 0.3
    outcome, result = scene.play()
    assert outcome.result is not Result.FINISHED
    (failure,) = [one for one in result.findings if one.status is Status.FAILURE]
    assert (failure.name, failure.why) == ("host-missing", "ssh is connecting")
    assert failure.what.startswith("node2 ")
    assert len(result.ranks) == 2


def test_a_clock_that_differs_is_a_note(scene: Scene) -> None:
    scene.machines[1].clock_offset_s = -60.5
    _, result = scene.play()
    (note,) = [one for one in result.findings if one.name == "clocks"]
    assert note.status is Status.NOTE
    assert "node2 is 1 min behind" in note.what


def test_a_transport_that_fails_is_the_reason_that_hosts_are_given(scene: Scene) -> None:
    class Fails(PlayedTransport):
        async def open(self, arrive: Arrive) -> None:
            await super().open(arrive)
            raise MusterError("the door is shut")

    with pytest.raises(MusterError, match="the door is shut"):
        scene.play(transport=Fails)
    (leave,) = scene.machines[0].of(protocol.Leave)
    assert leave.exit_code == 1
    assert "the door is shut" in leave.text
