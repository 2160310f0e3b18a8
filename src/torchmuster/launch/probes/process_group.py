"""Create and destroy the process group of the ranks.

The device is set before the group is created, every wait has a timeout, and the ranks agree on the backend
first: if one of them cannot use NCCL, all use gloo.
"""

import errno
import gc
import json
import logging
import os
import platform
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchmuster.decision import Decision
from torchmuster.errors import Impossible, MusterError, NotNow
from torchmuster.launch.probes import membership
from torchmuster.launch.probes.membership import BackendChoice, BackendFacts, Membership

_log = logging.getLogger("torchmuster.distributed")


@dataclass(frozen=True, kw_only=True)
class BackendOffer:
    """A backend, and why: of one rank, or of all of them after they agreed."""

    backend: str
    why: str


def rendezvous_store(member: Membership, timeout: timedelta, earlier_groups: int) -> Store:
    """Return the store through which the ranks exchange their addresses.

    ``earlier_groups`` is the number of earlier groups of this process, so that no group reads another's keys.
    """
    if member.alone:
        store: Store = HashStore()
        return store
    return PrefixStore(f"torchmuster/{member.world_size}/{earlier_groups}", _store(member, timeout))


def _store(member: Membership, timeout: timedelta) -> Store:
    launcher_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    server = member.rank == 0 and not launcher_has_it
    listener = None
    if server and member.on_this_machine and sys.platform != "win32":
        listener = _open_port(member)
    store: Store = TCPStore(
        host_name=member.address,
        port=member.port,
        world_size=member.world_size,
        is_master=server,
        timeout=timeout,
        wait_for_workers=False,  # we wait ourselves, and can report which ranks are missing
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",  # same default as torch
    )
    return store


def _open_port(member: Membership) -> socket.socket:
    address = membership.DEFAULT_ADDRESS if member.address == "localhost" else member.address
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, member.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise NotNow(
            f"cannot open the rendezvous port {address}:{member.port}",
            why="another program is using that port",
            fix="set MASTER_PORT to a free port, the same for all ranks, or start the script with "
            "muster run, which finds a free port",
        ) from error
    return listener


def agree_on_backend(
    store: Store, member: Membership, offer: BackendOffer, timeout: timedelta
) -> BackendOffer:
    """Let rank 0 compare all ranks' offers and publish the result.

    Each rank except the first writes and reads one key, however many ranks there are. A launcher that
    restarts ranks may keep its store, so keys of an earlier attempt must do no harm: keys are only set, never
    incremented.
    """
    store.set(f"offer/{member.rank}", json.dumps(vars(offer)))
    if member.rank == 0:
        keys = [f"offer/{rank}" for rank in range(member.world_size)]
        _wait_for_all(store, keys, timeout)
        agreed = compare_offers(
            [BackendOffer(**json.loads(text)) for text in store.multi_get(keys)]
        )
        store.set("verdict", json.dumps(vars(agreed)))
        return agreed
    store.wait(["verdict"], timeout)
    return BackendOffer(**json.loads(store.get("verdict")))


def compare_offers(offers: list[BackendOffer]) -> BackendOffer:
    """Return a GPU backend only if every rank can use it."""
    backends = sorted({offer.backend for offer in offers})
    if len(backends) == 1:
        return offers[0]
    for offer in offers:
        if offer.backend == "gloo":
            return offer
    return BackendOffer(backend="gloo", why=f"the ranks have {' and '.join(backends)}")


def _wait_for_all(store: Store, keys: list[str], timeout: timedelta) -> None:
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [key.removeprefix("offer/") for key in keys if not store.check([key])]
        shown = ", ".join(missing[:8]) + (" …" if len(missing) > 8 else "")
        raise MusterError(
            f"{len(missing)} of {len(keys)} ranks did not join: {shown}",
            why=f"rank 0 waited {timeout.total_seconds():g} s for them",
            fix="see the output of those ranks: they were not started, exited early, or cannot "
            "reach this host",
        ) from error


@dataclass(frozen=True, kw_only=True)
class ProcessGroupInfo:
    """The group that ``setup`` created, and the reasons for its settings."""

    member: Membership
    choice: BackendChoice
    device: torch.device
    reasons: tuple[str, ...]
    interface_set: bool  # GLOO_SOCKET_IFNAME was set by us, and will be unset by us


@dataclass
class _State:
    group: ProcessGroupInfo | None = None
    made: int = 0  # groups created so far; part of their keys, so that none reads another's


_state = _State()


def setup_process_group(
    rank: int, world_size: int, requested: str, timeout_s: float
) -> ProcessGroupInfo:
    """Create the default process group, or accept the existing one if it is the same."""
    member = membership.read_membership(rank, world_size, os.environ)
    if dist.is_initialized():
        return _accept_existing(member)
    return _make(member, requested, timeout_s)


def _make(member: Membership, requested: str, timeout_s: float) -> ProcessGroupInfo:
    own = membership.choose_backend(requested, member, backend_facts())
    if own.value.index is not None:
        torch.accelerator.set_device_index(own.value.index)
    timeout = timedelta(seconds=timeout_s)
    interface_set = _stay_on_this_machine(member)
    try:
        store = rendezvous_store(member, timeout, _state.made)
        choice, instead = _agree(store, member, own, timeout)
        dist.init_process_group(
            choice.backend,
            store=PrefixStore("default_pg", store),
            rank=member.rank,
            world_size=member.world_size,
            timeout=timeout,
            # With a device NCCL connects at once, so that errors show here.
            device_id=_device_of(choice) if choice.backend in ("nccl", "xccl") else None,
        )
    except BaseException as error:
        _leave_interface(interface_set)
        if isinstance(error, RuntimeError):
            raise _no_group(member, timeout_s, error) from error
        raise
    _state.made += 1
    for text in member.reasons:
        _log.info("%s", text)
    reason = instead or own.reason
    fell_back = choice.backend == "gloo" and requested != "gloo"
    _log.log(logging.WARNING if fell_back else logging.INFO, "%s", reason)
    _state.group = ProcessGroupInfo(
        member=member,
        choice=choice,
        device=_device_of(choice),
        reasons=(*member.reasons, reason),
        interface_set=interface_set,
    )
    return _state.group


def cleanup_process_group() -> None:
    """Destroy the group if there is one.

    While an exception propagates, only a group of gloo is destroyed: NCCL waits for work that other ranks may never
    do, and the process would not exit. Such a process cannot create another group.
    """
    group, _state.group = _state.group, None
    if group is not None:
        _leave_interface(group.interface_set)
    if not dist.is_initialized():
        return
    if sys.exc_info()[1] is not None and dist.get_backend() not in ("gloo", "fake"):
        return
    # Uncollected garbage (DDP is part of reference cycles) keeps the group's threads running until Python shuts
    # down, where such a thread aborts the process.
    gc.collect()
    try:
        dist.destroy_process_group()
    except RuntimeError as error:  # in a finally this must not hide the original error
        _log.warning("the process group did not shut down cleanly: %s", _first_line(error))


def group_store() -> Store:
    """Return the store of the default group; a second store would need another port that all ranks know."""
    group = dist.group.WORLD
    assert group is not None
    return group.get_group_store()


def current_group() -> ProcessGroupInfo | None:
    """Return the group that ``setup`` created, if it still exists."""
    return _state.group if dist.is_initialized() else None


def current_device() -> torch.device:
    """Return the device of tensors in the default group."""
    group = current_group()
    if group is not None:
        return group.device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def use_device(device: torch.device) -> None:
    """Make an accelerator the current device of this thread; call it first in a thread that uses torch.

    A new thread starts with device 0: on every rank, its CUDA calls would open a context of about 0.5 GB on GPU 0.
    """
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def backend_facts() -> BackendFacts:
    """Return what torch can use in this process."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return BackendFacts(
        system=sys.platform,
        torch_version=torch.__version__,
        accelerator=None if accelerator is None else accelerator.type,
        device_count=0 if accelerator is None else torch.accelerator.device_count(),
        libraries=frozenset(
            name
            for name in ("nccl", "xccl")
            if getattr(dist, f"is_{name}_available", lambda: False)()
        ),
    )


def _accept_existing(member: Membership) -> ProcessGroupInfo:
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (member.rank, member.world_size):
        raise Impossible(
            f"rank {member.rank} in a group of {member.world_size} requested, but this process is "
            f"already rank {rank} in a group of {size}",
            why="a process has one default group at a time",
            fix="call cleanup_distributed() first",
        )
    if _state.group is None:
        device = current_device()
        _state.group = ProcessGroupInfo(
            member=member,
            choice=BackendChoice(
                backend=dist.get_backend(), device=device.type, index=device.index
            ),
            device=device,
            reasons=("the process group already existed",),
            interface_set=False,
        )
    _log.info("the process group already exists: rank %d in a group of %d", rank, size)
    return _state.group


def _agree(
    store: Store, member: Membership, own: Decision[BackendChoice], timeout: timedelta
) -> tuple[BackendChoice, str]:
    """Return the backend that all ranks agreed on, and the reason if it is not this rank's choice."""
    if member.world_size == 1:
        return own.value, ""
    choice = own.value
    why = f"rank {member.rank} on {platform.node()}: {own.reason}"
    offer = BackendOffer(backend=choice.backend, why=why)
    agreed = agree_on_backend(store, member, offer, timeout)
    if agreed.backend == choice.backend:
        return choice, ""
    instead = membership.without_library(choice.device, choice.index)
    return instead, f"gloo instead of {choice.backend} on all ranks: {agreed.why}"


def gpu_uuid(index: int) -> str | None:
    """Return the UUID of torch's GPU, part of the UUID that ``muster gpus`` shows; None if it has none."""
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    if torch.version.hip is None:
        return uuid
    from torchmuster.devices.identify import rocm_uuid

    return rocm_uuid(uuid)


def _device_of(choice: BackendChoice) -> torch.device:
    return (
        torch.device(choice.device, choice.index)
        if choice.index is not None
        else torch.device("cpu")
    )


def _stay_on_this_machine(member: Membership) -> bool:
    """Keep gloo's connections on loopback if no address was given."""
    name = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if member.address_given or name is None or "GLOO_SOCKET_IFNAME" in os.environ:
        return False
    os.environ["GLOO_SOCKET_IFNAME"] = name
    return True


def _leave_interface(interface_set: bool) -> None:
    if interface_set:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


def _no_group(member: Membership, timeout_s: float, error: RuntimeError) -> MusterError:
    return MusterError(
        f"rank {member.rank} could not form a group of {member.world_size} at "
        f"{member.address}:{member.port} (limit {timeout_s:g} s)",
        why=_first_line(error),
        fix="check that all ranks were started, with the same MASTER_ADDR, MASTER_PORT and "
        "WORLD_SIZE; muster run reports the missing ones",
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {first}"
