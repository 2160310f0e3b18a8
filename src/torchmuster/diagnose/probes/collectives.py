"""The program that tests a group of ranks with known values: devices, collectives, pairs.

Run it as ``torchrun --nproc-per-node 2 -m torchmuster.diagnose.probes.collectives``; ``muster
check`` runs it on all hosts. Each rank prints its record (``diagnose/rank_record.py``) and exits
with 0 whatever it found: the launcher evaluates the records of all ranks
(``diagnose/collectives.py``).

Every stage begins with a barrier through the store and has a timeout, so that a hang names its
ranks.
"""

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from torchmuster.devices import snapshot
from torchmuster.diagnose.probes import exact_values, matmul, pairs
from torchmuster.diagnose.probes.exact_values import Seat
from torchmuster.diagnose.probes.in_time import Absent, Hangs, RankBarrier, in_time
from torchmuster.diagnose.rank_record import Health, RankRecord, Trouble, line_of
from torchmuster.diagnose.torch_private import collectives_begun
from torchmuster.errors import MusterError
from torchmuster.launch.probes import membership, process_group

_FORM_S = 60.0
_COME_S = 10.0
_SILENT_S = 8.0
_END_S = 3.0
_MEASURED_AGAIN = 2
_SUSPICIOUS = 0.75  # of the fastest device of the same model

Changes = dict[str, Any]  # fields of the record that a stage fills


def device_health(uuid: str | None) -> Health:
    """Return temperature and throttling of a GPU, by its UUID; empty for a CPU."""
    if uuid is None:
        return Health()
    for device in snapshot.take_snapshot().accelerators:
        if uuid in device.uuid:
            return Health(
                temperature_c=device.temperature_c,
                throttled_by=device.throttled_by,
            )
    return Health()


def main() -> int:
    """Run all stages; return 0 unless the process group could not be created."""
    record = RankRecord(
        rank=membership.number_from("RANK", os.environ) or 0,
        world_size=membership.number_from("WORLD_SIZE", os.environ) or 1,
        host=socket.gethostname(),
        node=membership.number_from("GROUP_RANK", os.environ),
        local_rank=membership.number_from("LOCAL_RANK", os.environ),
        stage="group",
    )
    _say(record)
    try:
        group = process_group.setup_process_group(
            record.rank, record.world_size, _wanted_backend(), _FORM_S
        )
    except MusterError as error:
        _say(_changed(record, trouble=Trouble(stage="group", problem="error", text=error.what)))
        print(f"[rank {record.rank}] {error}", file=sys.stderr, flush=True)
        return error.exit_code
    record = _changed(
        record,
        device=str(group.device),
        device_name=_device_name(group.device),
        device_uuid=(
            process_group.gpu_uuid(group.device.index) if group.device.type == "cuda" else None
        ),
        backend=group.choice.backend,
        backend_reason=group.reasons[-1],
        hip=torch.version.hip is not None and group.device.type == "cuda",
        accelerator=process_group.backend_facts().accelerator,
        gpu_error=gpu_error(),
    )
    together = RankBarrier(process_group.group_store(), record.rank, record.world_size)
    record = _Stages(record, together, group.device).run()
    _say(_changed(record, stage="end", ended=True))
    _end(record, together)
    return 0


class _Stages:
    """Runs the stages in order, and stops at the first that fails."""

    def __init__(self, record: RankRecord, together: RankBarrier, device: torch.device) -> None:
        self._record = record
        self._together = together
        self._device = device
        self._seat = Seat(rank=record.rank, world_size=record.world_size, device=device)

    def run(self) -> RankRecord:
        """Run the stages and return the filled record."""
        stages = {
            "devices": self._devices,
            "collectives": self._collectives,
            "pairs": self._pairs,
        }
        for name, work in stages.items():
            self._change(stage=name)
            _say(self._record)
            trouble = self._stage(name, work)
            if trouble is not None:
                self._change(trouble=trouble)
                break
        return self._record

    def _change(self, **changes: Any) -> None:
        self._record = _changed(self._record, **changes)

    def _stage(self, name: str, work: Callable[[], Changes]) -> Trouble | None:
        try:
            self._together.share(f"come {name}", self._record.host, _COME_S)
        except Absent as error:
            return Trouble(stage=name, problem="absent", ranks=error.ranks)
        except (Hangs, RuntimeError) as error:
            return Trouble(stage=name, problem="error", text=_first_line(error))
        try:
            self._change(**in_time(work, _SILENT_S, self._together.heartbeat))
        except Hangs:
            return Trouble(stage=name, problem="hangs", ranks=self._stragglers(name))
        except Absent as error:
            return Trouble(stage=name, problem="absent", ranks=error.ranks)
        except Exception as error:
            return Trouble(stage=name, problem="error", text=_first_line(error))
        return None

    def _stragglers(self, stage: str) -> tuple[int, ...]:
        """Return the ranks that have begun fewer collectives, for which all others wait."""
        begun = collectives_begun(dist.group.WORLD)
        if begun is None:
            return ()
        try:
            of_all = self._together.share(f"hangs {stage}", begun, _END_S)
        except Absent as error:
            return error.ranks
        except (Hangs, RuntimeError):
            return ()
        return tuple(rank for rank, count in enumerate(of_all) if count < max(of_all))

    def _devices(self) -> Changes:
        matmuls = matmul.check_matmuls(self._device)
        for again in range(_MEASURED_AGAIN):
            # Another process may have interfered; slow ranks measure again while the others pause.
            fastest = self._fastest_alike(f"speeds {again}", matmuls[0].flops_per_s)
            if matmuls[0].flops_per_s < _SUSPICIOUS * fastest:
                matmuls = matmul.better_matmul(matmul.check_matmuls(self._device), matmuls)
        return {"matmuls": matmuls, "health": device_health(self._record.device_uuid)}

    def _fastest_alike(self, name: str, flops_per_s: float) -> float:
        """Return the best speed among devices of the same model."""
        own = self._record.device_name
        speeds = self._together.share(name, [own, flops_per_s], _COME_S)
        return float(max(speed for model, speed in speeds if model == own))

    def _collectives(self) -> Changes:
        return {"operations": exact_values.check_collectives(self._seat, self._together)}

    def _pairs(self) -> Changes:
        """Exchange values in pairs, and sums as well if any sum was wrong on any rank."""
        wrong = [operation.name for operation in self._record.operations if operation.values.wrong]
        sums = bool({"all-reduce", "reduce-scatter"} & set(wrong))
        again = any(self._together.share("sums", sums, _COME_S))
        return {"pairs": pairs.measure_pairs(self._seat, self._together, sums=again)}


def _wanted_backend() -> str:
    return "nccl" if torch.accelerator.is_available() else "gloo"


def _changed(record: RankRecord, **changes: Any) -> RankRecord:
    return msgspec.structs.replace(record, **changes)


def _say(record: RankRecord) -> None:
    # One write per line, so that the lines of different ranks do not mix.
    sys.stdout.write(line_of(record) + "\n")
    sys.stdout.flush()


def _end(record: RankRecord, together: RankBarrier) -> None:
    """Exit together: rank 0 may host the store, and others may still have to read from it."""
    try:
        together.share("end", True, _END_S)
        together.share("left", True, _END_S)
    except (Absent, Hangs, RuntimeError):
        pass  # the others are gone; the records are already printed
    if record.trouble is not None:
        # A thread may hang in a collective forever; a normal exit would wait for it.
        sys.stderr.flush()
        os._exit(0)
    process_group.cleanup_process_group()


def gpu_error() -> str:
    """Return why torch has no GPU here; "" if it has one."""
    if torch.accelerator.is_available():
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # a build without CUDA, or what the driver reports
        return _first_line(error)
    return "the driver reports no GPU"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return snapshot.take_snapshot().cpu.name


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
