"""The private names of torch that launch/ uses inside the ranks. Torch is never imported here."""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

# Private names, and what each is for:
# - torch.autograd.graph._engine_run_backward: recognize the backward pass in a rank's stack; without it, the phase
#   of a hanging rank is not reported
# - torch.nn.Module._call_impl: recognize the forward pass in a rank's stack; without it, the phase of a hanging
#   rank is not reported
# - torch._dynamo: recognize compilation in a rank's stack; without it, the phase of a hanging rank is not reported
# - torch._inductor: recognize compilation in a rank's stack; without it, the phase of a hanging rank is not
#   reported
# - torch.distributed.ProcessGroup._broadcast_oop: identify recorded collectives that need the same shapes on all
#   ranks; without it, ranks with different shapes are not reported
# - torch.distributed.ProcessGroup._all_gather_base: identify recorded collectives that need the same shapes on all
#   ranks; without it, ranks with different shapes are not reported
# - torch.distributed.ProcessGroup._reduce_scatter_base: identify recorded collectives that need the same shapes on
#   all ranks; without it, ranks with different shapes are not reported
# - torch._C._distributed_c10d._dump_fr_trace_json: read the flight recorder of gloo's collectives, and from torch
#   2.15 on of every backend's; without it, hangs are reported without the collective that ranks wait in
# - torch._C._distributed_c10d._dump_nccl_trace_json: read the flight recorder of NCCL's collectives; without it,
#   the same as for gloo; builds without NCCL do not have this name
# - torch.utils.data._utils.worker._worker_loop: recognize a data loader worker that waits for its next batch;
#   without it, `muster hang` also shows the stacks of idle workers
# - torch.distributed.distributed_c10d._world: list all process groups of a rank, even before their first
#   collective; without it, a group is known only after its first collective

# Functions and folders of torch in the stack of a rank.
BACKWARD, CALL_MODULE = "_engine_run_backward", "_call_impl"
COMPILERS = ("_dynamo", "_inductor")
WORKER_LOOP = "_worker_loop"
# Native functions in which a thread waits for other ranks, and what it waits in; the first match counts.
_NATIVE_WAITS = {
    "c10d::Reducer::": "all_reduce",  # of DDP's gradients
    "c10d::broadcast_coalesced": "broadcast",  # of DDP's buffers
    "c10d::TCPStore::": "store.wait",
    "c10d::": "wait",
    "gloo::": "wait",
    "cudaStreamSynchronize": "cuda.synchronize",
    "cudaEventSynchronize": "cuda.synchronize",
    "cudaDeviceSynchronize": "cuda.synchronize",
    "cuStreamSynchronize": "cuda.synchronize",
    "cuCtxSynchronize": "cuda.synchronize",
}
# Collectives, by their name in a flight recorder, that need the same shapes on all ranks.
SAME_SHAPES = ("_broadcast_oop", "_all_gather_base", "_reduce_scatter_base")


def native_wait(functions: Sequence[str]) -> str:
    """Return what a thread with these native functions waits in: an operation, "wait" if unknown, "" if in none."""
    for start, operation in _NATIVE_WAITS.items():
        if any(function.startswith(start) for function in functions):
            return operation
    return ""


def flight_recorders() -> dict[str, Callable[..., bytes]]:
    """Return the functions that dump the flight recorders, by backend and GPU backends first; {} if torch has none.

    From torch 2.15 on, each backend has its own recorder and ``nccl`` is another class, ``nccl2``; the dump of a backend
    is asked for by name. Before, there is one recorder for NCCL and one for everything else.
    """
    module = sys.modules.get("torch._C._distributed_c10d")
    nccl = getattr(module, "_dump_nccl_trace_json", None)
    dump = getattr(module, "_dump_fr_trace_json", None)
    recorders: dict[str, Callable[..., bytes]] = {}
    if nccl is not None:
        recorders["legacy nccl"] = nccl
    if dump is None:
        return recorders
    # Native functions have no signature but the first line of their docstring.
    if "backend" in str(dump.__doc__).partition("->")[0]:
        for backend in _recording_backends():
            recorders[backend] = functools.partial(dump, backend=backend)
    recorders["gloo"] = dump
    return recorders


def _recording_backends() -> list[str]:
    """Return the backends of this rank's groups that may have a recorder of their own, without gloo."""
    world = _world()
    backends: dict[str, None] = {}
    for config in list(getattr(world, "pg_backend_config", {}).values()):
        for part in str(config).split(","):  # cpu:gloo,cuda:nccl
            backends[part.rpartition(":")[2]] = None
    if "nccl" in backends:
        backends["nccl2"] = None
    return [backend for backend in backends if backend not in ("", "gloo", "undefined", "mpi")]


def _world() -> Any:
    return getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)


def group_names() -> list[str]:
    """Return the names of this rank's process groups, which are the same on all ranks; [] if unknown."""
    return [str(name) for name in list(getattr(_world(), "pg_names", {}).values())]
