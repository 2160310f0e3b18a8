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
from torchmuster.diagnose.probes.exact_values import Seat, silent_s
from torchmuster.diagnose.probes.in_time import Absent, Hangs, RankBarrier, in_time
from torchmuster.diagnose.rank_record import Health, RankRecord, Trouble, line_of
from torchmuster.diagnose.torch_private import collectives_begun
from torchmuster.errors import MusterError
from torchmuster.launch.probes import membership, process_group

_FORM_S = 60.0
_COME_S = 10.0
_END_S = 3.0
_SUSPICIOUS = 0.75  # of the fastest device of the same model

Changes = dict[str, Any]  # fields of the record that a stage fills
Stage = Callable[[RankRecord, Seat, RankBarrier], Changes]


def device_health(uuid: str | None) -> Health:
    """Return temperature and throttling of a GPU, by its UUID; empty for a CPU."""
    if uuid is None:
        return Health()
    for device in snapshot.take_snapshot().accelerators:
        if uuid in device.uuid:
            return Health(temperature_c=device.temperature_c, throttled_by=device.throttled_by)
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
    seat = Seat(rank=record.rank, world_size=record.world_size, device=group.device)
    for stage, work in _STAGES.items():
        record = _changed(record, stage=stage)
        _say(record)
        record = _run_stage(work, record, seat, together)
        if record.trouble is not None:
            break
    _say(_changed(record, stage="end", ended=True))
    _end(record, together)
    return 0


def _run_stage(work: Stage, record: RankRecord, seat: Seat, together: RankBarrier) -> RankRecord:
    """Run a stage; return the record with its results, or with its trouble."""
    stage = record.stage
    try:
        together.share(f"come {stage}", record.host, _COME_S)
        changes = in_time(
            lambda: work(record, seat, together), silent_s(seat.device), together.heartbeat
        )
    except Absent as error:
        return _changed(record, trouble=Trouble(stage=stage, problem="absent", ranks=error.ranks))
    except Hangs:
        ranks = _stragglers(stage, together)
        return _changed(record, trouble=Trouble(stage=stage, problem="hangs", ranks=ranks))
    except Exception as error:
        trouble = Trouble(stage=stage, problem="error", text=_first_line(error))
        return _changed(record, trouble=trouble)
    return _changed(record, **changes)


def _stragglers(stage: str, together: RankBarrier) -> tuple[int, ...]:
    """Return the ranks that have begun fewer collectives, for which all others wait."""
    begun = collectives_begun(dist.group.WORLD)
    try:
        of_all = together.share(f"hangs {stage}", begun, _END_S)
    except Absent as error:
        return error.ranks
    except (Hangs, RuntimeError):
        return ()
    return tuple(rank for rank, count in enumerate(of_all) if count < max(of_all))


def _check_device(record: RankRecord, seat: Seat, together: RankBarrier) -> Changes:
    matmuls = matmul.check_matmuls(seat.device)
    model, speed = record.device_name, matmuls[0].flops_per_s
    shared = together.share("speeds", [model, speed], _COME_S)
    fastest = max(other for device_name, other in shared if device_name == model)
    if speed < _SUSPICIOUS * fastest:
        # Another process may have interfered; slow ranks measure again while the others pause.
        matmuls = matmul.better_matmuls(matmul.check_matmuls(seat.device), matmuls)
    return {"matmuls": matmuls, "health": device_health(record.device_uuid)}


def _check_collectives(record: RankRecord, seat: Seat, together: RankBarrier) -> Changes:
    return {"operations": exact_values.check_collectives(seat, together)}


def _check_pairs(record: RankRecord, seat: Seat, together: RankBarrier) -> Changes:
    """Exchange values in pairs, and sums as well if any sum was wrong on any rank."""
    wrong = {operation.name for operation in record.operations if operation.values.wrong}
    again = any(together.share("sums", bool({"all-reduce", "reduce-scatter"} & wrong), _COME_S))
    return {"pairs": pairs.measure_pairs(seat, together, sums=again)}


_STAGES: dict[str, Stage] = {
    "devices": _check_device,
    "collectives": _check_collectives,
    "pairs": _check_pairs,
}


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
