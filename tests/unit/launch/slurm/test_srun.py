"""The arguments of srun, and how the nodes that it starts connect."""

import asyncio
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from patience import GIVE_UP_S
from torchmuster.errors import Impossible
from torchmuster.launch import protocol
from torchmuster.launch.schedulers.slurm import jobs
from torchmuster.launch.schedulers.slurm.allocation import Allocation
from torchmuster.launch.transports import srun
from torchmuster.launch.transports.channel import Channel, Transport
from torchmuster.launch.transports.join.client import connect_to_host
from torchmuster.launch.transports.srun import SrunTransport, environment_for_srun, srun_command
from torchmuster.launch.transports.srun_step import SrunStep

SIMULATED_HOSTS = Path(__file__).parents[4] / "benchmarks" / "control_plane.py"
ALLOCATION = Allocation(
    job="41",
    nodes=("n1", "n2"),
    gpus_per_node=8,
    tasks_per_node=8,
    copies=1,
    restarts=0,
)


def test_one_step_over_all_nodes_with_all_their_gpus() -> None:
    words = srun_command(ALLOCATION, ["node agent"])
    assert words[:5] == ["srun", "--jobid=41", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    assert "--gres=gpu:8" in words
    assert words[-3:] == ["node agent", "--place-from", "SLURM_PROCID"]


def test_one_node_again() -> None:
    words = srun_command(ALLOCATION, ["node agent"], place=1)
    assert {"--nodes=1", "--ntasks=1", "--nodelist=n2", "--gres=gpu:8"} <= set(words)
    assert words[-3:] == ["node agent", "--place", "1"]


def test_only_the_jobs_own_variables_reach_srun() -> None:
    kept = {"HOME": "/", "SLURM_CONF": "c", "SLURM_JOB_ID": "41", "SLURM_RESTART_COUNT": "1"}
    options = dict.fromkeys(
        ["SLURM_GPUS_PER_TASK", "SLURM_UNBUFFEREDIO", "SLURM_NTASKS", "SLURM_EXPORT_ENV"], "1"
    )
    assert environment_for_srun({**kept, **options, "SRUN_CPUS_PER_TASK": "2"}) == kept


@pytest.fixture
def as_srun(tmp_path: Path) -> dict[str, str]:
    """Variables with which ``srun`` is a program that prints like a task prolog, and plays all nodes."""
    (tmp_path / "srun").write_text(
        "#!/bin/sh\necho '==== Welcome ===='; echo '+-----+'\n"
        f'exec {sys.executable} {SIMULATED_HOSTS} srun "$@"\n'
    )
    (tmp_path / "srun").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "MUSTER_SIMULATED_HOSTS": str(tmp_path)}


def sized(nodes: int) -> Allocation:
    return dataclasses.replace(
        ALLOCATION, nodes=tuple(f"n{place}" for place in range(nodes)), gpus_per_node=None
    )


@pytest.mark.parametrize("nodes", [2, 20])
def test_every_node_connects_as_its_place_and_gets_only_its_own_messages(
    as_srun: dict[str, str], tmp_path: Path, nodes: int
) -> None:
    async def scene() -> None:
        arrivals: asyncio.Queue[tuple[int, Channel]] = asyncio.Queue()
        transport = SrunTransport(sized(nodes), environment=as_srun, patience_s=GIVE_UP_S)
        await transport.open(lambda place, channel: arrivals.put_nowait((place, channel)))
        channels = dict([await asyncio.wait_for(arrivals.get(), GIVE_UP_S) for _ in range(nodes)])
        assert sorted(channels) == list(range(nodes))
        for place, channel in channels.items():
            hello = await asyncio.wait_for(channel.receive(), GIVE_UP_S)
            assert isinstance(hello, protocol.Hello)
            assert hello.record.host == f"node{place:05d}"
        await channels[1].send(protocol.Listen(nonce="n", port=7))
        while not isinstance(
            answer := await asyncio.wait_for(channels[1].receive(), GIVE_UP_S), protocol.Listening
        ):
            assert answer == protocol.Alive()
        assert answer.addresses[0].address == "10.0.0.1"
        for channel in channels.values():
            await channel.send(protocol.Leave(exit_code=0, text=""))
        await transport.close()

    asyncio.run(scene())
    # The join code is all that srun copies; one node got two messages, the others one.
    got = json.loads((tmp_path / "result.json").read_text())["received_bytes"]
    assert got / nodes < 700


def test_a_stranger_without_the_secret_is_not_admitted(as_srun: dict[str, str]) -> None:
    events: list[str] = []

    async def scene() -> None:
        transport = SrunTransport(
            sized(2), environment={**as_srun, "PATH": "/nowhere"}, on_event=events.append
        )
        arrivals: list[int] = []
        await transport.open(lambda place, channel: arrivals.append(place))
        service = transport._service
        assert service is not None
        wrong = msgspec.structs.replace(service.code, secret=bytes(16))
        with pytest.raises(Impossible):
            await connect_to_host(wrong, place=0, on_event=events.append)
        assert not arrivals
        await transport.close()

    asyncio.run(scene())
    assert any("has not printed this code" in event for event in events)


@pytest.mark.parametrize(
    ("answer", "ports"),
    [
        ("SrunPortRange           = 60001-60003\n", {60001, 60002, 60003}),
        ("SrunPortRange           = 0-0\n", {0}),
        ("", {0}),
    ],
)
def test_the_launcher_listens_where_the_cluster_lets_srun_listen(
    answer: str, ports: set[int]
) -> None:
    found = srun._allowed_ports(lambda command: jobs.SlurmAnswer(code=0, out=answer, err=""))
    assert set(found) == ports


def test_the_agents_are_started_with_this_python() -> None:
    words = [sys.executable, "-m", "torchmuster.launch.node.supervisor", "--place", "0"]
    assert srun_command(ALLOCATION, place=0)[-5:] == words


def test_without_srun_every_place_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    async def scene() -> protocol.Trouble | None:
        transport: Transport = SrunTransport(ALLOCATION)
        assert transport.gave_up(1) is None
        await transport.open(lambda place, channel: None)
        trouble = transport.gave_up(1)
        await transport.close()
        return trouble

    trouble = asyncio.run(scene())
    assert trouble is not None
    assert trouble.name == "srun-failed"
    assert trouble.what == "srun could not start the node agent on n2"
    assert trouble.why == "srun: No such file or directory"


def test_srun_names_the_node_whose_agent_ended_while_others_go_on() -> None:
    transport = SrunTransport(ALLOCATION)
    step = SrunStep()
    step.output.extend(["welcome", "srun: error: n2: task 1: Exited with exit code 127"])
    transport._step_of = {0: step, 1: step}
    assert transport.gave_up(0) is None
    trouble = transport.gave_up(1)
    assert trouble is not None
    assert "Exited with exit code 127" in trouble.why


def test_a_process_that_keeps_sruns_output_does_not_hold_up_the_end() -> None:
    async def scene() -> None:
        step = SrunStep()
        command = ["sh", "-c", "echo welcome; sleep 600 & echo $!"]
        await step.start(command, dict(os.environ), b"code\n")
        async with asyncio.timeout(GIVE_UP_S):
            while len(step.output) < 2:
                await asyncio.sleep(0.01)
            await step.close(GIVE_UP_S)
            os.kill(int(step.output[1]), signal.SIGKILL)

    asyncio.run(scene())
