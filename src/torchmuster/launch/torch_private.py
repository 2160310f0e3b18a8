"""The private names of torch that launching uses. They are read inside the ranks: torch is never imported here."""

import sys
from collections.abc import Callable

from torchmuster.torch_internals import PrivateName

NAMES = (
    PrivateName(
        "torch.autograd.graph._engine_run_backward",
        "see in a rank's stack that it computes a backward",
        without="the phase of a rank that hangs is not named",
    ),
    PrivateName(
        "torch.nn.Module._call_impl",
        "see in a rank's stack that it computes a forward",
        without="the phase of a rank that hangs is not named",
    ),
    PrivateName(
        "torch._dynamo",
        "see in a rank's stack that it compiles",
        without="the phase of a rank that hangs is not named",
    ),
    PrivateName(
        "torch._inductor",
        "see in a rank's stack that it compiles",
        without="the phase of a rank that hangs is not named",
    ),
    PrivateName(
        "torch.distributed.ProcessGroup._broadcast_oop",
        "know of a collective in a flight recorder that all ranks bring the same shapes",
        without="ranks that bring different shapes to it are not named",
    ),
    PrivateName(
        "torch.distributed.ProcessGroup._all_gather_base",
        "know of a collective in a flight recorder that all ranks bring the same shapes",
        without="ranks that bring different shapes to it are not named",
    ),
    PrivateName(
        "torch.distributed.ProcessGroup._reduce_scatter_base",
        "know of a collective in a flight recorder that all ranks bring the same shapes",
        without="ranks that bring different shapes to it are not named",
    ),
    PrivateName(
        "torch._C._distributed_c10d._dump_fr_trace_json",
        "read the flight recorder of gloo's collectives",
        without="hangs are found without knowing which collective ranks wait in",
    ),
    PrivateName(
        "torch._C._distributed_c10d._dump_nccl_trace_json",
        "read the flight recorder of NCCL's collectives",
        without="as without gloo's; builds without NCCL do not have it",
    ),
    PrivateName(
        "torch.distributed.distributed_c10d._world",
        "name the process groups of a rank, also those without a collective yet",
        without="groups are known from their first collective on",
    ),
)

# Functions and folders of torch in the stack of a rank.
BACKWARD, CALL_MODULE = "_engine_run_backward", "_call_impl"
COMPILERS = ("_dynamo", "_inductor")
# Collectives, by their name in a flight recorder, to which all ranks bring the same shapes.
SAME_SHAPES = ("_broadcast_oop", "_all_gather_base", "_reduce_scatter_base")


def flight_recorders() -> list[Callable[..., bytes]]:
    """Return what dumps the flight recorders, NCCL's first; [] where this torch has none."""
    # Where both are used, gloo's groups are told apart from NCCL's of the same name.
    recorder = sys.modules.get("torch._C._distributed_c10d")
    found = (
        getattr(recorder, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    )
    return [one for one in found if one is not None]


def group_names() -> list[str]:
    """Return the names of this rank's process groups, which are the same on all ranks; [] if unknown."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    return [str(name) for name in list(getattr(world, "pg_names", {}).values())]
