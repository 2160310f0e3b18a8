"""A node agent ends what it started, whatever becomes of the launcher, and whenever."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from patience import GIVE_UP_S
from torchmuster.launch import protocol
from torchmuster.launch.node import node_agent as agent_module
from torchmuster.launch.node import process_cleanup
from torchmuster.launch.node.node_agent import NodeAgent

pytestmark = pytest.mark.usefixtures("patient_agent")


class FakeEnd:
    """The launcher's side, played by the test.

    ``deaf`` as one whose link was cut, ``slow_s`` as one to whom output travels slowly; what is in
    ``cannot_send`` is too much for the link.
    """

    def __init__(self) -> None:
        self.to_agent: asyncio.Queue[protocol.ToAgent | Exception | None] = asyncio.Queue()
        self.heard: list[protocol.FromAgent] = []
        self.deaf = False
        self.slow_s = 0.0
        self.cannot_send: type[protocol.Message] | None = None

    async def receive(self) -> protocol.ToAgent | None:
        message = await self.to_agent.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def send(self, message: protocol.FromAgent) -> None:
        if self.deaf:
            await asyncio.Event().wait()
        if isinstance(message, protocol.Output):
            await asyncio.sleep(self.slow_s)
        if self.cannot_send is not None and isinstance(message, self.cannot_send):
            self.cannot_send = None
            raise protocol.UnreadableMessage("a message of 5000000 bytes is too long to send")
        self.heard.append(message)

    def output(self) -> str:
        """What the ranks wrote, as far as it has come."""
        return "".join(
            one.text for one in self.heard if isinstance(one, protocol.Output) and not one.file
        )

    async def close(self) -> None:
        pass

    def say(self, *messages: protocol.ToAgent | Exception | None) -> None:
        for message in messages:
            self.to_agent.put_nowait(message)

    def hear_output(self, text: str) -> bool:
        return any(isinstance(one, protocol.Output) and text in one.text for one in self.heard)

    async def hear(self, kind: type[protocol.Message]) -> protocol.Message:
        async with asyncio.timeout(GIVE_UP_S):
            while True:
                for message in self.heard:
                    if isinstance(message, kind):
                        return message
                await asyncio.sleep(0.01)


class Scene:
    """A node agent and a script for its ranks, which needs no torch."""

    def __init__(self, folder: Path, script: str) -> None:
        (folder / "script.py").write_text(script)
        self.token = os.urandom(8).hex()
        self.prepare = protocol.Prepare(
            run_id="r",
            token=self.token,
            command=("script.py",),
            module=False,
            folder=str(folder),
            device="cpu",
            ranks=1,
        )
        self.start = protocol.Start(
            attempt=3,
            node_rank=0,
            nodes=1,
            first_rank=0,
            world_size=1,
            address="127.0.0.1",
            port=1,
            interface=None,
            max_restarts=5,
        )
        self.end = FakeEnd()
        self.code = -1

    async def started(self, start: protocol.Start | None = None) -> None:
        """Have the ranks started."""
        self.end.say(self.prepare)
        await self.end.hear(protocol.Prepared)
        self.end.say(start or self.start)

    def play(
        self,
        scene: Callable[["Scene"], Awaitable[None]],
        tell: Callable[[str], None] | None = None,
        folder: Path | None = None,
        *,
        is_local: bool = False,
    ) -> NodeAgent:
        """Play it; with ``folder``, as a machine that joined from there."""

        async def go() -> NodeAgent:
            self.end = FakeEnd()
            agent = NodeAgent(
                self.end,
                folder=folder,
                tell=tell,
                is_local=is_local,
            )
            keeping = asyncio.create_task(agent.run())
            await scene(self)
            self.code = await asyncio.wait_for(keeping, GIVE_UP_S)
            return agent

        agent = asyncio.run(go())
        assert process_cleanup.processes_of(self.token) == []
        return agent


_FOREVER = "import time\nprint('here', flush=True)\ntime.sleep(600)\n"


@pytest.mark.usefixtures("own_machine")
def test_a_request_to_stop_that_comes_with_the_start_is_not_lost(tmp_path: Path) -> None:
    async def scene(it: Scene) -> None:
        it.end.say(it.prepare)
        await it.end.hear(protocol.Prepared)
        it.end.say(it.start, protocol.Stop(attempt=3, grace_s=0.0, why=""))
        ended = await it.end.hear(protocol.Ended)
        assert isinstance(ended, protocol.Ended)
        assert ended.attempt == 3
        assert process_cleanup.processes_of(it.token) == []
        it.end.say(protocol.Leave(exit_code=0, text="over"))

    Scene(tmp_path, _FOREVER).play(scene)


@pytest.mark.usefixtures("own_machine")
def test_where_nothing_runs_that_is_the_answer(tmp_path: Path) -> None:
    async def scene(it: Scene) -> None:
        it.end.say(protocol.Stop(attempt=-1, grace_s=5.0, why=""))
        assert await it.end.hear(protocol.Ended) == protocol.Ended(attempt=-1, good=True)
        it.end.say(None)

    Scene(tmp_path, _FOREVER).play(scene)


@pytest.mark.usefixtures("own_machine")
def test_a_launcher_that_goes_while_ranks_are_starting_leaves_none(tmp_path: Path) -> None:
    async def scene(it: Scene) -> None:
        it.end.say(it.prepare)
        await it.end.hear(protocol.Prepared)
        it.end.say(it.start, None)

    agent = Scene(tmp_path, _FOREVER).play(scene)
    assert agent.why_exited == "the launcher is gone"


@pytest.mark.usefixtures("own_machine")
def test_a_launcher_that_takes_nothing_any_more_does_not_keep_the_agent(tmp_path: Path) -> None:
    async def scene(it: Scene) -> None:
        it.end.say(it.prepare)
        await it.end.hear(protocol.Prepared)
        it.end.say(it.start)
        await it.end.hear(protocol.Output)
        it.end.deaf = True
        await asyncio.sleep(0.5)  # something is stuck on its way by now
        it.end.say(None)

    flood = "while True:\n    print('x' * 1000, flush=True)\n"
    Scene(tmp_path, flood).play(scene)


@pytest.mark.usefixtures("own_machine")
def test_a_launcher_that_never_says_a_word_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "_SILENT_AT_FIRST_S", 0.5)

    async def scene(it: Scene) -> None:
        await it.end.hear(protocol.Hello)

    agent = Scene(tmp_path, _FOREVER).play(scene)
    assert "no message from the launcher" in agent.why_exited


@pytest.mark.usefixtures("own_machine")
def test_a_launcher_of_this_host_may_be_silent_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is busy: its end would close the pipe."""
    monkeypatch.setattr(agent_module, "_SILENT_AT_FIRST_S", 0.2)

    async def scene(it: Scene) -> None:
        await it.end.hear(protocol.Hello)
        await asyncio.sleep(1.5)
        it.end.say(protocol.Leave(exit_code=1, text="over"))

    assert Scene(tmp_path, _FOREVER).play(scene, is_local=True).why_exited == "over"


_SAVES = """
import signal, sys, time
def save(*_):
    time.sleep(2.5)
    open("saved", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("here", flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("own_machine")
def test_ranks_may_save_when_the_launcher_falls_silent(tmp_path: Path) -> None:
    async def scene(it: Scene) -> None:
        it.prepare = msgspec.structs.replace(it.prepare, lost_after_s=0.5)
        await it.started()
        while not it.end.hear_output("here"):
            it.end.say(protocol.Alive())
            await asyncio.sleep(0.1)

    agent = Scene(tmp_path, _SAVES).play(scene)
    assert "no message from the launcher" in agent.why_exited
    assert (tmp_path / "saved").exists()


class HeldUpClock:
    """The clock of a node agent that a test can hold up."""

    def __init__(self) -> None:
        self.held_up_s = 0.0
        self.reads = 0

    def monotonic(self) -> float:
        self.reads += 1
        return time.monotonic() + self.held_up_s


@pytest.mark.usefixtures("own_machine")
def test_an_agent_that_was_held_up_itself_does_not_take_its_launcher_for_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "_SILENT_AT_FIRST_S", GIVE_UP_S)
    clock = HeldUpClock()
    monkeypatch.setattr(agent_module, "time", clock)

    async def scene(it: Scene) -> None:
        await it.end.hear(protocol.Hello)
        clock.held_up_s = 2 * GIVE_UP_S
        reads = clock.reads
        while clock.reads < reads + 10:  # by then it has looked again
            await asyncio.sleep(0.01)
        it.end.say(protocol.Leave(exit_code=1, text="over"))

    agent = Scene(tmp_path, _FOREVER).play(scene)
    assert agent.why_exited == "over"


@pytest.mark.usefixtures("own_machine")
def test_an_agent_that_cannot_go_on_watching_says_so_and_ends_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError("the disk has gone")

    async def scene(it: Scene) -> None:
        it.end.say(it.prepare)
        await it.end.hear(protocol.Prepared)
        monkeypatch.setattr("torchmuster.launch.node.output.RankLog.take", broken)
        it.end.say(it.start)
        ended = await it.end.hear(protocol.Ended)
        assert isinstance(ended, protocol.Ended)
        assert not ended.good
        assert ended.text.endswith("OSError: the disk has gone")
        assert process_cleanup.processes_of(it.token) == []
        it.end.say(protocol.Leave(exit_code=1, text="over"))

    Scene(tmp_path, _FOREVER).play(scene)


_LINES = 50_000
# All at once: a launcher that takes it slowly cannot keep pace, however the rank gets on.
_WRITES_MUCH = (
    f"print('\\n'.join(f'line {{number:06}} ' + 'x' * 100 for number in range({_LINES})))\n"
)


@pytest.mark.usefixtures("own_machine")
def test_where_the_logs_are_kept_the_end_waits_for_no_backlog(tmp_path: Path) -> None:
    one = Scene(tmp_path, _WRITES_MUCH)
    logs = tmp_path / "logs"
    one.prepare = msgspec.structs.replace(one.prepare, run=str(tmp_path))

    async def scene(it: Scene) -> None:
        it.end.slow_s = 0.1
        await it.started()
        await it.end.hear(protocol.Ended)
        assert f" MiB left out here: see {logs}/rank-0.log\n" in it.end.output()
        it.end.say(protocol.Leave(exit_code=0, text="over"))

    one.play(scene)
    assert (logs / "rank-0.log").read_text().count("line ") == _LINES


@pytest.mark.usefixtures("own_machine")
def test_launcher_whose_bytes_cause_any_other_error_is_given_up(tmp_path: Path) -> None:
    async def scene(it: Scene) -> None:
        await it.started()
        await it.end.hear(protocol.Output)
        it.end.say(RecursionError("too deep"))

    agent = Scene(tmp_path, _FOREVER).play(scene)
    assert agent.why_exited.endswith(": too deep")


@pytest.mark.usefixtures("own_machine")
def test_a_launcher_that_cannot_be_understood_is_given_up(tmp_path: Path) -> None:
    garbled = protocol.UnreadableMessage("received an invalid message")

    async def scene(it: Scene) -> None:
        await it.started()
        await it.end.hear(protocol.Output)
        it.end.say(garbled)

    agent = Scene(tmp_path, _FOREVER).play(scene)
    assert agent.why_exited.endswith(f": {garbled}")


_OWN_SESSION = """\
import os, time
print(os.getsid(0), os.environ.get("NCCL_SOCKET_IFNAME"), flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("own_machine")
def test_ctrl_c_at_its_own_terminal_is_leaving_and_is_the_agent_s_to_deal_with(
    tmp_path: Path,
) -> None:
    async def scene(it: Scene) -> None:
        await it.started(msgspec.structs.replace(it.start, interface=""))
        await it.end.hear(protocol.Output)
        session, interface = it.end.output().split()
        assert int(session) != os.getsid(0)  # the terminal's Ctrl-C does not reach the ranks
        assert interface == "None"  # one without a name is none
        os.kill(os.getpid(), signal.SIGINT)

    one = Scene(tmp_path, _OWN_SESSION)
    agent = one.play(scene, tell=lambda _: None)
    assert agent.why_exited == "left the run after Ctrl-C"
    assert one.code == 130


@pytest.mark.usefixtures("own_machine")
def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    async def scene(it: Scene) -> None:
        await it.end.hear(protocol.Hello)
        later = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, later.set)
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGUSR1)
        await later.wait()
        it.end.say(protocol.Leave(exit_code=0, text="over"))

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        one = Scene(tmp_path, _FOREVER)
        agent = one.play(scene)
        assert (agent.why_exited, one.code) == ("over", 0)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("own_machine")
def test_a_machine_that_joined_runs_the_script_in_its_own_folder(tmp_path: Path) -> None:
    shown: list[str] = []
    one = Scene(tmp_path, "import os\nprint(os.getcwd(), flush=True)\n")
    one.prepare = msgspec.structs.replace(one.prepare, folder="/")

    async def scene(it: Scene) -> None:
        await it.started()
        ended = await it.end.hear(protocol.Ended)
        assert isinstance(ended, protocol.Ended)
        assert ended.good
        assert it.end.output().split() == [str(tmp_path)]
        it.end.say(protocol.Leave(exit_code=0, text="over"))

    one.play(scene, tell=shown.append, folder=tmp_path)
    assert shown[0].startswith(f"will run in {tmp_path}: ")


@pytest.mark.usefixtures("own_machine")
def test_an_agent_that_has_ended_handles_no_signal_to_end(tmp_path: Path) -> None:
    """A node of a group serves one launcher after the other, and may be signalled between them."""

    async def go() -> None:
        end = FakeEnd()
        end.say(protocol.Leave(exit_code=1, text="over"))
        await NodeAgent(end).run()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            assert not loop.remove_signal_handler(number)

    asyncio.run(go())


@pytest.mark.usefixtures("own_machine")
def test_devices_are_not_leased_if_the_logs_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_folder(run: str | None) -> Path:
        raise PermissionError("no folder for temporary files")

    def lease(*_: object) -> object:
        raise AssertionError("leased")

    monkeypatch.setattr("torchmuster.launch.node.output.create_log_folder", no_folder)
    monkeypatch.setattr("torchmuster.launch.node.device_lease.lease_devices", lease)

    async def scene(it: Scene) -> None:
        it.end.say(it.prepare)
        done = await it.end.hear(protocol.Done)
        assert isinstance(done, protocol.Done)
        assert done.trouble is not None
        assert "no folder for temporary files" in done.trouble.what
        it.end.say(None)

    Scene(tmp_path, "").play(scene)
