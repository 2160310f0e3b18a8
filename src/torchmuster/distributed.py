"""Functions that list, choose and benchmark GPUs, and set up the process group.

GPU ids are the indices that ``nvidia-smi`` and ``muster gpus`` show, regardless of
``CUDA_VISIBLE_DEVICES``; a MIG slice is ``"0:1"``. Only GPUs visible to this process are used.
Torch is imported only by the functions that return a ``torch.device`` or need a process group,
and by the training classes on first use. ``GPUMonitor`` works without it.
"""

import importlib
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torchmuster.decision import Decision
from torchmuster.devices import cuda_driver, snapshot
from torchmuster.devices.choose import choose_devices, device_load
from torchmuster.devices.claims import Claims
from torchmuster.devices.for_model import Strategy, choose_for_model
from torchmuster.devices.identify import find_device
from torchmuster.devices.model import Device, DeviceKind, Node
from torchmuster.devices.request import Claim, DeviceRequest, GpuId
from torchmuster.devices.visibility import variables_for, visible
from torchmuster.errors import CudaAlreadyInitialized, MusterError
from torchmuster.units import MiB

if TYPE_CHECKING:
    import torch

    from torchmuster.monitor.gpu_monitor import GPUMonitor
    from torchmuster.train.legacy.data import (
        create_distributed_dataloader,
        reduce_mean,
        sync_gradients,
    )
    from torchmuster.train.legacy.trainers import DDPTrainer, ProductionTrainer

__all__ = [
    "DDPTrainer",
    "GPUMonitor",
    "GpuIds",
    "ProductionTrainer",
    "auto_select_gpus_for_model",
    "benchmark_matmul",
    "cleanup_distributed",
    "create_distributed_dataloader",
    "get_available_gpus",
    "get_device_info",
    "get_gpu_info",
    "get_gpu_memory_usage",
    "get_group_info",
    "get_local_rank",
    "get_optimal_device",
    "print_gpu_info",
    "reduce_mean",
    "select_gpus",
    "set_visible_gpus",
    "setup_distributed",
    "setup_gpu_environment",
    "sync_gradients",
    "verify_gpu_communication",
]

_log = logging.getLogger(__name__)

# Modules of the training API, imported on first use: most need torch, which this module must not
# import.
_TRAINING = {
    "DDPTrainer": "torchmuster.train.legacy.trainers",
    "GPUMonitor": "torchmuster.monitor.gpu_monitor",
    "ProductionTrainer": "torchmuster.train.legacy.trainers",
    "create_distributed_dataloader": "torchmuster.train.legacy.data",
    "reduce_mean": "torchmuster.train.legacy.data",
    "sync_gradients": "torchmuster.train.legacy.data",
}


def __getattr__(name: str) -> Any:
    if name in _TRAINING:
        return getattr(importlib.import_module(_TRAINING[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class GpuIds(list[GpuId]):
    """A list of GPU ids with the reason for the choice.

    ``strategy`` is single, ddp or fsdp if they were chosen for a model, else None.
    """

    def __init__(
        self, devices: Iterable[Device], reason: str, strategy: Strategy | None = None
    ) -> None:
        super().__init__(_id(device) for device in devices)
        self.reason = reason
        self.strategy = strategy


def get_available_gpus() -> list[GpuId]:
    """Return the ids of the GPUs that are visible to this process and respond."""
    return [_id(device) for device in _visible(snapshot.take_snapshot()) if not device.trouble]


def select_gpus(
    gpu_ids: Sequence[GpuId] | None = None,
    num_gpus: int | None = None,
    min_memory_mb: int | None = None,
) -> GpuIds:
    """Choose GPUs by id, by number, or all, each with at least ``min_memory_mb`` total memory.

    ``num_gpus`` takes the least loaded GPUs and skips those in use. GPUs given by id, or all of
    them, are taken even if they are in use.
    """
    decision = _select(snapshot.take_snapshot(), gpu_ids, num_gpus, min_memory_mb)
    return GpuIds(decision.value, decision.reason)


def auto_select_gpus_for_model(model_size_gb: float, num_gpus: int | None = None) -> GpuIds:
    """Choose the fewest GPUs that can train a model whose weights take ``model_size_gb``.

    The reason states the strategy: one GPU, a copy on each GPU (ddp), or sharded (fsdp). Only the
    size is considered; ``muster plan`` also considers the model, its batch size and its precision.
    """
    node = snapshot.take_snapshot()
    decision = choose_for_model(
        node,
        round(model_size_gb * 10**9),
        DeviceRequest(count=num_gpus),
        environment=os.environ,
        claims=_claims(node),
    )
    _log.info("%s", decision.reason)
    return GpuIds(decision.value.devices, decision.reason, decision.value.strategy)


def set_visible_gpus(gpu_ids: Sequence[GpuId]) -> None:
    """Make only these GPUs visible to this process and its children. An empty list means the CPU.

    Call it before anything uses CUDA; it raises an error if CUDA is already initialized.
    """
    node = snapshot.take_snapshot()
    _hide_all_but([find_device(node, gpu_id, os.environ) for gpu_id in gpu_ids])


def setup_gpu_environment(
    gpu_ids: Sequence[GpuId] | None = None, num_gpus: int | None = None
) -> "torch.device":
    """Choose GPUs, hide all others from this process, and return the device to use.

    Without a GPU, this is the CPU, and a warning gives the reason.
    """
    import torch

    node = snapshot.take_snapshot()
    if not _visible(node) and gpu_ids is None:
        _log.warning("using the CPU: %s", _why_no_gpu(node))
        return torch.device("cpu")
    chosen = _select(node, gpu_ids, num_gpus).value
    _hide_all_but(chosen)
    return _torch_device(node, min(chosen, key=device_load))


def get_optimal_device(gpu_ids: Sequence[GpuId] | None = None) -> "torch.device":
    """Return the least loaded of these GPUs (or of all) as a torch device; the CPU if there is none."""
    import torch

    node = snapshot.take_snapshot()
    if gpu_ids is None and not _visible(node):
        return torch.device("cpu")
    ids = None if gpu_ids is None else tuple(gpu_ids)
    request = DeviceRequest(ids=ids, count=1, share=True)
    decision = choose_devices(node, request, environment=os.environ, claims=_claims(node))
    _log.info("%s", decision.reason)
    return _torch_device(node, decision.value[0])


def setup_distributed(
    rank: int, world_size: int, backend: str = "nccl", *, timeout_s: float = 600.0
) -> "torch.device":
    """Create the process group and return this rank's device, which is set before the group is created.

    Uses the variables of torchrun (``RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT``) and
    rejects arguments that contradict them. One process without a launcher is a group of 1; several
    without one use 127.0.0.1, port 29500. If nccl does not work on a rank, all ranks use gloo and a
    warning gives the reason. ``timeout_s`` limits the creation of the group and each later wait for
    other ranks.
    """
    from torchmuster.launch.probes import process_group

    return process_group.setup_process_group(rank, world_size, backend, timeout_s).device


def cleanup_distributed() -> None:
    """Destroy the process group; does nothing without one, so it may be called twice.

    While an exception propagates, as in a ``finally``, a group of NCCL is left open: destroying it
    may wait for ranks that are gone.
    """
    from torchmuster.launch.probes import process_group

    process_group.cleanup_process_group()


def verify_gpu_communication(rank: int, world_size: int, *, timeout_s: float = 60.0) -> bool:
    """Run an all-reduce over all ranks on their devices; True if the sum is right on this rank.

    A wrong sum, an error or a timeout is False, and the log gives the reason. After False the group
    is unusable: exit, or destroy it. On GPUs, torch kills the process once a collective has taken
    longer than the group's own timeout.
    """
    from torchmuster.diagnose.probes import communication

    return communication.verify_communication(rank, world_size, timeout_s)


def benchmark_matmul(
    device: "str | torch.device", size: int, iterations: int = 100
) -> dict[str, Any]:
    """Multiply two square float32 matrices; return ``seconds`` and ``tflops`` of one product.

    It warms up first and synchronizes the device. ``iterations`` is the number of samples:
    ``seconds`` is their median, and ``noise`` half of their interquartile range relative to it.
    ``muster bench matmul`` covers all sizes and dtypes, and compares GPU and CPU.
    """
    from torchmuster.bench import matmul

    return matmul.benchmark_matmul(device, size, iterations)


def get_local_rank() -> int:
    """Return the local rank of this process: ``LOCAL_RANK`` as torchrun sets it, else 0."""
    from torchmuster.launch.probes import membership

    return membership.local_rank(os.environ)


def get_group_info() -> dict[str, Any]:
    """Return the group of ``setup_distributed``, with ``reasons`` for its choices; or {}."""
    from torchmuster.launch.probes import process_group

    group = process_group.current_group()
    if group is None:
        return {}
    return {
        "rank": group.member.rank,
        "world_size": group.member.world_size,
        "local_rank": group.member.local_rank,
        "backend": group.choice.backend,
        "device": group.device,
        "simulated": group.member.alone,
        "reasons": list(group.reasons),
    }


def _select(
    node: Node,
    gpu_ids: Sequence[GpuId] | None,
    num_gpus: int | None,
    min_memory_mb: int | None = None,
) -> Decision[tuple[Device, ...]]:
    request = DeviceRequest(
        ids=None if gpu_ids is None else tuple(gpu_ids),
        count=num_gpus,
        min_total_bytes=None if min_memory_mb is None else min_memory_mb * MiB,
        share=num_gpus is None,
    )
    decision = choose_devices(node, request, environment=os.environ, claims=_claims(node))
    _log.info("%s", decision.reason)
    return decision


def _hide_all_but(devices: Sequence[Device]) -> None:
    changes = variables_for(devices) or {"CUDA_VISIBLE_DEVICES": ""}
    if all(os.environ.get(name) == value for name, value in changes.items()):
        return
    _refuse_if_cuda_has_started(devices)
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _torch_device(node: Node, device: Device) -> "torch.device":
    """Return a device as a torch device; the CPU, with a warning, if this torch cannot use it."""
    import torch

    usable = torch.accelerator.current_accelerator(check_available=True)
    if usable is None:
        _log.warning("using the CPU: %s", _why_torch_sees_no_gpu(torch))
        return torch.device("cpu")
    if device.kind is DeviceKind.MPS:
        return torch.device("mps")
    return torch.device(usable.type, _torch_number(node, device))


def get_gpu_info() -> list[dict[str, Any]]:
    """Return the properties of each visible GPU, memory in MB of 1024 x 1024 bytes."""
    return [
        {
            "id": _id(device),
            "uuid": device.uuid,
            "name": device.name,
            "total_memory_mb": _mb(device.total_bytes),
            "used_memory_mb": _mb(device.used_bytes),
            "free_memory_mb": _mb(device.free_bytes),
            "utilization_percent": device.utilization_percent,
            "temperature_c": device.temperature_c,
            "compute_capability": device.compute_capability,
            "processes": [process.pid for process in device.processes],
            "trouble": device.trouble,
        }
        for device in _visible(snapshot.take_snapshot())
    ]


def print_gpu_info(gpu_ids: Sequence[GpuId] | None = None) -> None:
    """Print a line for each of these GPUs (or for all)."""
    node = snapshot.take_snapshot()
    if gpu_ids is None:
        devices = _visible(node)
        print(f"Available GPUs: {len(devices)}")
    else:
        devices = [find_device(node, gpu_id, os.environ) for gpu_id in gpu_ids]
    for device in devices:
        print(_device_line(device))


def get_gpu_memory_usage(gpu_id: GpuId) -> tuple[int, int, float]:
    """Return (allocated, total, percent) of a GPU's memory in MB, for all processes on it."""
    device = find_device(snapshot.take_snapshot(), gpu_id, os.environ)
    used, total = _mb(device.used_bytes), _mb(device.total_bytes)
    if used is None or total is None:
        raise MusterError(
            f"{device.label} does not report its memory usage",
            why=f"it does not answer: {device.trouble}" if device.trouble else "",
            fix="muster gpus  # shows what it does report",
        )
    return used, total, _used_percent(device)


def get_device_info() -> dict[str, Any]:
    """Return ``num_gpus``, ``devices`` and ``cuda_available`` as this torch sees them."""
    import torch

    available = torch.cuda.is_available()
    devices = get_gpu_info() if available else []
    return {"num_gpus": len(devices), "devices": devices, "cuda_available": available}


def _visible(node: Node) -> list[Device]:
    shown = visible(node.accelerators, os.environ).devices
    return [device for device in shown if device.kind is node.main_kind]


def _claims(node: Node) -> dict[str, Claim]:
    uuids = [device.uuid for device in node.accelerators]
    return Claims.here(os.environ).read(uuids).blocking


def _id(device: Device) -> GpuId:
    return device.index if device.mig_index is None else device.number


def _mb(count: int | None) -> int | None:
    return None if count is None else count // MiB


def _used_percent(device: Device) -> float:
    return 100 * (device.used_bytes or 0) / device.total_bytes if device.total_bytes else 0.0


def _device_line(device: Device) -> str:
    if device.trouble:
        return f"GPU {device.number}: {device.name} (does not answer: {device.trouble})"
    parts = []
    if device.total_bytes is not None:
        parts.append(f"{_mb(device.total_bytes)} MB total")
    if device.used_bytes is not None:
        parts.append(f"{_mb(device.used_bytes)} MB used ({_used_percent(device):.1f}%)")
    if device.compute_capability is not None:
        parts.append("Compute {}.{}".format(*device.compute_capability))
    return f"GPU {device.number}: {device.name} ({', '.join(parts)})"


def _refuse_if_cuda_has_started(devices: Sequence[Device]) -> None:
    loaded = sys.modules.get("torch")
    if not cuda_driver.cuda_has_started() and not (loaded and loaded.cuda.is_initialized()):
        return
    names = ", ".join(device.number for device in devices) or "none"
    raise CudaAlreadyInitialized(
        f"cannot select GPUs {names}: CUDA is already initialized in this process",
        why="CUDA reads CUDA_VISIBLE_DEVICES once, at initialization; a later change has no effect",
        fix="select GPUs before anything uses CUDA (.cuda(), .to('cuda'), torch.cuda.…, including "
        "torch.cuda.is_available()), or start the program with: "
        "muster gpus pick --gpu-ids … python …",
    )


def _why_no_gpu(node: Node) -> str:
    hidden = visible(node.accelerators, os.environ).hidden_by
    if hidden:
        return f"all GPUs are hidden by {', '.join(sorted(set(hidden.values())))}"
    known = "; ".join(f"{finding.what} (fix: {finding.fix})" for finding in node.findings)
    return known or "no GPU is visible on this machine"


def _why_torch_sees_no_gpu(torch: Any) -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without GPU support; install a build with it"
    return (
        f"torch {torch.__version__} cannot use the GPU; the driver may be too old for its CUDA "
        f"{torch.version.cuda}"
    )


def _torch_number(node: Node, device: Device) -> int:
    """Return torch's index of a device.

    CUDA puts the fastest of different GPUs first, so torch's UUIDs are compared in that case; this initializes CUDA.
    """
    shown = _visible(node)
    pinned = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith(("GPU-", "MIG-"))
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    alike = len({other.name for other in shown}) == 1
    if pinned or by_bus or alike or device.kind is not DeviceKind.CUDA:
        return shown.index(device)
    import torch

    from torchmuster.launch.probes import process_group

    for number in range(torch.cuda.device_count()):
        uuid = process_group.gpu_uuid(number)
        if uuid is not None and uuid in device.uuid:
            return number
    return shown.index(device)
