"""This process's rank and group, from the arguments and the launcher's environment.

``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are
honored as torchrun sets them. Missing values get defaults, which are logged.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from torchmuster.decision import Decision
from torchmuster.errors import Impossible

DEFAULT_ADDRESS = "127.0.0.1"
DEFAULT_PORT = 29500
# The communication library of each kind of GPU. AMD's GPUs are "cuda" and RCCL is "nccl" to torch.
_LIBRARIES = {"cuda": "nccl", "xpu": "xccl"}


@dataclass(frozen=True, kw_only=True)
class Membership:
    """One process's rank in a group, and the rendezvous address of the group.

    ``local_rank`` and ``local_world_size`` are None if it is unknown which host has which ranks.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    address: str
    port: int
    alone: bool  # a group of one process, without a rendezvous
    address_given: bool
    reasons: tuple[str, ...]

    @property
    def on_this_machine(self) -> bool:
        """Whether the whole group is on this host: its rendezvous address is loopback."""
        return is_loopback(self.address)


def read_membership(rank: int, world_size: int, environment: Mapping[str, str]) -> Membership:
    """Combine the arguments with the environment; raises ``Impossible`` if they conflict."""
    if world_size < 1 or not 0 <= rank < world_size:
        raise Impossible(
            f"rank {rank} is not valid in a group of {world_size}",
            why="ranks are numbered from 0 to world_size - 1",
            fix="setup_distributed(rank, world_size) with 0 <= rank < world_size",
        )
    _agree("rank", rank, "RANK", environment)
    _agree("world_size", world_size, "WORLD_SIZE", environment)
    given = environment.get("MASTER_ADDR") or None
    port = number_from("MASTER_PORT", environment, lowest=1)
    alone = world_size == 1 and (given is None or port is None)
    address = DEFAULT_ADDRESS if given is None or alone else given
    local_rank = number_from("LOCAL_RANK", environment)
    local_world_size = number_from("LOCAL_WORLD_SIZE", environment, lowest=1)
    if is_loopback(address):  # all ranks are on this host, so local and global rank are equal
        local_rank = rank if local_rank is None else local_rank
        local_world_size = world_size if local_world_size is None else local_world_size
    return Membership(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        address=address,
        port=DEFAULT_PORT if port is None else port,
        alone=alone,
        address_given=given is not None and not alone,
        reasons=_assumptions(alone, given, port),
    )


def local_rank(environment: Mapping[str, str]) -> int:
    """Return ``LOCAL_RANK`` as torchrun sets it, or 0 if it is not set."""
    return number_from("LOCAL_RANK", environment) or 0


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _assumptions(alone: bool, given: str | None, port: int | None) -> tuple[str, ...]:
    if alone:
        return ("one process and no launcher: a simulated group of 1 that needs no network",)
    reasons = []
    if given is None:
        reasons.append(
            f"MASTER_ADDR is not set: assuming that all ranks are on this host, at {DEFAULT_ADDRESS}"
        )
    if port is None:
        reasons.append(f"MASTER_PORT is not set: using port {DEFAULT_PORT}")
    return tuple(reasons)


def _agree(argument: str, value: int, variable: str, environment: Mapping[str, str]) -> None:
    set_to = number_from(variable, environment)
    if set_to is None or set_to == value:
        return
    raise Impossible(
        f"setup_distributed was called with {argument}={value}, but {variable}={set_to} is set",
        why=f"the launcher (torchrun, muster run) set {variable}={set_to} for this process; "
        "with another value the process group cannot form",
        fix=f"pass int(os.environ[{variable!r}]) as {argument}, or start without a launcher and "
        f"unset {variable}",
    )


def number_from(variable: str, environment: Mapping[str, str], *, lowest: int = 0) -> int | None:
    """Return the integer value of a variable, None if unset; raises ``Impossible`` for a wrong value."""
    text = environment.get(variable, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < lowest:
        raise Impossible(
            f"{variable}={text} is not valid",
            why=f"{variable} is an integer from {lowest}; torchrun and muster run set it automatically",
            fix=f"unset {variable}",
        )
    return int(text)


@dataclass(frozen=True, kw_only=True)
class BackendFacts:
    """What torch supports in this process."""

    system: str  # sys.platform
    torch_version: str
    accelerator: str | None  # cuda, xpu, mps; None: no GPU that torch can use
    device_count: int
    libraries: frozenset[str]  # which of nccl and xccl this torch has


@dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """The library, and the device as torch names it; ``index`` is None for the CPU."""

    backend: str
    device: str
    index: int | None = None


def choose_backend(
    requested: str, member: Membership, here: BackendFacts
) -> Decision[BackendChoice]:
    """Return the requested backend, or gloo if that is impossible in this process."""
    if requested == "gloo":
        value = BackendChoice(backend="gloo", device="cpu")
        return Decision(value=value, reason="gloo on the CPU, as requested")
    if requested not in _LIBRARIES.values():
        raise Impossible(
            f"unknown backend {requested!r}",
            why="supported backends: nccl (GPUs; xccl for Intel GPUs) and gloo (CPU)",
            fix="setup_distributed(rank, world_size, backend='gloo'), or call "
            "torch.distributed.init_process_group yourself",
        )
    problem = _why_no_library(here)
    index, no_device = _own_device(member, here)
    if not problem and index is not None and here.accelerator is not None:
        library = _LIBRARIES[here.accelerator]
        value = BackendChoice(backend=library, device=here.accelerator, index=index)
        return Decision(
            value=value, reason=f"{library}, with {here.accelerator}:{index} for this rank"
        )
    value = without_library(here.accelerator, index)
    reason = f"gloo instead of {requested}, on the {_device_name(value)}: {problem or no_device}"
    return Decision(value=value, reason=reason)


def without_library(accelerator: str | None, index: int | None) -> BackendChoice:
    """Return gloo with this rank's GPU, if it has one that gloo can read, else with the CPU."""
    if accelerator == "cuda" and index is not None:
        return BackendChoice(backend="gloo", device="cuda", index=index)
    return BackendChoice(backend="gloo", device="cpu")


def _device_name(choice: BackendChoice) -> str:
    return "CPU" if choice.index is None else "GPU"


def _why_no_library(here: BackendFacts) -> str:
    if here.system == "win32":
        return "NCCL does not exist for Windows"
    if here.accelerator == "mps":
        return "there is no communication library for Apple GPUs"
    wanted = _LIBRARIES.get(here.accelerator or "cuda", "nccl")
    if wanted not in here.libraries:
        return f"torch {here.torch_version} is built without {wanted.upper()}"
    return ""


def _own_device(member: Membership, here: BackendFacts) -> tuple[int | None, str]:
    """Return the index of this rank's own GPU, or None and the reason."""
    count, ranks = here.device_count, member.local_world_size
    if here.accelerator not in _LIBRARIES or count == 0:
        return None, "torch sees no GPU on this host"
    if count == 1 and member.local_rank is not None:
        # Schedulers show each rank only its own GPU. Whether two ranks see the same one is checked when
        # they compare their offers.
        return 0, ""
    if ranks is not None and ranks > count:
        return None, f"this host has {ranks} ranks, but torch sees {count} GPUs"
    if member.local_rank is None:
        return member.rank % count, ""
    if member.local_rank >= count:
        return None, f"LOCAL_RANK is {member.local_rank}, but torch sees {count} GPUs"
    return member.local_rank, ""
