"""Which library carries the group's data, and which device this rank gets: a choice with its reason.

NCCL needs a GPU for each rank. Where that cannot be, gloo does the same work more slowly, on the GPU if
this rank has one that gloo can read, else on the CPU.
"""

from dataclasses import dataclass

from torchmuster.decision import Decision
from torchmuster.errors import Impossible
from torchmuster.launch.probes.membership import Membership

# The library that serves each kind of GPU. AMD's GPUs are "cuda" and RCCL is "nccl" to torch.
_LIBRARIES = {"cuda": "nccl", "xpu": "xccl"}


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What torch can do in this process."""

    system: str  # sys.platform
    torch_version: str
    accelerator: str | None  # cuda, xpu, mps; None: no GPU that torch can use
    device_count: int
    libraries: frozenset[str]  # of nccl and xccl, those that this torch has


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The library, and the device as torch names it; ``index`` is None for the CPU."""

    backend: str
    device: str
    index: int | None = None


def choose(asked: str, member: Membership, here: Surroundings) -> Decision[Choice]:
    """Take what was asked for, or gloo if that is impossible in this process."""
    if asked == "gloo":
        value = Choice(backend="gloo", device="cpu")
        return Decision(value=value, reason="gloo, on the CPU: it was asked for")
    if asked not in _LIBRARIES.values():
        raise Impossible(
            f"backend {asked!r} is not known",
            why="the choice is nccl (GPUs; Intel's are served by xccl) or gloo (CPU)",
            fix="setup_distributed(rank, world_size, backend='gloo'), or call "
            "torch.distributed.init_process_group yourself",
        )
    problem = _why_no_library(here)
    index, no_device = _own_device(member, here)
    if not problem and index is not None and here.accelerator is not None:
        library = _LIBRARIES[here.accelerator]
        value = Choice(backend=library, device=here.accelerator, index=index)
        return Decision(
            value=value, reason=f"{library}, with {here.accelerator}:{index} for this rank"
        )
    value = without_library(here.accelerator, index)
    reason = f"gloo instead of {asked}, on the {_kind(value)}: {problem or no_device}"
    return Decision(value=value, reason=reason)


def without_library(accelerator: str | None, index: int | None) -> Choice:
    """Return gloo with this rank's GPU, if it has one that gloo can read, else with the CPU."""
    if accelerator == "cuda" and index is not None:
        return Choice(backend="gloo", device="cuda", index=index)
    return Choice(backend="gloo", device="cpu")


def _kind(choice: Choice) -> str:
    return "CPU" if choice.index is None else "GPU"


def _why_no_library(here: Surroundings) -> str:
    if here.system == "win32":
        return "NCCL does not exist for Windows"
    if here.accelerator == "mps":
        return "no library connects Apple's GPUs"
    wanted = _LIBRARIES.get(here.accelerator or "cuda", "nccl")
    if wanted not in here.libraries:
        return f"torch {here.torch_version} is built without {wanted.upper()}"
    return ""


def _own_device(member: Membership, here: Surroundings) -> tuple[int | None, str]:
    """Return the number of the GPU that only this rank uses, or None and why there is none."""
    count, ranks = here.device_count, member.local_world_size
    if here.accelerator not in _LIBRARIES or count == 0:
        return None, "torch sees no GPU here"
    if count == 1 and member.local_rank is not None:
        # Schedulers show each rank its own GPU alone. Whether two ranks see the same one is found
        # out when they meet.
        return 0, ""
    if ranks is not None and ranks > count:
        return None, f"this machine has {ranks} ranks, but torch sees {count} GPUs"
    if member.local_rank is None:
        return member.rank % count, ""
    if member.local_rank >= count:
        return None, f"LOCAL_RANK is {member.local_rank}, but torch sees {count} GPUs"
    return member.local_rank, ""
