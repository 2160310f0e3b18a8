"""A machine's accelerators, as a file in the run's folder: for whoever watches the run from another machine.

Beside ``node_ranks.py``; written less often, because a driver that is asked has to stop for it.
"""

import contextlib
import dataclasses
import socket
import threading
from pathlib import Path

import msgspec

from torchmuster.devices import snapshot
from torchmuster.devices.model import Device, Node
from torchmuster.devices.readers import nvml
from torchmuster.runfolder import RunFolder, write_atomically

_EVERY_S = 10.0
# What was written longer ago is not shown as if it were so now.
_OLD_AFTER_S = 45.0


class NodeDevices(msgspec.Struct, frozen=True, kw_only=True):
    """The accelerators of one machine at one moment."""

    host: str
    at_unix_s: float
    devices: tuple[Device, ...]


class Noting:
    """Writes them down in a thread of its own, since a driver may take long to answer, or never answer.

    On a machine without accelerators it looks once; on one that does not see the run's folder, never.
    """

    def __init__(self, run: RunFolder | None, first_rank: int) -> None:
        self._path = None if run is None else run.metrics / f"devices-from-{first_rank}.json"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._note, name="devices", daemon=True)

    def __enter__(self) -> threading.Thread:
        self._thread.start()
        return self._thread

    def __exit__(self, *_: object) -> None:
        self._over.set()  # not waited for: see above

    def _note(self) -> None:
        if self._path is None:
            return
        with nvml.kept_open():
            while not self._over.is_set():
                node = snapshot.take()
                if not node.accelerators:
                    return
                write(self._path, node)
                self._over.wait(_EVERY_S)


def write(path: Path, node: Node) -> None:
    """Write down a machine's accelerators; a full disk must not end the run."""
    content = NodeDevices(
        host=socket.gethostname(),
        at_unix_s=node.taken_unix_s,
        devices=tuple(map(_for_others, node.accelerators)),
    )
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, msgspec.json.encode(content).decode(), durable=False)


def _for_others(device: Device) -> Device:
    """Return a device without what others on it have typed: a run's folder is shown around."""
    nameless = tuple(dataclasses.replace(one, command=None) for one in device.processes)
    return dataclasses.replace(device, processes=nameless)


def read(run: RunFolder, now_unix_s: float) -> list[NodeDevices]:
    """Return the machines whose accelerators were seen lately."""
    files = sorted(run.metrics.glob("devices-from-*.json"))
    found = [one for one in map(_read, files) if one is not None]
    return [one for one in found if now_unix_s - one.at_unix_s < _OLD_AFTER_S]


def _read(path: Path) -> NodeDevices | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=NodeDevices)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
