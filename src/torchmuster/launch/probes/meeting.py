"""Where the ranks meet: a store they all reach, and what they agree on there.

The store of a group that stays on this machine listens on loopback only; torch's own would listen on
every interface.
"""

import errno
import json
import os
import platform
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchmuster.errors import MusterError, NotNow
from torchmuster.launch.probes import membership
from torchmuster.launch.probes.membership import Membership


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What one rank tells the others: what it can use, why, and its GPU's UUID if it is known."""

    backend: str
    reason: str
    uuid: str | None
    rank: int
    host: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What all ranks use, and why it is not what they offered; GPUs that several ranks have."""

    backend: str
    why: str = ""
    shared: tuple[str, ...] = ()


def meet(member: Membership, timeout: timedelta, earlier_groups: int) -> Store:
    """Return the store through which the ranks exchange their addresses.

    ``earlier_groups`` is how many this process has had, so that no group reads another's keys.
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
        listener = _listen(member)
    store: Store = TCPStore(
        host_name=member.address,
        port=member.port,
        world_size=member.world_size,
        is_master=server,
        timeout=timeout,
        wait_for_workers=False,  # we wait ourselves, and can say for whom
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",  # as torch itself decides
    )
    return store


def _listen(member: Membership) -> socket.socket:
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
            f"the ranks cannot meet at {address}:{member.port}",
            why="another program is using that port",
            fix="MASTER_PORT=… (any free port, the same for all ranks), or start the script with "
            "muster run, which finds one by itself",
        ) from error
    return listener


def agree(store: Store, member: Membership, offer: Offer, timeout: timedelta) -> Verdict:
    """Let rank 0 compare all ranks' offers and tell the result to all.

    Each rank but the first sends and reads one key, however many there are. A launcher that restarts
    ranks may keep its store, so what is left of an earlier attempt must do no harm: keys are only
    set, never counted up.
    """
    store.set(f"offer/{member.rank}", json.dumps(vars(offer)))
    if member.rank == 0:
        keys = [f"offer/{rank}" for rank in range(member.world_size)]
        _wait_for_all(store, keys, timeout)
        verdict = compare([Offer(**json.loads(text)) for text in store.multi_get(keys)])
        store.set("verdict", json.dumps(vars(verdict)))
        return verdict
    store.wait(["verdict"], timeout)
    told: Mapping[str, object] = json.loads(store.get("verdict"))
    shared = told["shared"]
    assert isinstance(shared, list)
    return Verdict(backend=str(told["backend"]), why=str(told["why"]), shared=tuple(shared))


def compare(offers: list[Offer]) -> Verdict:
    """Take a library only if every rank can use it and no two ranks have the same GPU."""
    first = offers[0]
    for other in offers:
        if other.backend == "gloo" and any(one.backend != "gloo" for one in offers):
            return Verdict(backend="gloo", why=f"rank {other.rank} on {other.host}: {other.reason}")
        if other.backend != first.backend:
            why = f"rank {first.rank} has {first.backend}, rank {other.rank} has {other.backend}"
            return Verdict(backend="gloo", why=why)
    owner: dict[str, Offer] = {}
    shared: dict[str, str] = {}
    for offer in offers:
        if offer.uuid is None:
            continue
        earlier = owner.setdefault(offer.uuid, offer)
        if earlier is not offer:
            shared.setdefault(
                offer.uuid, f"ranks {earlier.rank} and {offer.rank} on {offer.host} have one GPU"
            )
    if not shared:
        return Verdict(backend=first.backend)
    return Verdict(backend="gloo", why=next(iter(shared.values())), shared=tuple(shared))


def offer_of(member: Membership, backend: str, reason: str, uuid: str | None) -> Offer:
    """Return this rank's offer."""
    host = platform.node()
    return Offer(backend=backend, reason=reason, uuid=uuid, rank=member.rank, host=host)


def _wait_for_all(store: Store, keys: list[str], timeout: timedelta) -> None:
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = [key.removeprefix("offer/") for key in keys if not store.check([key])]
        shown = ", ".join(missing[:8]) + (" …" if len(missing) > 8 else "")
        raise MusterError(
            f"{len(missing)} of {len(keys)} ranks did not come: {shown}",
            why=f"rank 0 waited {timeout.total_seconds():g} s for them",
            fix="look at the output of those ranks: they were not started, ended early, or cannot "
            "reach this machine",
        ) from error
