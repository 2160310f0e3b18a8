"""A crowd that fights for GPUs while its members are killed at random; run as a program.

Every member claims 1 to 3 GPUs, again and again. Whether a grant is exclusive is checked by a
witness of another kind: a POSIX record lock on one byte per GPU, which the kernel also drops when its
owner dies. The program prints one JSON line with what happened.
"""

import fcntl
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from torchmuster.devices.acquire import acquire_devices
from torchmuster.devices.claims import Claims
from torchmuster.devices.model import Node
from torchmuster.devices.readers import cpu, nvml
from torchmuster.devices.request import DeviceRequest

CPU = cpu.read_cpu()


def look() -> Node:
    """The GPUs and their links through the real binding, without what else a machine has."""
    seen = nvml.read_nvml()
    return Node(
        hostname="crowd",
        taken_unix_s=time.time(),
        accelerators=seen.devices,
        cpu=CPU,
        links=seen.links,
    )


class Witness:
    """Says whether anybody else believes to own a GPU.

    Opened before any claim: the kernel closes a dead process's files in ascending order, so the
    witness's locks are gone before the claims are.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)

    def enter(self, gpu: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, gpu)
        except OSError:
            return False
        return True

    def leave(self, gpu: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, gpu)


def member(slot: int, rounds: int, folder: Path, seed: int) -> None:
    """Claim, hold and release until this place's rounds are done; each is noted as one byte."""
    chance = random.Random(seed)
    random.seed(seed)
    witness = Witness(folder / "witness")
    claims = Claims(folder / "claims")
    progress = os.open(folder / f"slot-{slot}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while os.fstat(progress).st_size < rounds:
        request = DeviceRequest(count=chance.randint(1, 3))
        started = time.monotonic()
        with acquire_devices(
            claims, look, request, environment={}, wait_s=120, command=["member"]
        ) as held:
            waited = time.monotonic() - started
            numbers = [device.index for device in held.decision.value]
            alone = [witness.enter(number) for number in numbers]
            if not all(alone):
                os.write(progress, b"D")  # granted twice
            time.sleep(chance.uniform(0, 0.01))
            for number in numbers:
                witness.leave(number)
            os.write(progress, b"s" if waited > 30 else b".")
    os._exit(0)


def start(slot: int, rounds: int, folder: Path, seed: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            member(slot, rounds, folder, seed)
        except BaseException as error:
            (folder / f"error-{slot}-{seed}").write_text(repr(error))
        finally:
            os._exit(1)
    return pid


def main(members: int, rounds: int, kills: int, folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    started = time.monotonic()
    crowd = {start(slot, rounds, folder, seed + slot): slot for slot in range(members)}
    killed = fresh = 0
    while crowd:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid:
            slot = crowd.pop(pid)
            if status != 0:  # killed: somebody new takes its place
                fresh += 1
                crowd[start(slot, rounds, folder, seed + members * fresh + slot)] = slot
        elif killed < kills:
            os.kill(chance.choice(list(crowd)), signal.SIGKILL)
            killed += 1
            time.sleep(chance.uniform(0, 0.1))
        else:
            time.sleep(0.01)
    notes = "".join((folder / f"slot-{slot}").read_text() for slot in range(members))
    left = (
        Claims(folder / "claims").read(device.uuid for device in nvml.read_nvml().devices).claimed
    )
    print(
        json.dumps(
            {
                "grants": len(notes),
                "granted_twice": notes.count("D"),
                "starved": notes.count("s"),
                "killed": killed,
                "still_held": sorted(left),
                "errors": [path.read_text() for path in folder.glob("error-*")],
                "waiters_left": len(list((folder / "claims" / "queue").iterdir())),
                "seconds": round(time.monotonic() - started, 1),
            }
        )
    )


if __name__ == "__main__":
    members, rounds, kills, folder, seed = sys.argv[1:]
    main(int(members), int(rounds), int(kills), Path(folder), int(seed))
