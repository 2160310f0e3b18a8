"""What an event of a trace is: work of the device, communication, a mark of the recorder, an operation."""

import enum
import functools
import re

from torchmuster.bench.profile.trace_events import Event

_STEP = re.compile(r"(?:muster:step|ProfilerStep)#(\d+)")
STEP_MARKS = (b"muster:step#", b"ProfilerStep#")
# As in HolisticTraceAnalysis: whatever of a kernel's name says that it sends, or that it moves memory.
_SENDS = re.compile(r"^(?:(nccl|rccl|ncclx?|mscclpp)|.*(nccl|rccl)(?:Dev)?Kernel)", re.IGNORECASE)
_MOVES = re.compile(r"^(Memcpy|Memset)|^dma", re.IGNORECASE)
_BLOCKS = re.compile(r"^(cuda|hip)(Stream|Device|Event)Synchronize$|^(cuda|hip)Memcpy$")


class Lane(enum.Enum):
    """What may go on at a moment of a rank, several of them at once."""

    WORK = "work"  # on a device: kernels that compute
    SENDING = "sending"  # collectives on their way
    COPIES = "copies"  # on a device: memory that is moved or set
    DATA = "data"
    READS = "reads"
    BLOCKED = "blocked"  # the host waits for the device
    SAVE = "save"
    OPTIMIZER = "optimizer"
    OPTIMIZER_ON_DEVICE = "optimizer on device"
    COMMUNICATION = "communication"  # the host is in a call of torch.distributed
    FORWARD = "forward"
    BACKWARD = "backward"


_MARKS = {
    "muster:data": Lane.DATA,
    "muster:read": Lane.READS,
    "muster:save": Lane.SAVE,
    "muster:optimizer": Lane.OPTIMIZER,
    "muster:communication": Lane.COMMUNICATION,
    "muster:forward": Lane.FORWARD,
    "muster:backward": Lane.BACKWARD,
}
# Marks that PyTorch makes itself, for traces that others recorded.
_OF_TORCH = {
    "enumerate(DataLoader)": Lane.DATA,
    "Optimizer.step#": Lane.OPTIMIZER,
    "DistributedDataParallel.forward": Lane.FORWARD,
}


def step_of(event: Event) -> int | None:
    """Return the number of the step that an event marks on the host, if it marks one."""
    if event.ph != "X" or event.cat != "user_annotation":
        return None
    found = _STEP.fullmatch(event.name)
    return int(found[1]) if found else None


def lane_of(event: Event) -> Lane | None:
    """Return what goes on while an event lasts, or None for what no share of a step is made of."""
    return _lane(event.cat, event.name)


@functools.lru_cache(maxsize=4096)
def _lane(cat: str | None, name: str) -> Lane | None:
    if cat in ("kernel", "gpu_memcpy", "gpu_memset"):
        if _SENDS.match(name):
            return Lane.SENDING
        return Lane.COPIES if cat != "kernel" or _MOVES.match(name) else Lane.WORK
    if cat == "user_annotation":
        if name.startswith("gloo:"):
            return Lane.SENDING
        return _mark(name)
    if cat == "gpu_user_annotation" and _mark(name) is Lane.OPTIMIZER:
        return Lane.OPTIMIZER_ON_DEVICE
    if cat in ("cuda_runtime", "cuda_driver") and _BLOCKS.match(name):
        return Lane.BLOCKED
    return None


def _mark(name: str) -> Lane | None:
    if name in _MARKS:
        return _MARKS[name]
    return next((lane for begin, lane in _OF_TORCH.items() if name.startswith(begin)), None)


def is_operation(event: Event) -> bool:
    """Tell whether it is one of PyTorch's operations on the host."""
    return event.cat == "cpu_op"


def computes(operation: str) -> bool:
    """Tell whether an operation computes, rather than hands something over to be sent."""
    return not operation.startswith(("c10d::", "record_param_comms"))
