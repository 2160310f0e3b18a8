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

_MATMUL_S = 0.5
_SIZE = {"cpu": 512}
_GPU_SIZE = 4096
_CHECKED_PRODUCTS = 3


def main() -> int:
    """Run the stages; an error in one is recorded and does not stop the next."""
    _begin("import")
    began = time.perf_counter()
    import torch

    _tell("import", seconds=time.perf_counter() - began, **_facts(torch))
    _begin("numpy")
    _tell("numpy", **_numpy(torch))
    _begin("group")
    _tell("group", **_group())
    for device in _devices(torch):
        _begin("device")
        _tell("device", **_multiply(torch, device))
    return 0


def _facts(torch: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "torch": str(torch.__version__),
        "gpu_build": bool(torch.version.cuda or torch.version.hip),
        "devices": 0,
    }
    try:
        facts["devices"] = torch.accelerator.device_count()
        if facts["gpu_build"] and not facts["devices"]:
            torch.cuda.init()  # raises the reason
    except Exception as error:
        facts["gpu_error"] = f"{type(error).__name__}: {error}"
    return facts


def _numpy(torch: Any) -> dict[str, Any]:
    try:
        import numpy
    except ModuleNotFoundError:
        return {"installed": False}
    except Exception as error:
        return {"installed": True, "error": f"{type(error).__name__}: {error}"}
    try:
        total = int(torch.from_numpy(numpy.arange(4)).sum())
    except Exception as error:
        return {"installed": True, "error": f"{type(error).__name__}: {error}"}
    return {"installed": True, "error": "" if total == 6 else f"0+1+2+3 gave {total}"}


def _group() -> dict[str, Any]:
    import torch.distributed as dist

    if not dist.is_available():
        return {"error": "this torch is built without torch.distributed"}
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    try:
        # An in-process store opens no port that another program could hold.
        dist.init_process_group(
            "gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20)
        )
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


def _devices(torch: Any) -> list["torch.device"]:
    found = [torch.device("cpu")]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        found += [torch.device(kind, index) for index in range(torch.accelerator.device_count())]
    return found


def _multiply(torch: Any, device: "torch.device") -> dict[str, Any]:
    """Multiply matrices of 1 and -1, whose product is exact in every dtype."""
    size = _SIZE.get(device.type, _GPU_SIZE)
    record: dict[str, Any] = {"name": str(device), "index": device.index, "model": device.type}
    try:
        if device.type == "cuda":
            record["model"] = torch.cuda.get_device_name(device)
            record["built_for"] = torch.cuda.get_arch_list()
        generator = torch.Generator().manual_seed(0)
        a, b = (
            torch.randint(0, 2, (size, size), generator=generator).mul_(2).sub_(1).float()
            for _ in range(2)
        )
        return record | _timed(torch, device, a, b)
    except Exception as error:
        return record | {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}


def _timed(torch: Any, device: "torch.device", a: Any, b: Any) -> dict[str, Any]:
    on_device = a.to(device), b.to(device)
    first = torch.mm(*on_device)
    began, products, wrong = time.perf_counter(), 0, int(not _is_right(torch, first, a, b))
    while products < _CHECKED_PRODUCTS or time.perf_counter() - began < _MATMUL_S:
        # The comparison also waits for the device to finish.
        wrong += not torch.equal(torch.mm(*on_device), first)
        products += 1
    seconds = (time.perf_counter() - began) / products
    return {
        "products": products + 1,
        "wrong": wrong,
        "gflops": 2 * a.shape[0] ** 3 / seconds / 1e9,
        "error": "",
    }


def _is_right(torch: Any, product: Any, a: Any, b: Any) -> bool:
    """Compare with integer arithmetic on the CPU: for a vector v, (AB)v is A(Bv)."""
    vector = torch.arange(1, a.shape[0] + 1)
    exact = a.long() @ (b.long() @ vector)
    return bool(torch.equal(product.cpu().long() @ vector, exact))


def _begin(stage: str) -> None:
    _tell(stage, begun=True)


def _tell(stage: str, **values: Any) -> None:
    sys.stdout.write(f"{MARK}{json.dumps({'stage': stage, **values})}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch's shutdown is not part of the test
