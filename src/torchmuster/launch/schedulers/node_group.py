"""Nodes on each of which a scheduler starts the same command: Kubernetes, SkyPilot, dstack.

``muster run`` and ``muster train`` find their node rank in the environment. Node rank 0 is the launcher; the other nodes connect
to it, and prove with a secret that they belong to the run. A node that is replaced, also node rank 0, takes its place
again. The scheduler only has to start the command again; its API is not used.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
_RUN_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")
_ADDRESS = re.compile(
    r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?::(?P<port>\d{1,5}))?"
)


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


def group_here(environment: Mapping[str, str]) -> NodeGroup | None:
    """Return the group that this process belongs to; None if the scheduler has not described one."""
    if NODES not in environment and NODE_RANK not in environment:
        return None
    nodes = _number(environment, NODES, least=1)
    node_rank = _number(environment, NODE_RANK, least=0)
    if node_rank >= nodes:
        raise Impossible(
            f"{NODE_RANK}={node_rank}, but {NODES}={nodes}",
            why="node ranks begin with 0",
            fix=f"{NODE_RANK} must be less than {NODES}",
        )
    run_id = environment.get(RUN_ID)
    if run_id is not None and not _RUN_ID.fullmatch(run_id):
        raise Impossible(
            f"{RUN_ID}={run_id!r} is not a valid run id",
            why="it has at most 64 lowercase letters, digits and dashes",
        )
    job_uid = environment.get(JOB_UID, "")
    if nodes == 1:
        return NodeGroup(nodes=1, node_rank=0, run_id=run_id, job_uid=job_uid)
    launcher, port = _launcher_address(environment.get(LAUNCHER, ""))
    return NodeGroup(
        nodes=nodes,
        node_rank=node_rank,
        launcher=launcher,
        port=port,
        secret=_checked_secret(environment.get(SECRET, "")),
        run_id=run_id,
        job_uid=job_uid,
    )


def _launcher_address(text: str) -> tuple[str, int]:
    address = _ADDRESS.fullmatch(text)
    port = LAUNCHER_PORT
    if address is not None and address["port"]:
        port = int(address["port"])
    if address is None or not 1 <= port <= 65535:
        raise Impossible(
            f"{LAUNCHER}={text!r} is not the address of the launcher",
            why="the other nodes connect to the node with rank 0",
            fix=f"{LAUNCHER}=NAME, or NAME:PORT (default port: {LAUNCHER_PORT})",
        )
    return address["host"], port


def _checked_secret(secret: str) -> str:
    if len(secret) >= _SHORTEST_SECRET:
        return secret
    mistake = "is too short" if secret else "is not set"
    raise Impossible(
        f"{SECRET} {mistake}",
        why=f"the nodes prove with it that they belong to the run; it has at least {_SHORTEST_SECRET} characters",
        fix="openssl rand -hex 32  # the same value on every node, for example from a Secret",
    )


def _number(environment: Mapping[str, str], name: str, *, least: int) -> int:
    text = environment.get(name, "")
    if not text.isdecimal() or int(text) < least:
        raise Impossible(
            f"{name}={text!r} is not a number of at least {least}"
            if text
            else f"{name} is not set",
            why=f"{NODES} and {NODE_RANK} together describe this node",
            fix=f"set both, or unset both: {NODES}=4 {NODE_RANK}=0",
        )
    return int(text)
