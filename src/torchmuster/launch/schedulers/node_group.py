"""Nodes on each of which a scheduler starts the same command: Kubernetes, SkyPilot, dstack.

``muster run`` and ``muster train`` find their node rank in the environment. Node rank 0 is the launcher; the other nodes connect
to it, and prove with a secret that they belong to the run. A node that is replaced, also node rank 0, takes its place
again. The scheduler only has to start the command again; its API is not used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from torchmuster.errors import ExitCode, Impossible
from torchmuster.launch.history import run_state
from torchmuster.launch.transports.join.code import SharedKey, shared_key
from torchmuster.runfolder import RunFolder, create_run_folder

NODES = "TORCHMUSTER_NNODES"
NODE_RANK = "TORCHMUSTER_NODE_RANK"
LAUNCHER = "TORCHMUSTER_LAUNCHER"
SECRET = "TORCHMUSTER_JOIN_SECRET"  # noqa: S105  a variable's name
RUN_ID = "TORCHMUSTER_RUN_ID"
JOB_UID = "TORCHMUSTER_JOB_UID"
VARIABLES = (NODES, NODE_RANK, LAUNCHER, SECRET, RUN_ID, JOB_UID)
LAUNCHER_PORT = 29399
# With these the run is over. With any other exit code, the scheduler should start the node again.
FINAL = frozenset(
    {
        ExitCode.GOOD,
        ExitCode.FAILED,
        ExitCode.IMPOSSIBLE,
        ExitCode.NOT_NOW,
        ExitCode.INTERRUPTED,
    }
)

_SHORTEST_SECRET = 16
_RUN_ID = r"\A[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?\Z"
_ADDRESS = r"\A[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?(?::[1-9]\d{0,4})?\Z"


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """This node's place among the nodes of a run."""

    nodes: int
    node_rank: int
    # DNS name or address of the node with rank 0, and the secret of the group; a group of one node has neither.
    launcher: str = ""
    port: int = LAUNCHER_PORT
    secret: str | None = field(default=None, repr=False)
    run_id: str | None = None  # the run folder in which a launcher that is started again resumes
    job_uid: str = ""  # of the scheduler's job: a run that ended is not repeated for the same job

    def key(self) -> SharedKey:
        """Return the key from which the certificate and the join secret of this job come."""
        assert self.secret is not None, "a group of one node connects to nothing"
        return shared_key(f"{self.secret}\0{self.job_uid}")

    def earlier_run(self, root: Path) -> RunFolder | None:
        """Return the run that an earlier launcher of this group started; None if this is the first."""
        if self.run_id is None:
            return None
        run = RunFolder(root / self.run_id)
        return run if run.marker.is_file() else None

    def run_folder(self, root: Path, name: str) -> RunFolder:
        """Return the folder of the run, which may exist."""
        return self.earlier_run(root) or create_run_folder(root, name, run_id=self.run_id)

    def ended(self, root: Path) -> int | None:
        """Return the exit code with which the run ended for good in this job; None if it did not."""
        run = self.earlier_run(root)
        job = run_state.read_job(run) if run is not None else None
        if run is None or job is None or not self.job_uid or job.job_uid != self.job_uid:
            return None
        state = run_state.state_of(run, job)
        return state.exit_code if state is not None and state.exit_code in FINAL else None


class _Variables(msgspec.Struct, kw_only=True, rename=str.upper):
    """The variables that describe a node, as a scheduler sets them."""

    torchmuster_nnodes: Annotated[int, msgspec.Meta(ge=1)]
    torchmuster_node_rank: Annotated[int, msgspec.Meta(ge=0)]
    torchmuster_launcher: Annotated[str, msgspec.Meta(pattern=_ADDRESS)] = ""
    torchmuster_join_secret: Annotated[str, msgspec.Meta(min_length=_SHORTEST_SECRET)] = ""
    torchmuster_run_id: Annotated[str, msgspec.Meta(pattern=_RUN_ID)] | None = None
    torchmuster_job_uid: str = ""


def group_here(environment: Mapping[str, str]) -> NodeGroup | None:
    """Return the group that this process belongs to; None if the scheduler has not described one."""
    if NODES not in environment and NODE_RANK not in environment:
        return None
    known = {name: environment[name] for name in VARIABLES if name in environment}
    if known.get(NODES) == "1":  # it connects to nothing
        known.pop(LAUNCHER, None)
        known.pop(SECRET, None)
    try:
        variables = msgspec.convert(known, _Variables, strict=False)
    except msgspec.ValidationError as error:
        raise _wrong(str(error)) from error
    nodes, node_rank = variables.torchmuster_nnodes, variables.torchmuster_node_rank
    if node_rank >= nodes:
        raise _wrong(f"{NODE_RANK} is {node_rank}, but {NODES} is {nodes}; node ranks begin with 0")
    run_id, job_uid = variables.torchmuster_run_id, variables.torchmuster_job_uid
    if nodes == 1:
        return NodeGroup(nodes=1, node_rank=0, run_id=run_id, job_uid=job_uid)
    missing = [name for name in (LAUNCHER, SECRET) if name not in known]
    if missing:
        raise _wrong(f"{missing[0]} is not set")
    host, _, port = variables.torchmuster_launcher.partition(":")
    return NodeGroup(
        nodes=nodes,
        node_rank=node_rank,
        launcher=host,
        port=int(port or LAUNCHER_PORT),
        secret=variables.torchmuster_join_secret,
        run_id=run_id,
        job_uid=job_uid,
    )


def _wrong(why: str) -> Impossible:
    return Impossible(
        "the variables that describe this node of a group are wrong",
        why=why,
        fix=f"{NODES}=4 {NODE_RANK}=0 {LAUNCHER}=NAME, or NAME:PORT (default port: {LAUNCHER_PORT})\n"
        f"{SECRET}=$(openssl rand -hex 32)  # the same value on every node, at least {_SHORTEST_SECRET} characters",
    )
