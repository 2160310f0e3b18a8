"""The rendezvous of torchrun's agents, with hosts, order and address known in advance.

The launcher has chosen and tested all of these, so the default backend, ``torchmuster``, is torch's static rendezvous with
one addition: the store listens on a socket that the first host's node agent opened. That socket is bound to one address
(TCPStore by itself listens on all), and has been open since the port was chosen, so no other process can take the port in
between.

torch's own ``c10d`` and ``etcd-v2`` number the hosts by the text of their addresses. Under ``torchmuster-c10d`` and
``torchmuster-etcd-v2`` the hosts find each other in the same way, but keep the order in which the user listed them.
"""

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

RENDEZVOUS = "torchmuster"
ORDERED = ("c10d", "etcd-v2")


def register_rendezvous() -> None:
    """Register these rendezvous backends with torchrun."""
    rendezvous_handler_registry.register(RENDEZVOUS, StaticRendezvous)
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


class StaticRendezvous(StaticTCPRendezvous):
    """torch's static rendezvous; on the first host its store listens on a socket that is already open."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        address, port = parse_rendezvous_endpoint(parameters.endpoint, -1)
        super().__init__(
            address,
            port,
            parameters.get_as_int("rank", 0) or 0,
            parameters.max_nodes,
            parameters.run_id,
            parameters.get_as_int("timeout", 120) or 120,
        )
        self._socket = parameters.get_as_int("socket", -1)
        self._server: dist.TCPStore | None = None  # type: ignore[name-defined]

    def get_backend(self) -> str:
        """Return the name by which torchrun knows this rendezvous."""
        return RENDEZVOUS

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store's server on the first host's socket, then continue as torch does."""
        if self.rank == 0 and self._socket != -1 and self._server is None:
            # multi_tenant: the store that torch opens for this port uses this server.
            self._server = dist.TCPStore(  # type: ignore[attr-defined]
                self.master_addr,
                self.master_port,
                self.world_size,
                True,
                self.timeout,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=self._socket,
            )
        return super().next_rendezvous()


class OrderedRendezvous(RendezvousHandler):
    """A rendezvous in which the order of the hosts is known in advance."""

    def __init__(self, inner: RendezvousHandler, parameters: RendezvousParameters) -> None:
        self._inner = inner
        self._name = parameters.backend
        self._rank = parameters.get_as_int("rank", 0) or 0
        self._local_address = parameters.local_addr

    def get_backend(self) -> str:
        """Return the name by which torchrun knows this rendezvous."""
        return self._name

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the rendezvous, then use the given node rank."""
        met = self._inner.next_rendezvous()
        # A separate prefix, because the inner rendezvous stores there which host it considers first.
        store = dist.PrefixStore("ordered", met.store)  # type: ignore[attr-defined]
        place = RendezvousStoreInfo.build(self._rank, store, local_addr=self._local_address)
        return RendezvousInfo(store, self._rank, met.world_size, place)

    def is_closed(self) -> bool:
        """Return whether the inner rendezvous is closed."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """Close the inner rendezvous."""
        self._inner.set_closed()  # type: ignore[no-untyped-call]  # torch's own

    def num_nodes_waiting(self) -> int:
        """Return 0: no host joins later, because each attempt has a new agent."""
        return 0

    def get_run_id(self) -> str:
        """Return the run's id."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Shut down the inner rendezvous."""
        return self._inner.shutdown()
