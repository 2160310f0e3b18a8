"""One srun starts all node agents, which connect to the launcher, on a real cluster."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from patience import GIVE_UP_S
from slurm.slurm_lab import SlurmLab
from torchmuster.launch import protocol
from torchmuster.launch.schedulers.slurm import allocation as allocations
from torchmuster.launch.schedulers.slurm.allocation import Allocation
from torchmuster.launch.transports.channel import Channel
from torchmuster.launch.transports.srun import SrunTransport

# The launcher is a process of this machine.
pytestmark = pytest.mark.usefixtures("at_node1")
FAKE = (sys.executable, str(Path(__file__).with_name("fake_agent.py")))


@pytest.fixture
def at_node1(cluster: SlurmLab) -> Iterator[None]:
    with cluster.in_network_of("node1"):
        yield


PER_TASK = {"SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS_PER_NODE": "4"}


def allocate(
    cluster: SlurmLab, *options: str, variables: Mapping[str, str] | None = None
) -> Allocation:
    """Return an allocation as a shell of salloc sees it, with these variables of Slurm."""
    said = cluster.run("salloc", "--no-shell", *options)
    job = said.split("Granted job allocation ")[1].split()[0]
    nodes = cluster.run("squeue", "-h", "-j", job, "-o", "%N").strip()
    usual = {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": nodes}
    found = allocations.allocation_here({**usual, **(variables or {})})
    assert found is not None
    return found


class Agents:
    """The channels of those who have come, by place."""

    def __init__(self) -> None:
        self.channels: dict[int, Channel] = {}
        self.hellos: dict[int, protocol.Hello] = {}
        self._come = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    def arrive(self, place: int, channel: Channel) -> None:
        self._tasks.append(asyncio.create_task(self._greet(place, channel)))

    async def _greet(self, place: int, channel: Channel) -> None:
        hello = await channel.receive()
        assert isinstance(hello, protocol.Hello)
        async with self._come:
            self.channels[place], self.hellos[place] = channel, hello
            self._come.notify_all()

    async def all_here(self, count: int) -> None:
        async with self._come:
            await asyncio.wait_for(
                self._come.wait_for(lambda: len(self.channels) >= count), GIVE_UP_S
            )


@asynccontextmanager
async def agents_on(transport: SrunTransport, count: int) -> AsyncIterator[Agents]:
    agents = Agents()
    try:
        await transport.open(agents.arrive)
        await agents.all_here(count)
        yield agents
    finally:
        await transport.close()


async def hear(channel: Channel) -> protocol.FromAgent | None:
    return await asyncio.wait_for(channel.receive(), GIVE_UP_S)


async def cause(channel: Channel) -> str:
    """Return why a channel is closed, once srun has said so too."""
    while "srun" not in (why := channel.why_closed()):
        await asyncio.wait_for(asyncio.sleep(0.05), GIVE_UP_S)
    return why


async def prepared(channel: Channel, *variables: str) -> protocol.Prepared:
    await channel.send(
        protocol.Prepare(
            run_id="r",
            token="t",
            command=variables,
            module=False,
            folder="/",
            device="cpu",
            ranks=1,
        )
    )
    answer = await hear(channel)
    assert isinstance(answer, protocol.Prepared)
    return answer


def test_agents_come_in_the_order_of_the_nodes(cluster: SlurmLab) -> None:
    async def scene() -> None:
        transport = SrunTransport(allocate(cluster, "-N3"), agent=FAKE)
        assert transport.places == ("node1", "node2", "node3")
        async with agents_on(transport, 3) as agents:
            hosts = [agents.hellos[place].record.host for place in range(3)]
            assert hosts == ["node1", "node2", "node3"]
            for place, channel in agents.channels.items():
                answer = await prepared(channel, "SLURM_PROCID", "SLURMD_NODENAME")
                assert answer.logs == f"{place},node{place + 1}"

    asyncio.run(scene())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "variables"),
    [
        (["--gpus-per-node=4"], {"SLURM_GPUS_PER_NODE": "4"}),
        (["--gres=gpu:a100:4"], {}),
        (["--ntasks-per-node=4", "--gpus-per-task=1"], PER_TASK),
        (["--ntasks-per-node=4", "--gpus-per-task=1", "--gpu-bind=single:1"], PER_TASK),
    ],
)
def test_every_agent_has_all_gpus_of_its_node(
    cluster: SlurmLab, options: Sequence[str], variables: Mapping[str, str]
) -> None:
    async def scene() -> None:
        allocation = allocate(cluster, "-N3", *options, variables=variables)
        # As inside a job: srun would take these for its own options.
        inherited = {"SLURM_GPUS_PER_TASK": "1", "SLURM_NTASKS": "12"}
        transport = SrunTransport(allocation, agent=FAKE, environment={**os.environ, **inherited})
        async with agents_on(transport, 3) as agents:
            for channel in agents.channels.values():
                assert (await prepared(channel)).devices == ("0", "1", "2", "3")

    asyncio.run(scene())


def test_an_agent_that_is_killed_is_named_and_the_others_go_on(cluster: SlurmLab) -> None:
    async def scene() -> None:
        transport = SrunTransport(allocate(cluster, "-N3"), agent=FAKE)
        async with agents_on(transport, 3) as agents:
            await agents.channels[1].send(protocol.Signal(name="KILL"))
            assert await hear(agents.channels[1]) is None
            assert await hear(agents.channels[1]) is None
            assert await cause(agents.channels[1]) == "srun: error: node2: task 1: Killed"
            await agents.channels[1].send(protocol.Alive())  # does nothing
            for place in (0, 2):
                await agents.channels[place].send(protocol.Alive())
                assert await hear(agents.channels[place]) == protocol.Alive()
            del agents.channels[1]
            await transport.reopen(1)
            await agents.all_here(3)
            assert agents.hellos[1].record.host == "node2"
            await agents.channels[1].send(protocol.Stop(attempt=0, grace_s=1, why="again"))
            assert await hear(agents.channels[1]) == protocol.Output(rank=1, text="again")

    asyncio.run(scene())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("agent", "why", "fix"),
    [
        (("/no/such/python",), "No such file or directory", "path on every node"),
        ((*FAKE, "--silent"), "cannot begin\nsrun: error: node", "srun --jobid="),
    ],
)
def test_what_cannot_be_started_is_given_up_with_the_cause(
    cluster: SlurmLab, agent: Sequence[str], why: str, fix: str
) -> None:
    async def scene() -> None:
        transport = SrunTransport(allocate(cluster, "-N3"), agent=agent)
        agents = Agents()
        try:
            await transport.open(agents.arrive)
            assert re.match(r"srun .*, \d+ s", transport.waiting_for(0))
            while any(transport.gave_up(place) is None for place in range(3)):
                await asyncio.wait_for(asyncio.sleep(0.05), GIVE_UP_S)
            for place in range(3):
                trouble = transport.gave_up(place)
                assert trouble is not None
                assert trouble.name == "srun-failed"
                assert trouble.what.endswith(f" node{place + 1}")
                assert why in trouble.why
                assert fix in trouble.fix
        finally:
            await transport.close()
        assert agents.channels == {}

    asyncio.run(scene())


def test_a_job_without_gpus_has_none(cluster: SlurmLab) -> None:
    assert allocate(cluster, "-N2").gpus_per_node is None
