"""The srun transport: one ``srun`` starts the node agents of an allocation, which connect to the launcher by TLS.

srun copies its standard input to every task, so a message to one node would be sent to all of them: with N nodes, N times N
messages. Therefore srun carries only the join code, and each node agent has a connection of its own.
srun reports how a task ended (``srun: error: node2: task 1: Killed``); such lines explain a lost connection.

Measured with Slurm 22.05, and relied on here:

- In a job submitted with ``--gpus-per-task=N`` a step's task gets only N GPUs, even if the step does
  not request that; ``--gres`` gets all GPUs of the node.
- SIGTERM to srun kills the tasks at once, without a chance to clean up; closing its input lets them
  exit by themselves.
"""

import asyncio
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from torchmuster.launch import protocol
from torchmuster.launch.schedulers.slurm import jobs
from torchmuster.launch.schedulers.slurm.allocation import Allocation
from torchmuster.launch.transports.channel import Arrive, Channel, Transport
from torchmuster.launch.transports.join.code import encode_code
from torchmuster.launch.transports.join.transport import JoinTransport
from torchmuster.launch.transports.local import NODE_AGENT
from torchmuster.launch.transports.srun_step import SrunStep

# srun takes options from the environment (SLURM_GPUS_PER_TASK, SLURM_UNBUFFEREDIO, SRUN_…). Our
# steps are fully described by their arguments, so only Slurm's variables that describe the job are kept.
_OF_THE_JOB = (
    "SLURM_CONF",
    "SLURM_CLUSTER",
    "SLURM_WORKING_CLUSTER",
    "SLURM_JWT",
    "SLURM_JOB",
    "SLURM_ARRAY_",
    "SLURM_SUBMIT_",
    "SLURM_RESTART_COUNT",
    "SLURM_NODE_ALIASES",
)
# A closed connection is noticed before srun has said how the task exited.
_REPORT_WITHIN_S = 1.0
_PORTS_TRIED = 20


def srun_command(
    allocation: Allocation,
    agent: Sequence[str] | None = None,
    place: int | None = None,
) -> list[str]:
    """Return the argument vector that starts the node agents, or the one of ``place`` again."""
    count = len(allocation.nodes)
    who = ["--place-from", "SLURM_PROCID"]
    if place is not None:
        count = 1
        who = ["--place", str(place)]
    gpus = allocation.gpus_per_node
    return [
        "srun",
        f"--jobid={allocation.job}",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        *([] if place is None else [f"--nodelist={allocation.nodes[place]}"]),
        "--distribution=block",  # ranks in the order of the node list
        "--overlap",  # alongside the job's script, with all resources of the job
        "--mem=0",
        *([f"--gres=gpu:{gpus}"] if gpus else []),
        "--cpu-bind=none",
        "--mpi=none",
        "--input=all",
        # The launcher decides what to do when a task or a node is lost.
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--export=ALL",
        *([sys.executable, *NODE_AGENT] if agent is None else agent),
        *who,
    ]


def environment_for_srun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that srun reads as options."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(("SLURM_", "SRUN_")) or name.startswith(_OF_THE_JOB)
    }


class SrunChannel:
    """The launcher's end of the connection to one node agent; srun knows how it exited."""

    def __init__(self, channel: Channel, step: SrunStep, node: str) -> None:
        self._channel = channel
        self._step = step
        self._node = node
        self.send = channel.send
        self.say_alive = channel.say_alive
        self.close = channel.close

    async def receive(self) -> protocol.FromAgent | None:
        """Return the next message, or None when the node agent is gone."""
        message = await self._channel.receive()
        if message is None:
            await asyncio.sleep(_REPORT_WITHIN_S)
        return message

    def why_closed(self) -> str:
        """Return what srun says about the task, or the error of the connection."""
        return "\n".join(self._step.errors_of(self._node)) or self._channel.why_closed()


class SrunTransport(Transport):
    """A transport to the nodes of an allocation (see channel.Transport)."""

    def __init__(
        self,
        allocation: Allocation,
        *,
        agent: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        on_event: Callable[[str], None] = lambda command: None,
        patience_s: float = 10.0,
    ) -> None:
        self._allocation = allocation
        self._agent = agent
        self._environment = environment_for_srun(os.environ if environment is None else environment)
        self._on_event = on_event
        self._patience_s = patience_s
        self._arrive: Arrive | None = None
        self._service: JoinTransport | None = None
        self._steps: list[SrunStep] = []
        self._step_of: dict[int, SrunStep] = {}
        self._joined: set[int] = set()

    @property
    def places(self) -> Sequence[str]:
        """The nodes in Slurm's order, which is the rank order."""
        return self._allocation.nodes

    async def open(self, arrive: Arrive) -> None:
        """Listen for the node agents, and start them on all nodes."""
        self._arrive = arrive
        self._service = JoinTransport(
            count=len(self.places),
            ports=await asyncio.to_thread(_allowed_ports),
            on_event=self._on_event,
        )
        await self._service.open(self._arrived)
        await self._start(range(len(self.places)), srun_command(self._allocation, self._agent))

    async def reopen(self, place: int) -> None:
        """Start the node agent of one node again, in a separate step."""
        assert self._service is not None
        self._joined.discard(place)
        await self._service.reopen(place)
        await self._start([place], srun_command(self._allocation, self._agent, place))

    def _arrived(self, place: int, channel: Channel) -> None:
        assert self._arrive is not None
        self._joined.add(place)
        self._arrive(place, SrunChannel(channel, self._step_of[place], self.places[place]))

    async def _start(self, places: Iterable[int], command: Sequence[str]) -> None:
        assert self._service is not None
        step = SrunStep()
        self._steps.append(step)
        self._step_of.update(dict.fromkeys(places, step))
        line = f"{encode_code(self._service.code)}\n".encode()
        await step.start(command, self._environment, line)

    def waiting_for(self, place: int) -> str:
        """Return what srun is doing."""
        step = self._step_of.get(place)
        if step is None:
            return "srun has not been started"
        text = f"srun is starting the node agent, {time.monotonic() - step.since_s:.0f} s"
        return "; ".join([text, *list(step.output)[-1:]])

    def gave_up(self, place: int) -> protocol.Trouble | None:
        """Return why a node will not join, once srun or its task has exited."""
        step = self._step_of.get(place)
        node = self.places[place]
        if step is None or place in self._joined:
            return None
        if not step.over and not step.errors_of(node):
            return None
        job = self._allocation.job
        return protocol.Trouble(
            name="srun-failed",
            what=f"srun could not start the node agent on {node}",
            why="\n".join(step.output),
            fix=f"srun --jobid={job} --overlap --nodelist={node} {sys.executable} -m torchmuster --version  # try it by hand",
        )

    async def close(self) -> None:
        """Close the steps; the node agents and srun exit."""
        await asyncio.gather(*(step.close(self._patience_s) for step in self._steps))
        if self._service is not None:
            await self._service.close()


def _allowed_ports(ask: jobs.Ask = jobs.run_slurm_command) -> list[int]:
    """Return some of the ports that the cluster keeps open for srun; [0] if any will do."""
    answer = ask(["scontrol", "show", "config"])
    found = re.search(r"SrunPortRange\s*=\s*(\d+)-(\d+)", answer.out) if answer else None
    if found is None or int(found[2]) == 0:
        return [0]
    ports = range(int(found[1]), int(found[2]) + 1)
    return random.sample(ports, min(len(ports), _PORTS_TRIED))
