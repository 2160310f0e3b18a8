"""Forming the ranks' group, and ending it.

The device is set before the group is made, every wait has a limit, and the ranks agree on the library
when they meet: if one of them cannot use NCCL, all use gloo.
"""

import gc
import logging
import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchmuster.decision import Decision
from torchmuster.errors import Impossible, MusterError
from torchmuster.launch.probes import backend, meeting, membership, sampler_watch
from torchmuster.launch.probes.backend import Choice, Surroundings
from torchmuster.launch.probes.membership import Membership

_log = logging.getLogger("torchmuster.distributed")


@dataclass(frozen=True, kw_only=True)
class Group:
    """The group that ``setup`` made, and why it is as it is."""

    member: Membership
    choice: Choice
    device: torch.device
    reasons: tuple[str, ...]
    interface_set: bool  # GLOO_SOCKET_IFNAME was set by us, and will be unset by us


@dataclass
class _State:
    group: Group | None = None
    made: int = 0  # groups made so far; part of their keys, so that none reads another's


_state = _State()


def setup(rank: int, world_size: int, asked: str, timeout_s: float) -> Group:
    """Make the default process group, or accept the one that is there if it is the same."""
    member = membership.read(rank, world_size, os.environ)
    group = _accept_existing(member) if dist.is_initialized() else _make(member, asked, timeout_s)
    if rank == 0:  # one rank's word is enough
        sampler_watch.begin()
    return group


def _make(member: Membership, asked: str, timeout_s: float) -> Group:
    own = backend.choose(asked, member, look_around())
    _set_device(own.value)
    timeout = timedelta(seconds=timeout_s)
    interface_set = _stay_on_this_machine(member)
    try:
        store = meeting.meet(member, timeout, _state.made)
        choice, instead = _agree(store, member, own, timeout)
        dist.init_process_group(
            choice.backend,
            store=PrefixStore("default_pg", store),
            rank=member.rank,
            world_size=member.world_size,
            timeout=timeout,
            # With its device NCCL connects at once, so that what is wrong shows here.
            device_id=_device(choice) if choice.backend in ("nccl", "xccl") else None,
        )
    except RuntimeError as error:
        _leave_interface(interface_set)
        raise _no_group(member, timeout_s, error) from error
    except BaseException:
        _leave_interface(interface_set)
        raise
    _state.made += 1
    for said in member.reasons:
        _log.info("%s", said)
    reason = instead or own.reason
    fell_back = choice.backend == "gloo" and asked != "gloo"
    _log.log(logging.WARNING if fell_back else logging.INFO, "%s", reason)
    _state.group = Group(
        member=member,
        choice=choice,
        device=_device(choice),
        reasons=(*member.reasons, reason),
        interface_set=interface_set,
    )
    return _state.group


def cleanup() -> None:
    """End the group if there is one. Waits for nobody, so it is safe after a failure too."""
    sampler_watch.end()
    group, _state.group = _state.group, None
    if group is not None:
        _leave_interface(group.interface_set)
    if not dist.is_initialized():
        return
    # What is dropped but not yet collected (DDP is part of cycles) keeps the group's threads running into
    # the end of Python, where one that still wants it aborts the process.
    gc.collect()
    try:
        dist.destroy_process_group()
    except RuntimeError as error:  # in a finally this must not hide the error that led there
        _log.warning("the process group did not end cleanly: %s", _first_line(error))


def group_store() -> Store:
    """Return the store that the ranks of the default group met at; a second one would need a port that all know."""
    group = dist.group.WORLD
    assert group is not None
    return group.get_group_store()


def current() -> Group | None:
    """Return the group that ``setup`` made, if it is still there."""
    return _state.group if dist.is_initialized() else None


def current_device() -> torch.device:
    """Return the device whose tensors the default group carries."""
    group = current()
    if group is not None:
        return group.device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def look_around() -> Surroundings:
    """Ask torch what it can use in this process."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return Surroundings(
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


def _accept_existing(member: Membership) -> Group:
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (member.rank, member.world_size):
        raise Impossible(
            f"asked for rank {member.rank} in a group of {member.world_size}, but this process is "
            f"already rank {rank} in a group of {size}",
            why="a process has one default group at a time",
            fix="cleanup_distributed() first",
        )
    if _state.group is None:
        device = current_device()
        _state.group = Group(
            member=member,
            choice=Choice(backend=dist.get_backend(), device=device.type, index=device.index),
            device=device,
            reasons=("the process group was there already",),
            interface_set=False,
        )
    _log.info("the process group is there already: rank %d in a group of %d", rank, size)
    return _state.group


def _agree(
    store: Store, member: Membership, own: Decision[Choice], timeout: timedelta
) -> tuple[Choice, str]:
    """Return what this rank uses after all have compared, and why if that is not its own choice."""
    if member.world_size == 1:
        return own.value, ""
    choice, uuid = own.value, _uuid(own.value)
    offer = meeting.offer_of(member, choice.backend, own.reason, uuid)
    verdict = meeting.agree(store, member, offer, timeout)
    if verdict.backend == choice.backend:
        return choice, ""
    index = None if uuid in verdict.shared else choice.index
    instead = backend.without_library(choice.device, index)
    return instead, f"gloo instead of {choice.backend} on all ranks: {verdict.why}"


def _uuid(choice: Choice) -> str | None:
    if choice.backend != "nccl" or choice.index is None:
        return None
    return str(torch.cuda.get_device_properties(choice.index).uuid)


def _set_device(choice: Choice) -> None:
    if choice.index is not None:
        torch.accelerator.set_device_index(choice.index)


def _device(choice: Choice) -> torch.device:
    return (
        torch.device(choice.device, choice.index)
        if choice.index is not None
        else torch.device("cpu")
    )


def _stay_on_this_machine(member: Membership) -> bool:
    """Keep gloo's own connections off the network where nobody named an address."""
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
        "WORLD_SIZE; muster run names those that are missing",
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    first = text.splitlines()[0] if text else ""
    return f"{type(error).__name__}: {first}"
