"""Stories of people in trouble: what is wrong, what torch says of it, and what ``muster`` makes of that.

Each story is data. What torch says is had from torch itself on the hosts, or quoted where it takes minutes to
say it. From there on only what ``muster`` says is followed, beginning with the explanation of that text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hosts.catalogue import MIB
from hosts.faults import (
    ClockSkew,
    ClosedPorts,
    Fault,
    KeyRefused,
    Mtu,
    OnlyOpenPorts,
    PortTaken,
    own_name_is_loopback,
    own_name_is_unknown,
)
from hosts.machine_faults import Packages, SmallFileSystem, Variables

#: What every host has in its working folder.
SCRIPTS = {
    "train.py": """\
import platform

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
print(f"{platform.node()}: {dist.get_world_size()} ranks, sum {value.item():g}")
dist.destroy_process_group()
""",
    "load.py": """\
import torch
from torch.utils.data import DataLoader

if __name__ == "__main__":
    images = [torch.zeros(4, 1024, 1024)] * 8  # 16 MiB each
    for batch in DataLoader(images, batch_size=8, num_workers=1):
        print(f"a batch of {len(batch)}")
""",
}


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """One story.

    ``bare`` is what is started on each host without muster; the words of the first that gives up are then
    explained as ``cause``. ``next_line`` is how the line of the explanation begins that is typed next,
    on ``typed_on``. If it examines, it must find ``finding``; the lines of its fix with ``mended_by`` in
    them are run on the host that it names. Without ``mended_by`` the fault is undone, as a person would.
    ``next_line`` that runs something settles the matter by itself.
    """

    name: str
    faults: Sequence[Fault]
    cause: str
    next_line: str
    bare: Mapping[str, Sequence[str]] = field(default_factory=dict)
    quoted: str = ""
    typed_on: str = "node1"
    finding: str = ""
    says: Sequence[str] = ()
    mended_by: str = ""
    hosts: int = 2


_CHECK, _RUN = "muster check --hosts", "muster run --hosts"
_TORCHRUN = ("torchrun", "--nnodes", "2", "--nproc-per-node", "1")


def _meeting_at(endpoint: str) -> dict[str, Sequence[str]]:
    words = ("--rdzv-backend", "c10d", "--rdzv-id", "x", "--rdzv-endpoint", endpoint)
    return dict.fromkeys(("node1", "node2"), (*_TORCHRUN, *words, "train.py"))


def _with_ranks_given(address: str, port: int) -> dict[str, Sequence[str]]:
    words = ("--master-addr", address, "--master-port", str(port))
    return {
        f"node{rank + 1}": (*_TORCHRUN, *words, "--node-rank", str(rank), "train.py")
        for rank in range(2)
    }


TROUBLES = [
    Trouble(
        name="the meeting port is dropped",
        faults=[ClosedPorts(host="node1", ports=(29400,))],
        quoted="[W socket.cpp:752] [c10d] The client socket has timed out after 60000ms while trying to "
        "connect to (10.77.0.11, 29400).\n"
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d "
        "store has failed. See inner exception for details.\n",
        cause="rendezvous-timeout",
        next_line=_CHECK,
        finding="meeting-port-blocked",
        says=["does not reach 10.77.0.11 on the rendezvous port 29400", "dropped"],
        mended_by="iptables",
    ),
    Trouble(
        name="the ports of ranks are dropped",
        faults=[OnlyOpenPorts(host="node1", ports=(2222, 29400))],
        quoted="RuntimeError: Gloo connectFullMesh failed with [/__w/pytorch/pytorch/third_party/gloo/gloo/"
        "transport/tcp/pair.cc:152] timed out connecting: SO_ERROR: Connection timed out, "
        "remote=[10.77.0.11]:64387$1\n",
        cause="gloo-connect-failed",
        next_line=_CHECK,
        finding="data-ports-blocked",
        says=["node2 does not reach node1 except on the rendezvous port 29400", "dropped"],
        mended_by="iptables",
    ),
    Trouble(
        name="the ports of ranks are refused",
        faults=[OnlyOpenPorts(host="node1", ports=(2222, 29500), verdict="refuse")],
        bare=_with_ranks_given("10.77.0.11", 29500),
        cause="gloo-connect-failed",
        next_line=_CHECK,
        finding="blocked-rejected",
        says=["node2 does not reach node1", "refused"],
        mended_by="iptables",
    ),
    Trouble(
        name="a machine does not know its own name",
        faults=[own_name_is_unknown("node2")],
        bare=_meeting_at("10.77.0.11:29400"),
        cause="hostname-unresolvable",
        next_line="muster doctor --only names",
        typed_on="node2",
        finding="name-unresolvable",
        says=["this host cannot resolve its own hostname, node2"],
        mended_by="tee -a /etc/hosts",
    ),
    Trouble(
        name="the machines' own names mean 127.0.1.1",
        faults=[own_name_is_loopback("node1"), own_name_is_loopback("node2")],
        bare=_meeting_at("node1:29400"),
        cause="hostname-is-loopback",
        next_line=_RUN,
    ),
    Trouble(
        name="GLOO_SOCKET_IFNAME names no interface",
        faults=[Variables(host="node2", values={"GLOO_SOCKET_IFNAME": "ens5"})],
        bare=_meeting_at("10.77.0.11:29400"),
        cause="gloo-no-interface",
        next_line=_CHECK,
        finding="socket-interface",
        says=["node2: GLOO_SOCKET_IFNAME=ens5 cannot work", "ens5 does not exist"],
        mended_by="unset GLOO_SOCKET_IFNAME",
    ),
    Trouble(
        name="large packets vanish between two of three machines",
        faults=[Mtu(host="node2"), Mtu(host="node3")],
        hosts=3,
        quoted="RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] "
        "Timed out waiting 40000ms for recv operation to complete\n",
        cause="collective-timeout",
        next_line=_CHECK,
        finding="stalled-link",
        says=["large transfers stall, small messages pass: the link between node2 and node3"],
        mended_by="mtu 1500",
    ),
    Trouble(
        name="the port is held by another program",
        faults=[PortTaken(host="node1", port=29500)],
        bare=_with_ranks_given("10.77.0.11", 29500),
        cause="port-in-use",
        next_line=_RUN,
    ),
    Trouble(
        name="the meeting port is held by another program, and torchrun says nothing",
        faults=[PortTaken(host="node1", port=29400)],
        quoted="\n",
        cause="no-error-text",
        next_line=_CHECK,
        finding="meeting-port-taken",
        says=["node1: port 29400 is in use; Muster uses 29401 instead", "without a message"],
    ),
    Trouble(
        name="a clock is behind, and torchrun trains alone",
        faults=[ClockSkew(host="node2", seconds=-60)],
        bare=_meeting_at("10.77.0.11:29400"),
        cause="connection-reset",
        next_line=_RUN,
    ),
    Trouble(
        name="/dev/shm is too small for DataLoader workers",
        faults=[SmallFileSystem(host="node2", path="/dev/shm", size_bytes=64 * MIB)],
        bare={"node2": ("python", "load.py")},
        cause="shared-memory-full",
        next_line="sudo mount -o remount,size=90% /dev/shm",
        typed_on="node2",
    ),
    Trouble(
        name="another version of torch on one machine",
        faults=[
            Packages(
                host="node2",
                files={"torch/__init__.py": "", "torch/version.py": "__version__ = '2.12.0+cpu'\n"},
            )
        ],
        quoted="[W TCPStore.cpp:106] [c10d] recvValue failed on SocketImpl(fd=3): Connection reset by peer\n"
        "torch.distributed.DistNetworkError: Connection reset by peer\n",
        cause="connection-reset",
        next_line=_CHECK,
        finding="torch-version",
        says=["torch versions differ", "2.12.0 on node2"],
    ),
    Trouble(
        name="the ssh key is refused",
        faults=[KeyRefused(host="node2")],
        bare={"node1": ("ssh", "node2", "true")},
        cause="ssh-permission-denied",
        next_line=_CHECK,
        finding="ssh-key-refused",
        says=["cannot connect to host 10.77.0.12", "does not accept your key"],
    ),
]
