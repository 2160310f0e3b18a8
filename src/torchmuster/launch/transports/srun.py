"""The srun transport: one ``srun`` starts all node agents of an allocation and carries their messages.

A heterogeneous job has one ``srun`` for each component.

srun copies its standard input to every task, so each line begins with the place that it is meant for
(``3 =…``), or ``*`` for all of them. Output of a task has the task number as prefix (``3: =…``). srun
reports failed tasks on its standard error.

Measured with Slurm 22.05, and relied on here:

- ``--label`` keeps lines of up to 1023 characters whole; with ``--unbuffered`` it does not: lines
  are cut at read boundaries, and the pieces are labeled as lines.
- In a job submitted with ``--gpus-per-task=N`` a step's task gets only N GPUs, even if the step does
  not request that; ``--gres`` gets all GPUs of the node.
- SIGTERM to srun kills the tasks at once, without a chance to clean up; closing its input lets them
  exit by themselves.
"""

import asyncio
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence

from torchmuster.launch import protocol
from torchmuster.launch.schedulers.slurm.allocation import Allocation
from torchmuster.launch.transports.channel import Arrive
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


def srun_command(
    allocation: Allocation,
    agent: Sequence[str] | None = None,
    place: int | None = None,
    component: int = 0,
) -> list[str]:
    """Return the argument vector that starts the node agents of a component, or the one of ``place`` again."""
    components = allocation.components
    if place is None:
        places: Sequence[int] = components[component]
    else:
        places = [place]
        component = next(group for group, part in enumerate(components) if place in part)
    gpus = allocation.gpus_at(places)
    who = ["--place-from", "SLURM_PROCID"] if place is None else ["--place", str(place)]
    if place is None and component:
        who += ["--first-place", str(places[0])]
    return [
        "srun",
        f"--jobid={allocation.job}",
        # srun copies its input to the tasks of one component only, so each component has its own step.
        *([f"--het-group={component}"] if len(components) > 1 else []),
        f"--nodes={len(places)}",
        f"--ntasks={len(places)}",
        "--ntasks-per-node=1",
        *([] if place is None else [f"--nodelist={allocation.nodes[place]}"]),
        "--distribution=block",  # ranks in the order of the node list
        "--overlap",  # alongside the job's script, with all resources of the job
        "--mem=0",
        *([f"--gres=gpu:{gpus}"] if gpus else []),
        "--cpu-bind=none",
        "--mpi=none",
        "--label",
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


class SrunTransport:
    """A transport to the nodes of an allocation (see channel.Transport)."""

    def __init__(
        self,
        allocation: Allocation,
        *,
        agent: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        patience_s: float = 10.0,
    ) -> None:
        self._allocation = allocation
        self._agent = agent
        self._environment = environment_for_srun(os.environ if environment is None else environment)
        self._patience_s = patience_s
        self._arrive: Arrive | None = None
        self._steps: list[SrunStep] = []
        self._step_of: dict[int, SrunStep] = {}

    @property
    def places(self) -> Sequence[str]:
        """The nodes in Slurm's order, which is the rank order."""
        return self._allocation.nodes

    async def open(self, arrive: Arrive) -> None:
        """Start the node agents on all nodes."""
        self._arrive = arrive
        for component, places in enumerate(self._allocation.components):
            command = srun_command(self._allocation, self._agent, component=component)
            await self._start(places, command)

    async def reopen(self, place: int) -> None:
        """Start the node agent of one node again, in a separate step."""
        await self._start([place], srun_command(self._allocation, self._agent, place))

    async def _start(self, places: Iterable[int], words: Sequence[str]) -> None:
        assert self._arrive is not None
        step = SrunStep(tuple(places), self.places, self._arrive)
        self._steps.append(step)
        self._step_of.update(dict.fromkeys(step.places, step))
        await step.start(words, self._environment)

    def waiting_for(self, place: int) -> str:
        """Return what srun is doing."""
        step = self._step_of.get(place)
        if step is None:
            return "srun has not been started"
        seconds = f"srun is starting the node agent, {time.monotonic() - step.since:.0f} s"
        return f"{seconds}; srun: {step.srun_words}" if step.srun_words else seconds

    def gave_up(self, place: int) -> protocol.Trouble | None:
        """Return why a node will not join, once srun or its task has exited."""
        step = self._step_of.get(place)
        if step is None or not step.missing(place):
            return None
        said = step.last_words(place)
        return protocol.Trouble(
            name="srun-failed",
            what=f"srun could not start the node agent on {self.places[place]}",
            why=said,
            fix=_way_out(said, self._allocation.job),
        )

    def rejoins(self, place: int) -> bool:
        """Return False: nodes do not connect by themselves."""
        return False

    async def close(self) -> None:
        """Close the steps; the node agents and srun exit."""
        await asyncio.gather(*(step.close(self._patience_s) for step in self._steps))


def _way_out(said: str, job: str) -> str:
    text = said.lower()
    if "no such file or directory" in text:
        return "install torchmuster at the same path on every node, for example on a shared disk"
    if any(word in text for word in ("expired", "invalid job id", "completing or completed")):
        return f"job {job} has ended; submit it again"
    if "busy" in text or "temporarily" in text:
        return f"another step uses the nodes; list the steps: squeue --steps --jobs={job}"
    if "generic resource" in text or "gres" in text:
        return "request the same number of GPUs on each node: sbatch --gpus-per-node=N"
    return f"try srun by hand: srun --jobid={job} --overlap --label hostname"
