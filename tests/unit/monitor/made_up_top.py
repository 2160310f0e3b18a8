"""Machines and runs for ``muster top``: as many ranks as wanted, each on a GPU of its own."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from made_up_runs import LINE, NOW
from torchmuster.devices.model import Device, DeviceKind, DeviceProcess, Node
from torchmuster.launch.hangs.heartbeat import Heartbeat
from torchmuster.launch.history import node_records
from torchmuster.monitor.views.top_picture import TopPicture, TopWatch
from torchmuster.runfolder import RunFolder, create_run_folder, write_atomically
from torchmuster.units import GiB

FIRST_PID = 4_200_000
PHASES = ("forward", "backward", "update", "loading data")


def gpu(index: int, *, host: str = "a", pid: int | None = None, **more: object) -> Device:
    """Return a GPU, on which perhaps a process computes."""
    process = DeviceProcess(pid=pid or 0, compute=True, memory_bytes=70 * GiB, user="ana")
    known: dict[str, object] = {
        "kind": DeviceKind.CUDA,
        "index": index,
        "uuid": f"GPU-{host}-{index}",
        "name": "NVIDIA A100-SXM4-80GB",
        "total_bytes": 80 * GiB,
        "used_bytes": 70 * GiB if pid else 0,
        "utilization_percent": 90 if pid else 0,
        "temperature_c": 62,
        "slowdown_temperature_c": 89,
        "power_w": 390.0,
        "power_limit_w": 400.0,
        "processes": (process,) if pid else (),
    }
    return Device(**{**known, **more})  # type: ignore[arg-type]


def machine(*devices: Device, hostname: str = "a") -> Node:
    """Return a machine with these."""
    cpu = Device(kind=DeviceKind.CPU, index=0, uuid="CPU-0", name="a cpu")
    return Node(
        hostname=hostname,
        taken_unix_s=NOW,
        accelerators=devices,
        cpu=cpu,
        driver_version="570.86.15",
    )


def with_gpus(count: int) -> Node:
    """Return a machine with so many GPUs, on each of which the process of a rank computes."""
    return machine(*(gpu(rank, pid=FIRST_PID + rank) for rank in range(count)))


def heartbeat(rank: int, **more: object) -> Heartbeat:
    """Return what a healthy rank says."""
    known: dict[str, object] = {
        "rank": rank,
        "pid": FIRST_PID + rank,
        "beat": 1,
        "moves": 1,
        "step": 1200,
        "phase": PHASES[rank % len(PHASES)],
        "data_share": 0.1,
        "communication_share": 0.2,
        "busy": 1.5,
        "memory_bytes": 4 * GiB + rank,
    }
    return Heartbeat(**{**known, **more})  # type: ignore[arg-type]


def running(folder: Path, *heartbeats: Heartbeat, host: str = "a", name: str = "llm") -> RunFolder:
    """Make a run that is going on, with these ranks on one machine."""
    run = create_run_folder(folder / "runs", name)
    state = {"phase": "running", "since_unix_s": NOW - 50, "started_unix_s": NOW - 100}
    write_atomically(run.state, json.dumps(state))
    steps = run.metrics / "steps.jsonl"
    steps.write_text(json.dumps(LINE) + "\n")
    os.utime(steps, (NOW, NOW))
    on_machine(run, *heartbeats, host=host)
    return run


def on_machine(
    run: RunFolder, *heartbeats: Heartbeat, host: str, devices: tuple[Device, ...] = ()
) -> None:
    """Let a machine tell of its ranks, and of its devices."""
    if not heartbeats:
        return
    first = heartbeats[0].rank
    ranks = node_records.NodeRanks(host=host, attempt=0, at_unix_s=NOW, ranks=heartbeats)
    place = node_records.node_record_path(run, host, first)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(msgspec.json.encode(ranks))
    if devices:
        told = node_records.NodeDevices(host=host, at_unix_s=NOW, devices=devices)
        (run.metrics / f"devices-from-{first}.json").write_bytes(msgspec.json.encode(told))


def look(
    folder: Path, node: Node | Callable[[], Node], *, only: RunFolder | None = None
) -> TopPicture:
    """Take one look."""
    take = (lambda: node) if isinstance(node, Node) else node
    return TopWatch(folder / "runs", take, only=only).look(NOW)
