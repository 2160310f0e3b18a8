"""torchrun's rendezvous for a group that has already been called together.

It has nothing left to find out. Who takes part, in which order, and where they meet has been settled
and tried by the launcher, so no clock, no host name and no vote can change it. The store listens on a
socket that the first machine's keeper opened: bound to one address (TCPStore by itself listens on all),
and held since it was chosen, so that nobody else can take the port in between.

torch's own ``c10d`` and ``etcd-v2``, for who wants them, number the machines by the text of their
addresses. Under ``torchmuster-c10d`` and ``torchmuster-etcd-v2`` the machines find each other as there,
and then keep the order in which they were written.
"""

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

RENDEZVOUS = "torchmuster"
ORDERED = ("c10d", "etcd-v2")


def register() -> None:
    """Make these rendezvous known to torchrun."""
    rendezvous_handler_registry.register(RENDEZVOUS, SettledRendezvous)
    for backend in ORDERED:
        rendezvous_handler_registry.register(f"{RENDEZVOUS}-{backend}", _ordered(backend))


def _ordered(backend: str) -> Callable[[RendezvousParameters], RendezvousHandler]:
    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        inner = rendezvous_handler_registry.create_handler(
            RendezvousParameters(
                backend=backend,
                endpoint=parameters.endpoint,
                run_id=parameters.run_id,
                min_nodes=parameters.min_nodes,
                max_nodes=parameters.max_nodes,
                local_addr=parameters.local_addr,
                **parameters.config,
            )
        )
        return OrderedRendezvous(inner, parameters)

    return create


class SettledRendezvous(RendezvousHandler):
    """A meeting whose members, order and place are known beforehand."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._nodes = parameters.max_nodes
        self._rank = parameters.get_as_int("rank", 0) or 0
        self._timeout = timedelta(seconds=parameters.get_as_int("timeout", 120) or 120)
        self._socket = parameters.get_as_int("socket", -1)
        self._address, self._port = parse_rendezvous_endpoint(parameters.endpoint, -1)
        self._store: dist.TCPStore | None = None  # type: ignore[name-defined]

    def get_backend(self) -> str:
        """Return the name by which torchrun knows this."""
        return RENDEZVOUS

    @property
    def use_agent_store(self) -> bool:
        """The ranks use the agent's store: it outlives each of them, and there is one port less."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store on the first machine, connect to it from the others."""
        first = self._rank == 0
        if self._store is None:
            opened = self._socket if first and self._socket != -1 else None
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                self._address,
                self._port,
                self._nodes,
                first,
                self._timeout,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=opened,
            )
        place = RendezvousStoreInfo(self._address, self._port)
        return RendezvousInfo(
            dist.PrefixStore(self._run_id, self._store),  # type: ignore[attr-defined]
            self._rank,
            self._nodes,
            place,
        )

    def is_closed(self) -> bool:
        """Nobody closes it: a new attempt is a new agent."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def num_nodes_waiting(self) -> int:
        """Nobody joins later."""
        return 0

    def get_run_id(self) -> str:
        """Return the run's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing to do: the store ends with the agent."""
        return True


class OrderedRendezvous(RendezvousHandler):
    """A rendezvous in which the order of the machines is known beforehand."""

    def __init__(self, inner: RendezvousHandler, parameters: RendezvousParameters) -> None:
        self._inner = inner
        self._name = parameters.backend
        self._rank = parameters.get_as_int("rank", 0) or 0
        self._local_address = parameters.local_addr

    def get_backend(self) -> str:
        """Return the name by which torchrun knows this."""
        return self._name

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the others, then take the number that was given."""
        met = self._inner.next_rendezvous()
        # Of its own, for the other rendezvous has written there which machine it takes for the first.
        store = dist.PrefixStore("ordered", met.store)  # type: ignore[attr-defined]
        place = RendezvousStoreInfo.build(self._rank, store, local_addr=self._local_address)
        return RendezvousInfo(store, self._rank, met.world_size, place)

    def is_closed(self) -> bool:
        """Ask the rendezvous that is used."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """Close the rendezvous that is used."""
        self._inner.set_closed()  # type: ignore[no-untyped-call]  # torch's own

    def num_nodes_waiting(self) -> int:
        """Nobody joins later: a new attempt is a new agent."""
        return 0

    def get_run_id(self) -> str:
        """Return the run's id."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """End the rendezvous that is used."""
        return self._inner.shutdown()
