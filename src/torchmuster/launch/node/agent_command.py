"""What exactly is started on a machine: torchrun's agent with every setting made explicit."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchmuster.launch import protocol
from torchmuster.launch.node.elastic_agent import GRACE_VARIABLE, USUAL_GRACE_S
from torchmuster.launch.node.process_cleanup import TOKEN_VARIABLE

_RANK = Path(__file__).parents[1] / "rank" / "start.py"


@dataclass(frozen=True, kw_only=True)
class Share:
    """One machine's share of a run: what was settled with it, and where it keeps its files."""

    prepare: protocol.Prepare
    start: protocol.Start
    ranks: int
    logs: Path
    records: Path
    socket: int | None = None  # the listening socket of the store, on the first machine

    @property
    def first(self) -> bool:
        """Whether this is the machine with rank 0."""
        return self.start.node_rank == 0


def rank_command(share: Share) -> list[str]:
    """Return the command of each rank; its number is in the environment."""
    settings = {
        "logs": str(share.logs),
        "records": str(share.records),
        "world_size": share.start.world_size,
        "attempt": share.start.attempt,
        "max_restarts": share.start.max_restarts,
        "module": share.prepare.module,
    }
    return [sys.executable, "-u", str(_RANK), json.dumps(settings), *share.prepare.command]


def agent_command(share: Share) -> list[str]:
    """Return the command of the agent: torchrun's own flags, nothing left to its defaults."""
    flags = [
        f"--nnodes={share.start.nodes}",
        f"--nproc-per-node={share.ranks}",
        f"--rdzv-id={share.prepare.run_id}.{share.start.attempt}",
        *_rendezvous(share),
        f"--local-addr={share.start.local_address}",
        "--max-restarts=0",  # a restart is the launcher's: of all machines, with a clean store
        "--monitor-interval=0.1",
        f"--log-dir={share.records / 'torchrun'}",
        "--no-python",
    ]
    # torchrun replaces ${local_rank} and $$ in a command; what was typed should arrive as it is.
    command = [word.replace("$", "$$") for word in rank_command(share)]
    report = str(share.records / "agent.json")
    return [sys.executable, "-m", "torchmuster.launch.node.elastic_agent", report, *flags, *command]


def _rendezvous(share: Share) -> list[str]:
    start = share.start
    timeout = round(start.timeout_s)
    if start.backend == "muster":
        conf = f"rank={start.node_rank},timeout={timeout}"
        if share.socket is not None:
            conf += f",socket={share.socket}"
        flags = ["--rdzv-backend=torchmuster", f"--rdzv-endpoint={start.endpoint}"]
        return [*flags, f"--rdzv-conf={conf}"]
    # The keep-alive compares the clocks of different machines, so it must allow for wrong ones.
    conf = f"rank={start.node_rank},join_timeout={timeout},last_call_timeout=5,keep_alive_interval=5,keep_alive_max_attempt=1000"
    if start.backend == "c10d":
        conf += f",is_host={str(share.first).lower()},read_timeout={timeout}"
    return [
        f"--rdzv-backend=torchmuster-{start.backend}",
        f"--rdzv-endpoint={start.endpoint}",
        f"--rdzv-conf={conf}",
    ]


def environment(
    share: Share, base: Mapping[str, str], devices: Mapping[str, str | None], threads: int
) -> dict[str, str]:
    """Return the environment of the agent and its ranks; what the user set is never overwritten."""
    merged = {name: value for name, value in base.items() if not name.startswith("PET_")}
    merged |= share.prepare.environment
    for name, value in devices.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = value
    merged.setdefault("OMP_NUM_THREADS", str(threads))
    merged[TOKEN_VARIABLE] = share.prepare.token
    # Restarted ranks must not find what an earlier attempt left in a shared store.
    merged["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    merged.setdefault(GRACE_VARIABLE, USUAL_GRACE_S)
    return merged


def direct_environment(share: Share, local_rank: int) -> dict[str, str]:
    """Return what torchrun would tell a rank, for systems on which its agent cannot run."""
    start = share.start
    return {
        "RANK": str(start.first_rank + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(start.world_size),
        "LOCAL_WORLD_SIZE": str(share.ranks),
        "GROUP_RANK": str(start.node_rank),
        "GROUP_WORLD_SIZE": str(start.nodes),
        "MASTER_ADDR": start.address,
        "MASTER_PORT": str(start.port),
        "USE_LIBUV": "0",  # the Windows builds of torch are made without it
    }
