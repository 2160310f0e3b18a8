"""Test torch in this process, stage by stage; each stage writes lines of JSON.

One line marks the start of a stage, another has its result, so a crash or a hang shows its stage.
"""

import json
import os
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torchmuster.diagnose.rank_record import MARK

if TYPE_CHECKING:
    import torch


def main() -> int:
    """Run the stages; an error in one is recorded and does not stop the next."""
    _begin("import")
    began = time.perf_counter()
    import torch

    _record("import", seconds=time.perf_counter() - began, **_gpus_seen(torch))
    _begin("group")
    _record("group", error=_group_error())
    for device in _devices(torch):
        _begin("device")
        _record("device", **_multiply(torch, device))
    return 0


def _gpus_seen(torch: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"gpu_build": bool(torch.version.cuda or torch.version.hip)}
    try:
        facts["devices"] = torch.accelerator.device_count()
        if facts["gpu_build"] and not facts["devices"]:
            torch.cuda.init()  # raises the reason
    except Exception as error:
        facts["gpu_error"] = f"{type(error).__name__}: {error}"
    return facts


def _group_error() -> str:
    import torch.distributed as dist

    if not dist.is_available():
        return "this torch is built without torch.distributed"
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    try:
        # An in-process store opens no port that another program could hold.
        dist.init_process_group(
            "gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20)
        )
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _devices(torch: Any) -> list["torch.device"]:
    devices = [torch.device("cpu")]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        for index in range(torch.accelerator.device_count()):
            devices.append(torch.device(kind, index))
    return devices


def _multiply(torch: Any, device: "torch.device") -> dict[str, Any]:
    from torchmuster.diagnose.probes.matmul import check_matmuls

    record: dict[str, Any] = {"name": str(device)}
    try:
        if device.type == "cuda":
            record["built_for"] = torch.cuda.get_arch_list()
        matmuls = check_matmuls(device)
    except Exception as error:
        return record | {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
    record["wrong"] = sum(matmul.values.wrong for matmul in matmuls)
    record["compared"] = sum(matmul.values.compared for matmul in matmuls)
    record["gflops"] = matmuls[0].flops_per_s / 1e9
    return record


def _begin(stage: str) -> None:
    _record(stage, begun=True)


def _record(stage: str, **values: Any) -> None:
    sys.stdout.write(f"{MARK}{json.dumps({'stage': stage, **values})}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch's shutdown is not part of the test
